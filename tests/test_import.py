"""Importing the package needs no Triton, no GPU and no extra, and touches no device."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("matplotlib", "tyro", "tokenizers", "tensorboard", "rich", "safetensors")


def run(code: str) -> str:
    """Run `code` in a fresh interpreter that sees no GPU and return what it prints."""
    env = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None  # any `import triton` now raises ImportError
import torch, halfbyte as hb
q = hb.quantize(torch.ones(2, 16), hb.NVFP4())
print(float(q.dequantize(torch.float32).sum()))
"""
    assert run(code).strip() == "32.0"


def test_import_touches_no_device():
    code = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("a device was initialised at import")
torch.cuda._lazy_init = refuse
torch.cuda.is_available = refuse
torch.cuda.device_count = refuse
import halfbyte
print(torch.cuda.is_initialized())
"""
    assert run(code).strip() == "False"


def test_import_leaves_the_extras_alone():
    code = f"import sys, halfbyte; print([name for name in {EXTRAS!r} if name in sys.modules])"
    assert run(code).strip() == "[]"


def test_import_changes_no_global_state():
    code = """
import random, torch
before = torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state(), random.getstate()
import halfbyte
after = torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state(), random.getstate()
print(before[:2] == after[:2], torch.equal(before[2], after[2]), before[3] == after[3])
"""
    assert run(code).split() == ["True"] * 3


@pytest.mark.parametrize("name", ["__version__", "NVFP4", "MXFP8", "recipes", "quantize", "Philox"])
def test_public_names_are_there(name):
    import halfbyte

    assert hasattr(halfbyte, name)
