"""The maxima with which both orientations of a tensor will be quantized, before they are quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.reference.hadamard import rotate
from halfbyte.reference.scale import finite_amax
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4


def operand_amaxes(y: Tensor, row: str, col: NVFP4 | None, sign_draw: Draw | None) -> tuple[Tensor, Tensor]:
    """Return the amaxes with which y and y.T will be quantized; empty where none is wanted.

    Args:
        y: [rows, cols].
        row: "", "tensor" for one amax or "row" for one of each row.
        col: the spec of y.T, with one amax for the tensor; None for no amax.
        sign_draw: the place of fresh signs.
    """
    row_amax, col_amax = (torch.empty(0, dtype=torch.float32, device=y.device) for _ in range(2))
    if row:
        row_amax = finite_amax(y, dim=-1 if row == "row" else None)
    if col is not None:
        col_amax = finite_amax(y if col.rotation is None else rotate(y.T, col.rotation, sign_draw))
    return row_amax, col_amax
