"""Layers and experts that several GPUs share: time, memory and bytes of a step in bf16 and in recipe nvfp4.

    torchrun --nproc-per-node=2 -m bench.parallel --out bench/results

A step is a forward and a backward, eager, of bf16 parameters: no optimizer, no sum of gradients over ranks that see
other data. "dense" is --layers blocks of the shape of --dense on one sequence of --tokens, whose tokens lie in parts
between the layers (sequence parallel): under torch's own styles, and under NVFP4Colwise and NVFP4Rowwise, whose
activations travel as codes. "mixture" is the decoder --mixture on --tokens of each rank, its experts on all ranks:
tokens travel in their values or as codes, as many as there are or at most a capacity. Each is timed on one GPU too, by
every rank for itself; started with one process, that alone. The ways of a case are built, then timed in turn, steps
unbroken as in training; "awaited" is a step between whose ends the host waits for the GPU, "host" its launching alone.
Without GPUs it runs on gloo with small models: that shows that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from bench import host_profile, machine, results
from bench.gather import merged, shape_of, step_times
from bench.zero import release, start, synchronize
from halfbyte.train import model as models
from halfbyte.train.moe import MoE
from halfbyte.train.parallel import cross_entropy

WARM_UP, AWAITED, TIMED = 2, 5, 7
SPARE = 1.25
"""A capacity, of the copies that a rank sends another where all experts are chosen alike."""
DENSE, MIXTURE = "parallel/dense", "parallel/mixture"
ALONE = "one GPU"


class Way(NamedTuple):
    """One line of the result.

    case: DENSE or MIXTURE.
    way: ALONE; of DENSE "values" or "codes", of MIXTURE "plain" or "nvfp4": what activations travel as.
    recipe: "bf16" or "nvfp4".
    has_capacity: of MIXTURE, whether a rank sends at most so many copies.
    """

    case: str
    way: str
    recipe: str
    has_capacity: bool = False


WAYS = (
    Way(DENSE, ALONE, "bf16"),
    Way(DENSE, ALONE, "nvfp4"),
    Way(DENSE, "values", "bf16"),
    Way(DENSE, "values", "nvfp4"),
    Way(DENSE, "codes", "nvfp4"),
    Way(MIXTURE, ALONE, "bf16"),
    Way(MIXTURE, ALONE, "nvfp4"),
    *(Way(MIXTURE, "plain", recipe, room) for room in (False, True) for recipe in ("bf16", "nvfp4")),
    *(Way(MIXTURE, "nvfp4", "nvfp4", room) for room in (False, True)),
)


class Block(nn.Module):
    """A block of the Llama family, whose stream between the layers is one tensor."""

    def __init__(self, config: models.ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = models.Attention(config), models.FeedForward(config)

    def forward(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TD, sin_TD)
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks(nn.Module):
    """Blocks one behind another, for sequences of one length."""

    def __init__(self, config: models.ModelConfig, length: int) -> None:
        super().__init__()
        self.layers, self.length = nn.ModuleList(Block(config) for _ in range(config.layers)), length
        self.rotary = models.Rotary(config)

    def forward(self, x: Tensor) -> Tensor:
        cos_TD, sin_TD = self.rotary(self.length)
        for block in self.layers:
            x = block(x, cos_TD, sin_TD)
        return x


class Work(NamedTuple):
    """What is timed.

    model: whose gradients a step leaves behind.
    forward: returns what `backward` takes.
    """

    model: nn.Module
    state: hb.RunState
    forward: Callable[[], Any]
    backward: Callable[[Any], None]

    def step(self, traffic: Traffic | None = None) -> None:
        """Make a step."""
        outcome = self.forward()
        if traffic is not None:
            traffic.stage = "backward"
        self.backward(outcome)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.state.advance()


class Traffic(TorchDispatchMode):
    """Adds up the bytes that come from other ranks, by pass, collective and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.found = "forward", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            dtype = str(args[0].dtype).removeprefix("torch.")
            self.found[f"{self.stage} {name} {dtype}"] += arriving(name, args, out)
        return out


def arriving(name: str, args: tuple[Any, ...], out: Tensor) -> int:
    """Return the bytes that a functional collective has from other ranks, of the least that it can do with."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if name == "all_to_all_single":
        received = list(args[1])
        return out.nbytes // max(1, sum(received)) * (sum(received) - received[rank])
    whole = out.nbytes if name == "all_gather_into_tensor" else args[0].nbytes
    return whole * (world - 1) // world * (2 if name == "all_reduce" else 1)


def in_bf16(model: nn.Module) -> nn.Module:
    """Draw the matrices of a model and round its parameters, not its buffers, in place; the same on all ranks."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        parameter.data = parameter.data.bfloat16()
    return model


