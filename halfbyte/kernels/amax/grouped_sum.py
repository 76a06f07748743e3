"""Sums over the tokens of each group: the order of halfbyte/arithmetic.py, begun anew in every group.

A program holds the 32 lanes of that order for its columns of one group and adds them up itself: experts and columns
make programs enough, and nothing is written but the sums.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.token_sum import GROUP_LANES
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.running_max import ROW_GROUP
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div

COLUMNS, WARPS = 64, 4  # of a program: 32 lines of 128 bytes a load in bf16; not timed


@jit(do_not_specialize=("rows",))
def grouped_token_sum_kernel(
    x_ptr, offsets_ptr, out_ptr, rows, cols, stride_r, C: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [E, cols] = the sums of the columns of each group of x [rows, cols]; +0 for a group without rows."""
    overlap.begin(OVERLAP)
    group = tl.program_id(0)
    col = tl.program_id(1) * C + tl.arange(0, C)
    lane = tl.arange(0, GROUP_LANES)
    # Offsets that are no cumulative ends give wrong sums, but no access outside.
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), rows)
    end = tl.minimum(tl.load(offsets_ptr + group).to(tl.int32), rows)
    stride, inside = tl.cast(stride_r, tl.int64), (col < cols)[None, :]
    total = tl.zeros((GROUP_LANES, C), tl.float32)
    STEP: tl.constexpr = GROUP_LANES * ROW_GROUP
    for row0 in range(start, end, STEP):
        summed = tl.zeros((GROUP_LANES, C), tl.float32)
        for i in tl.static_range(ROW_GROUP):
            row = row0 + lane * ROW_GROUP + i
            pointers = x_ptr + row[:, None] * stride + col[None, :]
            summed += pm.to_fp32(tl.load(pointers, mask=(row < end)[:, None] & inside, other=0.0))
        total += summed
    for stage in tl.static_range(5):
        total = tl.sum(tl.reshape(total, (GROUP_LANES >> (stage + 1), 2, C)), axis=1)
    total = tl.reshape(total, (C,))
    tl.store(out_ptr + group * tl.cast(cols, tl.int64) + col, total, mask=col < cols)


def grouped_token_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each column of every group of x [M, N], fp32 [E, N]: the reference's bits, in one launch."""
    (rows, cols), groups = x.shape, offsets.shape[0]
    out = torch.empty(groups, cols, dtype=torch.float32, device=x.device)
    if not x.numel():
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    options = overlap.launch_options(x.device)
    grouped_token_sum_kernel[(groups, ceil_div(cols, COLUMNS))](
        x,
        offsets.contiguous(),
        out,
        rows,
        cols,
        x.stride(0),
        C=COLUMNS,
        **options,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out
