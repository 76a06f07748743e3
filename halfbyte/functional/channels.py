"""Channels of x that are multiplied in more than four bits, beside the quantized product (numerics.md section 2).

Outlier channels: with x = x0 + x_I, where x0 has zeros in the channels I, y = nt(x0, w) + nt(x_I, w_I), the second in
MXFP8. Zeros stay zeros in every cast, so the columns I of nt(dy.T, x0.T) are zero and dw's are the MXFP8 product alone.

A patch: with x = X + dX and w = W + dW, upper case what the codes stand for, x w = X W + dX W + X dW + dX dW. The
first is the quantized product, the next two are added for the channels I where the errors are largest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.channels import Channels
from halfbyte.functional.operands import Place, both
from halfbyte.spec import MXFP8, Recipe, Spec
from halfbyte.tensor.quant_tensor import QuantTensor

_MX = MXFP8()
_NOWHERE = Place(None, None, 0, (0, 0), (False, False))
"""MXFP8 draws nothing."""


class Apart(NamedTuple):
    """What of x is multiplied apart.

    index: int64 [k], the channels in ascending order; of a patch None, which depends on the weight.
    row, col: x_I and x_I.T as operands, where fprop and wgrad quantize x.
    """

    index: Tensor | None = None
    row: ops.Operand | None = None
    col: ops.Operand | None = None


def outliers_apart(
    x_MK: Tensor, channels: Channels, specs: tuple[Spec | None, Spec | None], place: Place
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Apart]:
    """Return x and x.T as GEMM operands, outlier channels taken out of those that are quantized; and these.

    Args:
        x_MK: [M, K].
        channels: which.
        specs: of x in fprop and in wgrad.
        place: where x draws.
    """
    index = outlier_index(x_MK, channels)
    row, col = both(x_MK.index_fill(1, index, 0), *specs, place, ops.Amaxes())
    mx_row, mx_col = both(
        x_MK.index_select(1, index), _MX if specs[0] else None, _MX if specs[1] else None, _NOWHERE, _NONE
    )
    return (
        row if specs[0] else x_MK,
        col if specs[1] else x_MK.mT,
        Apart(index, _quantized(mx_row), _quantized(mx_col)),
    )


_NONE = ops.Amaxes()


def outlier_index(x_MK: Tensor, channels: Channels) -> Tensor:
    """Return the channels of x with the greatest norm, int64 [k], ascending."""
    return _greatest(ops.token_mean(x_MK.float().square()), channels)


def _quantized(operand: ops.Operand | Tensor) -> ops.Operand | None:
    return operand if isinstance(operand, ops.Operand) else None


def _greatest(scores_K: Tensor, channels: Channels) -> Tensor:
    """Return the channels with the greatest scores, int64 [k], ascending; of equal ones the first."""
    order = scores_K.sort(stable=True, descending=True).indices  # topk leaves open which of equals it takes
    return order[: channels.count(scores_K.shape[0])].sort().values


def product_with_channels(
    x: tuple[Tensor, Any, Apart], w: tuple[Tensor | None, Any], recipe: Recipe, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return fprop's output [M, N] with what channels add: all in fp32 before the only rounding.

    Args:
        x: [M, K], its operand, what is apart.
        w: [N, K] or None where only codes are left, and its operand.
        recipe: of the layer.
        bias: [N] or None.
        dtype: of the output.
    """
    x_MK, row, apart = x
    assert recipe.channels is not None, "asked for where channels are taken apart"
    if recipe.channels.kind == "patch":
        w_NK = weight_values(*w, torch.float32 if w[0] is None else x_MK.dtype)  # codes alone have no error
        left, right = _patches(x_MK, row, w_NK, w[1], recipe.channels)
    elif apart.index is None or apart.row is None:
        return ops.gemm_nt(row, w[1], out_dtype=dtype, bias=bias)
    else:
        w_I = weight_values(*w, x_MK.dtype).index_select(1, apart.index)
        left, (right, _) = apart.row, both(w_I, _MX, None, _NOWHERE, _NONE)
    added = ops.gemm_nt(left, right, out_dtype=torch.float32, bias=bias)
    return ops.gemm_nt_add(row, w[1], added, out_dtype=dtype)


def weight_values(w: Tensor | None, operand: Any, dtype: torch.dtype) -> Tensor:
    """Return a weight in the dtype of x; of one that exists in codes alone, what they stand for."""
    if w is None:
        return ops.dequantize(operand, dtype) if isinstance(operand, ops.Operand) else operand
    return (w.dequantize() if isinstance(w, QuantTensor) else w).detach().to(dtype)


def _patches(
    x_MK: Tensor, row: ops.Operand, w_NK: Tensor, w_row: ops.Operand, channels: Channels
) -> tuple[Tensor, Tensor]:
    """Return [dX_I, X_I] [M, 2k] and [W_I, dW_I] [N, 2k] in the dtype of x."""
    X, W = ops.dequantize(row, torch.float32), ops.dequantize(w_row, torch.float32)
    dX, dW = x_MK.float() - X, w_NK.float() - W
    index = _greatest(ops.token_mean(dX.abs()) + ops.token_mean(dW.abs()), channels)
    left, right = ([t.index_select(1, index).to(x_MK.dtype) for t in pair] for pair in ((dX, X), (W, dW)))
    return torch.cat(left, 1), torch.cat(right, 1)


def with_outliers(
    dw: Tensor | None, dy_MN: Tensor, apart: tuple[Tensor | None, Any], dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """Return dw [N, K] with the columns of outlier channels, in MXFP8; added to `main_grad` where there is one.

    Args:
        dw: of the quantized product, whose columns I are zero; None with `main_grad`.
        dy_MN: the gradient of the output.
        apart: the channels, and x_I.T as operand; None: dw is whole.
        dtype: of the GEMMs.
        main_grad: fp32 [N, K] or None.
    """
    index, x_col = apart
    if index is None:
        return dw
    _, col = both(dy_MN, None, _MX, _NOWHERE, _NONE)
    if main_grad is not None:
        main_grad.index_add_(1, index, ops.gemm_nt(col, x_col, out_dtype=torch.float32))
        return None
    assert dw is not None, "a gradient without a buffer is returned"
    return dw.index_copy(1, index, ops.gemm_nt(col, x_col, out_dtype=dtype).to(dw.dtype))


def kept_for_backward(apart: Apart) -> list[Any]:
    """Return what wgrad reads: the channels and x_I.T, None where there are none."""
    return [None, None] if apart.col is None else [apart.index, apart.col]
