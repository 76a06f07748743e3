"""Experts whose features lie in parts on several ranks: split.py, for tokens in groups and the weights of experts.

Tokens are whole on every rank, so that groups begin and end where they do on one process; N or K lies in parts. Amaxes
are those of whole groups. Groups draw at places that follow from their sizes, which the host does not know: an operand
that draws is quantized as wide as the whole, with zeros in the place of other ranks' parts, and cut again.

Shape suffixes: M tokens, E experts, N out_features, K in_features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.group import all_max, gathered
from halfbyte.functional.operands import Place, both
from halfbyte.functional.split import LayerSplit, Part, cut, report
from halfbyte.layout import Blocks
from halfbyte.sides import Side, Sides, share_tiles
from halfbyte.spec import Spec


def part_of_experts(split: LayerSplit | None, letters: str, moved: bool = False) -> Part | None:
    """Return which part of a tensor is here, None where all of it is.

    Args:
        split: of the layer.
        letters: "MK" of x, "NK" of an expert, "MN" of dy.
        moved: whether the tensor has the parts of fprop's operand, not those in which the ranks hold it.
    """
    if split is None or split.dim not in letters:
        return None
    return Part(split, letters.index(split.dim), split.cuts if moved and split.dim == "K" else split.borders)


def both_of_part(
    part: Part, t: Tensor, offsets: Tensor | None, specs: tuple[Spec | None, Spec | None], place: Place
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return t and, group by group, t.mT as GEMM operands with the bytes that they have as parts of the whole ones.

    Args:
        part: of t that is here.
        t: tokens [M, C] with offsets, or experts [E, N, K] without.
        specs: how its rows and columns are quantized, None for not at all.
        place: where they draw.
    """
    axis = t.dim() - 2 + part.axis
    is_here = all(part.is_local(side, spec) for side, spec in enumerate(specs))
    quantize = partial(_quantize_with_whole_amaxes, part, t, offsets)
    if is_here and not any(spec is not None and spec.needs_rng for spec in specs):
        return both(t, *specs, place, ops.Amaxes(), quantize)
    if is_here:
        whole = _among_zeros(part, t, axis)
    else:
        report(part, *specs)
        whole = gathered(t, axis, part.held, part.split.group)
        quantize = partial(_quantize, offsets)
    made = both(whole, *specs, place, ops.Amaxes(), quantize)
    plain = (t, t.detach().mT) if is_here else (None, None)
    row, col = (
        one if one is not None and spec is None else cut(operand, part, side)
        for side, (operand, spec, one) in enumerate(zip(made, specs, plain, strict=True))
    )
    return row, col


def _quantize(offsets: Tensor | None, t: Tensor, row: Side | None, col: Side | None) -> Any:
    return ops.grouped_quantize_row_col(t, offsets, row, col)


def _quantize_with_whole_amaxes(
    part: Part, own: Tensor, offsets: Tensor | None, t: Tensor, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Quantize t with the amaxes of all ranks' parts, of which `own` is this one's."""
    return ops.grouped_quantize_row_col(t, offsets, *_with_whole_amaxes(part, own, offsets, (row, col)))


def _with_whole_amaxes(part: Part, own: Tensor, offsets: Tensor | None, sides: Sides) -> Sides:
    """Return what is asked for with the amaxes of whole groups, where other parts have a say in them."""
    row, col = (_own_amax_of(part, i, side) for i, side in enumerate(sides))
    if sides[0] is not None and sides[1] is not None and share_tiles(sides[0].spec, sides[1].spec):
        col = None
    if row is None and col is None:
        return sides
    asked, made = (row, col), ops.grouped_quantize_row_col(own, offsets, row, col)
    amaxes = [
        torch.empty(0, device=own.device, dtype=torch.float32) if blocks is None else blocks.amax for blocks in made
    ]
    sizes = [amax.numel() for amax in amaxes]
    found = all_max(torch.cat([amax.reshape(-1) for amax in amaxes]), part.split.group).split(sizes)
    row, col = (
        side if side is None or wanted is None else side._replace(amax=one.view(amax.shape))
        for side, wanted, one, amax in zip(sides, asked, found, amaxes, strict=True)
    )
    return row, col


def _own_amax_of(part: Part, index: int, side: Side | None) -> Side | None:
    """Return what quantizes a part for its amaxes, None where the part's own are those of the whole."""
    if side is None or side.amax is not None or not side.spec.format.has_amax:
        return None
    return side._replace(transient=False) if side.spec.has_tensor_amax or part.is_summed(index) else None


def _among_zeros(part: Part, t: Tensor, axis: int) -> Tensor:
    """Return a tensor as wide as the whole one, with this rank's part in its place."""
    start, stop = part.bounds
    shape = list(t.shape)
    shape[axis] = part.held[-1]
    whole = t.new_zeros(shape)
    whole.narrow(axis, start, stop - start).copy_(t)
    return whole