def plan(way: str) -> dict[str, Any]:
    """Return how the ranks of a mesh share a block: torch's tutorial's plan, or that whose activations are codes."""
    norms = {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    first = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    last = ("self_attn.o_proj", "mlp.down_proj")
    if way == "codes":
        colwise = {name: hb.distributed.NVFP4Colwise(*names) for name, names in first.items()}
        return norms | colwise | {name: hb.distributed.NVFP4Rowwise(use_local_output=False) for name in last}
    positions = {"self_attn": 2, "mlp": 0}
    found: dict[str, Any] = dict(norms)
    for name, names in first.items():
        nothing = (None,) * positions[name]
        found[name] = PrepareModuleInput(
            input_layouts=(Shard(1), *nothing), desired_input_layouts=(Replicate(), *nothing)
        )
        found |= {f"{name}.{layer}": ColwiseParallel() for layer in names}
    return found | {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in last}


def dense(config: models.ModelConfig, how: Way, tokens: int, device: torch.device) -> Work:
    """Return the step of blocks on one sequence of `tokens`."""
    torch.manual_seed(0)
    with device:
        model = in_bf16(Blocks(config, tokens))
        x, dy = (torch.randn(1, tokens, config.dim, dtype=torch.bfloat16) for _ in range(2))
    state = hb.RunState(0, rank=0).to(device)  # ranks that share layers draw alike
    if how.recipe != "bf16":
        hb.quantize_(model, how.recipe, keep=hb.Keep(names=(), last_fraction=0), state=state)
    if how.way != ALONE:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        blocks: Any = model.layers
        for block in blocks:
            parallelize_module(block, mesh, plan(how.way), src_data_rank=None)
        x, dy = (distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for t in (x, dy))
    x.requires_grad_()

    def backward(y: Tensor) -> None:
        x.grad = None
        y.backward(dy)

    return Work(model, state, partial(model, x), backward)


def mixture(config: models.ModelConfig, how: Way, tokens: int, device: torch.device) -> Work:
    """Return the step of a decoder with experts on `tokens` of this rank, in sequences of at most 2,048."""
    torch.manual_seed(0)
    with device:
        model = in_bf16(models.Decoder(config))
    state = hb.RunState(0, rank=0 if how.way == ALONE else None).to(device)
    if how.recipe != "bf16":
        hb.quantize_(model, how.recipe, keep=hb.Keep(names=("lm_head",), last_fraction=0), state=state)
    if how.way != ALONE:
        _share_experts(model, how, tokens, init_device_mesh(device.type, (dist.get_world_size(),)), state)
    generator = torch.Generator().manual_seed(dist.get_rank())
    length = min(tokens, 2048)
    drawn = torch.randint(config.vocab_size, (tokens // length, length + 1), generator=generator).to(device)

    def forward() -> Tensor:
        logits, balance = model(drawn[:, :-1], balance=True)
        return cross_entropy(logits, drawn[:, 1:]) + balance

    return Work(model, state, forward, torch.Tensor.backward)


def _share_experts(model: nn.Module, how: Way, tokens: int, mesh: DeviceMesh, state: hb.RunState) -> None:
    """Let the ranks of a mesh, which see other tokens, share the experts of every mixture of a model, in place."""
    hb.distributed.place_ranks_(state, mesh)
    for module in model.modules():
        if isinstance(module, MoE):
            options: dict[str, Any] = {"dispatch": how.way, "src_data_rank": None}
            if how.has_capacity:
                options["capacity"] = int(SPARE * tokens * module.config.per_token / mesh.size())
            module.exchange = hb.distributed.shard_experts_(module, mesh, "gate_up_proj", **options)


def measure(
    config: models.ModelConfig,
    ways: Sequence[Way],
    tokens: int,
    device: torch.device,
    rounds: int,
    *,
    is_profiled: bool = False,
) -> list[dict[str, Any]]:
    """Return times, memory and bytes of a step of each way: of the slowest rank, and of the first one.

    All are built, then timed in turn, TIMED steps in each round: what a machine does meanwhile meets all alike. Then,
    if they are profiled, rank 0 prints what its host does in a step of each.
    """
    built = [_built(config, how, tokens, device) for how in ways]
    times: list[list[dict[str, Any]]] = [[] for _ in built]
    for _ in range(rounds):
        for (work, _), found in zip(built, times, strict=True):
            found.append({"steps_ms": _slowest(step_times(work, device, TIMED), device)})
    lines = [merged(found) | about for (_, about), found in zip(built, times, strict=True)]
    for how, (work, _) in zip(ways if is_profiled else (), built, strict=False):
        seen = host_profile.text(*host_profile.shares(work.step, device))
        if dist.get_rank() == 0:
            print(f"{how.case}, {how.way}{', capacity' if how.has_capacity else ''}, {how.recipe}\n{seen}", flush=True)
    del built
    release()
    return lines


def _built(config: models.ModelConfig, how: Way, tokens: int, device: torch.device) -> tuple[Work, dict[str, Any]]:
    """Return what is timed, its first steps behind it, and what is measured once: bytes, memory, the host's time."""
    begun = time.perf_counter()
    release()
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    work = (dense if how.case == DENSE else mixture)(config, how, tokens, device)
    for _ in range(WARM_UP):
        work.step()
    with Traffic() as traffic:
        work.step(traffic)
    work.step()  # what was watched was no record of launches
    synchronize(device)
    ready = time.perf_counter() - begun
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    took, launched = [], []
    for _ in range(AWAITED):
        dist.barrier()
        synchronize(device)
        begun = time.perf_counter()
        work.step()
        launched.append(1e3 * (time.perf_counter() - begun))
        synchronize(device)
        took.append(1e3 * (time.perf_counter() - begun))
    peak = (torch.cuda.max_memory_allocated(device) - others) / 2**30 if device.type == "cuda" else 0.0
    slowest = _slowest([statistics.median(took), statistics.median(launched), peak], device)
    exchanges = [module.exchange for module in work.model.modules() if isinstance(module, MoE)]
    dropped = [int(one.dropped) for one in exchanges if one is not None and one.dropped is not None]
    about = dict(zip(("awaited_ms", "host_ms", "peak_GiB"), slowest, strict=True))
    about |= {"arriving_bytes": dict(traffic.found), "until_warm_s": round(ready, 1)}
    return work, about | ({"dropped": sum(dropped)} if how.has_capacity else {})


def _slowest(figures: list[float], device: torch.device) -> list[float]:
    """Return of each figure the greatest of all ranks."""
    found = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def beside(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return a step's multiple of bf16's that is shared alike, and that of one GPU, as far as they are timed."""

    def step(recipe: str, is_alone: bool, room: bool) -> float | None:
        of_case = [other for other in lines if other["case"] == line["case"] and other["recipe"] == recipe]
        alike = [o for o in of_case if (o["way"] == ALONE) == is_alone and o["has_capacity"] == room]
        return alike[0]["step_ms"] if alike else None

    is_alone = line["way"] == ALONE
    bf16 = step("bf16", is_alone, line["has_capacity"])
    found = {} if bf16 is None else {"of_bf16": line["step_ms"] / bf16}
    alone, bf16 = step(line["recipe"], True, False), step("bf16", True, False)
    return found | ({"alone_of_bf16": alone / bf16} if alone is not None and bf16 is not None else {})


COLUMNS = {
    "step_ms": "step, ms",
    "awaited_ms": "awaited, ms",
    "host_ms": "host, ms",
    "of_bf16": "of bf16",
    "alone_of_bf16": "on one GPU",
    "peak_GiB": "peak, GiB",
}


def table(lines: list[dict[str, Any]]) -> str:
    """Return the measured steps as a table, and the bytes of each below it."""
    rows = [f"{'':<42}" + "".join(f"{title:>12}" for title in COLUMNS.values())]
    for line in lines:
        values = [line.get(name) for name in COLUMNS]
        rows.append(f"{_title(line):<42}" + "".join("" if v is None else f"{v:>12,.3f}" for v in values))
    for line in lines:
        bytes_ = ", ".join(f"{name} {count / 1e6:,.2f} MB" for name, count in line["arriving_bytes"].items())
        rows += [f"{_title(line)}: {bytes_}"] if bytes_ else []
    return "\n".join(rows)


def _title(line: dict[str, Any]) -> str:
    room = ", capacity" if line["has_capacity"] else ""
    return f"{line['model']}, {line['world']} ranks, {line['way']}{room}, {line['recipe']}"


def main(arguments: list[str]) -> int:
    """Run on every rank; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        prog="bench.parallel", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--dense", default="8b" if on_gpu else "nano", metavar="PRESET")
    parser.add_argument("--layers", type=int, default=2, help="blocks of --dense")
    parser.add_argument("--mixture", default="moe-1b" if on_gpu else "moe-tiny", metavar="PRESET")
    parser.add_argument("--mixture-layers", type=int, help="blocks of --mixture; by default all")
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 64)
    parser.add_argument("--rounds", type=int, default=3, help="how often the ways of a case are timed, in turn")
    parser.add_argument("--only", choices=("dense", "mixture"))
    parser.add_argument("--profile", action="store_true", help="print what the host does in a step of each way too")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    device = start()
    leads, world = dist.get_rank() == 0, dist.get_world_size()
    shapes = {
        DENSE: (options.dense, shape_of(options.dense, options.layers)),
        MIXTURE: (options.mixture, shape_of(options.mixture, options.mixture_layers)),
    }
    lines: list[dict[str, Any]] = []
    for case, (name, config) in shapes.items():
        ways = [how for how in WAYS if how.case == case and (world > 1 or how.way == ALONE)]
        if options.only and options.only not in case:
            continue
        begun = time.perf_counter()
        about = {"world": world, "model": name, "layers": config.layers, "tokens": options.tokens}
        measured = measure(config, ways, options.tokens, device, options.rounds, is_profiled=options.profile)
        made = [about | how._asdict() | found for how, found in zip(ways, measured, strict=True)]
        took = round(time.perf_counter() - begun, 1)
        for line in made:
            line |= beside(line, made) | {"took_s": took}
            if leads:
                print(json.dumps(line), flush=True)
        lines += made
    if leads:
        facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
        path = results.claim(facts, options.out, "parallel")
        results.write(path, facts | {"world": world}, lines)
        print(table(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
