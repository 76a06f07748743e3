"""The amaxes of groups under rotations wider than a block; read as for their quantization.

Every orientation is a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import wide_lines as wl
from halfbyte.kernels.device.decode import cast
from halfbyte.kernels.device.magnitudes import INF_BITS, finite_bits, magnitude_bits
from halfbyte.kernels.device.operands import StridedMatrix
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice


@triton.jit
def load_flipped(
    x, row, end, col, whole, sign_ptr, sign_stream, RULE: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr
):
    """Return fp32 [T, RULE.group] of columns or rows from `row` and `col` [T] on, with their signs."""
    flips = wl.flips_of_lines(sign_ptr, sign_stream, RULE, row.shape[0])
    if COLUMNS:
        loaded = wl.load_col_lines(x, row, end, col, x.cols, whole, RULE.group)
    else:
        loaded = wl.load_row_lines(x, row, end, col, x.cols, whole, RULE.group, PACKED)
    return wl.flipped_lines(loaded, flips, x.ptr.dtype.element_ty == tl.bfloat16, PACKED)


@jit(do_not_specialize=("sign_stream", "groups", "side_tiles"))
def grouped_wide_amax_kernel(
    x_ptr, out_ptr, sign_ptr, table_ptr, tile_group_ptr, groups, cols, stride_r, stride_c, sign_stream,
    side_tiles, RULE: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, TILE_ROWS: tl.constexpr,
    T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of T rotated groups, or halves, of one group of tokens or one expert, or of their rows; out zero before.

    side_tiles, PACKED: as in `grouped_wide_kernel`.
    """
    overlap.begin(OVERLAP)
    x = StridedMatrix(x_ptr, None, cols, stride_r, stride_c)
    SIZE: tl.constexpr = RULE.group
    SHARE: tl.constexpr = 2 if RULE.paired else 1
    WIDTH: tl.constexpr = SIZE * SHARE
    LINES: tl.constexpr = T // SHARE
    PARTS: tl.constexpr = TILE_ROWS // WIDTH if COLUMNS else 1
    outer = pm.divide(tl.program_id(0), side_tiles)
    side = tl.program_id(0) - outer * side_tiles.count
    tile = outer // PARTS
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    if group < groups:
        local = (tile - first) * TILE_ROWS + outer % PARTS * WIDTH
        p_sign = None if sign_ptr is None else sign_ptr + group * 2
        own_line, half = wl.line_of(T, RULE.paired)
        if COLUMNS:
            i_col = side * LINES
            whole = (start + local + WIDTH <= end) & (i_col + LINES <= x.cols)
            row, col = start + local + half * SIZE, i_col + own_line
        else:
            i_col = side * WIDTH
            whole = (start + local + LINES <= end) & (i_col + WIDTH <= x.cols)
            row, col = start + local + own_line, i_col + half * SIZE
        values = load_flipped(x, row, end, col, whole, p_sign, sign_stream, RULE, COLUMNS, PACKED)
        # The factor and the rounding keep the order: they are applied to the maxima alone.
        bits = magnitude_bits(cast(tl.fma(rw.largest_transformed(values, RULE.paired), RULE.norm, 0.0), tl.bfloat16))
        if tl.max(bits, axis=0) >= INF_BITS:
            # Again: values and signs that are kept for this take twice the registers.
            values = load_flipped(x, row, end, col, False, p_sign, sign_stream, RULE, COLUMNS, PACKED)
            y = rw.unpacked(rw.rotated_pairs(values, None, RULE))
            bits = tl.max(finite_bits(magnitude_bits(y)), axis=1)
        if not RULE.row_amax:
            tl.atomic_max(out_ptr + group, tl.max(bits, axis=0), sem="relaxed")
        elif COLUMNS:
            tl.atomic_max(out_ptr + group.to(tl.int64) * x.cols + col, bits, mask=col < x.cols, sem="relaxed")
        else:
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
        x.shape[1], *x.stride(), sign_stream, pm.Divisor.of(choice.facts), **choice.constants, enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )  # fmt: skip
