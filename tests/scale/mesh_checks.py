"""What the tests of `halfbyte train` on meshes share: a corpus, runs on it, their losses, and their checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ranks
import train_checks

from halfbyte.train import config as configs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with the corpus, tokenized once for all runs."""
    folder = tmp_path_factory.mktemp("runs")
    train_checks.write_corpus(folder)
    train_checks.load(train_checks.tiny(str(folder), "mixed", "none"))
    return str(folder)


def run_on(folder: str, model: str, mesh: configs.MeshConfig, out: str, **changes) -> configs.TrainConfig:
    """Return a run of a model on a mesh: 8 steps of 4 sequences, unless `changes` say otherwise."""
    config = train_checks.tiny(folder, "mixed", out, **{"batch": 4, "steps": 8, **changes})
    return replace(config, model=model, mesh=mesh)


def losses(config: configs.TrainConfig, recipe: str) -> list[float]:
    """Train a run to its end, and return the training loss of every step."""
    if config.mesh.size == 1 and config.device == "cpu":
        train_checks.train_all(0, 1, [(config, recipe)])
    else:
        how = {"seconds": 280, "device": config.device}
        ends = ranks.run(config.mesh.size, train_checks.train_all, [(config, recipe)], **how)
        assert all(end == ends[0] for end in ends), "all ranks end with the same weights"
    found = [loss for _, _, loss in train_checks.lines(config, "step")]
    assert len(found) == config.optim.steps
    return found


def until(config: configs.TrainConfig, steps: int) -> tuple:
    """Return what a run began with and what it has after so many steps, on its first rank."""
    if config.mesh.size > 1:
        return ranks.run(config.mesh.size, train_checks.until, config, "nvfp4", steps)[0]
    return train_checks.until(0, 1, config, "nvfp4", steps)
