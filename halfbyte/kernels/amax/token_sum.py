"""Sums and means over tokens: the order of halfbyte/arithmetic.py, which lies well on a GPU.

A lane of that order is a program's: it adds every 32nd group of rows of its columns, so that x is read once and all
that is written is 32 numbers a column. A second kernel adds these up.
"""

from __future__ import annotations

from typing import NamedTuple

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
from halfbyte.kernels.device.running_max import ROW_GROUP
from halfbyte.kernels.launch import jit
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div

GROUP_LANES = tl.constexpr(GROUP_LANES_)
MEAN_COLUMNS, MEAN_WARPS = 32, 1  # of a program that adds up lanes: a line of each


class SumTile(NamedTuple):
    """Columns and warps of a program, and groups of rows that are loaded before the first is added."""

    cols: int
    num_warps: int
    ahead: int


SUM_TILES = (SumTile(512, 4, 1), SumTile(256, 2, 1), SumTile(128, 1, 2))  # the first that fills the GPU
PER_SM = 4  # programs
INTERPRETED_TILE = SumTile(2048, 1, 1)  # the interpreter pays by the operation


@triton.jit
def add_rows(xs, FIRST: tl.constexpr):
    """Return the sum of ROW_GROUP rows of values as stored, from row FIRST of xs on, in order from +0."""
    total = tl.zeros(xs[0].shape, tl.float32)
    for i in tl.static_range(ROW_GROUP):
        total += pm.to_fp32(xs[FIRST + i])
    return total


@jit
def token_sum_kernel(
    x_ptr, lanes_ptr, rows, cols, stride_r, C: tl.constexpr, AHEAD: tl.constexpr, FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """lanes [GROUP_LANES, cols]: lane l adds the sums of row groups l, l + GROUP_LANES, ... of x [rows, cols].

    FULL: whole tiles of AHEAD groups in every lane, and of C columns.
    """
    overlap.begin(OVERLAP)
    lane = tl.program_id(0) % GROUP_LANES
    col = tl.program_id(0) // GROUP_LANES * C + tl.arange(0, C)
    stride = tl.cast(stride_r, tl.int64)
    total = tl.zeros((C,), tl.float32)
    STEP: tl.constexpr = GROUP_LANES * ROW_GROUP
    for row0 in range(lane * ROW_GROUP, rows, STEP * AHEAD):
        xs = ()
        for j in tl.static_range(AHEAD):
            first = row0 + j * STEP
            xs = xs + rm.load_group(x_ptr + first * stride, first, rows, col, cols, stride, ROW_GROUP, FULL)
        for j in tl.static_range(AHEAD):
            total += add_rows(xs, j * ROW_GROUP)
    tl.store(lanes_ptr + lane * tl.cast(cols, tl.int64) + col, total, mask=col < cols)


@jit
def token_mean_kernel(
    lanes_ptr, out_ptr, rows, cols, MEAN: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [cols] = the sum of lanes [GROUP_LANES, cols]; MEAN: divided by `rows`, rounded, 0 where it is not finite."""
    overlap.begin(OVERLAP)
    col = tl.program_id(0) * C + tl.arange(0, C)
    lane = tl.arange(0, GROUP_LANES)
    pointers = lanes_ptr + lane[:, None] * tl.cast(cols, tl.int64) + col[None, :]
    total = tl.load(pointers, mask=(col < cols)[None, :], other=0.0)
    for stage in tl.static_range(5):
        total = tl.sum(tl.reshape(total, (GROUP_LANES >> (stage + 1), 2, C)), axis=1)
    total = tl.reshape(total, (C,))
    if MEAN:
        total = tl.div_rn(total, tl.zeros((C,), tl.float32) + rows)
        total = pm.to_fp32(dc.cast(total, out_ptr.dtype.element_ty))
        total = tl.where(tl.abs(total) < float("inf"), total, 0.0)
    tl.store(out_ptr + col, dc.cast(total, out_ptr.dtype.element_ty), mask=col < cols)


def token_sum(x: Tensor) -> Tensor:
    """Return the sum of each column of x [M, K], fp32 [K]: the bits of `halfbyte.reference.token_sum`."""
    return _summed(x, torch.float32, mean=False)


def token_mean(x: Tensor) -> Tensor:
    """Do what `halfbyte.reference.token_mean` does, in two launches."""
    return _summed(x, residual_dtype(x.dtype), mean=True)


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
    options = overlap.launch_options(x.device)
    token_sum_kernel[(GROUP_LANES_ * ceil_div(cols, tile.cols),)](
        x,
        lanes,
        rows,
        cols,
        x.stride(0),
        C=tile.cols,
        AHEAD=tile.ahead,
        FULL=rows % (GROUP_LANES_ * ROW_GROUP.value * tile.ahead) == cols % tile.cols == 0,
        **options,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    token_mean_kernel[(ceil_div(cols, MEAN_COLUMNS),)](
        lanes,
        out,
        rows,
        cols,
        MEAN=mean,
        C=MEAN_COLUMNS,
        **options,
        num_warps=MEAN_WARPS,
        enable_fp_fusion=False,
    )
    return out
