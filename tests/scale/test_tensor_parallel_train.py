"""`halfbyte train --tp`: step for step beside one process, its checkpoints on any mesh, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import mesh_checks
import pytest
from mesh_checks import folder, losses, until

from halfbyte.train import config as configs

__all__ = ["folder"]
MESHES = {"one": configs.MeshConfig(), "tp": configs.MeshConfig(tp=2), "fsdp2": configs.MeshConfig(dp_shard=2, tp=2)}


def run_on(folder: str, mesh: str, out: str, **changes) -> configs.TrainConfig:
    """Return a run of the smallest model with two key/value heads."""
    return mesh_checks.run_on(folder, "nano", MESHES[mesh], out, **changes)


@pytest.mark.parametrize("mesh, steps", [("tp", 8), pytest.param("fsdp2", 50, marks=pytest.mark.full)])
def test_losses_are_those_of_one_process(folder, mesh, steps):
    """As far as the order of sums allows, which moves a code now and then; under FSDP2 ranks also draw apart."""
    alone = losses(run_on(folder, "one", f"one-{mesh}", steps=steps), "nvfp4")
    shared = losses(run_on(folder, mesh, f"losses-{mesh}", steps=steps), "nvfp4")
    near_one_process(shared, alone, 1e-5 if mesh == "tp" else 2e-3)


def near_one_process(shared: list[float], alone: list[float], first: float) -> None:
    """Check losses of ranks that share features, the first one closely."""
    assert abs(shared[0] - alone[0]) < first
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
