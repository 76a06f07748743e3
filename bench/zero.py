"""ZeroOptimizer on several GPUs, weights gathered as NVFP4 beside weights gathered in bf16.

    torchrun --nproc-per-node=2 -m bench.zero --models 1b 3b --bitwise 125m --out bench/results

For each model and both ways: bytes that a step gathers and reduces, the time of a gather alone, of a step, peak memory,
and how much of the gathers' time a trace shows beside other kernels. --bitwise trains a model for --steps steps both
ways and compares every loss and norm. Without GPUs it runs on gloo with small models: that shows that it works.

    torchrun --nproc-per-node=2 -m bench.zero --one-gpu --bitwise 10m

runs every rank on the first GPU, over gloo, which carries messages through the host: the kernels and bits of several
GPUs where there is one, and no time that says anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

import halfbyte as hb
from bench import machine, results
from bench.exposure import Kernels, gathers_of, traced_kernels
from bench.measure import repeatable
from halfbyte.distributed import ZeroConfig, ZeroOptimizer
from halfbyte.distributed.plan import BucketPlan, Item, scale_room, storage_plan
from halfbyte.distributed.weights import tiled_parameters
from halfbyte.train import model as models

VOCABULARY = 32_000
WARM_UP, TIMED, TRACED = 3, 6, 4
CHUNK = 25
Way = Literal["nvfp4", "plain"]
WAYS: tuple[Way, ...] = ("nvfp4", "plain")


class Trainer:
    """A decoder in bf16 whose layers follow the recipe nvfp4, and its optimizer.

    Args:
        name: of a model preset; its vocabulary is cut to `vocabulary`.
        weights: "nvfp4" or "plain".
        tokens: sequences and their length on every rank.
    """

    def __init__(
        self, name: str, weights: Way, tokens: tuple[int, int], device: torch.device, vocabulary: int = VOCABULARY
    ) -> None:
        config = models.model_preset(name)
        config = replace(config, vocab_size=min(config.vocab_size, vocabulary))
        torch.manual_seed(0)
        with device:
            self.model = models.Decoder(config).bfloat16()
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
        self.state = hb.RunState(0, rank=dist.get_rank()).to(device)
        keep = hb.Keep(names=("lm_head",), last_fraction=0)
        hb.quantize_(self.model, "nvfp4", state=self.state, keep=keep)
        adamw = partial(torch.optim.AdamW, lr=3e-4, fused=True)
        zero = ZeroConfig(weights=weights, grad_dtype=torch.bfloat16, max_norm=1.0)
        self.zero = ZeroOptimizer(self.model, adamw, config=zero)
        self.tokens, self.device, self.vocabulary = tokens, device, config.vocab_size
        self.count = 0

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Train one step on tokens that follow a rule that can be learned; return loss and norm."""
        loss = self.loss()
        loss.backward()
        self.state.advance()
        self.count += 1
        return loss.detach(), self.zero.step()

    def loss(self) -> torch.Tensor:
        """Run the forward."""
        generator = torch.Generator().manual_seed(1000 * self.count + dist.get_rank())
        first = torch.randint(self.vocabulary, (self.tokens[0], 1), generator=generator)
        x = (first * (1 + torch.arange(self.tokens[1] + 1)) % 997 % self.vocabulary).to(self.device, non_blocking=True)
        return F.cross_entropy(self.model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bitwise(
    name: str, steps: int, tokens: tuple[int, int], device: torch.device, seconds: float = math.inf
) -> dict[str, Any]:
    """Train both ways in turn and compare every loss and norm, bit for bit, on every rank.

    Args:
        seconds: no chunk of steps begins that would, like the one before, end later.
    """
    end, took = time.perf_counter() + seconds, 0.0
    curves: dict[str, list[torch.Tensor]] = {way: [] for way in WAYS}
    with repeatable():
        trainers = {way: Trainer(name, way, tokens, device) for way in WAYS}
        while (done := len(curves[WAYS[-1]]) * CHUNK) < steps:
            differs = done > 0 and not torch.equal(*(curves[way][-1].view(torch.int32) for way in WAYS))
            start = time.perf_counter()
            stop = torch.tensor(float(differs or start + took > end), device=device)
            dist.all_reduce(stop)  # ranks stop together
            if stop.item():
                break
            if done and dist.get_rank() == 0:
                print(f"{name}: {done} steps, equal so far", file=sys.stderr, flush=True)
            for way in WAYS:
                own = [torch.stack(trainers[way].step()).float() for _ in range(min(CHUNK, steps - done))]
                curves[way].append(torch.stack(own).cpu())
            took = time.perf_counter() - start
    ours, plain = (torch.cat(curves[way]) for way in WAYS)
    differing = (ours.view(torch.int32) != plain.view(torch.int32)).any(1)
    first = torch.tensor(float(differing.nonzero()[0]) if differing.any() else math.inf, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return {
        "case": "zero/bitwise",
        "model": name,
        "steps": len(ours),
        "equal": math.isinf(first.item()),
        "first_difference": None if math.isinf(first.item()) else int(first),
        "first_loss": ours[0, 0].item(),
        "last_loss": ours[-1, 0].item(),
    }


def measure(name: str, way: Way, tokens: tuple[int, int], device: torch.device, vocabulary: int) -> dict[str, Any]:
    """Return traffic, times, memory and hidden share of one model and way."""
    trainer = Trainer(name, way, tokens, device, vocabulary)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    zero = trainer.zero
    for _ in range(WARM_UP):
        trainer.step()
    before = dict(zero.traffic)
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(TIMED):  # unbroken, as in training: the gathers of a step end beside the next forward
        trainer.step()
    synchronize(device)
    seconds = (time.perf_counter() - start) / TIMED
    traffic = {key: (zero.traffic[key] - before[key]) / TIMED for key in before}
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    planned = planned_bytes([bucket.plan for bucket in zero.buckets], way)
    outcome = {
        "case": "zero/step",
        "model": name,
        "weights": way,
        "vocabulary": trainer.vocabulary,
        "tokens": list(tokens),
        **planned,
        "gathered_bytes": traffic["gathered"],
        "reduced_bytes": traffic["reduced"],
        "gather_ms": 1e3 * gather_seconds(zero, device),
        "step_ms": 1e3 * seconds,
        "peak_GiB": peak / 2**30,
    }
    hidden = hidden_share(traced(trainer, device), zero, TRACED) if device.type == "cuda" else {}
    del trainer, zero
    release()
    return outcome | hidden


def planned_bytes(plans: Sequence[BucketPlan], way: Way) -> dict[str, Any]:
    """Return what a gather takes of what it takes in bf16: of the weights in tiles alone, and of the whole model."""
    numel, bytes_ = {True: 0, False: 0}, {True: 0, False: 0}
    for plan in plans:
        numel[plan.tiled] += sum(place.item.rows * place.item.cols for place in plan.places)
        coded = plan.tiled and way == "nvfp4"
        bytes_[plan.tiled] += plan.numel // 2 if coded else 2 * plan.numel
    if way == "nvfp4":
        bytes_[True] += scale_room(plans) * plans[0].world
    return {
        "parameters": sum(numel.values()),
        "tiled_parameters": numel[True],
        "tiled_weights_of_bf16": bytes_[True] / (2 * numel[True]),
        "whole_model_of_bf16": sum(bytes_.values()) / (2 * sum(numel.values())),
    }


def planned(name: str, vocabulary: int, tied: bool, world: int) -> dict[str, Any]:
    """Return the bytes that a model of any size would gather, from its storage plan: nothing is allocated."""
    config = replace(models.model_preset(name), vocab_size=vocabulary, tie_embeddings=tied)
    with torch.device("meta"):
        model = models.Decoder(config).bfloat16()
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("lm_head",), last_fraction=0))
    tiled = tiled_parameters(model)
    items = [
        Item(n, p.shape[0], p.shape[1], True) if n in tiled else Item(n, 1, p.numel(), False)
        for n, p in model.named_parameters()
    ]
    own = {"case": "zero/bytes", "model": name, "vocabulary": vocabulary, "tied": tied, "world": world}
    return own | planned_bytes(storage_plan(items, world, ZeroConfig().bucket_numel), "nvfp4")


