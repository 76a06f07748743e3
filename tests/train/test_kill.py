"""The promise that matters most: train, kill -9, resume gives the bits of a run that nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.train import checkpoint, log, loop

ROOT = Path(__file__).resolve().parent.parent.parent
HELD = Path(__file__).parent / "held.py"
KILL_AT, HELD_AT = 5, 8


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_killed_and_resumed_equals_undisturbed(run, folder):
    config, data = run(steps=10, checkpoint_every=4, log_every=1, eval_every=5, device="cpu")
    command = ["train", "--preset", "tiny", "--recipe", "nvfp4"]
    command += ["--corpus", config.data.corpus, "--out", str(folder / "killed"), "--cache", str(config.run.cache)]
    command += ["--steps", "10", "--checkpoint-every", "4", "--log-every", "1", "--eval-every", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(HELD), str(HELD_AT)]
    process = subprocess.Popen([*program, *command], env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        _wait_for_step(folder / "killed", KILL_AT, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / "killed" / "result.json").exists()
    program = [sys.executable, "-m", "halfbyte.cli"]
    subprocess.run([*program, *command], env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    undisturbed = replace(config, run=replace(config.run, out=folder / "undisturbed"))
    expected = loop.train(undisturbed, "nvfp4", data)
    result = json.loads((folder / "killed" / "result.json").read_text())
    assert result["held_out_loss"] == expected["held_out_loss"]
    for kind in ("step", "eval"):
        assert log.curve(folder / "killed", kind) == log.curve(folder / "undisturbed", kind)
    for part in ("model", "optimizer", "run_state"):
        saved, wanted = (_last(folder / name)[part] for name in ("killed", "undisturbed"))
        assert _bits(saved) == _bits(wanted)


def _wait_for_step(out, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if any(line["step"] >= step for line in log.read_log(out)):
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within two minutes")


def _last(out):
    path = checkpoint.Checkpoints(out / "checkpoints", keep=2).latest()
    return checkpoint.load_checkpoint(path, json.loads((out / "config.json").read_text())["identity"])


def _bits(value):
    if isinstance(value, dict):
        return {name: _bits(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_bits(part) for part in value]
    return value.numpy().tobytes() if hasattr(value, "numpy") else value
