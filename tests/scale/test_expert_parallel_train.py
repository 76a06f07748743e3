"""`halfbyte train --ep`: step for step beside one process, its checkpoints on any mesh, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import torch
import train_checks as checks

from halfbyte.train import config as configs

MESHES = {
    "one": configs.MeshConfig(),
    "fsdp2": configs.MeshConfig(dp_shard=2),
    "ep": configs.MeshConfig(ep=2),
    "codes": configs.MeshConfig(ep=2, dispatch="nvfp4"),
    "ep x fsdp2": configs.MeshConfig(dp_shard=4, ep=2),
    "ep x hsdp": configs.MeshConfig(dp_shard=2, dp_replicate=2, ep=2),
    "codes x fsdp2": configs.MeshConfig(dp_shard=4, ep=2, dispatch="nvfp4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    checks.write_corpus(folder)
    checks.load(checks.tiny(str(folder), "mixed", "none"))
    return str(folder)


def run_on(folder: str, mesh: str, out: str, **changes) -> configs.TrainConfig:
    config = checks.tiny(folder, "mixed", out, **{"batch": 4, "steps": 8, **changes})
    return replace(config, model="moe-tiny", mesh=MESHES[mesh])


def first_gradients(config: configs.TrainConfig, recipe: str) -> dict[str, torch.Tensor]:
    """Return the gradients of the first micro-batch on the first rank, whole."""
    (found,) = ranks.run(config.mesh.size, checks.first_gradients, [(config, recipe)])[0]
    return {name: torch.frombuffer(bytearray(raw), dtype=torch.float32) for name, raw in found.items()}


def test_gradients_are_those_of_fsdp2(folder):
    """The mean over all ranks, of experts too, in high precision: no bit is drawn, no amax depends on the ranks."""
    expected = None
    for mesh in ("fsdp2", "ep"):
        found = first_gradients(run_on(folder, mesh, f"gradients {mesh}"), "bf16")
        expected = expected or found
        assert found.keys() == expected.keys()
        for name, got in found.items():
            assert (got - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
