"""`halfbyte train --tp` with a mixture, alone and with --ep: step for step beside one process, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace

import mesh_checks
import pytest
from mesh_checks import folder, losses, until

from halfbyte.train import config as configs

__all__ = ["folder"]
MESHES = {
    "one": configs.MeshConfig(),
    "ep": configs.MeshConfig(ep=2),
    "tp": configs.MeshConfig(tp=2),
    "tp x fsdp2": configs.MeshConfig(tp=2, dp_shard=2),
    "tp x ep": configs.MeshConfig(tp=2, ep=2),
    "tp x ep x fsdp2": configs.MeshConfig(tp=2, ep=2, dp_shard=4),
    "codes": configs.MeshConfig(tp=2, ep=2, dispatch="nvfp4"),
}


def run_on(folder: str, mesh: str, out: str, **changes) -> configs.TrainConfig:
    """Return a run of the smallest mixture with two key/value heads."""
    return mesh_checks.run_on(folder, "moe-2m", MESHES[mesh], out, **{"steps": 2, **changes})


@pytest.mark.parametrize(
    "like, mesh, recipe, first",
    [
        ("one", "tp", "nvfp4@all", 1e-4),
        ("ep", "tp x ep", "bf16", 1e-5),
        pytest.param("one", "tp", "bf16", 1e-5, marks=pytest.mark.full),
        pytest.param("one", "tp x fsdp2", "nvfp4@all", 5e-3, marks=pytest.mark.full),
        pytest.param("ep", "codes", "nvfp4@all", 1e-3, marks=pytest.mark.full),
        pytest.param("one", "tp x ep x fsdp2", "four_over_six", 5e-3, marks=pytest.mark.full),
    ],
)
def test_losses_are_those_without_shared_features(folder, like, mesh, recipe, first):
    """As far as the order of sums allows, which moves a code or a route; under FSDP2 ranks also draw apart."""
    alone, shared = (losses(run_on(folder, name, f"{name} {mesh} {recipe}"), recipe) for name in (like, mesh))
    assert abs(shared[0] - alone[0]) < first
    assert all(abs(a - b) < 0.02 * b for a, b in zip(shared, alone, strict=True))


@pytest.mark.parametrize(
    "meshes",
    [("tp x ep", "one"), pytest.param(("tp x fsdp2", "tp x ep x fsdp2", "ep", "tp"), marks=pytest.mark.full)],
    ids=len,
)
def test_a_checkpoint_goes_on_on_any_mesh(folder, meshes):
    parts = run_on(folder, "tp", f"parts {len(meshes)}", steps=8)
    _, left = until(parts, 1)
    for done, mesh in enumerate(meshes, 2):
        begun, ended = until(replace(parts, mesh=MESHES[mesh]), done)
        assert begun == left, mesh
        left = ended


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_recomputation(folder, changes):
    how = changes["recompute"]
    again, plain = run_on(folder, "codes", f"with {how}", **changes), run_on(folder, "codes", f"without {how}")
    assert losses(again, "nvfp4@all") == losses(plain, "nvfp4@all")


def test_the_mesh_of_both():
    mesh = configs.MeshConfig(tp=2, ep=2)
    assert mesh.over(4).in_words() == "dp_replicate=1, dp_shard=2, tp=2, ep=2"
    with pytest.raises(ValueError, match="the mesh has 4 ranks, and 2 run"):
        mesh.over(2)
    with pytest.raises(ValueError, match="model='moe-tiny' with tp=2: its 1 key/value heads are no multiple"):
        replace(configs.tiny(), model="moe-tiny", mesh=mesh)
