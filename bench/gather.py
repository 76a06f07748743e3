"""FSDP2 on several GPUs, weights gathered as NVFP4 codes beside weights gathered in bf16.

    torchrun --nproc-per-node=2 -m bench.gather --models 1b --layers 8 --bitwise 10m --seconds 140 --out bench/results

Masters are fp32, MixedPrecisionPolicy gathers in bf16 and reduces in fp32, the layers compute in recipe nvfp4 either
way. --bitwise trains a model for --steps steps both ways and compares every loss and norm, and the masters at the end.
For each of --models and both ways: bytes that a step gathers, the time of a step, of its all-gathers, how much of that
no other kernel hides, on rank 0 and on the rank that comes last to each and waits for none, peak memory. Every step is
timed: the median and the interquartile range are those of all steps of --rounds, in each of which the ways are measured
in turn, their models built anew. Without GPUs it runs on gloo with small models: that shows that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfbyte as hb
from bench import machine, results
from bench.exposure import Gather, exposed, gathers_of, of_the_last, traced_kernels
from bench.measure import repeatable
from bench.zero import release, start, synchronize
from halfbyte.distributed.fsdp_choice import groups_of, is_wrapped
from halfbyte.train import model as models
from halfbyte.train.parallel import cross_entropy, local, prefetch_

VOCABULARY = 32_000
WARM_UP, TIMED, TRACED = 3, 12, 3
CHUNK = 25
Way = Literal["codes", "shared", "bf16"]
WAYS: tuple[Way, ...] = ("codes", "bf16")
"""What gives the same bits; "shared" is codes, with embedding and head that ranks share (`--head shared`)."""
Blocks = Literal["plain", "fused", "compiled"]
"""How blocks run: op by op, layers fused with norms and activations, or fused and compiled, as in `halfbyte train`."""


class Trainer:
    """A decoder with fp32 masters that FSDP2 shards block by block, its layers in recipe nvfp4, and AdamW.

    Args:
        config: its shape.
        way: how its weights are gathered.
        tokens: sequences and their length on every rank.
        ahead: how many blocks are gathered before the forward of one is launched, beside its own.
        blocks: how they run.
    """

    def __init__(
        self,
        config: models.ModelConfig,
        way: Way,
        tokens: tuple[int, int],
        device: torch.device,
        ahead: int = 1,
        *,
        blocks: Blocks = "plain",
    ) -> None:
        torch.manual_seed(0)
        with device:
            self.model = models.Decoder(config)
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
        keep = hb.Keep(names=("lm_head",), last_fraction=0)
        self.state = hb.RunState(0).to(device)
        hb.quantize_(self.model, "nvfp4", state=self.state, keep=keep)
        if blocks != "plain":
            hb.nn.fuse_(self.model)
        if blocks == "compiled":
            for block in self.model.layers:
                block.compile(fullgraph=True)
        hb.distributed.place_ranks_(self.model)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        ignored = None
        if way == "shared":
            options = {"tokens": tokens[0] * tokens[1], "policy": policy, "head": "lm_head"}
            ignored = hb.distributed.shard_embedding_(self.model, mesh, **options).params
        fully_shard(self.model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        prefetch_(self.model.layers, ahead)
        self.gather = None if way == "bf16" else hb.distributed.fsdp_gather_nvfp4_(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.tokens, self.device, self.vocabulary = tokens, device, config.vocab_size
        self.count = 0

    def step(self) -> torch.Tensor:
        """Train one step on tokens that follow a rule that can be learned; return loss and norm, fp32 [2]."""
        generator = torch.Generator().manual_seed(1000 * self.count + dist.get_rank())
        first = torch.randint(self.vocabulary, (self.tokens[0], 1), generator=generator)
        x = (first * (1 + torch.arange(self.tokens[1] + 1)) % 997 % self.vocabulary).to(self.device, non_blocking=True)
        loss = cross_entropy(self.model(x[:, :-1]), x[:, 1:])
        loss.backward()
        self.state.advance()
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        return torch.stack((loss.detach(), norm.full_tensor()))


def shape_of(name: str, layers: int | None = None, vocabulary: int = VOCABULARY) -> models.ModelConfig:
    """Return the shape of a preset, with fewer blocks and words."""
    config = models.model_preset(name)
    return replace(config, layers=layers or config.layers, vocab_size=min(config.vocab_size, vocabulary))


def bitwise(
    name: str,
    steps: int,
    tokens: tuple[int, int],
    device: torch.device,
    seconds: float = math.inf,
    *,
    blocks: Blocks = "plain",
) -> dict[str, Any]:
    """Train both ways in turn and compare every loss and norm, then the masters, bit for bit, on every rank.

    Args:
        seconds: no chunk of steps begins that would, like the one before, end later.
    """
    end, took = time.perf_counter() + seconds, 0.0
    curves: dict[str, list[torch.Tensor]] = {way: [] for way in WAYS}
    with repeatable():
        trainers = {way: Trainer(shape_of(name), way, tokens, device, blocks=blocks) for way in WAYS}
        while (done := len(curves[WAYS[-1]]) * CHUNK) < steps:
            begun = time.perf_counter()
            if _any(begun + took > end, device):  # ranks stop together
                break
            for way in WAYS:
                own = [trainers[way].step() for _ in range(min(CHUNK, steps - done))]
                curves[way].append(torch.stack(own).cpu())
            took = time.perf_counter() - begun
    ours, plain = (torch.cat(curves[way]).view(torch.int32) for way in WAYS)
    differing = (ours != plain).any(1)
    masters = zip(*(trainers[way].model.parameters() for way in WAYS), strict=True)
    changed = sum(not torch.equal(local(a), local(b)) for a, b in masters)
    losses = ours.view(torch.float32)[:, 0]
    gather = trainers["codes"].gather
    assert gather is not None, "it is the way of codes"
    return {
        "case": "gather/bitwise",
        "model": name,
        "blocks": blocks,
        "steps": len(ours),
        "equal": not _any(bool(differing.any()) or changed > 0 or not bool(losses.isfinite().all()), device),
        "first_difference": int(differing.nonzero()[0]) if differing.any() else None,
        "differing_masters": changed,
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "quantized": len(gather.report.quantized),
        **gather.traffic,
    }


def _any(found: bool, device: torch.device) -> bool:
    """Return whether it is so on some rank."""
    flag = torch.tensor(float(found), device=device)
    dist.all_reduce(flag)
    return bool(flag)


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count all-gathers and the bytes that they return, this rank's own included, of FSDP2 and anybody else."""
    counts = {"gathered_bytes": 0, "gather_calls": 0}
    names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    own = {name: getattr(dist, name) for name in names}

    def call(function: Callable, *args: Any, **options: Any) -> Any:
        output = args[0] if args else options["output_tensor"]
        counts["gathered_bytes"] += output.nbytes
        counts["gather_calls"] += 1
        return function(*args, **options)

    for name, function in own.items():
        setattr(dist, name, partial(call, function))
    try:
        yield counts
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def measure(config: models.ModelConfig, way: Way, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return traffic, times and memory of one model and way in one round."""
    torch._dynamo.reset()  # graphs of the models before, of which it keeps so many
    begun = time.perf_counter()
    trainer = Trainer(config, way, tuple(options.tokens), device, options.prefetch, blocks=options.blocks)
    for _ in range(WARM_UP):
        trainer.step()
    synchronize(device)
    ready = time.perf_counter() - begun
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with counted() as counts:
        trainer.step()
    outcome = {
        "steps_ms": step_times(trainer, device),
        **counts,
        "parameters": config.parameters,
        "peak_GiB": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        "until_warm_s": round(ready, 1),
    }
    if trainer.gather is not None:
        outcome["of_bf16"] = trainer.gather.report.ratio
    outcome |= host_times(trainer, device)
    outcome |= traced(trainer, device) if device.type == "cuda" else {}
    del trainer
    release()
    return outcome


class Stepping(Protocol):
    """What is timed."""

    def step(self) -> object:
        """Make a step."""


def step_times(trainer: Stepping, device: torch.device, count: int = TIMED) -> list[float]:
    """Return the ms of each of `count` steps, unbroken as in training: between the ends of one and the next."""
    dist.barrier()
    synchronize(device)
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(count):
            trainer.step()
            ends.append(time.perf_counter())
        return [1e3 * (end - begun) for begun, end in pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        trainer.step()
        event.record()
    synchronize(device)
    return [begun.elapsed_time(end) for begun, end in pairwise(events)]


MOST = ("peak_GiB", "most_exposed_ms", "until_warm_s")


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one way's record of all its rounds.

    step_ms: the median of all steps; spread: their interquartile range as a share of it; steps_ms: each, round by
    round. Of other figures the median of the rounds, of those in MOST the greatest; counts are the same in each.
    """
    steps = [ms for one in rounds for ms in one["steps_ms"]]
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    found: dict[str, Any] = {"step_ms": middle, "spread": (high - low) / middle}
    found["rounds_ms"] = [round(statistics.median(one["steps_ms"]), 3) for one in rounds]
    found["steps_ms"] = [round(ms, 3) for ms in steps]
    for key, first in rounds[0].items():
        if key not in found:
            join = max if key in MOST else statistics.median
            found[key] = join([one[key] for one in rounds]) if isinstance(first, float) else first
    return found


def beside_bf16(lines: Sequence[dict[str, Any]]) -> None:
    """Add to every way's record how many times a step of bf16's gather its own takes, of all rounds and of each."""
    bf16 = next(line for line in lines if line["way"] == "bf16")
    for line in lines:
        line["step_of_bf16"] = line["step_ms"] / bf16["step_ms"]
        ratios = zip(line["rounds_ms"], bf16["rounds_ms"], strict=True)
        line["rounds_of_bf16"] = [round(own / other, 4) for own, other in ratios]


def in_turn(
    config: models.ModelConfig,
    ways: Sequence[Way],
    device: torch.device,
    options: argparse.Namespace,
    say: Callable[[dict[str, Any]], None],
) -> dict[Way, dict[str, Any]]:
    """Measure the ways in turn, `options.rounds` times, and return the merged record of each.

    Args:
        say: is told every measurement as soon as it is there.
    """
    rounds: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
    took = dict.fromkeys(ways, 0.0)
    for number in range(options.rounds):
        for way in ways:
            at = time.perf_counter()
            rounds[way].append(measure(config, way, device, options))
            took[way] += time.perf_counter() - at
            say({"way": way, "round": number, **rounds[way][-1]})
    return {way: merged(rounds[way]) | {"took_s": round(took[way], 1)} for way in ways}


HOST = {
    "unshard": "host_send_ms",
    "wait_for_unshard": "host_arrive_ms",
    "reshard": "host_free_ms",
}
"""FSDP2's methods in which a gather takes the host's time; hooks are called inside them."""


@contextlib.contextmanager
def timed_on_host(trainer: Trainer) -> Iterator[dict[str, float]]:
    """Sum the host's milliseconds in gathers: sending, arriving, freeing, and of codes the casts and turns."""
    spent = dict.fromkeys((*HOST.values(), "host_cast_ms", "host_turn_ms"), 0.0)
    groups = {id(group): group for part in trainer.model.modules() if is_wrapped(part) for group in groups_of(part)}
    owners: list[tuple[Any, str, str]] = [(one, name, key) for one in groups.values() for name, key in HOST.items()]
    if trainer.gather is not None:
        owners.append((trainer.gather, "refresh", "host_cast_ms"))
        arrivals = {id(weight.arrival): weight.arrival for weight in trainer.gather.weights}
        owners += [(arrival, "fill_turned", "host_turn_ms") for arrival in arrivals.values()]

    def call(function: Callable, key: str, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[key] += 1e3 * (time.perf_counter() - begun)

    for owner, name, key in owners:
        setattr(owner, name, partial(call, getattr(owner, name), key))
    try:
        yield spent
    finally:
        for owner, name, _ in owners:
            delattr(owner, name)


def host_times(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Return the host's milliseconds of a step, and of its gathers; a step that takes it as long waits for nothing."""
    dist.barrier()
    synchronize(device)
    with timed_on_host(trainer) as spent:
        begun = time.perf_counter()
        for _ in range(TRACED):
            trainer.step()
        launched = 1e3 * (time.perf_counter() - begun)
        synchronize(device)
    return {"host_step_ms": launched / TRACED} | {key: value / TRACED for key, value in spent.items()}


def traced(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Return what a trace of TRACED steps says of their gathers, on this rank and on the last that comes to each."""

    def run(steps: int) -> None:
        for _ in range(steps):
            trainer.step()
        synchronize(device)

    traced_kernels(partial(run, 1))  # the first trace of a process stops the host to set itself up
    dist.barrier()
    synchronize(device)
    kernels = traced_kernels(partial(run, TRACED))
    ranks: list[list[Gather]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, gathers_of(kernels))
    return exposed(kernels, TRACED) | of_the_last(ranks, TRACED, first=2)  # embedding, norm and head; then its own


COLUMNS = {
    "step_ms": "step, ms",
    "spread": "spread, %",
    "step_of_bf16": "of bf16's",
    "gathered_bytes": "gathered, MB",
    "gather_kernels_ms": "gathers, ms",
    "exposed_ms": "exposed, ms",
    "wires_alone_ms": "by wires, ms",
    "host_step_ms": "host, ms",
    "host_send_ms": "send, ms",
    "host_arrive_ms": "arrive, ms",
    "host_cast_ms": "cast, ms",
    "host_turn_ms": "turn, ms",
    "peak_GiB": "peak, GiB",
}


UNITS = {"gathered_bytes": 1e6, "spread": 1e-2}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the measured steps as a table, and what was compared bit for bit below it."""
    rows = [f"{'model':<10}{'layers':>6} {'way':<6}" + "".join(f"{title:>14}" for title in COLUMNS.values())]
    for line in lines:
        if line["case"] == "gather/step":
            values = [line.get(name, math.nan) / UNITS.get(name, 1) for name in COLUMNS]
            start_of_row = f"{line['model']:<10}{line['layers']:>6} {line['way']:<6}"
            rows.append(start_of_row + "".join(f"{value:>14,.2f}" for value in values))
    for line in lines:
        if line["case"] == "gather/bitwise":
            what = "equal, bit for bit" if line["equal"] else f"DIFFERENT from step {line['first_difference']}"
            rows.append(f"{line['model']}: {line['steps']} steps {what}, loss {line['last_loss']:.4f}")
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    """Run on every rank; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        prog="bench.gather", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], metavar="PRESET")
    parser.add_argument("--layers", type=int, help="blocks of a model of --models; by default all")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="the most words of a model of --models")
    parser.add_argument("--tokens", nargs=2, type=int, default=[4, 2048], metavar=("SEQUENCES", "LENGTH"))
    parser.add_argument("--prefetch", type=int, default=1, help="blocks gathered before the one whose forward runs")
    parser.add_argument("--rounds", type=int, default=2, help="how often the ways are measured, in turn")
    parser.add_argument("--head", choices=("gathered", "shared"), default="gathered", help="shared: a third way")
    parser.add_argument("--blocks", choices=get_args(Blocks), default="compiled", help="how they run")
    parser.add_argument("--bitwise", metavar="PRESET")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bitwise-tokens", nargs=2, type=int, default=[2, 256])
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole run; --bitwise stops then")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    device = start()
    leads = dist.get_rank() == 0
    lines: list[dict[str, Any]] = []

    def say(values: dict[str, Any]) -> None:
        if leads:
            print(json.dumps(values), flush=True)

    for name in options.models:
        config = shape_of(name, options.layers, options.vocabulary)
        about = {"case": "gather/step", "model": name, "layers": config.layers, "tokens": options.tokens}
        about["vocabulary"] = config.vocab_size
        ways: tuple[Way, ...] = WAYS if options.head == "gathered" else (WAYS[0], "shared", *WAYS[1:])
        about |= {"world": dist.get_world_size(), "ahead": options.prefetch, "blocks": options.blocks}
        of_model = [
            {**about, "way": way, **outcome} for way, outcome in in_turn(config, ways, device, options, say).items()
        ]
        beside_bf16(of_model)
        lines += of_model
    if options.bitwise:
        left = begun + options.seconds - time.perf_counter()
        at = time.perf_counter()
        found = bitwise(
            options.bitwise, options.steps, tuple(options.bitwise_tokens), device, left, blocks=options.blocks
        )
        lines.append({"world": dist.get_world_size(), **found, "took_s": round(time.perf_counter() - at, 1)})
        say(lines[-1])
    if leads:
        facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
        path = results.claim(facts, options.out, "gather")
        results.write(path, facts | {"world": dist.get_world_size()}, lines)
        print(table(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(line.get("equal", True) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
