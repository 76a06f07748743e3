"""x quantized without its mean over tokens, and dy with its sum over them (docs/numerics.md section 2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import residual_dtype
from halfbyte.kernels.amax.rotated import launch_rotated
from halfbyte.kernels.amax.token_sum import parts_added, token_sum
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.both import launch_both, quantize_row_col
from halfbyte.kernels.quantize.both_route import WRITTEN, Residual, choose_residual
from halfbyte.layout import Blocks, ceil_div, matrix_shape
from halfbyte.sides import Side

TILE, NUM_WARPS = 8192, 8  # values of a program
MAX_COLUMNS = 1024


@jit
def residual_kernel(
    x_ptr, mean_ptr, out_ptr, rows, cols, stride_r, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, cols] = x - mean, rounded once; FULL: whole tiles of R x C."""
    overlap.begin(OVERLAP)
    beside = tl.cdiv(cols, C)
    row = tl.program_id(0) // beside * R + tl.arange(0, R)
    col = tl.program_id(0) % beside * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    mean = pm.to_fp32(masked_load(mean_ptr + col, col < cols, FULL))
    o_row = row.to(tl.int64)[:, None]
    x = pm.to_fp32(masked_load(x_ptr + o_row * stride_r + col[None, :], inside, FULL))
    rest = dc.cast(x - mean[None, :], out_ptr.dtype.element_ty)
    masked_store(out_ptr + o_row * cols + col[None, :], rest, inside, FULL)


def residual_of(x: Tensor, mean: Tensor) -> Tensor:
    """Return x [M, K] without its mean [K]: the bits of `halfbyte.reference.residual_of`."""
    rows, cols = x.shape
    out = torch.empty(rows, cols, dtype=residual_dtype(x.dtype), device=x.device)
    if not x.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    c = min(MAX_COLUMNS, triton.next_power_of_2(cols))
    r = TILE // c
    residual_kernel[(ceil_div(rows, r) * ceil_div(cols, c),)](
        x,
        mean.contiguous(),
        out,
        rows,
        cols,
        x.stride(0),
        R=r,
        C=c,
        FULL=rows % r == cols % c == 0,
        **overlap.launch_options(x.device),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out


def quantize_residual(
    x: Tensor, mean: Tensor, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Return what `quantize_row_col` does of x [M, K] without its mean [K]."""
    x = x.reshape(matrix_shape(x.shape))
    choice = choose_residual(Residual(x, row, col))
    if choice.kernel == WRITTEN or row is None or col is None:
        return quantize_row_col(residual_of(x, mean), row, col)
    amaxes, both = choice.facts
    col_amax, row_amax = launch_rotated(amaxes, col.sign_draw, mean)
    return launch_both(both, x, mean, row._replace(amax=row_amax), col._replace(amax=col_amax))


def quantize_with_sum(x: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None, Tensor]:
    """Do what `halfbyte.reference.quantize_with_sum` does; the kernel that finds the amaxes sums, if there is one."""
    choice = choose_residual(Residual(x, row, col))
    if choice.kernel == WRITTEN or row is None or col is None:
        return *quantize_row_col(x, row, col), token_sum(x)
    amaxes, both = choice.facts
    _, _, parts = amaxes.facts
    sums = torch.empty(parts, x.shape[1], dtype=torch.float32, device=x.device)
    col_amax, row_amax = launch_rotated(amaxes, col.sign_draw, None, sums)
    operands = launch_both(both, x, None, row._replace(amax=row_amax), col._replace(amax=col_amax))
    return *operands, parts_added(sums)
