"""A corpus of a few kilobytes and a training config of a second, for all tests of the trainer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.train import config, data

TEXT = "the model reads a block of sixteen values and keeps one scale for them def return self import not in"


def write_corpus(folder: Path) -> Path:
    """Write twenty files of words in a fixed random order."""
    folder.mkdir(parents=True, exist_ok=True)
    words, generator = TEXT.split(), random.Random(0)
    for number in range(20):
        text = " ".join(generator.choice(words) for _ in range(400))
        (folder / f"part{number:02d}.txt").write_text(text + "\n")
    return folder


def tiny(folder: Path, **changes) -> config.TrainConfig:
    """Return a run of 12 steps on the corpus in `folder`; changes go to the config that has a field of that name."""
    whole = config.tiny()
    parts = {name: getattr(whole, name) for name in ("data", "optim", "run")}
    parts["data"] = replace(parts["data"], corpus=str(folder / "corpus"))
    parts["run"] = replace(parts["run"], out=folder / "run", cache=folder / "cache")
    for field, value in changes.items():
        if field in config.TrainConfig.__dataclass_fields__:
            whole = replace(whole, **{field: value})
            continue
        (part,) = (name for name, values in parts.items() if hasattr(values, field))
        parts[part] = replace(parts[part], **{field: value})
    return replace(whole, **parts)


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus")
    return tmp_path


@pytest.fixture
def run(folder):
    """A function from changes of the config to the config and its data."""

    def make(**changes):
        one = tiny(folder, **changes)
        return one, data.load_data(one.data, one.run.cache)

    return make
