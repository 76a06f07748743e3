"""bench/titan.py on a CPU: what it prints of two runs, and what it refuses; titan_runs.py says what stands in."""

from __future__ import annotations

import math

import pytest
import titan_runs as runs
from test_torchtitan import _one_process  # noqa: F401
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from bench import titan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_both_runs_are_printed_and_judged(capsys):
    options = ["--steps", "12", "--tokens", "2", "64", "--text", runs.TEXT]
    assert titan.main(options) == 0
    heading, plain, ours, verdict = capsys.readouterr().out.splitlines()
    assert heading.startswith("torchtitan 0.3.0, torch 2.") and "ranks of FSDP2: 1 (torchtitan's backend)" in heading
    assert "llama3 debugmodel, 2x64 tokens a rank, 12 steps, attention sdpa, CUDA graphs off" in heading
    assert verdict.startswith("verdict: PASS; the last losses are ")
    config = runs.small(llama3_debugmodel(), ".", steps=12)
    config.parallelism.spmd_backend, config.loss = "partial_dtensor", config.loss.loss_fn
    _, losses = runs.run(config)
    said = f"bf16: loss (step) {losses[0]:.4f} (1), {losses[9]:.4f} (10); mean of the last 12 {sum(losses) / 12:.4f}; "
    assert plain.startswith(said) and plain != ours.replace("nvfp4", "bf16")


def test_the_verdict_says_what_fails():
    plain = titan.Measured([4.0] + [2.0] * 20, rate=100.0, gib=math.nan)
    near = plain._replace(losses=[4.01] + [2.02] * 20, rate=50.0)
    line, is_good = titan.verdict(plain, near)
    assert is_good and line == (
        "verdict: PASS; the last losses are +1.00% of bf16's, the first 0.250% apart; 0.50 of bf16's tokens/s"
    )
    wrong = {
        "another arithmetic": plain,
        "within 3%": near._replace(losses=[4.0] + [2.1] * 20),
        "the same beginning": near._replace(losses=[4.2] + [2.02] * 20),
        "both learn, within 3%": near._replace(losses=[4.0] * 21),
        "as many steps": near._replace(losses=[4.0] + [2.0] * 20 + [2.01]),
    }
    for words, run in wrong.items():
        line, is_good = titan.verdict(plain, run)
        assert not is_good and line.startswith(f"verdict: FAIL, not: {words};"), line


def test_names_that_torch_lacks_are_supplied_and_the_stand_in_builds_nothing(monkeypatch):
    monkeypatch.delattr(titan.fsdp, "DataParallelMeshDims")
    assert titan.complete_torch() == ["DataParallelMeshDims"] and titan.complete_torch() == []
    with pytest.raises(RuntimeError, match=r"no DataParallelMeshDims, .* need on several ranks; use 'partial_dtensor'"):
        titan.fsdp.DataParallelMeshDims(shard="fsdp")


def test_refusals(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        titan.parsed(["--one-gpu"])
    assert "--one-gpu: torchtitan runs on cpu: leave it out" in capsys.readouterr().err
    monkeypatch.setattr(runs.utils, "device_type", "cuda")
    if not runs.torch.cuda.is_available():
        with pytest.raises(SystemExit):
            titan.parsed([])
        assert "torch sees no GPU, which torchtitan's Trainer needs" in capsys.readouterr().err
    monkeypatch.setattr(runs.torch.cuda, "is_available", lambda: True)
    for gpus, message in {1: "no CUDA graph captures: leave out --graphs", 2: "several GPUs, over which"}.items():
        monkeypatch.setattr(runs.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(SystemExit):
            titan.parsed(["--one-gpu", "--graphs"])
        assert message in capsys.readouterr().err
