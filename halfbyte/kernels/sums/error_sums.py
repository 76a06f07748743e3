"""Sums of statistics: what a product lost, how large a tensor is, and outliers of every column."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import ERROR_SUMS
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap
from halfbyte.kernels.launch import jit
from halfbyte.kernels.sums import partial
from halfbyte.layout import ceil_div


class Window(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    cols: int


WIDE_TILE, NARROW_TILE = Window(4, 256), Window(8, 256)  # with fp32 among what is read, and without: 16 bytes a thread
OUTLIER_TILE = Window(16, 256)
OUTLIER_PROGRAMS = 2048


@jit
def error_sums_kernel(
    values_ptr, restored_ptr, parts_ptr, rows, cols, each, stride_r, stride_c, restored_stride, R: tl.constexpr,
    C: tl.constexpr, V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the ERROR_SUMS of `each` tiles R x C of v and q to parts [3, programs].

    Without q: the sum of v * v, and the largest magnitude, to parts [2, programs]. V: neighbours that a thread holds.
    """
    overlap.begin(OVERLAP)
    programs, first, beside = tl.num_programs(0), tl.program_id(0), tl.cdiv(cols, C)
    tiles = tl.cdiv(rows, R) * beside
    signal = tl.zeros((R, C // V, V), tl.float64)
    largest = tl.zeros((R, C // V), tl.int32)
    restored, noise = signal, signal
    for tile in range(first, tl.minimum(tiles, first + each * programs), programs):
        row, col = tile // beside * R + tl.arange(0, R), tile % beside * C + tl.arange(0, C)
        o_row, inside = row.to(tl.int64)[:, None], (row < rows)[:, None] & (col < cols)[None, :]
        pointers = values_ptr + o_row * stride_r + col.to(tl.int64)[None, :] * stride_c
        v = tl.reshape(pm.to_fp32(tl.load(pointers, mask=inside, other=0.0)), (R, C // V, V))
        signal = partial.add_squares(signal, v)
        if restored_ptr is not None:
            q = pm.to_fp32(tl.load(restored_ptr + o_row * restored_stride + col[None, :], mask=inside, other=0.0))
            q = tl.reshape(q, (R, C // V, V))
            restored = partial.add_squares(restored, q)
            noise = partial.add_squares(noise, q - v)
        else:
            largest = tl.maximum(largest, tl.max(partial.ordered_bits(v), axis=2))
    out = parts_ptr + first
    tl.store(out, tl.sum(signal))
    if restored_ptr is not None:
        tl.store(out + programs, tl.sum(restored))
        tl.store(out + 2 * programs, tl.sum(noise))
    else:
        tl.store(out + programs, partial.largest_of(largest))


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
    # fp32 values exceed an fp64 limit of at least 0 as they exceed the largest fp32 number that is not above it.
    wide = tl.load(limit_ptr)
    nearest = wide.to(tl.float32)
    below = nearest.to(tl.int32, bitcast=True) - (nearest.to(tl.float64) > wide).to(tl.int32)
    limit = below.to(tl.float32, bitcast=True)
    count = tl.zeros((R, C), tl.int32)
    for first in range(part * each, min(part * each + each, rows), R):
        row = first + tl.arange(0, R)
        pointers = values_ptr + row.to(tl.int64)[:, None] * stride_r + col.to(tl.int64)[None, :] * stride_c
        x = pm.to_fp32(tl.load(pointers, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0))
        count += (tl.abs(x) > limit).to(tl.int32)
    tl.store(counts_ptr + tl.cast(part, tl.int64) * cols + col, tl.sum(count, axis=0), mask=col < cols)


def error_sums(values: Tensor, restored: Tensor) -> Tensor:
    """Do what `halfbyte.reference.error_sums` does, in one pass, up to the order in which fp64 is added."""
    if not values.numel():
        return torch.zeros(len(ERROR_SUMS), dtype=torch.float64, device=values.device)
    restored = restored if restored.stride(1) == 1 else restored.contiguous()
    return partial.add_parts(_parts(values, restored, len(ERROR_SUMS)), len(ERROR_SUMS))


def square_sum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `halfbyte.reference.square_sum` does, up to the order in which fp64 is added."""
    if not values.numel():
        nothing = torch.zeros(2, dtype=torch.float64, device=values.device)
        return nothing[0], nothing[1]
    same = values if values.stride(1) == 1 or values.stride(0) != 1 else values.T
    found = partial.add_parts(_parts(same, None, 2), 1)
    return found[0], found[1]


def _parts(values: Tensor, restored: Tensor | None, figures: int) -> Tensor:
    """Return what programs find, fp64 [figures, programs]."""
    rows, cols = values.shape
    is_wide = torch.float32 in (values.dtype, values.dtype if restored is None else restored.dtype)
    tile = WIDE_TILE if is_wide else NARROW_TILE
    each, programs = partial.shares(ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols))
    parts = torch.empty(figures, programs, dtype=torch.float64, device=values.device)
    error_sums_kernel[(programs,)](
        values,
        restored,
        parts,
        rows,
        cols,
        each,
        values.stride(0),
        values.stride(1),
        0 if restored is None else restored.stride(0),
        R=tile.rows,
        C=tile.cols,
        V=4 if is_wide else 8,
        **overlap.launch_options(values.device),
        num_warps=partial.NUM_WARPS,
        enable_fp_fusion=False,
    )
    return parts


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
        num_warps=partial.NUM_WARPS,
        enable_fp_fusion=False,
    )
    return counts.sum(0, dtype=torch.float64)
