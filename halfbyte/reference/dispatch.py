"""Tokens that travel to their experts as codes (docs/numerics.md section 8): the definition, in one process."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from halfbyte.layout import Blocks, Operand
from halfbyte.reference.grouped import grouped_dequantize, grouped_quantize_row_col
from halfbyte.sides import Side


class Arriving(NamedTuple):
    """What the GEMMs of experts read of tokens that arrive as codes.

    row: of fprop.
    values: [M, C] that it stands for, in the dtype of the tokens.
    col: of wgrad, made of the values; None where it is not asked for.
    """

    row: Blocks
    values: Tensor
    col: Blocks | None


def dispatched_row_col(x: Tensor, offsets: Tensor, row: Side, col: Side | None) -> Arriving:
    """Return both operands of tokens that travel as codes.

    Args:
        x: [M, C], sorted by expert.
        offsets: integer [E], cumulative ends of the groups.
        row: as fprop reads it, with an amax of every token and without random bits.
        col: as wgrad reads it, or None.
    """
    assert row.spec.has_row_amax, "a token travels with its own amax"
    blocks, _ = grouped_quantize_row_col(x, offsets, row, None)
    assert blocks is not None, "a row is asked for"
    values = grouped_dequantize(Operand(blocks, row.spec, x.shape[1]), offsets, x.dtype)
    return Arriving(blocks, values, grouped_quantize_row_col(values, offsets, None, col)[1])