def gather_seconds(zero: ZeroOptimizer, device: torch.device) -> float:
    """Return the time of one gather of all buckets with nothing beside it, what follows from it included."""
    out = []
    for _ in range(4):
        zero.synchronize()
        synchronize(device)
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for sender in (*zero.scales, *zero.buckets):
            sender.start_gathering()
        zero.synchronize()
        synchronize(device)
        out.append(time.perf_counter() - start)
    return min(out[1:])


def traced(trainer: Trainer, device: torch.device) -> list[tuple[str, float, float]]:
    """Return the kernels of TRACED steps and a forward."""

    def first() -> None:
        trainer.step()
        trainer.zero.synchronize()
        synchronize(device)

    def steps() -> None:
        for _ in range(TRACED):
            trainer.step()
        trainer.loss()  # as in training: without gradients other kernels run, and compiling them would stop the host
        synchronize(device)

    traced_kernels(first)  # the first trace of a process stops the host to set itself up
    dist.barrier()
    synchronize(device)
    return traced_kernels(steps)


def hidden_share(kernels: Kernels, zero: ZeroOptimizer, steps: int) -> dict[str, Any]:
    """Return from a trace how much of the gathers' time other kernels ran beside them, and what nothing ran beside.

    The share is the median step's: a gather lasts until the last rank's host has launched its own, so that one late
    host stretches it on all.
    """
    gathers = gathers_of(kernels)
    total = sum(one.took for one in gathers)
    if not total:
        return {}
    exposed = [one.alone for one in gathers]
    names = messages(zero)
    assert len(exposed) == steps * len(names), (len(exposed), len(names))
    of_step = [slice(i * len(names), (i + 1) * len(names)) for i in range(steps)]
    shares = [1 - sum(exposed[step]) / sum(one.took for one in gathers[step]) for step in of_step]
    times = {name: sum(exposed[i :: len(names)]) / steps / 1e3 for i, name in enumerate(names)}
    most = sorted(names, key=lambda name: -times[name])[:4]
    reduced = sum(e - s for name, s, e in kernels if "reducescatter" in name.lower())
    return {
        "gather_kernels_ms": total / steps / 1e3,
        "exposed_ms": sum(exposed) / steps / 1e3,
        "hidden_share": statistics.median(shares),
        "hidden_shares": [round(share, 4) for share in shares],
        "most_exposed_ms": {name: round(times[name], 4) for name in most},
        "reduce_kernels_ms": reduced / steps / 1e3,
    }


