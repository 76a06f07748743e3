"""torchtitan's own Trainer on GPUs: a Llama of its registry in bf16, then in a recipe, with losses and tokens a second.

    torchrun --nproc-per-node=1 -m bench.titan --steps 200
    torchrun --nproc-per-node=2 -m bench.titan --steps 200 --one-gpu

Both runs have the same seed, text and process; FSDP2 shards over all ranks. Tokens are bytes of the interpreter's own
sources. torch 2.11 lacks names that torchtitan 0.3.0 imports: they are supplied here, and the first line says which.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

from halfbyte.train.corpus import load_corpus


class NoMeshDims:
    """Stands for torch's DataParallelMeshDims where torch has none: torchtitan imports it whatever a run needs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise RuntimeError(
            f"torch {torch.__version__} has no DataParallelMeshDims, which parallelism.spmd_backend='spmd_types' and "
            "'full_dtensor' need on several ranks; use 'partial_dtensor'"
        )


def complete_torch() -> list[str]:
    """Give torch the names that torchtitan 0.3.0 is ahead of, and return those that it lacked."""
    lacking = []
    if not hasattr(fsdp, "DataParallelMeshDims"):  # torch 2.13 has it
        setattr(fsdp, "DataParallelMeshDims", NoMeshDims)  # noqa: B010 - a name that torch's types may know
        lacking.append("DataParallelMeshDims")
    if not hasattr(dist, "set_timeout"):  # torch 2.13 has it as a private function
        setattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # noqa: B010
        lacking.append("set_timeout")
    return lacking


LACKING = complete_torch()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import llama3_configs, model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from halfbyte.integrations.torchtitan import quantize_config_  # noqa: E402

LOGGED = (1, 10, 50, 100, 200)
LAST = 20
"""Losses whose mean the verdict compares: a single one says more of its text than of the weights."""

WARM_UP = 10
"""Steps that compile, fill the allocator or capture a graph: no time of theirs counts."""

MOST = 0.03
"""By how much the recipe's last losses may differ from bf16's, as in the tests of two ranks on a CPU."""

TEXT = 16 << 20
"""Bytes of text: 200 steps of 8 x 2048 tokens read none of them twice."""


class Bytes(BaseTokenizer):
    """Tokens are bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Windows(BaseDataLoader):
    """Pieces of a text in order, every data-parallel rank its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        corpus: str = "python"
        """As of `halfbyte train`: "python", or a path to text."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.world, self.rank, self.length, self.batch, self.next = dp_world_size, dp_rank, seq_len, local_batch_size, 0
        self.tokens = torch.frombuffer(bytearray(text(config.corpus)), dtype=torch.uint8).long()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.next * self.world + self.rank) * self.batch
            starts = [(first + i) * self.length % (len(self.tokens) - self.length - 1) for i in range(self.batch)]
            rows = torch.stack([self.tokens[start : start + self.length + 1] for start in starts])
            self.next += 1
            positions = torch.arange(self.length, dtype=torch.int32).expand(self.batch, -1)
            yield {"input": rows[:, :-1], "positions": positions.contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.next = state_dict["next"]


def text(corpus: str) -> bytes:
    """Return the first TEXT bytes of a corpus."""
    pieces, size = [], 0
    for document in load_corpus(corpus).documents():
        pieces.append(document)
        size += len(document)
        if size >= TEXT:
            break
    return b"".join(pieces)[:TEXT]


class Measured(NamedTuple):
    """What a run gave: losses and tokens a second are those of all ranks, memory is this rank's."""

    losses: list[float]
    rate: float
    gib: float
    rank: int = 0
    world: int = 1


def configured(options: argparse.Namespace, folder: str) -> Trainer.Config:
    """Return the config of a run in bf16."""
    config = llama3_debugmodel()
    config.model_spec = model_registry(options.model)
    if options.attention == "sdpa":
        for _, _, parent, attribute in list(config.model_spec.model.traverse(FlexAttention.Config)):
            setattr(parent, attribute, ScaledDotProductAttention.Config())
    # In chunks, torchtitan's choice, it runs over weights of the head that FSDP2 of torch 2.11 has freed.
    config.loss = config.loss.loss_fn
    config.dump_folder = config.hf_assets_path = folder
    config.tokenizer, config.dataloader = Bytes.Config(), Windows.Config(corpus=options.text)
    training = config.training
    training.local_batch_size, training.seq_len = options.tokens
    training.steps, training.disable_cuda_graphs = options.steps, not options.graphs
    config.debug, config.comm.train_timeout_seconds = DebugConfig(seed=3), 600  # the second run compiles once more
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need DataParallelMeshDims on several ranks
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    return config


