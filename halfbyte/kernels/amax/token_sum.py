"""Sums and means over tokens: the order of halfbyte/arithmetic.py, which lies well on a GPU.

A lane of that order is a program's: it adds every 32nd group of rows of its columns, so that x is read once and all
that is written is 32 numbers a column, which the last program of the columns adds up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import GROUP_LANES as GROUP_LANES_
from halfbyte.arithmetic import residual_dtype
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.device.running_max import ROW_GROUP
from halfbyte.kernels.launch import jit
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div

GROUP_LANES = tl.constexpr(GROUP_LANES_)


class SumTile(NamedTuple):
    """Columns and warps of a program, and groups of rows that are loaded before the first is added."""

    cols: int
    num_warps: int
    ahead: int


SUM_TILES = (SumTile(128, 1, 1), SumTile(64, 1, 2))  # the first that fills the GPU
PER_SM = 12  # programs
PARTS, PART_COLUMNS, PART_WARPS = 128, 32, 4  # that a program adds at once
INTERPRETED_TILE = SumTile(2048, 1, 1)  # the interpreter pays by the operation


class RowsOfLane(NamedTuple):
    """Rows `first` to `end` of a matrix with contiguous rows."""

    ptr: Any
    stride: Any
    first: Any
    end: Any


@triton.jit
def add_rows(xs, FIRST: tl.constexpr):
    """Return the sum of ROW_GROUP rows of values as stored, from row FIRST of xs on, in order from +0."""
    total = tl.zeros(xs[0].shape, tl.float32)
    for i in tl.static_range(ROW_GROUP):
        total += pm.to_fp32(xs[FIRST + i])
    return total


@triton.jit
def load_kept_rows(ptr, row0, rows, col, cols, stride, FULL: tl.constexpr, KEPT: tl.constexpr):
    """Return ROW_GROUP rows, as `rm.load_group` does. KEPT: what caches are told."""
    xs = ()
    for i in tl.static_range(ROW_GROUP):
        if FULL:
            x = tl.load(ptr + (i * stride + col), eviction_policy=KEPT)
        else:
            inside = (col < cols) & (row0 + i < rows)
            x = tl.load(ptr + (i * stride + col), mask=inside, other=0, eviction_policy=KEPT)
        xs = xs + (x,)
    return xs


@triton.jit
def add_groups(total, x, rows, col, cols, AHEAD: tl.constexpr, FULL: tl.constexpr, KEPT: tl.constexpr):
    """Add to a lane the sums of its row groups of RowsOfLane of x, which ends with a turn or with all rows."""
    STEP: tl.constexpr = GROUP_LANES * ROW_GROUP
    for row0 in range(x.first, x.end, STEP * AHEAD):
        xs = ()
        for j in tl.static_range(AHEAD):
            first = row0 + j * STEP
            xs = xs + load_kept_rows(x.ptr + first * x.stride, first, rows, col, cols, x.stride, FULL, KEPT)
        for j in tl.static_range(AHEAD):
            total += add_rows(xs, j * ROW_GROUP)
    return total


@triton.jit
def added_lanes(lanes_ptr, col, cols, FULL: tl.constexpr):
    """Return the sum of the lanes [GROUP_LANES, cols] of columns `col`: (0, 1), (2, 3), ... meet, until one is left."""
    xs = ()
    for lane in tl.static_range(GROUP_LANES):
        xs = xs + (masked_load(lanes_ptr + lane * tl.cast(cols, tl.int64) + col, col < cols, FULL),)
    for stage in tl.static_range(5):
        met = ()
        for i in tl.static_range(GROUP_LANES >> (stage + 1)):
            met = met + (xs[2 * i] + xs[2 * i + 1],)
        xs = met
    return xs[0]


@jit
def token_sum_kernel(
    x_ptr, lanes_ptr, out_ptr, tickets_ptr, rows, cols, stride_r, MEAN: tl.constexpr, C: tl.constexpr,
    AHEAD: tl.constexpr, FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [cols] = the sum of x [rows, cols]; MEAN: divided by `rows`, rounded, 0 where it is not finite.

    lanes [GROUP_LANES, cols]: lane l adds the sums of row groups l, l + GROUP_LANES, ...; the last program of a tile of
    columns adds them up.
    FULL: whole tiles of AHEAD groups in every lane, and of C columns.
    """
    overlap.begin(OVERLAP)
    lane = tl.program_id(0) % GROUP_LANES
    tile = tl.program_id(0) // GROUP_LANES
    col = tile * C + tl.arange(0, C)
    stride = tl.cast(stride_r, tl.int64)
    total = tl.zeros((C,), tl.float32)
    first = lane * ROW_GROUP
    if MEAN:  # x is read again next, from its end, of which caches keep more if they let go of the rest
        TURN: tl.constexpr = GROUP_LANES * ROW_GROUP * AHEAD
        half = rows // 2 // TURN * TURN
        total = add_groups(total, RowsOfLane(x_ptr, stride, first, half), rows, col, cols, AHEAD, FULL, "evict_first")
        total = add_groups(
            total, RowsOfLane(x_ptr, stride, first + half, rows), rows, col, cols, AHEAD, FULL, "evict_last"
        )
    else:
        total = add_groups(total, RowsOfLane(x_ptr, stride, first, rows), rows, col, cols, AHEAD, FULL, "")
    masked_store(lanes_ptr + lane * tl.cast(cols, tl.int64) + col, total, col < cols, FULL)
    if rm.arrives_last(tickets_ptr + tile, GROUP_LANES):
        total = added_lanes(lanes_ptr, col, cols, FULL)
        if MEAN:
            total = tl.div_rn(total, tl.zeros((C,), tl.float32) + rows)
            total = pm.to_fp32(dc.cast(total, out_ptr.dtype.element_ty))
            total = tl.where(tl.abs(total) < float("inf"), total, 0.0)
        masked_store(out_ptr + col, dc.cast(total, out_ptr.dtype.element_ty), col < cols, FULL)


