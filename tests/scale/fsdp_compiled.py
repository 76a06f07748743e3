"""Compiled blocks over weights that FSDP2 gathers as NVFP4, beside the same over its bf16 gather: for ranks.run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import fsdp_cases
import torch
from fsdp_cases import AUTOCAST, TOKENS, FusedBlock, in_high_precision, recomputed_around
from fsdp_checks import BF16, Case, same, train, wrapped
from small_models import Decoder
from torch import nn
from torch._dynamo.utils import counters

import halfbyte as hb

BLOCKS = 4


def decoder(dim: int = fsdp_cases.DIM) -> nn.Module:
    """Equal blocks of plain layers, whose q/k/v and gate/up share their amaxes."""
    return Decoder(BLOCKS, dim)


def fused_decoder() -> nn.Module:
    """The same, whose norms and MLPs `hb.nn.fuse_` replaced."""
    model = decoder()
    hb.nn.fuse_(model)
    return model


def fused_blocks() -> nn.Module:
    """Equal blocks of layers that are fused from the start."""
    return nn.Sequential(*(FusedBlock(32) for _ in range(BLOCKS)))


def recomputed(model: nn.Module) -> None:
    """Recompute each compiled block in backward, inside of FSDP2's hooks."""
    fsdp_cases.checkpointed(model)


PLAIN = {**TOKENS, "make": decoder, "dtype": torch.float32, "policy": BF16}
CASES = {
    "plain layers": Case(**PLAIN),
    "fused layers": Case(**{**PLAIN, "make": fused_decoder}),
    "fused blocks": Case(make=fused_blocks, shape=(6, 32), blocks=list),
    "rows": Case(**PLAIN, recipe="rl"),
    "evaluated between, not resharded, accumulated": Case(
        **PLAIN, reshard=False, micro_batches=2, before_step=fsdp_cases.evaluated
    ),
    "recomputed": Case(**PLAIN, before_wrap=recomputed),
    "under autocast": Case(**{**AUTOCAST, "make": fused_decoder}),
    "validated in high precision, fused": Case(**{**PLAIN, "make": fused_decoder}, before_step=in_high_precision),
    "HSDP": Case(**PLAIN, mesh=(2, 2)),
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is compiled: blocks, not what recomputes them."""
    found = list(model.layers) if hasattr(model, "layers") else list(model)
    return [getattr(block, "_checkpoint_wrapped_module", block) for block in found]


def compiling(case: Case, backend: str) -> Case:
    """The case with every block compiled before it is wrapped, into one graph."""

    def before(model: nn.Module) -> None:
        case.before_wrap(model)
        for block in blocks_of(model):
            block.compile(backend=backend, fullgraph=True)

    return replace(case, before_wrap=before)


def compared(case: Case, rank: int, world: int, backend: str) -> dict[str, Any]:
    """Train both ways; what differed, and how many graphs there were of each."""
    case, seen, graphs, breaks = compiling(case, backend), [], [], []
    for codes in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, state = wrapped(case, world)
        if codes:
            hb.distributed.fsdp_gather_nvfp4_(model, dtype=case.computes)
        seen.append(train(case, rank, model, state))
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(dict(counters["graph_break"]))
    pairs = list(zip(*seen, strict=True))
    return {
        "differs": [i for i, (a, b) in enumerate(pairs) if not same(a, b)],
        "graphs": graphs,
        "breaks": breaks,
        "finite": all(t is None or bool(t.isfinite().all()) for t in seen[1]),
        "moved": any(t is not None and bool(t.ne(0).any()) for t in seen[1]),
    }


def cases(rank: int, world: int, names: list[str], backend: str) -> dict[str, dict[str, Any]]:
    """What `compared` finds of some of CASES."""
    return {name: compared(CASES[name], rank, world, backend) for name in names}
