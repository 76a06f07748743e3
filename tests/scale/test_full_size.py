"""experiments/full_size.py: what it counts of steps is what FSDP2 gathers, and it leaves no checkpoint behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--model", "nano", "--device", "cpu", "--corpus", "python", "--held-out-corpus", "", "--tokenizer", "bytes"),
    *(
        "--dp-shard",
        "2",
        "--sequence",
        "64",
        "--batch",
        "4",
        "--steps",
        "3",
        "--eval-every",
        "3",
        "--eval-batches",
        "1",
    ),
)
MATRICES = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128
"""Weights of a block of nano: q and o, k and v, the MLP."""
NORMS, REST = 2 * 128, 2 * 256 * 128
"""Of a block; and of embedding and head, beside the last norm."""
BLOCKS, FP32, PASSES = 3, 4, 2
CODES = MATRICES // 2 + MATRICES // 256
"""Bytes of a quantized block: four bits a weight, a scale byte for every tile of 16 x 16."""


@pytest.mark.parametrize(
    "recipe, more, step_bytes",
    [
        ("bf16", (), FP32 * (PASSES * BLOCKS * (MATRICES + NORMS) + REST + 128)),
        (
            "nvfp4",  # which keeps the last block; rows of embedding and head are no gather
            ("--weights", "nvfp4", "--head", "shared"),
            FP32 * (PASSES * (MATRICES + BLOCKS * NORMS) + 128) + PASSES * (BLOCKS - 1) * CODES,
        ),
    ],
)
def test_it_counts_what_is_gathered(recipe, more, step_bytes, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # else all runs meet at one port
    command += ["--nproc-per-node=2", "experiments/full_size.py"]
    command += ["--recipe", recipe, *more, *SMALL, "--out", str(out), "--cache", str(tmp_path / "cache")]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((out / "full_size.json").read_text())
    assert found["step_bytes"] == found["steps"] * step_bytes and found["steps"] == 3
    if recipe == "bf16":  # a pass less
        assert found["validation_bytes"] == step_bytes - FP32 * BLOCKS * (MATRICES + NORMS)
    assert found["validations"] == 1 and found["world"] == 2
    assert (out / "result.json").exists() and not (out / "checkpoints").exists()
