"""The mean of x over tokens, split off before x is quantized and multiplied in high precision (numerics.md section 2).

With x = r + 1 mean, a linear layer is y = nt(r, w) + 1 v with v = nt(mean, w), and dw = nt(dy.T, r.T) + nt(s, mean)
with s the sum of dy over tokens: a bias more, and an outer product to which the GEMM adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.operands import Place, both
from halfbyte.spec import Spec


def both_without_mean(
    x_MK: Tensor, specs: tuple[Spec | None, Spec | None], place: Place
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return x and x.T as GEMM operands, the mean taken out of those that are quantized; and the mean, fp32 [K]."""
    residual, mean = ops.split_mean(x_MK)
    row, col = both(residual, *specs, place, ops.Amaxes())
    return row if specs[0] else x_MK, col if specs[1] else x_MK.T, mean


def bias_with_mean(bias: Tensor | None, mean: Tensor, w: Tensor | ops.Operand, dtype: torch.dtype) -> Tensor:
    """Return what fprop adds to every row: bias + nt(mean, w), fp32 [N].

    Args:
        bias: [N] or None.
        mean: fp32 [K].
        w: [N, K], rounded to `dtype` first; of codes the values that they stand for.
        dtype: of x.
    """
    values = w.detach().to(dtype) if isinstance(w, Tensor) else ops.dequantize(w, dtype)
    v = ops.gemm_nt(mean[None], values, out_dtype=torch.float32)[0]
    return v if bias is None else bias.float() + v


def add_mean_gradient(s: Tensor, mean: Tensor, main_grad: Tensor | None) -> Tensor:
    """Return nt(s, mean), fp32 [N, K], or `main_grad` with it added."""
    if main_grad is None:
        return ops.gemm_nt(s[:, None], mean[:, None], out_dtype=torch.float32)
    return ops.gemm_nt(s[:, None], mean[:, None], out=main_grad, accumulate=True)
