"""Importing the package needs no Triton, no GPU and no extra, and touches no device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOW = ("torch._dynamo", "torch.distributed.tensor")
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


WATCHED_IMPORT = f"""
import json, random, sys, torch

def refuse(*arguments):
    raise AssertionError("a device was asked for at import")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse

def state():
    rng = torch.random.get_rng_state().tolist(), random.getstate()
    return repr((torch.get_default_dtype(), torch.get_num_threads(), rng))

before = state()
import halfbyte
print(json.dumps({{
    "device": torch.cuda.is_initialized(),
    "slow": [name for name in {SLOW!r} if name in sys.modules],
    "extras": [name for name in {EXTRAS!r} if name in sys.modules],
    "changed": state() != before,
}}))
"""


def test_import_touches_no_device_no_extra_and_no_global_state():
    assert json.loads(run(WATCHED_IMPORT)) == {"device": False, "slow": [], "extras": [], "changed": False}


@pytest.mark.parametrize("name", ["__version__", "NVFP4", "MXFP8", "recipes", "quantize", "Philox"])
def test_public_names_are_there(name):
    import halfbyte

    assert hasattr(halfbyte, name)


def test_integrations_are_imported_when_they_are_asked_for():
    code = """
import sys, halfbyte as hb
assert "transformers" not in sys.modules
print(hb.integrations.transformers.HalfbyteConfig(recipe="nvfp4").recipe, hb.integrations.megatron.__name__)
try:
    hb.integrations.transformer
except AttributeError as error:
    print(error)
"""
    first, second = run(code).splitlines()
    assert first == "nvfp4 halfbyte.integrations.megatron"
    assert (
        second
        == "halfbyte.integrations has no 'transformer'; it has axolotl, lightning, megatron, torchtitan, transformers"
    )
