"""A model that four GPUs hold together, trained on real text by FSDP2: loss, speed, memory and what travels.

    python experiments/corpora.py packages --out corpora/packages
    torchrun --nproc-per-node=4 experiments/full_size.py --recipe bf16 --out runs/bf16
    torchrun --nproc-per-node=4 experiments/full_size.py --recipe nvfp4 --weights nvfp4 --head shared --out runs/nvfp4

What experiments/results/full_size holds was trained on the dictionary instead, every token once:

    python experiments/corpora.py gcide --dict gcide.dict.dz --out corpora/gcide
    torchrun … --steps 150 --eval-every 150 --corpus corpora/gcide/train --held-out-corpus corpora/gcide/held_out

It is `halfbyte train` with the options below and those that are given, which come last and count. Two things differ: no
checkpoint is written, which of 8B parameters takes 96 GB, and the bytes that all-gathers return to a rank are counted,
in steps and in validations apart: full_size.json in the run's folder, beside its log and result.json.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":  # a file of a folder that is no package
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.gather import counted
from bench.zero import synchronize
from halfbyte import cli, files
from halfbyte.train.checkpoint import Checkpoints
from halfbyte.train.loop import Trainer

OPTIONS = (
    *("--preset", "one_gpu", "--no-tensorboard", "--accumulate", "1"),
    *("--model", "8b", "--tokenizer", "bpe:32000", "--sequence", "2048", "--batch", "32", "--steps", "160"),
    *("--lr", "3e-4", "--warmup", "0.1", "--decay", "0.2", "--eval-every", "160", "--eval-batches", "2"),
    *("--log-every", "4", "--recompute", "full", "--compile", "off", "--dp-shard", "4"),
    *("--corpus", "corpora/packages/train", "--held-out-corpus", "corpora/packages/held_out"),
)
RECORD = "full_size.json"
LATE = 30
"""Seconds of the first step after which, and after as many again, every rank prints where it is."""


class Watched:
    """What a run gathers, and how long it takes to its first step."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts, self._begun = counts, time.perf_counter()
        self.found = {"steps": 0, "step_bytes": 0, "validations": 0, "validation_bytes": 0, "until_first_step_s": 0.0}
        self.found["first_step_s"] = 0.0

    def watching(self, kind: str, run: Any) -> Any:
        """Return a method that counts what `run` gathers as that of steps or of validations."""

        def watched(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
            before, begun = self._counts["gathered_bytes"], time.perf_counter()
            is_first = kind == "step" and not self.found["steps"]
            if is_first:
                self.found["until_first_step_s"] = round(begun - self._begun, 1)
                # It took minutes where later ones take seconds: every rank shows what it does meanwhile.
                faulthandler.dump_traceback_later(LATE, repeat=True)
            outcome = run(trainer, *arguments, **options)
            if is_first:
                synchronize(trainer.device)
                faulthandler.cancel_dump_traceback_later()
                self.found["first_step_s"] = round(time.perf_counter() - begun, 1)
            self.found[f"{kind}s"] += 1
            self.found[f"{kind}_bytes"] += self._counts["gathered_bytes"] - before
            self._write(trainer)
            return outcome

        return watched

    def _write(self, trainer: Trainer) -> None:
        on_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        if trainer.ranks.is_first:
            values = self.found | {"world": trainer.ranks.size, "peak_GiB": peak}
            files.write_json(trainer.folder / RECORD, values)


def main(arguments: list[str]) -> int:
    """Run on every rank."""
    given = ["train", *OPTIONS, *arguments]
    with ExitStack() as stack:
        watched = Watched(stack.enter_context(counted()))
        methods = ((Trainer, "_one_step", "step"), (Trainer, "evaluate", "validation"))
        for owner, name, kind in methods:
            kept = getattr(owner, name)
            setattr(owner, name, watched.watching(kind, kept))
            stack.callback(setattr, owner, name, kept)
        stack.callback(setattr, Checkpoints, "save", Checkpoints.save)
        Checkpoints.save = lambda self, content: Path()  # type: ignore[method-assign]
        status = cli.main(given)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
