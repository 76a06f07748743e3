"""The mean of activations over tokens, and x quantized without it (docs/numerics.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.arithmetic import residual_dtype
from halfbyte.layout import Blocks, matrix_shape
from halfbyte.reference.matmul import gemm_nt, plain
from halfbyte.reference.norm import column_sum
from halfbyte.reference.nvfp4 import quantize_row_col
from halfbyte.reference.scale import finite_amax
from halfbyte.sides import Epilogue, Side


def token_sum(x: Tensor) -> Tensor:
    """Return the sum of each column of x [M, K], fp32 [K], in the order of halfbyte/arithmetic.py."""
    return column_sum(x.float())


def token_mean(x: Tensor) -> Tensor:
    """Return the mean of each column of a matrix.

    Args:
        x: [M, K].

    Returns:
        [K], rounded to bf16 if x is bf16, else fp32; 0 where that is not finite, or if there is no row.
    """
    mean = (token_sum(x) / torch.full((), float(x.shape[0]), device=x.device, dtype=torch.float32)).to(
        residual_dtype(x.dtype)
    )
    return torch.where(mean.isfinite(), mean, 0.0)


def residual_of(x: Tensor, mean: Tensor) -> Tensor:
    """Return x [M, K] without its mean [K], rounded once: to bf16 if x is bf16, else to fp32."""
    return (x.float() - mean.float()).to(residual_dtype(x.dtype))


def quantize_residual(
    x: Tensor, mean: Tensor, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Return what `quantize_row_col` does of x [M, K] without its mean [K]."""
    return quantize_row_col(residual_of(x.reshape(matrix_shape(x.shape)), mean), row, col)


def quantize_with_sum(x: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None, Tensor]:
    """Return what `quantize_row_col` does of x [M, K], and the sum of its columns, fp32 [K]."""
    return *quantize_row_col(x, row, col), token_sum(x)


def amax_with_product(w: Tensor, a: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return max |w| over the finite elements of w [N, K], fp32 []; and nt(a, w) + bias of a row a [K], fp32 [N]."""
    product = gemm_nt(plain(a[None]), plain(w), Epilogue(torch.float32, bias))
    return finite_amax(w), product[0]
