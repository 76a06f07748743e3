"""The mean of x over tokens, split off before x is quantized and multiplied in high precision (numerics.md section 2).

With x = r + 1 mean, a linear layer is y = nt(r, w) + 1 v with v = nt(mean, w), and dw = nt(dy.T, r.T) + nt(s, mean)
with s the sum of dy over tokens: a bias more, and an outer product that the GEMM adds at its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.operands import Place, both
from halfbyte.layout import Blocks
from halfbyte.sides import Side
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import QuantTensor


def both_without_mean(
    x_MK: Tensor, specs: tuple[Spec | None, Spec | None], place: Place
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return x and x.T as GEMM operands, the mean taken out of those that are quantized; and the mean [K]."""
    mean = ops.token_mean(x_MK)

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        return ops.quantize_residual(t, mean, row, col)

    row, col = both(x_MK, *specs, place, ops.Amaxes(), quantize)
    return row, col, mean


def both_with_sum(
    dy_MN: Tensor, specs: tuple[Spec | None, Spec | None], place: Place, amaxes: ops.Amaxes
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor, Tensor]:
    """Return dy and dy.T as GEMM operands, quantized where their spec is not None; and s, fp32 [N]."""
    sums: list[Tensor] = []

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        if col is None:
            return ops.quantize_row_col(t, row, col)
        *operands, s_N = ops.quantize_with_sum(t, row, col)
        sums.append(s_N)
        return operands[0], operands[1]

    row, col = both(dy_MN, *specs, place, amaxes, quantize)
    return row, col, sums[0] if sums else ops.token_sum(dy_MN)


def bias_with_mean(bias: Tensor | None, mean: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what fprop adds to every row: nt(mean, w) + bias, fp32 [N].

    Args:
        bias: [N] or None.
        mean: [K].
        w: [N, K], rounded to `dtype` first; of a QuantTensor the values that it stands for.
        dtype: of x.
    """
    values = w.dequantize() if isinstance(w, QuantTensor) else w
    return ops.gemm_nt(mean[None], values.detach().to(dtype), out_dtype=torch.float32, bias=bias)[0]
