"""The mean of x over tokens, split off before x is quantized and multiplied in high precision (numerics.md section 2).

With x = r + 1 mean, a linear layer is y = nt(r, w) + 1 v with v = nt(mean, w), and dw = nt(dy.T, r.T) + nt(s, mean)
with s the sum of dy over tokens: a bias more, and an outer product to which the GEMM adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.operands import Place, both
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import QuantTensor


def both_without_mean(
    x_MK: Tensor,
    specs: tuple[Spec | None, Spec | None],
    place: Place,
    make: Callable[..., tuple[Any, Any]] = both,
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return x and x.T as GEMM operands, the mean taken out of those that are quantized; and the mean, fp32 [K]."""
    residual, mean = ops.split_mean(x_MK)
    row, col = make(residual, *specs, place, ops.Amaxes())
    plain_row, plain_col = make(x_MK, None, None, place, ops.Amaxes())
    return row if specs[0] else plain_row, col if specs[1] else plain_col, mean


def bias_with_mean(bias: Tensor | None, mean: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what fprop adds to every row: bias + nt(mean, w), fp32 [N].

    Args:
        bias: [N] or None.
        mean: fp32 [K].
        w: [N, K], rounded to `dtype` first; of a QuantTensor the values that it stands for.
        dtype: of x.
    """
    values = w.dequantize() if isinstance(w, QuantTensor) else w
    v = ops.gemm_nt(mean[None], values.detach().to(dtype), out_dtype=torch.float32)[0]
    return v if bias is None else bias.float() + v


def add_mean_gradient(s: Tensor, mean: Tensor, main_grad: Tensor | None) -> Tensor:
    """Return nt(s, mean), fp32 [N, K], or `main_grad` with it added."""
    if main_grad is None:
        return ops.gemm_nt(s[:, None], mean[:, None], out_dtype=torch.float32)
    return ops.gemm_nt(s[:, None], mean[:, None], out=main_grad, accumulate=True)
