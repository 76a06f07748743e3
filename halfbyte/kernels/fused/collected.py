"""What a kernel collects of the tensor that it writes, and what another launch finds once that is written."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device.running_max import AmaxPair
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4

MOST_ROWS = 32
"""Of a rotation that a kernel turns as it writes: it holds all rows at once. With 64 the assembler spills and takes
minutes, with 128 the compiler takes half an hour (docs/internals/fused.md)."""


def collected(col: NVFP4 | None) -> NVFP4 | None:
    """Return the spec of a column operand whose amax is collected; None where none is wanted, or it is found later."""
    return None if col is not None and col.rotation is not None and col.rotation.size > MOST_ROWS else col


def with_column(amaxes: AmaxPair, y: Tensor, col: NVFP4 | None, sign_draw: Draw | None) -> AmaxPair:
    """Return the amaxes of y [rows, cols] and y.T as collected, that of a wide rotation's columns by another read."""
    if col is None or collected(col) is not None:
        return amaxes
    return amaxes._replace(col=operand_amax(y.T, col, sign_draw))
