"""Tokens in parts between layers (sequence parallel): operands are quantized where the tokens are, and travel as codes.

Each rank quantizes the rows of its own tokens, with the amax of all, at the places of all, and the ranks gather codes
and scales: what a GEMM reads is byte for byte the operand of the gathered tensor, in 0.28 of the bytes that bf16 takes.
The operand that sums over tokens is made of the same tokens, kept as this rank's part, and gathered when its GEMM runs.
Sums travel the other way, in the dtype of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.functional.operands import Place, both
from halfbyte.functional.split import LayerSplit, Part, quantize_share, summed_block, with_whole_amaxes
from halfbyte.layout import Blocks
from halfbyte.sides import Side
from halfbyte.spec import Recipe, Spec


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How ranks share tokens: of each of `sequences` sequences every rank has `each` neighbours, in the ranks' order.

    of: "x" or "y": which of a layer's tensors lies so; the gradient of it does too.
    """

    of: str
    sequences: int
    each: int
    world: int
    rank: int
    group: str

    @property
    def split(self) -> LayerSplit:
        rows = self.sequences * self.each
        borders = tuple([rank * rows for rank in range(self.world + 1)])
        return LayerSplit(dim="M", borders=borders, cuts=borders, rank=self.rank, group=self.group)

    def maker(self) -> Callable[..., tuple[Any, Any]]:
        """Return what makes this rank's parts of both operands of a tensor, with the head of `operands.both`."""
        return partial(_both_of_tokens, self)


def block_problem(recipe: Recipe, each: int, specs: tuple[Spec | None, ...]) -> str | None:
    """Return why parts of `each` tokens cannot be quantized apart, None if they can."""
    block = max([summed_block(recipe, "M"), *[NVFP4_BLOCK for spec in specs if spec is not None and spec.is_tile]])
    if each % block:
        return f"a rank has {each} tokens of a sequence, and blocks take {block}: give each rank a multiple of {block}"
    return "activation_mean='split' takes the mean of all tokens" if recipe.splits_mean else None


