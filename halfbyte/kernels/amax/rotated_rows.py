"""The largest finite magnitude after a rotation along rows that lie in memory as they are rotated, read in words.

A thread holds whole groups, or half of one of 128, as in `quantize/wide.py`; 16 bytes of a row at a time reach it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device import wide_lines as wl
from halfbyte.kernels.device.decode import cast
from halfbyte.kernels.device.operands import StridedMatrix
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice
from halfbyte.rng import Draw


@triton.jit
def load_lines(x, first, total, groups, flips, RULE: tl.constexpr, FULL: tl.constexpr, T: tl.constexpr):
    """Return fp32 [T, RULE.group] of the groups from `first` on, of `total`, or their halves, with their signs.

    groups: of a row, a Divisor. FULL: all groups are whole, and none is beyond `total`.
    """
    SHARE: tl.constexpr = 2 if RULE.paired else 1
    own, half = wl.line_of(T, RULE.paired)
    place = first + own
    row = pm.divide(place, groups)
    col = (place - row * groups.count) * (RULE.group * SHARE) + half * RULE.group
    end = tl.where(place < total, x.rows, 0)
    words = wl.load_row_lines(x, row, end, col, x.cols, FULL, RULE.group, True)
    return rw.flipped_words(words, flips)


@jit(do_not_specialize=("sign_stream", "total", "groups", "programs"))
def amax_rotated_rows_kernel(
    x_ptr, out_ptr, space_ptr, sign_ptr, sign_stream, rows, cols, stride_r, groups, total, programs,
    RULE: tl.constexpr, FULL: tl.constexpr, T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax [] of x after a rotation along its rows: bf16, in words; total: groups of all rows, groups as `load_lines`.

    A program takes T groups, or halves, of every programs * T.
    """
    overlap.begin(OVERLAP)
    x = StridedMatrix(x_ptr, rows, cols, stride_r, 1)
    SHARE: tl.constexpr = 2 if RULE.paired else 1
    LINES: tl.constexpr = T // SHARE
    flips = wl.flips_of_lines(sign_ptr, sign_stream, RULE, T)
    top = tl.zeros((T,), tl.float32)
    for first in range(tl.program_id(0) * LINES, total, programs * LINES):
        values = load_lines(x, first, total, groups, flips, RULE, FULL, T)
        top = rw.nan_max(top, rw.largest_transformed(values, RULE.paired))
    # The factor and the rounding keep the order: they are applied to the maxima alone.
    bits = mg.magnitude_bits(cast(tl.fma(top, RULE.norm, 0.0), tl.bfloat16))
    if tl.max(bits, axis=0) >= mg.INF_BITS:
        bits = tl.zeros((T,), tl.int32)
        for first in range(tl.program_id(0) * LINES, total, programs * LINES):
            values = load_lines(x, first, total, groups, flips, RULE, FULL, T)
            y = rw.unpacked(rw.rotated_pairs(values, None, RULE))
            bits = tl.maximum(bits, tl.max(mg.finite_bits(mg.magnitude_bits(y)), axis=1))
    rm.publish((tl.max(bits, axis=0),), (out_ptr,), space_ptr, programs)


def launch_rotated_rows(choice: Choice, sign_draw: Draw | None) -> Tensor:
    """Return the amax of rotated rows of x, fp32 [].

    Args:
        choice: of `route.choose_amax`.
        sign_draw: the place of fresh signs.
    """
    x, groups = choice.facts
    rule = choice.constants["RULE"]
    assert not rule.fresh or sign_draw is not None, "fresh signs need a draw"
    out = torch.empty((), dtype=torch.float32, device=x.device)
    amax_rotated_rows_kernel[choice.grid](
        x, out, rm.workspace(rm.Wanted("tensor"), x.device), sign_draw.base if rule.fresh else None,
        sign_draw.stream if rule.fresh else 0, *x.shape, x.stride(0), pm.Divisor.of(groups), x.shape[0] * groups,
        *choice.grid, **choice.constants, enable_fp_fusion=False, **overlap.launch_options(x.device),
    )  # fmt: skip
    return out
