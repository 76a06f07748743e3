"""What ranks of a training run do, in processes that are there already; and the run that one process does alone."""

from __future__ import annotations

import json
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from halfbyte.train import config as configs
from halfbyte.train import data, loop, parallel, sharded
from halfbyte.train.launch import ProcessPlace
from halfbyte.train.ranks import World

PERIOD = "the model reads a block of 32 b\n"
"""As long as a sequence: all sequences are equal."""
TEXT = "the model reads a block of sixteen values and keeps one scale for them def return self import not in"


def write_corpus(folder: Path) -> None:
    """Write `equal.txt`, all of whose sequences are equal, and `mixed.txt`, none of whose are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "equal.txt").write_text(PERIOD * 2000)
    words, generator = TEXT.split(), torch.Generator().manual_seed(0)
    drawn = torch.randint(len(words), (8000,), generator=generator).tolist()
    (folder / "mixed.txt").write_text(" ".join(words[i] for i in drawn))


def tiny(folder: str, text: str, out: str, *, mesh: tuple[int, int] = (1, 1), **changes) -> configs.TrainConfig:
    """Return a run of 12 steps on the corpus `text`; mesh: (dp_replicate, dp_shard)."""
    whole = configs.tiny()
    parts = {name: getattr(whole, name) for name in ("data", "optim", "run")}
    parts["data"] = replace(parts["data"], corpus=f"{folder}/{text}.txt")
    parts["run"] = replace(parts["run"], out=Path(folder, out), cache=Path(folder, "cache"), log_every=1)
    for field, value in changes.items():
        (part,) = (name for name, values in parts.items() if hasattr(values, field))
        parts[part] = replace(parts[part], **{field: value})
    return replace(whole, mesh=configs.MeshConfig(dp_replicate=mesh[0], dp_shard=mesh[1]), **parts)


def saves_behind(rank: int, world: int, config: configs.TrainConfig) -> int:
    """Train a run whose first save writes only when a later step has begun; return how many saves there were."""
    later, saves = threading.Event(), []
    losses, write = loop.Trainer._losses, sharded._Writer.write_data

    def writes(*arguments):
        assert later.wait(60), "the steps wait for the save"
        saves.append(arguments)
        return write(*arguments)

    def steps(trainer, inputs, targets, model, *teacher):
        if trainer.step >= config.run.checkpoint_every and model is trainer.trained:
            later.set()
        return losses(trainer, inputs, targets, model, *teacher)

    loop.Trainer._losses, sharded._Writer.write_data = steps, writes
    loop.train(config, "nvfp4", load(config), ranks=world_of(rank, world))
    return len(saves)


def load(config: configs.TrainConfig) -> data.Data:
    return data.load_data(config.data, config.run.cache)


def world_of(rank: int, world: int) -> World:
    return World(ProcessPlace(rank=rank, size=world, local_rank=rank), dist.group.WORLD) if world > 1 else World()


def state_of(trainer: loop.Trainer) -> dict[str, torch.Tensor]:
    """Return weights and moments, whole."""
    states = trainer.parallel.state(trainer.model, trainer.optimizer)
    numbered = states["optimizer"]["state"].items()
    found = {f"{index}.{key}": value for index, state in numbered for key, value in state.items()}
    found |= states["model"]
    return {name: parallel.whole(tensor).clone() for name, tensor in found.items()}


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().cpu().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def lines(config: configs.TrainConfig, *kinds: str) -> list[tuple]:
    """Return step and loss of the log's lines."""
    read = map(json.loads, (config.run.out / "log.jsonl").read_text().splitlines())
    return [(line["kind"], line["step"], line["loss"]) for line in read if line["kind"] in (kinds or ("step", "eval"))]


def train_all(rank: int, world: int, runs: list[tuple[configs.TrainConfig, str]]) -> list[dict[str, bytes]]:
    """Train every run; return the bytes of what each ends with. Of FSDP2's warnings none reaches who trains."""
    ends = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped module")
        for config, recipe in runs:
            trainer = loop.Trainer(config, recipe, load(config), ranks=world_of(rank, world))
            trainer.train()
            ends.append(as_bytes(state_of(trainer)))
    return ends


def train_all_as_first(rank: int, world: int, runs: list[tuple[configs.TrainConfig, str]]) -> list[dict[str, bytes]]:
    """Train every run with the random bits of rank 0 on every rank; return the bytes of what each ends with."""
    ends = []
    for config, recipe in runs:
        trainer = loop.Trainer(config, recipe, load(config), ranks=world_of(rank, world))
        assert trainer.run_state.rank == rank, "its own, until the test says otherwise"
        trainer.run_state.set_rank(0)
        trainer.train()
        ends.append(as_bytes(state_of(trainer)))
    return ends


def begun_and_trained(rank: int, world: int, runs: list[tuple[configs.TrainConfig, str]]) -> list[tuple]:
    """Train every run; return the bytes of the weights that each began with, and of those it left."""
    ends = []
    for config, recipe in runs:
        trainer = loop.Trainer(config, recipe, load(config), ranks=world_of(rank, world))
        begun = weights_of(trainer)
        trainer.train()
        ends.append((begun, weights_of(trainer)))
    return ends


def weights_of(trainer: loop.Trainer) -> dict[str, bytes]:
    """Return the bytes of weights, whole."""
    model = trainer.parallel.state(trainer.model, trainer.optimizer)["model"]
    return as_bytes({name: parallel.whole(tensor).clone() for name, tensor in model.items()})


def until(rank: int, world: int, config: configs.TrainConfig, recipe: str, steps: int) -> tuple:
    """Build a run, which resumes, and train until so many steps are done and saved.

    Returns:
        The step, position, weights and moments it began with; and those it left.
    """
    trainer = loop.Trainer(config, recipe, load(config), ranks=world_of(rank, world))
    begun = trainer.step, trainer.run_state.position, as_bytes(state_of(trainer)) if trainer.step else {}
    while trainer.step < steps:
        trainer.run_state.begin_step(trainer.model)
        trainer._one_step()
    trainer.seconds += 1.0
    trainer._save()
    return begun, (trainer.step, trainer.run_state.position, as_bytes(state_of(trainer)))


def gradients(trainer: loop.Trainer) -> dict[str, torch.Tensor]:
    """Return the gradients of the first micro-batch, whole."""
    with trainer.parallel.reducing(trainer.trained, is_last=True):
        loss, balance = trainer._losses(*trainer.batches[0], trainer.trained)
        (loss + balance).backward()
    found = {n: parallel.whole(p.grad).clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(trainer.model.parameters()))
    return found


def first_gradients(rank: int, world: int, runs: list[tuple[configs.TrainConfig, str]]) -> list[dict[str, bytes]]:
    found = []
    for config, recipe in runs:
        trainer = loop.Trainer(config, recipe, load(config), ranks=world_of(rank, world))
        found.append(as_bytes(gradients(trainer)))
    return found


def gradients_alone(config: configs.TrainConfig, recipe: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return the gradients that one process has of a rank's part, with its random bits."""
    trainer = loop.Trainer(replace(config, mesh=configs.MeshConfig()), recipe, load(config))
    trainer.run_state.set_rank(rank)
    layout = {"sequence": config.data.sequence, "batch": config.data.batch, "device": trainer.device}
    trainer.batches = data.Batches(trainer.data.train, seed=config.seed, part=(rank, world), **layout)
    return gradients(trainer)


def held_out(rank: int, world: int, runs: list[configs.TrainConfig]) -> list[float]:
    return [loop.Trainer(c, "nvfp4", load(c), ranks=world_of(rank, world)).evaluate() for c in runs]
