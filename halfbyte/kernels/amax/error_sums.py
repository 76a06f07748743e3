"""Sums of statistics: what a quantized tensor lost, in one pass, and outliers of every column.

A program writes its own sums, fp64, which are added up behind it: no order of programs changes a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import ERROR_SUMS
from halfbyte.formats import f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.rotate_wide import stages
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div


class Tile(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    cols: int


ALONG_ROWS, ALONG_COLUMNS = Tile(8, 512), Tile(32, 128)  # by where neighbours in memory lie
NUM_WARPS = 8
OUTLIER_TILE = Tile(16, 256)
OUTLIER_PROGRAMS = 2048
SUMS = len(ERROR_SUMS)


@triton.jit
def rotated(x, sign_ptr, norm, SIZE: tl.constexpr):
    """Rotate groups of SIZE along the rows of x [R, C]: butterflies over strides 1, 2, ..., then the factor; bf16."""
    C: tl.constexpr = x.shape[1]
    sign = tl.load(sign_ptr + tl.arange(0, C) % SIZE)
    x = pm.to_fp32(dc.cast(x, tl.bfloat16)) * sign[None, :]
    return pm.to_fp32(dc.cast(stages(x, SIZE) * norm, tl.bfloat16))


@jit
def error_sums_kernel(
    values_ptr,
    restored_ptr,
    bound_ptr,
    sign_ptr,
    maxima_ptr,
    sums_ptr,
    rows,
    cols,
    wide,
    stride_r,
    stride_c,
    restored_stride,
    norm,
    R: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the ERROR_SUMS of one tile R x C of v and q to sums [programs, 8], maxima of blocks if there are BLOCKs.

    cols, wide: of v, and with the padding that q has. SIZE: of the rotation, 0 for none.
    """
    overlap.begin(OVERLAP)
    beside = tl.cdiv(wide, C)
    row = tl.program_id(0) // beside * R + tl.arange(0, R)
    col = tl.program_id(0) % beside * C + tl.arange(0, C)
    in_row, o_row = (row < rows)[:, None], row.to(tl.int64)[:, None]
    pointers = values_ptr + o_row * stride_r + col.to(tl.int64)[None, :] * stride_c
    v = pm.to_fp32(tl.load(pointers, mask=in_row & (col < cols)[None, :], other=0.0))
    if SIZE:
        v = rotated(v, sign_ptr, norm, SIZE)
    inside = in_row & (col < wide)[None, :]
    q = pm.to_fp32(tl.load(restored_ptr + o_row * restored_stride + col[None, :], mask=inside, other=0.0))
    saturated = 0
    if BLOCK:
        COUNT: tl.constexpr = C // BLOCK
        block = tl.program_id(0) % beside * COUNT + tl.arange(0, COUNT)
        o_block = o_row * (wide // BLOCK) + block[None, :]
        in_block = in_row & (block * BLOCK < wide)[None, :]
        magnitude = tl.reshape(tl.abs(v), (R, COUNT, BLOCK))
        bound = tl.load(bound_ptr + o_block, mask=in_block, other=float("inf"))
        saturated = tl.sum((magnitude > bound[:, :, None]).to(tl.int32))
        # Magnitudes are ordered as their bits are, and NaN is the largest.
        largest = tl.max(magnitude.to(tl.int32, bitcast=True), axis=2)
        tl.store(maxima_ptr + o_block, largest.to(tl.float32, bitcast=True), mask=in_block)
    d = q - v
    v_wide, q_wide, d_wide = v.to(tl.float64), q.to(tl.float64), d.to(tl.float64)
    out = sums_ptr + tl.cast(tl.program_id(0), tl.int64) * 8
    tl.store(out, tl.sum(v_wide * v_wide))
    tl.store(out + 1, tl.sum(q_wide * q_wide))
    tl.store(out + 2, tl.sum(d_wide * d_wide))
    tl.store(out + 3, tl.sum(tl.abs(v_wide)))
    tl.store(out + 4, tl.sum(tl.abs(d_wide)))
    tl.store(out + 5, tl.sum((v != 0).to(tl.int32)).to(tl.float64))
    tl.store(out + 6, tl.sum(((v != 0) & (q == 0)).to(tl.int32)).to(tl.float64))
    tl.store(out + 7, tl.cast(saturated, tl.float64))


@jit
def column_outliers_kernel(
    values_ptr, limit_ptr, counts_ptr, rows, cols, each, stride_r, stride_c, R: tl.constexpr, C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count in `each` rows of C columns, a multiple of R, what exceeds the limit, fp64: counts [parts, cols]."""
    overlap.begin(OVERLAP)
    beside = tl.cdiv(cols, C)
    part = tl.program_id(0) // beside
    col = tl.program_id(0) % beside * C + tl.arange(0, C)
    limit = tl.load(limit_ptr)
    count = tl.zeros((C,), tl.int32)
    for first in range(part * each, min(part * each + each, rows), R):
        row = first + tl.arange(0, R)
        pointers = values_ptr + row.to(tl.int64)[:, None] * stride_r + col.to(tl.int64)[None, :] * stride_c
        x = pm.to_fp32(tl.load(pointers, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0))
        count += tl.sum((tl.abs(x).to(tl.float64) > limit).to(tl.int32), axis=0)
    tl.store(counts_ptr + tl.cast(part, tl.int64) * cols + col, count, mask=col < cols)


def error_sums(
    values: Tensor, restored: Tensor, bounds: Tensor | None = None, signs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Do what `halfbyte.reference.error_sums` does, in one pass, up to the order in which fp64 is added."""
    rows, wide = restored.shape
    if not restored.numel():
        return torch.zeros(SUMS, dtype=torch.float64, device=values.device), bounds
    restored = restored if restored.stride(1) == 1 else restored.contiguous()
    tile = ALONG_COLUMNS if values.stride(0) == 1 and values.stride(1) != 1 else ALONG_ROWS
    programs = ceil_div(rows, tile.rows) * ceil_div(wide, tile.cols)
    sums = torch.empty(programs, SUMS, dtype=torch.float64, device=values.device)
    maxima = None if bounds is None else torch.empty_like(bounds, memory_format=torch.contiguous_format)
    error_sums_kernel[(programs,)](
        values,
        restored,
        None if bounds is None else bounds.contiguous(),
        signs,
        maxima,
        sums,
        rows,
        values.shape[1],
        wide,
        values.stride(0),
        values.stride(1),
        restored.stride(0),
        1.0 if signs is None else f32(len(signs) ** -0.5),
        R=tile.rows,
        C=tile.cols,
        SIZE=0 if signs is None else len(signs),
        BLOCK=0 if bounds is None else wide // bounds.shape[1],
        **overlap.launch_options(values.device),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return sums.sum(0), maxima


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of the squares of values [R, C], fp64 []."""
    same = values if values.stride(1) == 1 or values.stride(0) != 1 else values.T
    return error_sums(same, same)[0][ERROR_SUMS.index("signal")]


def column_outliers(values: Tensor, limit: Tensor) -> Tensor:
    """Do what `halfbyte.reference.column_outliers` does."""
    rows, cols = values.shape
    if not values.numel():
        return torch.zeros(cols, dtype=torch.float64, device=values.device)
    beside = ceil_div(cols, OUTLIER_TILE.cols)
    each = ceil_div(ceil_div(rows, max(1, OUTLIER_PROGRAMS // beside)), OUTLIER_TILE.rows) * OUTLIER_TILE.rows
    parts = ceil_div(rows, each)
    counts = torch.empty(parts, cols, dtype=torch.int32, device=values.device)
    column_outliers_kernel[(parts * beside,)](
        values,
        limit,
        counts,
        rows,
        cols,
        each,
        values.stride(0),
        values.stride(1),
        R=OUTLIER_TILE.rows,
        C=OUTLIER_TILE.cols,
        **overlap.launch_options(values.device),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return counts.sum(0).double()
