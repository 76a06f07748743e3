"""What is asked for when a tensor is quantized along its rows, its columns, or both."""

from __future__ import annotations

from typing import NamedTuple

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