def train(config: Trainer.Config) -> Measured:
    """Train; the process group that torchtitan made stays for the next run, because torchrun's store makes one."""
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if dist.get_backend() == "gloo" and isinstance(module, fsdp.FSDPModule):  # it has no sum with a factor
            module.set_force_sum_reduction_for_comms(True)
    losses: list[float] = []
    times = [time.perf_counter()]
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, *others: Any, **more: Any) -> None:  # loss is a number: its step is through
        losses.append(loss)
        times.append(time.perf_counter())
        log(step, loss, *others, **more)

    trainer.metrics_processor.log = note
    utils.device_module.reset_peak_memory_stats()
    trainer.train()
    trainer.close()
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    seconds = statistics.median(steps[WARM_UP:] or steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = config.training.local_batch_size * config.training.seq_len * world
    gib = torch.cuda.max_memory_allocated() / 2**30 if utils.device_type == "cuda" else math.nan
    return Measured(losses, tokens / seconds, gib, rank, world)


def sentence(name: str, run: Measured) -> str:
    """Return the line of a run."""
    losses = ", ".join(f"{run.losses[step - 1]:.4f} ({step})" for step in LOGGED if step <= len(run.losses))
    end = f"mean of the last {len(run.losses[-LAST:])} {ending(run):.4f}"
    memory = "" if math.isnan(run.gib) else f"; {run.gib:.2f} GiB at most"
    return f"{name}: loss (step) {losses}; {end}; {run.rate:,.0f} tokens/s (median){memory}"


def ending(run: Measured) -> float:
    """Return the mean of a run's last losses."""
    return statistics.fmean(run.losses[-LAST:])


def verdict(plain: Measured, ours: Measured) -> tuple[str, bool]:
    """Return the last line, and whether it is good."""
    gap, first = ending(ours) / ending(plain) - 1, abs(ours.losses[0] / plain.losses[0] - 1)
    checks = {
        "as many steps": len(plain.losses) == len(ours.losses),
        "another arithmetic": ours.losses != plain.losses,
        "the same beginning": first < 0.02,  # the same weights and tokens, rounded otherwise
        "both learn": all(ending(run) < run.losses[0] for run in (plain, ours)),
        f"within {MOST:.0%}": abs(gap) < MOST,
    }
    wrong = [name for name, holds in checks.items() if not holds]
    said = "FAIL, not: " + ", ".join(wrong) if wrong else "PASS"
    rate = f"{ours.rate / plain.rate:.2f} of bf16's tokens/s"
    return f"verdict: {said}; the last losses are {gap:+.2%} of bf16's, the first {first:.3%} apart; {rate}", not wrong


def heading(options: argparse.Namespace, world: int) -> str:
    """Return what was run on what."""
    gpu = torch.cuda.get_device_name() if utils.device_type == "cuda" else "CPU"
    way = "gloo, sharing one GPU: its tokens/s say nothing" if options.one_gpu else "torchtitan's backend"
    lacked = ", ".join(LACKING) or "nothing"
    return (
        f"torchtitan {metadata.version('torchtitan')}, torch {torch.__version__} (lacked {lacked}), {gpu}, ranks "
        f"of FSDP2: {world} ({way}); llama3 {options.model}, {'x'.join(map(str, options.tokens))} tokens a rank, "
        f"{options.steps} steps, attention {options.attention}, CUDA graphs {'on' if options.graphs else 'off'}"
    )


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        prog="bench.titan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(llama3_configs), default="debugmodel")
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", nargs=2, type=int, default=[8, 2048], metavar=("SEQUENCES", "LENGTH"))
    flex = "flex is torchtitan's own choice, whose masks torch 2.11 cannot make"
    parser.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa", help=flex)
    parser.add_argument("--graphs", action="store_true", help="capture forward and backward, torchtitan's own choice")
    parser.add_argument("--text", default="python", metavar="CORPUS", help="as of halfbyte train; default: python")
    parser.add_argument("--one-gpu", action="store_true", help="every rank on the only GPU, over gloo")
    options = parser.parse_args(arguments)
    if utils.device_type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU, which torchtitan's Trainer needs: run it where there is one")
    if options.one_gpu and utils.device_type != "cuda":
        parser.error(f"--one-gpu: torchtitan runs on {utils.device_type}: leave it out")
    if options.one_gpu and torch.cuda.device_count() > 1:
        parser.error("--one-gpu: torch sees several GPUs, over which torchtitan spreads its ranks: show it one of them")
    if options.one_gpu and options.graphs:
        parser.error("--one-gpu: gloo runs on the host, which no CUDA graph captures: leave out --graphs")
    return options


def main(arguments: list[str]) -> int:
    """Run on every rank; rank 0 prints."""
    options = parsed(arguments)
    if options.one_gpu:  # NCCL refuses two ranks on one GPU; torchtitan asks here for the backend of a device
        dist.Backend.default_device_backend_map["cuda"] = "gloo"
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bf16", options.recipe):
            config = configured(options, folder)
            runs.append(train(quantize_config_(config, name) if runs else config))
            if runs[-1].rank == 0:
                print(*([] if runs[1:] else [heading(options, runs[0].world)]), sentence(name, runs[-1]), sep="\n")
                sys.stdout.flush()
            gc.collect()  # torchtitan has switched it off, and the next run wants the memory
            utils.device_module.empty_cache()
    dist.destroy_process_group()
    line, is_good = verdict(*runs)
    if runs[0].rank == 0:
        print(line)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
