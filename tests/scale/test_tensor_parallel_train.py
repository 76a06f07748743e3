"""`halfbyte train --tp`: step for step beside one process, its checkpoints on any mesh, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import train_checks as checks

from halfbyte.train import config as configs

MESHES = {"one": configs.MeshConfig(), "tp": configs.MeshConfig(tp=2), "fsdp2": configs.MeshConfig(dp_shard=2, tp=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    checks.write_corpus(folder)
    checks.load(checks.tiny(str(folder), "mixed", "none"))
    return str(folder)


def run_on(folder: str, mesh: str, out: str, **changes) -> configs.TrainConfig:
    """Return a run of the smallest model with two key/value heads."""
    config = checks.tiny(folder, "mixed", out, **{"batch": 4, "steps": 8, **changes})
    return replace(config, model="nano", mesh=MESHES[mesh])


def until(config: configs.TrainConfig, steps: int) -> tuple:
    """Return what a run began with and what it has after so many steps, on its first rank."""
    return (
        ranks.run(config.mesh.size, checks.until, config, "nvfp4", steps)[0]
        if config.mesh.size > 1
        else checks.until(0, 1, config, "nvfp4", steps)
    )


def losses(config: configs.TrainConfig, steps: int) -> list[float]:
    ends = ranks.run(config.mesh.size, checks.train_all, [(config, "nvfp4")], seconds=280)
    assert all(end == ends[0] for end in ends), "all ranks end with the same weights"
    found = [loss for _, _, loss in checks.lines(config, "step")]
    assert len(found) == steps
    return found


@pytest.mark.parametrize("mesh, steps", [("tp", 8), pytest.param("fsdp2", 50, marks=pytest.mark.full)])
def test_losses_are_those_of_one_process(folder, mesh, steps):
    """As far as the order of sums allows, which moves a code now and then; under FSDP2 ranks also draw apart."""
    one = run_on(folder, "one", f"one-{mesh}", steps=steps)
    checks.train_all(0, 1, [(one, "nvfp4")])
    alone = [loss for _, _, loss in checks.lines(one, "step")]
    shared = losses(run_on(folder, mesh, f"losses-{mesh}", steps=steps), steps)
    assert abs(shared[0] - alone[0]) < (1e-5 if mesh == "tp" else 2e-3)
    assert all(abs(a - b) < 0.02 * b for a, b in zip(shared, alone, strict=True))


def test_a_checkpoint_goes_on_on_any_mesh(folder):
    whole = run_on(folder, "tp", "undisturbed")
    _, undisturbed = until(whole, 8)
    parts = run_on(folder, "tp", "parts")
    _, left = until(parts, 4)
    begun, ended = until(parts, 8)
    assert begun == left and ended == undisturbed, "killed and resumed, as if nothing had happened"
    began = [ended]
    for mesh in ("one", "fsdp2", "tp"):
        begun, left = until(replace(parts, mesh=MESHES[mesh]), 8)
        assert begun == began[-1], mesh
        began.append(left)


def test_what_it_refuses():
    run = configs.tiny()
    for problem, changes in {
        "key/value heads are no multiple": {"model": "tiny"},
        "fuse='on' with tp=2": {"model": "nano", "fuse": "on"},
        "compile='on' with tp=2": {"model": "nano", "compile": "on"},
        "cache_weights=True": {"model": "nano", "run": replace(run.run, cache_weights=True)},
    }.items():
        with pytest.raises(ValueError, match=problem):
            replace(run, mesh=MESHES["tp"], **changes)
    with pytest.raises(ValueError, match="weights='nvfp4': tp=2"):
        configs.MeshConfig(dp_shard=2, tp=2, weights="nvfp4")
    with pytest.raises(ValueError, match="not with DDP; give --dp-shard"):
        configs.MeshConfig(dp_replicate=2, tp=2)
    with pytest.raises(ValueError, match="dp_shard=2, tp=2: the mesh has 4 ranks, and 2 run"):
        configs.MeshConfig(dp_shard=2, tp=2).over(2)
    assert configs.MeshConfig(tp=4).over(4).in_words() == "dp_replicate=1, dp_shard=1, tp=4"
