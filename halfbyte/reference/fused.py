"""A norm or an activation, then the maxima with which both orientations of its output will be quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.reference.activation import activation, activation_backward
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.norm import norm
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


def norm_with_amaxes(
    x: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    kind: tuple[float, bool, torch.dtype],
    row: str,
    col: NVFP4 | None,
    sign_draw: Draw | None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return y, the sum, (mean, rstd) and `operand_amaxes` of y.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        parameters: weight and bias [cols]; bias may be None.
        kind: eps, whether centered (LayerNorm), dtype of y.
        row, col, sign_draw: as for `operand_amaxes`.
        residual: [rows, cols], what is added to x first; the norm is that of the sum, which torch rounds and returns.
            None: of x, and there is no sum.
    """
    total = None if residual is None else (x + residual).contiguous()
    y, statistics = norm(x if total is None else total, *parameters, *kind)
    return y, total, statistics, operand_amaxes(y, row, col, sign_draw)


def activation_with_amaxes(
    x: Tensor, up: Tensor | None, function: str, row: str, col: NVFP4 | None, sign_draw: Draw | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return h = f(x), or f(x) * up, and its `operand_amaxes`."""
    h = activation(x, up, function)
    amaxes = operand_amaxes(h, row, col, sign_draw)
    return h, amaxes


def activation_backward_with_amaxes(
    tensors: tuple[Tensor, Tensor, Tensor | None], function: str, row: str, col: NVFP4 | None, sign_draw: Draw | None
) -> tuple[tuple[Tensor, Tensor | None], tuple[tuple[Tensor, Tensor], ...]]:
    """Return the gradients of x and `up`, and of each its `operand_amaxes`.

    Args:
        tensors: dh, x and `up` (or None) [rows, cols].
        function, row, col, sign_draw: as for `activation_with_amaxes`.
    """
    dx, dup = activation_backward(*tensors, function)
    return (dx, dup), tuple(operand_amaxes(t, row, col, sign_draw) for t in (dx, dup) if t is not None)