def messages(zero: ZeroOptimizer) -> list[str]:
    """Return what a step gathers, in order: the first parameter of each bucket, and "scales" before those of codes."""
    names = {coded: [b.plan.places[0].item.name for b in zero.buckets if b.quantized == coded] for coded in (0, 1)}
    return [*names[0], *("scales" for _ in zero.scales), *names[1]]


def main(arguments: list[str]) -> int:
    """Run on every rank; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        prog="bench.zero", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], metavar="PRESET")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="the most words of a model of --models")
    parser.add_argument("--tokens", nargs=2, type=int, default=[8, 2048], metavar=("SEQUENCES", "LENGTH"))
    parser.add_argument("--planned", nargs="*", default=[], metavar="PRESET", help="bytes alone, from the storage plan")
    parser.add_argument("--bitwise", metavar="PRESET")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--bitwise-tokens", nargs=2, type=int, default=[2, 256])
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole run; --bitwise stops then")
    parser.add_argument(
        "--one-gpu", action="store_true", help="every rank on the first GPU, over gloo; measures no time"
    )
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    if options.one_gpu and options.models:
        parser.error(
            "--one-gpu: ranks that share a GPU wait for each other, and --models measures time: leave out either"
        )
    if options.one_gpu and not torch.cuda.is_available():
        parser.error("--one-gpu: torch sees no GPU; without it ranks on the CPU use gloo too")
    begun = time.perf_counter()
    device = start(one_gpu=options.one_gpu)
    leads = dist.get_rank() == 0
    lines: list[dict[str, Any]] = []

    def record(run: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        shared = {"one_gpu": True} if options.one_gpu else {}
        values = {"world": dist.get_world_size(), **shared, **run(), "took_s": round(time.perf_counter() - start, 1)}
        lines.append(values)
        if leads:
            print(json.dumps(values), flush=True)

    for name in options.models:
        for way in WAYS:
            record(partial(measure, name, way, tuple(options.tokens), device, options.vocabulary))
    for name in options.planned:
        own = models.model_preset(name)
        cut = options.vocabulary
        for shape in dict.fromkeys([(cut, True), (cut, False), (own.vocab_size, own.tie_embeddings)]):
            record(partial(planned, name, *shape, dist.get_world_size()))
    if options.bitwise:
        left = begun + options.seconds - time.perf_counter()
        record(partial(bitwise, options.bitwise, options.steps, tuple(options.bitwise_tokens), device, left))
    if leads:
        facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
        path = results.claim(facts, options.out, "zero")
        results.write(path, facts | {"world": dist.get_world_size()}, lines)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(line.get("equal", True) for line in lines) else 1


def start(*, one_gpu: bool = False) -> torch.device:
    on_gpu = torch.cuda.is_available()
    number = 0 if one_gpu else int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        nccl = on_gpu and not one_gpu  # which refuses two ranks on one GPU
        dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
