"""What is asked for: when a tensor is quantized along its rows, its columns or both, and of a product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.layout import LINEAR
from halfbyte.rng import Draw
from halfbyte.spec import Spec


class Side(NamedTuple):
    """One orientation that is asked for.

    spec: how it is quantized.
    draw: random bytes of stochastic rounding.
    sign_draw: fresh signs of the rotation.
    amax: fp32, used instead of the computed one; [], [rows], or of groups as `layout.grouped_shapes` says.
    scale_layout: "linear" or "swizzled_32_4_4".
    transient: meant for one GEMM at once: values serve as well as codes, Blocks(values, no scales, amax).
    """

    spec: Spec
    draw: Draw | None = None
    sign_draw: Draw | None = None
    amax: Tensor | None = None
    scale_layout: str = LINEAR
    transient: bool = False


Sides = tuple[Side | None, Side | None]


class Epilogue(NamedTuple):
    """What follows the sum of a GEMM [M, N], in fp32, before the only rounding.

    out_dtype: bf16, fp16 or fp32 of the result if `out` is None.
    bias: [N] of any float dtype.
    addend: [M, N] of any float dtype; `out` itself to accumulate.
    out: [M, N] to write into.
    outer: vectors [M] and [N] of any float dtype whose outer product is added, after the bias and before the addend.
    batch_invariant: whether the order of the sum of a row may depend on N and K alone, of operands that are quantized.
    """

    out_dtype: torch.dtype = torch.bfloat16
    bias: Tensor | None = None
    addend: Tensor | None = None
    out: Tensor | None = None
    outer: tuple[Tensor, Tensor] | None = None
    batch_invariant: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the result."""
        return self.out_dtype if self.out is None else self.out.dtype


def both_sides(
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    transient: tuple[bool, bool] = (False, False),
) -> Sides:
    """Return both orientations of one tensor; None where the spec is None.

    Args:
        draw: the row's random bytes; the column uses the next offset.
        others: as those of Side, for row and column.
    """
    row = col = None
    if row_spec is not None:
        row = Side(row_spec, draw, sign_draw, row_amax, scale_layout, transient[0])
    if col_spec is not None:
        col = Side(col_spec, draw and draw.next(), sign_draw, col_amax, scale_layout, transient[1])
    return row, col


def shared_draws(both: Sides) -> tuple[Draw | None, Draw | None]:
    """Return draw and sign_draw of which `both_sides` made what is asked for.

    Raises:
        ValueError: row and col have other draws or scale layouts than those that `both_sides` gives them.
    """
    row, col = both
    if row is not None and col is not None:
        _check_shared(row, col)
    if row is not None:
        return row.draw, row.sign_draw
    if col is None:
        return None, None
    return None if col.draw is None else col.draw.before(), col.sign_draw


def _check_shared(row: Side, col: Side) -> None:
    if row.scale_layout != col.scale_layout:
        raise ValueError(
            f"scale_layout={col.scale_layout!r} of col: that of row is {row.scale_layout!r}; give both one"
        )
    for name, mine, theirs in (("draw", row.draw, col.draw), ("sign_draw", row.sign_draw, col.sign_draw)):
        bases = [None if place is None else place.base for place in (mine, theirs)]
        if bases[0] is not bases[1]:
            raise ValueError(f"{name}: row and col draw at different places; make both with both_sides")
    if row.draw is None or col.draw is None:
        return
    follows = type(row.draw.stream) is not int or col.draw.stream == row.draw.stream + 1  # what varies is not compared
    if not follows:
        raise ValueError(
            f"draw.stream={col.draw.stream} of col: it follows that of row, {row.draw.stream}; use both_sides"
        )


def of_group(both: Sides, index: int) -> Sides:
    """Return what is asked for of one group of a grouped operand, which draws with another seed; amaxes stay."""
    bases: dict[int, Tensor] = {}

    def moved(place: Draw | None) -> Draw | None:
        if place is None:
            return None
        base = bases.get(id(place.base))
        base = bases[id(place.base)] = place.group(index).base if base is None else base
        return place._replace(base=base)

    row, col = (
        side and side._replace(draw=moved(side.draw), sign_draw=moved(side.sign_draw), transient=False) for side in both
    )
    return row, col


def share_tiles(row: Spec | None, col: Spec | None) -> bool:
    """Whether both orientations are one quantization: 16x16 tiles, whose transpose is exact."""
    return row is not None and row == col and row.is_tile
