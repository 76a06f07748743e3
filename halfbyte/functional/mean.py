"""The mean of x over tokens, split off before x is quantized and multiplied in high precision (numerics.md section 2).

With x = r + 1 mean, a linear layer is y = nt(r, w) + 1 v with v = nt(mean, w), and dw = nt(dy.T, r.T) + nt(s, mean)
with s the sum of dy over tokens: a bias more, and an outer product that the GEMM adds at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.arithmetic import residual_dtype
from halfbyte.functional.operands import Place, both
from halfbyte.functional.weights import takes_amax
from halfbyte.layout import Blocks
from halfbyte.sides import Side
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import QuantTensor


def both_without_mean(
    x_MK: Tensor,
    specs: tuple[Spec | None, Spec | None],
    place: Place,
    make: Callable[..., tuple[Any, Any]] = both,
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return x and x.T as GEMM operands, the mean taken out of those that are quantized; and the mean [K].

    Args:
        make: what makes operands of a tensor; other than `both` of parts, which it may have to gather.
    """
    mean = ops.token_mean(x_MK)
    if make is not both:
        row, col = make(without_mean(x_MK, mean), *specs, place, ops.Amaxes())
        plain_row, plain_col = make(x_MK, None, None, place, ops.Amaxes())
        return row if specs[0] else plain_row, col if specs[1] else plain_col, mean

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        return ops.quantize_residual(t, mean, row, col)

    row, col = both(x_MK, *specs, place, ops.Amaxes(), quantize)
    return row, col, mean


def without_mean(x: Tensor, mean: Tensor) -> Tensor:
    """Return x [M, K] without its mean [K], rounded once, as `ops.quantize_residual` quantizes it."""
    return (x.float() - mean.float()).to(residual_dtype(x.dtype))


def both_with_sum(
    dy_MN: Tensor,
    specs: tuple[Spec | None, Spec | None],
    place: Place,
    amaxes: ops.Amaxes,
    make: Callable[..., tuple[Any, Any]] = both,
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return dy and dy.T as GEMM operands, quantized where their spec is not None; and s, fp32 [N].

    Args:
        make: as for `both_without_mean`.
    """
    if make is not both:
        return *make(dy_MN, *specs, place, amaxes), ops.token_sum(dy_MN)
    sums: list[Tensor] = []

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        if col is None:
            return ops.quantize_row_col(t, row, col)
        *operands, s_N = ops.quantize_with_sum(t, row, col)
        sums.append(s_N)
        return operands[0], operands[1]

    row, col = both(dy_MN, *specs, place, amaxes, quantize)
    return row, col, sums[0] if sums else ops.token_sum(dy_MN)


def amaxes_with_product(
    w: Tensor,
    added: tuple[Tensor, Tensor | None],
    specs: tuple[Spec | None, Spec | None],
    amaxes: ops.Amaxes,
    make: Callable[..., tuple[Any, Any]] = both,
) -> tuple[ops.Amaxes, Tensor | None]:
    """Return the amaxes of w's operands and what `bias_with_mean` does, where one read of w gives both; else None.

    Args:
        w: [N, K].
        added: mean [K], and the bias [N] or None.
        specs: of the operands that are made now.
        amaxes: as far as known.
        make: as for `both_without_mean`.
    """
    wanted, (mean, bias) = [spec for spec in specs if spec is not None], added
    is_plain = make is both and w.dtype == mean.dtype and not isinstance(w, QuantTensor)
    if not (is_plain and wanted and all(map(takes_amax, wanted)) and amaxes.row is amaxes.col is None):
        return amaxes, None
    amax, v = ops.amax_with_product(w.detach(), mean, bias)
    return ops.Amaxes(amax, amax), v


def bias_with_mean(bias: Tensor | None, mean: Tensor, w: Tensor | ops.Operand, dtype: torch.dtype) -> Tensor:
    """Return what fprop adds to every row: nt(mean, w) + bias, fp32 [N].

    Args:
        bias: [N] or None.
        mean: [K].
        w: [N, K], rounded to `dtype` first; of codes the values that they stand for.
        dtype: of x.
    """
    if isinstance(w, ops.Operand):
        values = ops.dequantize(w, dtype)
    else:
        values = (w.dequantize() if isinstance(w, QuantTensor) else w).detach().to(dtype)
    return ops.gemm_nt(mean[None], values, out_dtype=torch.float32, bias=bias)[0]