def _both_of_tokens(
    tokens: Tokens, t: Tensor, row_spec: Spec | None, col_spec: Spec | None, place: Place, amaxes: ops.Amaxes
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    place = place._replace(transient=(False, False))  # codes travel
    return both(t, row_spec, col_spec, place, amaxes, partial(_quantize_tokens, tokens))


def _quantize_tokens(tokens: Tokens, t: Tensor, row: Side | None, col: Side | None) -> tuple[Any, Any]:
    split, rows = tokens.split, tokens.each * tokens.sequences
    part = Part(split, 0, split.borders)
    if tokens.sequences == 1 or not any(side is not None and side.spec.needs_rng for side in (row, col)):
        return quantize_share(part, t, row, col)
    row, col = with_whole_amaxes(part, t, row, col)
    made = []
    for i in range(tokens.sequences):  # each has places of its own
        start = (i * tokens.world + tokens.rank) * tokens.each
        here = Part(replace(split, rank=0), 0, (start, start + tokens.each, rows * tokens.world))
        lines = slice(i * tokens.each, (i + 1) * tokens.each)
        asked = row and row._replace(amax=row.amax[lines]) if row and row.amax is not None and row.amax.dim() else row
        made.append(quantize_share(here, t[lines], asked, col))
    rows_, cols = zip(*made, strict=True)
    return _joined(rows_, 0), _joined(cols, 1)


def _joined(parts: tuple, axis: int) -> Blocks | None:
    first = parts[0]
    if first is None:
        return None
    amax = first.amax
    if axis == 0 and amax.dim() and amax.numel():
        amax = torch.cat([one.amax for one in parts])
    qdata, scale = (torch.cat([one[i] for one in parts], axis) for i in range(2))
    return Blocks(qdata, scale, amax)


class OnItsWay(NamedTuple):
    """An operand that is being gathered.

    buffer: the bytes of all ranks, written until it is waited for; a plain tensor's values.
    """

    tokens: Tokens
    buffer: Tensor
    own: Any
    axis: int


def begin_gather(tokens: Tokens, operand: ops.Operand | Tensor, axis: int) -> OnItsWay:
    """Begin to gather an operand of which every rank has its tokens, as rows (axis 0) or columns (1)."""
    bytes_ = _tensors(operand, axis)
    if isinstance(operand, Tensor):
        flat = operand.contiguous().view(-1)
    else:
        flat = torch.cat([t.contiguous().view(torch.uint8).reshape(-1) for t in bytes_])
    buffer = torch.ops._c10d_functional.all_gather_into_tensor(flat, tokens.world, tokens.group)
    return OnItsWay(tokens, buffer, operand, axis)


def arrived(gathering: OnItsWay) -> ops.Operand | Tensor:
    """Return the whole operand once it is there."""
    tokens, buffer, own, axis = gathering
    every = torch.ops._c10d_functional.wait_tensor(buffer).view(tokens.world, -1)
    if isinstance(own, Tensor):
        return _in_order(tokens, every.view(tokens.world, *own.shape), axis)
    made, start = [], 0
    for t in _tensors(own, axis):
        size = t.numel() * t.element_size()
        parts = every[:, start : start + size].contiguous().view(t.dtype).view(tokens.world, *t.shape)
        made.append(_in_order(tokens, parts, axis))
        start += size
    amax = made[2] if len(made) == 3 else own.blocks.amax
    cols = own.cols * tokens.world if axis == 1 else own.cols
    return ops.Operand(Blocks(made[0], made[1], amax), own.spec, cols, own.scale_layout)


def _tensors(operand: Any, axis: int) -> list[Tensor]:
    """Return what of an operand travels: the amax of a token with its row."""
    if isinstance(operand, Tensor):
        return [operand]
    (qdata, scale, amax), spec = operand.blocks, operand.spec
    return [qdata, scale, amax] if axis == 0 and spec.format.has_amax and spec.has_row_amax else [qdata, scale]


def _in_order(tokens: Tokens, parts: Tensor, axis: int) -> Tensor:
    """Return [world, …] parts put together as the tokens follow each other."""
    if parts.dim() == 2 or axis == 0:  # rows, or an amax of each
        return parts.unflatten(1, (tokens.sequences, -1)).transpose(0, 1).flatten(0, 2)
    return parts.unflatten(2, (tokens.sequences, -1)).permute(1, 2, 0, 3).flatten(1, 3)


def received(operand: Any) -> Any:
    """Return an operand that is here, or the whole of one that is being gathered."""
    return arrived(operand) if isinstance(operand, OnItsWay) else operand


def sent(tokens: Tokens | None, of: str, operand: Any, axis: int) -> Any:
    """Begin to gather an operand of x or y where ranks share its tokens; any other stays as it is."""
    return operand if tokens is None or tokens.of != of or operand is None else begin_gather(tokens, operand, axis)


def added(tokens: Tokens | None, of: str, partial_MN: Tensor) -> Tensor:
    """Begin to add the partial sums of all ranks where each needs those of its tokens; wait with `arrived_sum`."""
    return partial_MN if tokens is None or tokens.of != of else scattered(tokens, partial_MN)


def token_sum(tokens: Tokens | None, dy_MN: Tensor) -> Tensor:
    """Return the sum of dy over all tokens, fp32 [N]."""
    own = dy_MN.sum(0, dtype=torch.float32)
    if tokens is None or tokens.of != "y":
        return own
    return arrived_sum(torch.ops._c10d_functional.all_reduce(own, "sum", tokens.group))


def scattered(tokens: Tokens, partial_MN: Tensor) -> Tensor:
    """Begin to add the partial sums of all ranks, of which each gets those of its tokens."""
    by_rank = partial_MN.view(tokens.sequences, tokens.world, tokens.each, -1).transpose(0, 1).contiguous()
    ops_ = torch.ops._c10d_functional
    return ops_.reduce_scatter_tensor(by_rank.view(-1, partial_MN.shape[1]), "sum", tokens.world, tokens.group)


def arrived_sum(t: Tensor) -> Tensor:
    """Return the sums once they are there."""
    return torch.ops._c10d_functional.wait_tensor(t)
