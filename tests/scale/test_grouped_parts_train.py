"""`halfbyte train --tp` with a mixture, alone and with --ep: step for step beside one process, and its checkpoints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import train_checks as checks

from halfbyte.train import config as configs

MESHES = {
    "one": configs.MeshConfig(),
    "ep": configs.MeshConfig(ep=2),
    "tp": configs.MeshConfig(tp=2),
    "tp x fsdp2": configs.MeshConfig(tp=2, dp_shard=2),
    "tp x ep": configs.MeshConfig(tp=2, ep=2),
    "tp x ep x fsdp2": configs.MeshConfig(tp=2, ep=2, dp_shard=4),
    "codes": configs.MeshConfig(tp=2, ep=2, dispatch="nvfp4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    checks.write_corpus(folder)
    checks.load(checks.tiny(str(folder), "mixed", "none"))
    return str(folder)


def run_on(folder: str, mesh: str, out: str, **changes) -> configs.TrainConfig:
    """Return a run of the smallest mixture with two key/value heads."""
    config = checks.tiny(folder, "mixed", out, **{"batch": 4, "steps": 2, **changes})
    return replace(config, model="moe-2m", mesh=MESHES[mesh])


def losses(config: configs.TrainConfig, recipe: str) -> list[float]:
    if config.mesh.size == 1:
        checks.train_all(0, 1, [(config, recipe)])
    else:
        ends = ranks.run(config.mesh.size, checks.train_all, [(config, recipe)], seconds=280)
        assert all(end == ends[0] for end in ends), "all ranks end with the same weights"
    found = [loss for _, _, loss in checks.lines(config, "step")]
    assert len(found) == config.optim.steps
    return found


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


def until(config: configs.TrainConfig, steps: int) -> tuple:
    """Return what a run began with and what it has after so many steps, on its first rank."""
    if config.mesh.size > 1:
        return ranks.run(config.mesh.size, checks.until, config, "nvfp4", steps)[0]
    return checks.until(0, 1, config, "nvfp4", steps)


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