def token_sum(x: Tensor) -> Tensor:
    """Return the sum of each column of x [M, K], fp32 [K]: the bits of `halfbyte.reference.token_sum`."""
    return _summed(x, torch.float32, mean=False)


def token_mean(x: Tensor) -> Tensor:
    """Do what `halfbyte.reference.token_mean` does, in one launch."""
    return _summed(x, residual_dtype(x.dtype), mean=True)


@jit(do_not_specialize=("parts",))
def parts_sum_kernel(
    parts_ptr, out_ptr, parts, cols, P: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [cols] = the sum of parts [parts, cols]."""
    overlap.begin(OVERLAP)
    col = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((P, C), tl.float32)
    for first in range(0, parts, P):
        part = first + tl.arange(0, P)
        pointers = parts_ptr + part[:, None] * tl.cast(cols, tl.int64) + col[None, :]
        total += tl.load(pointers, mask=(part < parts)[:, None] & (col < cols)[None, :], other=0.0)
    tl.store(out_ptr + col, tl.sum(total, axis=0), mask=col < cols)


def parts_added(sums: Tensor) -> Tensor:
    """Return the sum of parts [parts, cols] of sums over tokens, fp32 [cols], in an order of its own."""
    parts, cols = sums.shape
    out = torch.empty(cols, dtype=torch.float32, device=sums.device)
    parts_sum_kernel[(ceil_div(cols, PART_COLUMNS),)](
        sums,
        out,
        parts,
        cols,
        P=PARTS,
        C=PART_COLUMNS,
        **overlap.launch_options(sums.device),
        num_warps=PART_WARPS,
    )
    return out


def sum_tile(cols: int, device: torch.device) -> SumTile:
    """Return the widest tile with which there are enough programs, else the narrowest."""
    target = target_of(device)
    if target.interpreter:
        return INTERPRETED_TILE
    enough = target.multiprocessors * PER_SM
    return next((tile for tile in SUM_TILES if ceil_div(cols, tile.cols) * GROUP_LANES_ >= enough), SUM_TILES[-1])


def _summed(x: Tensor, dtype: torch.dtype, *, mean: bool) -> Tensor:
    rows, cols = x.shape
    out = torch.empty(cols, dtype=dtype, device=x.device)
    if not x.numel():
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = sum_tile(cols, x.device)
    lanes = torch.empty(GROUP_LANES_, cols, dtype=torch.float32, device=x.device)
    tiles = ceil_div(cols, tile.cols)
    token_sum_kernel[(GROUP_LANES_ * tiles,)](
        x,
        lanes,
        out,
        rm.tickets(tiles, x.device),
        rows,
        cols,
        x.stride(0),
        MEAN=mean,
        C=tile.cols,
        AHEAD=tile.ahead,
        FULL=rows % (GROUP_LANES_ * ROW_GROUP.value * tile.ahead) == cols % tile.cols == 0,
        **overlap.launch_options(x.device),
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    return out
