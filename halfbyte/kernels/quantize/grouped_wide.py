"""Rotations wider than a block in groups: a thread holds a whole group of values as one row of a tensor.

As tuples with masks, which groups of any size need, rotations of 32 compile for half a minute and of 128 for many; see
`rotate_wide`. Here every orientation is a launch of its own.
"""

from __future__ import annotations

import triton.language as tl

from halfbyte.kernels.amax.grouped_wide import load_lines
from halfbyte.kernels.amax.rotated import narrowed
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import scales as sc
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
    RULE: tl.constexpr, COLUMNS: tl.constexpr, STACKED: tl.constexpr, TILE_ROWS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Quantize T rotated groups of one group of tokens or one expert; the storage is that of `quantize_tile`."""
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    SIZE: tl.constexpr = RULE.group
    UNITS: tl.constexpr = 16 if RULE.decoded else 1
    PARTS: tl.constexpr = TILE_ROWS // SIZE if COLUMNS else 1
    HALVED: tl.constexpr = RULE.eden and SIZE == 128  # 118 registers for 173: two programs a multiprocessor
    side = tl.program_id(0) % side_tiles
    tile = tl.program_id(0) // (side_tiles * PARTS)
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    local = (tile - first) * TILE_ROWS + tl.program_id(0) // side_tiles % PARTS * SIZE
    start64 = start.to(tl.int64)
    p_draw = None if out.to.draw_ptr is None else out.to.draw_ptr + group * 2
    p_sign = None if out.to.sign_ptr is None else out.to.sign_ptr + group * 2
    flips = rw.sign_flips(p_sign, out.places.sign_stream, RULE)
    if COLUMNS:
        p_amax = out.to.amax_ptr + (group.to(tl.int64) * x.cols if RULE.row_amax else group)
        inside = tl.where(group == groups, start, end)
        values = load_lines(x, start, inside, local, side * T, x.cols, SIZE, True, T)
        if STACKED:
            size = group.to(tl.int64) * x.cols * out.blocks
            p_q, p_scale, storage, per_row = out.to.q_ptr + size * UNITS, out.to.scale_ptr + size, 0, out.blocks
            lines = tl.where(group == groups, 0, x.cols)  # there is nothing behind the last matrix
        else:
            p_q, p_scale, storage, lines = out.to.q_ptr, out.to.scale_ptr, first * TILE_ROWS, x.cols
            per_row = (tl.where(group == groups, 0, end - start) + SIZE - 1) // SIZE * (SIZE // 16)
        line = (side * T + tl.max_contiguous(tl.arange(0, T), 1)).to(tl.int64)
        place = ((storage + local) // SIZE).to(tl.int64) + tl.zeros((T,), tl.int64)
        first_block = (tl.zeros_like(start64) - storage) // 16
    else:
        p_amax = out.to.amax_ptr if RULE.row_amax else out.to.amax_ptr + group
        i_side = side * SIZE
        own_cols = tl.where(group == groups, 0, x.cols)
        values = load_lines(x, start, end, local, i_side, own_cols, SIZE, False, T)
        p_q, p_scale, per_row, lines = out.to.q_ptr, out.to.scale_ptr, out.blocks, end
        line = start64 + local + tl.arange(0, T)
        place = side.to(tl.int64) + tl.zeros((T,), tl.int64)
        first_block = -start64 * out.blocks
    places = Places(places.stream, first_block, per_row)
    own = WrittenOperand(Pointers(p_q, p_scale, p_amax, p_draw), sizes.blocks, places, constants)
    factors = sc.operand_factors(p_amax, out.constants, RULE)
    pairs = rw.rotated_pairs(narrowed(values, x.ptr.dtype.element_ty == tl.bfloat16), flips, RULE)
    quantize_lines(pairs, line, place, own, lines, factors, RULE, False, HALVED)
    if COLUMNS and not (STACKED or RULE.decoded):
        clear_padding(p_scale, storage // 16, per_row, local // 16, side * T, x.cols, out.blocks, SIZE // 16, T)


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
        x, to, plan.table, plan.tile_group, plan.groups, sizes._replace(rows=None), *numbers, tiles,
        **choice.constants, enable_fp_fusion=False,
    )  # fmt: skip
