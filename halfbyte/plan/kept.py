"""What one block keeps for its backward under a recipe: `hb.memory_report` asked about a block of the model's shape.

Parameters are traced as a run has them: in fp32 under bf16 autocast, or in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import halfbyte as hb
from halfbyte.memory import fake_parameters
from halfbyte.nn.linear import describe_recipe
from halfbyte.plan.architecture import Architecture, Kind
from halfbyte.spec import Recipe
from halfbyte.train.model import ATTENTION

Masters = Literal["fp32", "bf16"]
"""Dtype of the parameters that the forward sees: fp32 under bf16 autocast, or bf16."""
Recompute = Literal["nothing", "selective", "full"]
TOKEN_BYTES = 8
WORD = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class BlockKept:
    """Bytes that one block keeps.

    Args:
        per_token: that grow with tokens.
        weights: that do not: copies of weights in the dtype of the GEMMs, and their quantized transposes.
        again: per token while its backward runs, of what a checkpoint left out; 0 without one.
    """

    per_token: float
    weights: float
    again: float = 0.0


class Probe(nn.Module):
    """A block behind an embedding of one word: autograd sees its input as that of a block in a model."""

    def __init__(self, block: nn.Module, dim: int, head_dim: int) -> None:
        super().__init__()
        self.block, self.head_dim = block, head_dim
        with torch.device("meta"):
            self.words = nn.Embedding(1, dim)

    @property
    def autocast(self) -> torch.dtype | None:
        """In which dtype GEMMs run beside the parameters' own."""
        return torch.bfloat16 if self.words.weight.dtype == torch.float32 else None

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.empty(tokens.shape[-1], self.head_dim, dtype=torch.float32)
        y, residual, balance = self.block(self.words(tokens), None, table, table)
        return y + residual if balance is None else (y + residual).sum() + balance


@lru_cache(maxsize=256)
def kept(
    architecture: Architecture,
    kind: Kind,
    recipe: Recipe,
    sequence: int,
    masters: Masters,
    recompute: Recompute = "nothing",
    compiled: bool = True,
) -> BlockKept:
    """Return what a block of `kind` keeps for its backward.

    Args:
        architecture, kind: which block.
        recipe: of its linear layers.
        sequence: tokens of one sequence.
        masters: see Masters.
        recompute: activation checkpointing of the block.
        compiled: whether MLPs are compiled or fused.
    """
    if recompute != "nothing":
        whole = kept(architecture, kind, recipe, sequence, masters, "nothing", compiled)
        held, weights = float(architecture.config.dim * WORD[masters]), 0.0
        if recompute == "selective":
            one, two = (_selected(_probe(architecture, kind, masters, compiled), recipe, (n, sequence)) for n in (1, 2))
            held, weights = held + (two - one) / sequence, 2 * one - two
        return BlockKept(per_token=held, weights=weights, again=max(0.0, whole.per_token - held))
    probe = _probe(architecture, kind, masters, compiled)
    tokens = torch.zeros(1, sequence, dtype=torch.int64, device="meta")
    row = hb.memory_report(probe, tokens, recipes=[recipe], dtype=probe.autocast)[describe_recipe(recipe)]
    return BlockKept(per_token=row.per_token - TOKEN_BYTES, weights=row.fixed)


def _probe(architecture: Architecture, kind: Kind, masters: Masters, compiled: bool) -> Probe:
    latent = architecture.latent
    width = latent.rotary if latent is not None else architecture.config.head_dim
    probe = Probe(architecture.block(kind, compiled=compiled), architecture.config.dim, width)
    if masters == "bf16":
        probe.bfloat16()
    hb.quantize_(probe, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0))
    return probe


class _Outputs(TorchDispatchMode):
    """Adds up what the ops of a list return."""

    def __init__(self, ops: list) -> None:
        super().__init__()
        self.ops, self.storages = ops, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an op and count its outputs."""
        result = func(*args, **(kwargs or {}))
        if func in self.ops:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[storage._cdata] = (storage.nbytes(), tensor)
        return result


def _selected(probe: Probe, recipe: Recipe, tokens: tuple[int, int]) -> int:
    """Return the bytes that `halfbyte train --recompute selective` keeps of a block under a recipe."""
    hb.set_recipe_(probe, recipe)
    ops = [*hb.selective_checkpoint_ops(), *ATTENTION]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, fake_parameters(probe, mode):
        context, _ = create_selective_checkpoint_contexts(ops)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=probe.autocast is not None)
        with autocast, context, _Outputs(ops) as outputs:
            probe(torch.zeros(tokens, dtype=torch.int64))
    return sum(count for count, _ in outputs.storages.values())
