"""`halfbyte train --weights nvfp4` on ranks that shard nothing: ZeroOptimizer in the place of DDP, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import train_checks as checks
from mesh_checks import folder

from halfbyte.train.mesh_config import MeshConfig

__all__ = ["folder"]
UNCLIPPED = {"clip": float("inf"), "steps": 6}
FIRST = 2
"""Runs that are always compared; the others in full."""


def as_codes(config):
    """The run whose weights exist in NVFP4 alone, in another folder."""
    run = replace(config.run, out=config.run.out.with_name(f"{config.run.out.name}-codes"))
    return replace(config, run=run, mesh=replace(config.mesh, weights="nvfp4"))


@pytest.mark.parametrize(
    "which", [slice(FIRST), pytest.param(slice(FIRST, None), marks=pytest.mark.full)], ids=["first", "rest"]
)
def test_weights_in_nvfp4_alone_change_no_bit_of_ddp(folder, which):
    """Losses, held-out losses in high precision, weights, moments: kept layers, autocast, fused layers, experts."""
    wide = {"mesh": (2, 1), "batch": 4, **UNCLIPPED}
    runs = [
        (replace(checks.tiny(folder, "mixed", "autocast", **wide), dtype="bfloat16"), "four_over_six@all"),
        (replace(checks.tiny(folder, "mixed", "moe", accumulate=2, **wide), model="moe-tiny"), "nvfp4"),
        (checks.tiny(folder, "mixed", "default", **wide), "nvfp4"),
        (checks.tiny(folder, "mixed", "all", accumulate=2, **wide), "nvfp4@all"),
        (replace(checks.tiny(folder, "mixed", "fused", recompute="full", **wide), fuse="on"), "nvfp4@all"),
        (checks.tiny(folder, "mixed", "values", **wide), "rl"),
    ][which]
    codes = [(as_codes(config), recipe) for config, recipe in runs]
    plain, shared = (ranks.run(2, checks.train_all, which, seconds=200) for which in (runs, codes))
    for rank in (0, 1):
        for (config, _), one, other in zip(runs, plain[rank], shared[rank], strict=True):
            assert one.keys() == other.keys(), config.run.out.name
            assert [name for name in one if one[name] != other[name]] == [], config.run.out.name
    for (one, _), (other, recipe) in zip(runs, codes, strict=True):
        assert [(k, s, pytest.approx(v, abs=0)) for k, s, v in checks.lines(one)] == checks.lines(other)
        said = (other.run.out / "layers.txt").read_text().splitlines()[-1]
        assert said.startswith("0 of" if recipe == "rl" else tuple("123456789")) and "travel as NVFP4" in said


def test_a_run_goes_on_with_weights_of_any_kind_and_on_one_process(folder):
    """What is loaded is what was saved; and the end is that of a run that nobody disturbed."""
    whole = checks.tiny(folder, "mixed", "whole", mesh=(2, 1), **UNCLIPPED)
    parts = checks.tiny(folder, "mixed", "parts", mesh=(2, 1), **UNCLIPPED)
    undisturbed = ranks.run(2, checks.train_all, [(whole, "nvfp4@all")])
    parts.run.out.mkdir()
    codes = replace(parts, mesh=replace(parts.mesh, weights="nvfp4"))
    left = None
    for config, steps in ((codes, 2), (parts, 3), (codes, 4), (codes, 5)):
        ends = ranks.run(2, checks.until, config, "nvfp4@all", steps)
        assert left is None or all(begun == left for begun, _ in ends)
        left = ends[0][1]
    assert ranks.run(2, checks.train_all, [(codes, "nvfp4@all")]) == undisturbed
    assert checks.lines(parts) == [line for line in checks.lines(whole) if line[1] > 5]
    begun, _ = checks.until(0, 1, replace(parts, mesh=MeshConfig()), "nvfp4@all", 6)
    assert begun[2] == undisturbed[0][0]
    assert json.loads((Path(parts.run.out) / "result.json").read_text())["is_diverged"] is False


def test_clipped_steps_are_close(folder):
    """The norm is summed in another order."""
    plain = checks.tiny(folder, "mixed", "clipped", mesh=(2, 1), clip=0.1, steps=4)
    ranks.run(2, checks.train_all, [(plain, "nvfp4_forward"), (as_codes(plain), "nvfp4_forward")])
    for (_, step, loss), (_, _, other) in zip(checks.lines(plain), checks.lines(as_codes(plain)), strict=True):
        assert other == pytest.approx(loss, rel=1e-5), step
