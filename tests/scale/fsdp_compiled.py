"""Compiled blocks over weights that FSDP2 gathers as NVFP4, beside the same over its bf16 gather: for ranks.run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ranks
import torch
import train_checks
from fsdp_cases import AUTOCAST, DIM, TOKENS, FusedBlock, checkpointed, evaluated, in_high_precision
from fsdp_checks import BF16, Case, batch, same, train, wrapped
from small_models import Decoder
from torch import nn
from torch._dynamo.utils import counters

import halfbyte as hb
from halfbyte.functional import frozen
from halfbyte.train import model as models

BLOCKS = 3


def decoder() -> nn.Module:
    """Equal blocks of plain layers, whose q/k/v and gate/up share their amaxes; of two ranks' rows, some cut tiles."""
    return Decoder(BLOCKS, DIM)


def fused_decoder() -> nn.Module:
    """The same, whose norms and MLPs `hb.nn.fuse_` replaced."""
    model = decoder()
    hb.nn.fuse_(model)
    return model


def fused_blocks() -> nn.Module:
    """Equal blocks of layers that are fused from the start; no gradient of the first one's input is asked for."""
    return nn.Sequential(*(FusedBlock(32) for _ in range(BLOCKS)))


PLAIN: dict[str, Any] = {**TOKENS, "make": decoder, "dtype": torch.float32, "policy": BF16, "steps": 2}
FUSED = {**PLAIN, "make": fused_decoder}
CASES = {
    "plain layers": Case(**PLAIN),
    "fused layers, validated in high precision": Case(**FUSED, before_step=in_high_precision),
    "evaluated, accumulated, not resharded": Case(**FUSED, before_step=evaluated, micro_batches=2, reshard=False),
    "rows, recomputed": Case(**PLAIN, recipe="rl", before_wrap=checkpointed),
    "fused blocks under autocast": Case(
        **{**AUTOCAST, "tokens": None, "shape": (6, 32), "make": fused_blocks, "blocks": list}
    ),
    "four over six": Case(**PLAIN, recipe="four_over_six"),
    "random bits": Case(**PLAIN, recipe="quartet2"),
    "HSDP": Case(**PLAIN, mesh=(2, 2)),
}
WITH_BREAKS = {
    "trained in high precision for a step": Case(**PLAIN, aside=(1,)),
    "rows whose backward reads columns": Case(**PLAIN, recipe="naive_fp4"),
}


def compiling(case: Case, backend: str, fullgraph: bool) -> Case:
    """The case with every block compiled before it is wrapped; what recomputes a block stays outside."""

    def before(model: Any) -> None:
        case.before_wrap(model)
        for block in model.layers if hasattr(model, "layers") else model:
            inner: Any = getattr(block, "_checkpoint_wrapped_module", block)
            inner.compile(backend=backend, fullgraph=fullgraph)

    return replace(case, before_wrap=before)


def fresh() -> None:
    """Forget graphs and counts."""
    torch._dynamo.reset()
    counters.clear()


def counts() -> tuple[int, int]:
    """How many graphs there are, and how often code left one."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compared(case: Case, rank: int, world: int, backend: str, fullgraph: bool = True) -> dict[str, Any]:
    """Train both ways; what differed, graphs and breaks of each, and whether the other orientation was ever made."""
    seen, found = [], []
    case = compiling(case, backend, fullgraph)
    for codes in (False, True):
        fresh()
        model, state = wrapped(case, world)
        gather = hb.distributed.fsdp_gather_nvfp4_(model, dtype=case.computes) if codes else None
        seen.append(train(case, rank, model, state))
        found.append(counts())
    assert gather is not None and gather.traffic["gathers"]
    return {
        "differs": [i for i, (a, b) in enumerate(zip(*seen, strict=True)) if not same(a, b)],
        "counts": found,
        "turned": any(
            weight.arrival._turner is not None for weight in gather.weights if weight.name != "lm_head.weight"
        ),
        "finite": all(t is None or bool(t.isfinite().all()) for t in seen[1]),
        "moved": sum(t is not None and bool(t.ne(0).any()) for t in seen[1]) > len(seen[1]) // 2,
        "held": [name for name, layer in model.named_modules() if getattr(layer, "values_to_read", None) is not None],
    }


def cases(rank: int, world: int, names: list[str], backend: str = "aot_eager") -> dict[str, dict[str, Any]]:
    """What `compared` finds of some of CASES and WITH_BREAKS."""
    whole = {name: compared(CASES[name], rank, world, backend) for name in names if name in CASES}
    rest = [name for name in names if name not in CASES]
    return whole | {name: compared(WITH_BREAKS[name], rank, world, "eager", fullgraph=False) for name in rest}


def by_inductor(rank: int, world: int) -> dict[str, Any]:
    """The same, of code that is generated: of blocks whose norms are ours, or sums would have the order of a loop."""
    return compared(Case(make=fused_blocks, shape=(6, 32), blocks=list, steps=2), rank, world, "inductor")


def faulty(rank: int, world: int) -> dict[str, Any]:
    """The same, where what dgrad reads has one sign wrong."""
    turned = frozen._turned

    def flipped(operand: Any) -> Any:
        found = turned(operand)
        found.blocks.qdata[0, 0] ^= 8
        return found

    frozen._turned = flipped
    return compared(Case(**PLAIN), rank, world, "aot_eager")


def recipe_changed(rank: int, world: int) -> str:
    """What is said where a compiled layer's recipe reads its weight in another form than was gathered."""
    fresh()
    case = compiling(Case(**PLAIN), "aot_eager", fullgraph=False)
    model, _ = wrapped(case, world)
    hb.distributed.fsdp_gather_nvfp4_(model)
    model(batch(case, rank, 0, 0))
    hb.set_recipe_(model, "four_over_six")
    try:
        model(batch(case, rank, 0, 0))
    except ValueError as error:
        return str(error)
    return ""


def trained(rank: int, world: int, runs: list[tuple[Any, str]]) -> list[tuple[dict[str, bytes], tuple[int, int]]]:
    """What `halfbyte train` ends with, and graphs and breaks of each run."""
    models.Block.compile = lambda block, **options: nn.Module.compile(block, backend="aot_eager", **options)
    ends = []
    for run in runs:
        fresh()
        ends.append((*train_checks.train_all(rank, world, [run]), counts()))
    return ends


def described(found: dict[str, Any]) -> dict[str, Any]:
    """What `compared` found, but for what is as it has to be."""
    expected = {"differs": [], "finite": True, "moved": True, "held": []}
    return {name: value for name, value in found.items() if expected.get(name, ...) != value}


__all__ = ["CASES", "WITH_BREAKS", "by_inductor", "cases", "described", "faulty", "ranks", "recipe_changed", "trained"]
