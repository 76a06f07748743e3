"""Rotations wider than a block in groups: a thread holds a whole group of values, or half of one of 128, as one row.

As tuples with masks, which groups of any size need, rotations of 32 compile for half a minute and of 128 for many; see
`rotate_wide`. Here every orientation is a launch of its own.
"""

from __future__ import annotations

import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device import wide_lines as wl
from halfbyte.kernels.device.operands import Places, Pointers, StridedMatrix, WrittenOperand, arguments_of, varying
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.grouped_kernels import clear_padding
from halfbyte.kernels.quantize.grouped_route import PlannedSides
from halfbyte.kernels.quantize.wide import quantize_lines
from halfbyte.kernels.route import Choice


@jit(do_not_specialize=(*varying("places"), "groups", "side_tiles"))
def grouped_wide_kernel(
    x_ptr, to, table_ptr, tile_group_ptr, groups, sizes, places, constants, side_tiles,
    RULE: tl.constexpr, COLUMNS: tl.constexpr, STACKED: tl.constexpr, PACKED: tl.constexpr, TILE_ROWS: tl.constexpr,
    T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Quantize T rotated groups, or halves, of one group of tokens or one expert; stored as `quantize_tile` does.

    side_tiles: programs beside each other, a Divisor. PACKED: rows are read in words of two bf16.
    """
    overlap.begin(OVERLAP)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    NARROW: tl.constexpr = x.ptr.dtype.element_ty == tl.bfloat16
    SIZE: tl.constexpr = RULE.group
    SHARE: tl.constexpr = 2 if RULE.paired else 1
    WIDTH: tl.constexpr = SIZE * SHARE
    LINES: tl.constexpr = T // SHARE
    UNITS: tl.constexpr = 16 if RULE.decoded else 1
    HALVED: tl.constexpr = RULE.eden or (RULE.drawn and COLUMNS)  # 127 registers for 159: four programs for three
    PARTS: tl.constexpr = TILE_ROWS // WIDTH if COLUMNS else 1
    outer = pm.divide(tl.program_id(0), side_tiles)
    side = tl.program_id(0) - outer * side_tiles.count
    tile = outer // PARTS
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    local = (tile - first) * TILE_ROWS + outer % PARTS * WIDTH
    start64 = start.to(tl.int64)
    stop = tl.where(group == groups, start, end)  # the tail's values count as zeros
    own_line, half = wl.line_of(T, RULE.paired)
    if COLUMNS:
        i_col = side * LINES
        whole = (start + local + WIDTH <= stop) & (i_col + LINES <= x.cols)
        row = start + local + half * SIZE
        values = wl.load_col_lines(x, row, stop, i_col + own_line, x.cols, whole, SIZE)
        p_amax = out.to.amax_ptr + (group.to(tl.int64) * x.cols if RULE.row_amax else group)
        if STACKED:
            size = group.to(tl.int64) * x.cols * out.blocks
            p_q, p_scale, storage, per_row = out.to.q_ptr + size * UNITS, out.to.scale_ptr + size, 0, out.blocks
            lines = tl.where(group == groups, 0, x.cols)  # there is nothing behind the last matrix
        else:
            p_q, p_scale, storage, lines = out.to.q_ptr, out.to.scale_ptr, first * TILE_ROWS, x.cols
            per_row = (stop - start + WIDTH - 1) // WIDTH * (WIDTH // 16)
        line = (i_col + own_line).to(tl.int64)
        place = ((storage + local) // SIZE + half).to(tl.int64)
        first_block = (tl.zeros_like(start64) - storage) // 16
    else:
        i_col = side * WIDTH
        whole = (start + local + LINES <= stop) & (i_col + WIDTH <= x.cols)
        row = start + local + own_line
        values = wl.load_row_lines(x, row, stop, i_col + half * SIZE, x.cols, whole, SIZE, PACKED)
        p_amax = out.to.amax_ptr if RULE.row_amax else out.to.amax_ptr + group
        p_q, p_scale, per_row, lines = out.to.q_ptr, out.to.scale_ptr, out.blocks, end
        line = row.to(tl.int64)
        place = (side * SHARE + half).to(tl.int64)
        first_block = -start64 * out.blocks
    p_draw = None if out.to.draw_ptr is None else out.to.draw_ptr + group * 2
    p_sign = None if out.to.sign_ptr is None else out.to.sign_ptr + group * 2
    own = WrittenOperand(
        Pointers(p_q, p_scale, p_amax, p_draw), out.blocks, Places(places.stream, first_block, per_row), constants
    )
    factors = sc.operand_factors(p_amax, out.constants, RULE)
    flips = wl.flips_of_lines(p_sign, out.places.sign_stream, RULE, T)
    pairs = rw.rotated_pairs(wl.flipped_lines(values, flips, NARROW, PACKED), None, RULE)
    quantize_lines(pairs, line, place, own, lines, factors, RULE, False, HALVED)
    if COLUMNS and not (STACKED or RULE.decoded):
        clear_padding(p_scale, storage // 16, per_row, local // 16, i_col, x.cols, out.blocks, WIDTH // 16, LINES)


def quantize_wide(choice: Choice, out: WrittenOperand) -> None:
    """Quantize one orientation.

    Args:
        choice: of `grouped_route.choose_next_side`.
        out: of the operand.
    """
    sides: PlannedSides = choice.request
    plan, (_, tiles) = sides.plan, choice.facts
    x, to, sizes, *numbers = arguments_of(sides.x, out)
    grouped_wide_kernel[choice.grid](
        x, to, plan.table, plan.tile_group, plan.groups, sizes._replace(rows=None), *numbers, pm.Divisor.of(tiles),
        **choice.constants, enable_fp_fusion=False, **overlap.launch_options(sides.x.device),
    )  # fmt: skip
