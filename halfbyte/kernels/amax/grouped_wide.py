"""The amaxes of groups under rotations wider than a block; a thread holds a whole group of values, as in `rotate_wide`.

Every orientation is a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.rotated import narrowed
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device.decode import cast
from halfbyte.kernels.device.magnitudes import INF_BITS, finite_bits, magnitude_bits
from halfbyte.kernels.device.operands import StridedMatrix
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice


@triton.jit
def load_lines(x, start, end, local, i_side, cols, SIZE: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Return fp32 [T, SIZE], zeros outside the group: SIZE columns of T rows or, with COLUMNS, SIZE rows of T columns.

    x: a StridedMatrix. local, i_side: the first row, counted in the group, and the first column; cols: that count.
    """
    if COLUMNS:
        col = i_side + tl.max_contiguous(tl.arange(0, T), 1)  # a thread holds whole groups
        # Steps that all lines share, and what is left of the group: each serves an address and, in int32, its mask.
        step, stride = tl.arange(0, SIZE), tl.cast(x.stride_r, tl.int64)
        first = x.ptr + (start.to(tl.int64) + local) * stride + col.to(tl.int64) * x.stride_c
        inside = (col < cols)[:, None] & (step < end - start - local)[None, :]
        return pm.to_fp32(tl.load(first[:, None] + (step * stride)[None, :], mask=inside, other=0))
    else:
        row = start + local + tl.arange(0, T)
        col = i_side + tl.arange(0, SIZE)
        pointers = x.ptr + row.to(tl.int64)[:, None] * x.stride_r + col[None, :] * x.stride_c
        return pm.to_fp32(tl.load(pointers, mask=(row < end)[:, None] & (col < cols)[None, :], other=0))


@jit(do_not_specialize=("sign_stream", "groups", "side_tiles"))
def grouped_wide_amax_kernel(
    x_ptr, out_ptr, sign_ptr, table_ptr, tile_group_ptr, groups, cols, stride_r, stride_c, sign_stream, side_tiles,
    RULE: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """amax of T rotated groups of one group of tokens or one expert, or of each of their rows; out zero before."""
    x = StridedMatrix(x_ptr, None, cols, stride_r, stride_c)
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x.ptr.dtype.element_ty == tl.bfloat16
    PARTS: tl.constexpr = TILE_ROWS // SIZE if COLUMNS else 1
    side = tl.program_id(0) % side_tiles
    tile = tl.program_id(0) // (side_tiles * PARTS)
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    if group < groups:
        local = (tile - first) * TILE_ROWS + tl.program_id(0) // side_tiles % PARTS * SIZE
        flips = rw.sign_flips(None if sign_ptr is None else sign_ptr + group * 2, sign_stream, RULE)
        i_side = side * (T if COLUMNS else SIZE)
        values = narrowed(load_lines(x, start, end, local, i_side, x.cols, SIZE, COLUMNS, T), NARROW)
        # The factor and the rounding keep the order: they are applied to the maxima alone.
        bits = magnitude_bits(cast(tl.fma(rw.largest_rotated(values, flips), RULE.norm, 0.0), tl.bfloat16))
        if tl.max(bits, axis=0) >= INF_BITS:
            y = rw.unpacked(rw.rotated_pairs(values, flips, RULE))
            bits = tl.max(finite_bits(magnitude_bits(y)), axis=1)
        if not RULE.row_amax:
            tl.atomic_max(out_ptr + group, tl.max(bits, axis=0), sem="relaxed")
        elif COLUMNS:
            col = i_side + tl.arange(0, T)
            tl.atomic_max(out_ptr + group.to(tl.int64) * x.cols + col, bits, mask=col < x.cols, sem="relaxed")
        else:
            row = start + local + tl.arange(0, T)
            tl.atomic_max(out_ptr + row, bits, mask=row < end, sem="relaxed")


def wide_amax(choice: Choice, out: Tensor, sign_stream: int) -> None:
    """Raise out, int32 zeros [groups + 1] or one per row, to the amax of one orientation.

    Args:
        choice: of `amax.route.choose_group_amaxes`.
        out: of that orientation.
        sign_stream: where fresh signs lie.
    """
    x, plan = choice.request[:2]
    grouped_wide_amax_kernel[choice.grid](
        x, out, plan.signs if choice.constants["RULE"].fresh else None, plan.table, plan.tile_group, plan.groups,
        x.shape[1], *x.stride(), sign_stream, choice.facts, **choice.constants, enable_fp_fusion=False,
    )  # fmt: skip
