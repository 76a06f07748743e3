"""A run that begins with another's weights (QAT), and one that learns from another's logits (QAD).

Both are folders of `halfbyte train`. Their newest checkpoint is read and nothing in them is changed. What they are
belongs to the identity of the run: the hash of theirs and the step.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.train import checkpoint, recorded, restore
from halfbyte.train import model as models
from halfbyte.train.config import TrainConfig, TuneConfig
from halfbyte.train.data import Data
from halfbyte.train.moe import MoEConfig

TOKENS = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run whose weights are read.

    Args:
        option: that named it, for messages.
        path: its newest checkpoint.
        identity: its own, as its config.json has it.
    """

    option: str
    path: Path
    identity: dict

    @property
    def step(self) -> int:
        """The optimizer steps of its checkpoint."""
        found = checkpoint.NAME.fullmatch(self.path.name)
        assert found is not None, "checkpoints_in returns such names"
        return int(found[1])

    def facts(self) -> dict:
        """Return what tells it from every other: a hash of its identity, and the step."""
        text = json.dumps(self.identity, sort_keys=True)
        return {"run": hashlib.sha256(text.encode()).hexdigest(), "step": self.step}

    def shape(self) -> models.ModelConfig:
        """Return the shape of its model.

        Raises:
            ValueError: its identity says none.
        """
        values: Any = self.identity.get("shape")
        try:
            moe = values["moe"]
            shape: dict[str, Any] = {**values, "moe": None if moe is None else MoEConfig(**moe)}
            return models.ModelConfig(**shape)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{self.option}: config.json says no shape of a model ({error})") from error


def find_run(run: Path, option: str) -> FoundRun:
    """Return the newest checkpoint of a folder of `halfbyte train`.

    Raises:
        ValueError: there is none, or config.json is not one that a run wrote.
    """
    label = f"{option}={str(run)!r}"
    if not (run / recorded.CONFIG).exists():
        raise ValueError(f"{label}: no {recorded.CONFIG} there; give the --out of a run of halfbyte train")
    found = checkpoint.checkpoints_in(run / recorded.CHECKPOINTS)
    if not found:
        raise ValueError(f"{label}: no checkpoint there; let that run reach one")
    return FoundRun(option=label, path=found[-1], identity=recorded.recorded_config(run)["identity"])


def tune_identity(tune: TuneConfig) -> dict:
    """Return what of a run's identity follows from where its weights and its targets come from, {} for neither.

    Raises:
        ValueError: a folder holds no run.
    """
    facts: dict = {}
    if tune.begin is not None:
        facts["begin"] = find_run(tune.begin, "begin").facts()
    if tune.teacher is not None:
        facts["teacher"] = find_run(tune.teacher, "teacher").facts() | {"temperature": tune.temperature}
    return {"tune": facts} if facts else {}


def begin_(model: models.Decoder, config: TrainConfig, data: Data) -> None:
    """Give `model` the weights of the run that `config.tune.begin` names, if it names one.

    Raises:
        ValueError: that run has another shape or other tokens, or its checkpoint cannot be read.
    """
    if config.tune.begin is None:
        return
    source = find_run(config.tune.begin, "begin")
    _check_tokens(source, config, data)
    _load(model, source)


def teacher_of(config: TrainConfig, data: Data, device: torch.device) -> nn.Module | None:
    """Return the model of the run that `config.tune.teacher` names, in high precision and frozen; None without one.

    Raises:
        ValueError: that run has other tokens, or its checkpoint cannot be read.
    """
    if config.tune.teacher is None:
        return None
    source = find_run(config.tune.teacher, "teacher")
    _check_tokens(source, config, data)
    model = models.Decoder(source.shape())
    _load(model, source)
    return model.to(device).eval().requires_grad_(False)


def _check_tokens(source: FoundRun, config: TrainConfig, data: Data) -> None:
    theirs = source.identity.get("data")
    theirs = theirs.get(TOKENS) if isinstance(theirs, dict) else None
    if theirs != config.data.tokenizer:
        raise ValueError(f"{source.option}: its tokenizer is {theirs!r}, this run's {config.data.tokenizer!r}")
    corpus = source.identity.get("corpus_sha256")
    if theirs != "bytes" and corpus != data.summary["sha256"]:
        raise ValueError(
            f"{source.option}: its {theirs} tokenizer was trained on another text (corpus_sha256), so that numbers "
            "mean other tokens; give both runs one corpus, or --tokenizer bytes"
        )


def _load(model: models.Decoder, source: FoundRun) -> None:
    saved = checkpoint.load_checkpoint(source.path, source.identity)
    if checkpoint.is_of_ranks(source.path):
        from halfbyte.train import sharded  # DCP takes a second to import
        from halfbyte.train.ranks import World

        none = torch.optim.SGD([torch.zeros(1, dtype=torch.float32)])  # of the optimizer's state nothing stays
        saved = sharded.load_tensors(source.path, saved, model, none, World())
    try:
        restore.check_weights(saved["model"], model.state_dict())
    except ValueError as error:
        raise ValueError(f"{source.option}: does not fit this run ({error})") from error
    model.load_state_dict(saved["model"])
