"""`halfbyte`, run by torchrun, with a fault built in: `faulty.py PLACE RANK STEP COMMAND …`.

In step STEP, counted from 1, rank RANK is killed in `forward`, in `backward`, in a `gather` of the forward, or as it
saves (`save`; `publish`: when all shards are written and the folder is about to be renamed); `disk`: it has no
room left to write to when it saves; `error`: it raises in the forward; `signal`: it gets SIGTERM; `version`: from its
start it runs another release of halfbyte.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from halfbyte import cli
from halfbyte.train import loop, measure, sharded


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail() -> None:
    raise ValueError(f"rank {dist.get_rank()} had enough")


def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def in_gather() -> None:
    """Let FSDP2's next all-gather send nothing."""
    _fsdp_param_group.foreach_all_gather = lambda *arguments, **options: kill()


def install(place: str, rank: int, step: int) -> None:
    """Let the fault happen where it should."""
    losses, save, write = loop.Trainer._losses, loop.Trainer._save, sharded._Writer.write_data

    def is_due(trainer: loop.Trainer) -> bool:
        return dist.get_rank() == rank and trainer.step == step

    def in_forward(trainer, inputs, targets, model, *teacher):
        if dist.get_rank() == rank and trainer.step == step - 1 and model is trainer.trained:
            {"forward": kill, "error": fail, "signal": signalled, "gather": in_gather}.get(place, lambda: None)()
            loss, balance = losses(trainer, inputs, targets, model, *teacher)
            if place == "backward":
                loss.register_hook(lambda gradient: kill())
            return loss, balance
        return losses(trainer, inputs, targets, model, *teacher)

    def in_save(trainer):
        if is_due(trainer) and place == "disk":
            no_room()
        if is_due(trainer) and place == "save":
            sharded._Writer.write_data = lambda *arguments: (write(*arguments), kill())
        if is_due(trainer) and place == "publish":
            sharded._finish = lambda *arguments: kill()
        save(trainer)

    loop.Trainer._losses, loop.Trainer._save = in_forward, in_save
    if place == "version" and os.environ["RANK"] == str(rank):
        measure.__version__ = "0.0.1"


if __name__ == "__main__":
    where, who, when, *command = sys.argv[1:]
    install(where, int(who), int(when))
    sys.exit(cli.main(command))
