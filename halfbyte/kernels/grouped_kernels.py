"""Kernels on tokens in groups and on the weights of experts: a tile finds its group, then works as in a tensor alone.

`quantize_row_tile` and `quantize_col_tile` know nothing of groups: their rows, blocks and random bits are moved to
where the group's lie. Rows of the tail and of the padding are read as zeros, whose codes and scales are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels import primitives as pm
from halfbyte.kernels.amax import finite_max
from halfbyte.kernels.grouped_plan import group_of_tile
from halfbyte.kernels.tiles import load_col_groups, load_row_groups, quantize_col_tile, quantize_row_tile, rotate_group
from halfbyte.kernels.transpose import transpose_tile


@triton.jit
def block_units(RULE: tl.constexpr):
    """Return the stored items of a block: bf16 values, or int64 words of codes."""
    LENGTH: tl.constexpr = 16 if RULE.element == "" else 32
    if RULE.decoded:
        return LENGTH
    else:
        return 1 if RULE.element == "" else 4


VARYING = ("row_stream", "row_sign_stream", "col_stream", "col_sign_stream", "col_tiles", "groups")


@triton.jit
def clear_padding(scale_ptr, storage, own, i_block, i_col, cols, blocks, BLOCKS: tl.constexpr, C: tl.constexpr):
    """Zero the scales behind a group's own blocks: an amax that is no maximum has made them NaN too."""
    if i_block + BLOCKS > own:
        tl.debug_barrier()  # after the tile's own stores
        block = i_block + tl.arange(0, BLOCKS)
        col = i_col + tl.arange(0, C)
        pointers = scale_ptr + col.to(tl.int64)[None, :] * blocks + storage + block[:, None]
        padding = (block >= own) & (storage + block < blocks)
        tl.store(pointers, tl.zeros((BLOCKS, C), tl.uint8), mask=padding[:, None] & (col < cols)[None, :])


@triton.jit
def quantize_tile(
    group,
    start,
    end,
    storage,
    local,
    i_col,
    x_ptr,
    row_q_ptr,
    row_scale_ptr,
    row_amax_ptr,
    row_draw_ptr,
    row_sign_ptr,
    col_q_ptr,
    col_scale_ptr,
    col_amax_ptr,
    col_draw_ptr,
    col_sign_ptr,
    groups,
    cols,
    row_blocks,
    col_blocks,
    stride_r,
    stride_c,
    row_stream,
    row_sign_stream,
    col_stream,
    col_sign_stream,
    row_span,
    row_floor,
    row_inverse,
    row_unit,
    col_span,
    col_floor,
    col_inverse,
    col_unit,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    STACKED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Quantize TR x TC values, from row `local` of a group and column i_col on, along rows, columns or both.

    storage: where the group's blocks start along the columns of the col orientation, unless STACKED.
    """
    start64 = start.to(tl.int64)
    if COL is not None:
        col_constants = (col_span, col_floor, col_inverse, col_unit)
        in_group = tl.where(group == groups, 0, end - start)
        if STACKED:
            size = group.to(tl.int64) * cols * col_blocks
            p_q, p_scale = col_q_ptr + size * block_units(COL), col_scale_ptr + size
            rows, per_row = in_group, col_blocks
            col_count = tl.where(group == groups, 0, cols)  # there is nothing behind the last matrix
        else:
            p_q, p_scale = col_q_ptr, col_scale_ptr
            col_count = cols
            rows, per_row = storage + in_group, (in_group + COL.group - 1) // COL.group * (COL.group // 16)
        quantize_col_tile(
            (storage + local) // COL.group,
            i_col,
            x_ptr + (start64 - storage) * stride_r,
            p_q,
            p_scale,
            col_amax_ptr + (group.to(tl.int64) * cols if COL.row_amax else group),
            None if col_draw_ptr is None else col_draw_ptr + group * 2,
            None if col_sign_ptr is None else col_sign_ptr + group * 2,
            rows,
            col_count,
            col_blocks,
            stride_r,
            stride_c,
            col_stream,
            (tl.zeros_like(start64) - storage) // 16,
            per_row,
            col_sign_stream,
            col_constants,
            COL,
            False,
            TR // COL.group,
            TC,
        )
        if not (STACKED or COL.full or COL.decoded or COL.element != ""):
            clear_padding(p_scale, storage // 16, per_row, local // 16, i_col, cols, col_blocks, TR // 16, TC)
    if ROW is not None:
        row_constants = (row_span, row_floor, row_inverse, row_unit)
        quantize_row_tile(
            start + local,
            i_col // ROW.group,
            x_ptr,
            row_q_ptr,
            row_scale_ptr,
            row_amax_ptr if ROW.row_amax else row_amax_ptr + group,
            None if row_draw_ptr is None else row_draw_ptr + group * 2,
            None if row_sign_ptr is None else row_sign_ptr + group * 2,
            end,
            tl.where(group == groups, 0, cols),
            row_blocks,
            stride_r,
            stride_c,
            row_stream,
            -start64 * row_blocks,
            row_blocks,
            row_sign_stream,
            row_constants,
            ROW,
            False,
            TR,
            TC // ROW.group,
        )


@triton.jit(do_not_specialize=VARYING)
def grouped_quantize_kernel(
    x_ptr,
    row_q_ptr,
    row_scale_ptr,
    row_amax_ptr,
    row_draw_ptr,
    row_sign_ptr,
    col_q_ptr,
    col_scale_ptr,
    col_amax_ptr,
    col_draw_ptr,
    col_sign_ptr,
    table_ptr,
    tile_group_ptr,
    groups,
    cols,
    row_blocks,
    col_blocks,
    stride_r,
    stride_c,
    row_stream,
    row_sign_stream,
    col_stream,
    col_sign_stream,
    row_span,
    row_floor,
    row_inverse,
    row_unit,
    col_span,
    col_floor,
    col_inverse,
    col_unit,
    col_tiles,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    FULL_ROW: tl.constexpr,
    FULL_COL: tl.constexpr,
    STACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """One program quantizes TR x TC values of one group along the rows, the columns or both; TR divides TILE_ROWS.

    STACKED: the col orientation of each group is a matrix of its own; else all groups follow each other in its columns.
    FULL_ROW, FULL_COL: the rules for tiles without a ragged edge; None where columns have one.
    """
    PARTS: tl.constexpr = TILE_ROWS // TR
    i_col = tl.program_id(0) % col_tiles * TC
    tile = tl.program_id(0) // (col_tiles * PARTS)
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    local = (tile - first) * TILE_ROWS + tl.program_id(0) // col_tiles % PARTS * TR
    storage = 0 if STACKED else first * TILE_ROWS
    if FULL_ROW is None and FULL_COL is None:
        quantize_tile(
            group, start, end, storage, local, i_col, x_ptr, row_q_ptr, row_scale_ptr, row_amax_ptr, row_draw_ptr,
            row_sign_ptr, col_q_ptr, col_scale_ptr, col_amax_ptr, col_draw_ptr, col_sign_ptr, groups, cols,
            row_blocks, col_blocks, stride_r, stride_c, row_stream, row_sign_stream, col_stream, col_sign_stream,
            row_span, row_floor, row_inverse, row_unit, col_span, col_floor, col_inverse, col_unit, ROW, COL,
            STACKED, TR, TC,
        )  # fmt: skip
    else:
        if (local + TR <= end - start) & (group < groups):
            quantize_tile(
                group, start, end, storage, local, i_col, x_ptr, row_q_ptr, row_scale_ptr, row_amax_ptr, row_draw_ptr,
                row_sign_ptr, col_q_ptr, col_scale_ptr, col_amax_ptr, col_draw_ptr, col_sign_ptr, groups, cols,
                row_blocks, col_blocks, stride_r, stride_c, row_stream, row_sign_stream, col_stream, col_sign_stream,
                row_span, row_floor, row_inverse, row_unit, col_span, col_floor, col_inverse, col_unit, FULL_ROW,
                FULL_COL, STACKED, TR, TC,
            )  # fmt: skip
        else:
            quantize_tile(
                group, start, end, storage, local, i_col, x_ptr, row_q_ptr, row_scale_ptr, row_amax_ptr, row_draw_ptr,
                row_sign_ptr, col_q_ptr, col_scale_ptr, col_amax_ptr, col_draw_ptr, col_sign_ptr, groups, cols,
                row_blocks, col_blocks, stride_r, stride_c, row_stream, row_sign_stream, col_stream, col_sign_stream,
                row_span, row_floor, row_inverse, row_unit, col_span, col_floor, col_inverse, col_unit, ROW, COL,
                STACKED, TR, TC,
            )  # fmt: skip


@triton.jit
def rotated(xs, sign_ptr, sign_stream, NARROW: tl.constexpr, RULE: tl.constexpr):
    """Return the fp32 values of a group after the rule's rotation."""
    return pm.unpack_pairs(rotate_group(xs, sign_ptr, sign_stream, NARROW, RULE), 0, RULE.group)


@triton.jit
def largest(m):
    return tl.max(tl.max(m, axis=1), axis=0)


@triton.jit(do_not_specialize=("row_sign_stream", "col_sign_stream", "col_tiles", "groups"))
def grouped_amax_kernel(
    x_ptr,
    row_out_ptr,
    col_out_ptr,
    row_sign_ptr,
    col_sign_ptr,
    row_sign_stream,
    col_sign_stream,
    table_ptr,
    tile_group_ptr,
    groups,
    cols,
    stride_r,
    stride_c,
    col_tiles,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """amax of every group, or of its rows, along the rows and along the columns; out int32, zero before.

    The row's maximum comes from the column's read where it needs neither rotation nor rows of its own.
    """
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    i_col = tl.program_id(0) % col_tiles * TC
    tile = tl.program_id(0) // col_tiles
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    if group < groups:
        i_row = start + (tile - first) * TR
        if COL is not None:
            o_group = i_row + tl.arange(0, TR // COL.group) * COL.group
            col = i_col + tl.arange(0, TC)
            in_col = col < cols
            xs = load_col_groups(x_ptr, o_group, end, col, in_col, stride_r, stride_c, COL.group)
            if ROW is not None:  # noqa: SIM102  compiled one by one
                if ROW.norm == 0.0 and not ROW.row_amax:
                    tl.atomic_max(row_out_ptr + group, largest(finite_max(xs)), sem="relaxed")
            if COL.norm != 0.0:
                p_sign = None if col_sign_ptr is None else col_sign_ptr + group * 2
                xs = rotated(xs, p_sign, col_sign_stream, NARROW, COL)
            m = finite_max(xs)
            if COL.row_amax:
                p_out = col_out_ptr + group.to(tl.int64) * cols + col
                tl.atomic_max(p_out, tl.max(m, axis=0), mask=in_col, sem="relaxed")
            else:
                tl.atomic_max(col_out_ptr + group, largest(m), sem="relaxed")
        if ROW is not None:  # noqa: SIM102
            if COL is None or ROW.norm != 0.0 or ROW.row_amax:
                row = i_row + tl.arange(0, TR)
                in_row = row < end
                row64 = row.to(tl.int64)
                o_col = i_col + tl.arange(0, TC // ROW.group) * ROW.group
                xs = load_row_groups(x_ptr, row64 * stride_r, in_row, o_col, cols, stride_c, ROW.group)
                if ROW.norm != 0.0:
                    p_sign = None if row_sign_ptr is None else row_sign_ptr + group * 2
                    xs = rotated(xs, p_sign, row_sign_stream, NARROW, ROW)
                m = finite_max(xs)
                if ROW.row_amax:
                    tl.atomic_max(row_out_ptr + row64, tl.max(m, axis=1), mask=in_row, sem="relaxed")
                else:
                    tl.atomic_max(row_out_ptr + group, largest(m), sem="relaxed")


@triton.jit(do_not_specialize=("groups", "row_tiles", "word_tiles"))
def grouped_transpose_kernel(
    qdata_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    table_ptr,
    tile_group_ptr,
    groups,
    cols,
    words,
    out_words,
    row_tiles,
    word_tiles,
    STACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Transpose the 16x16 tiles of every group; words of 8 codes, in rows of `words` and of `out_words`.

    STACKED: each group's result is a matrix of its own, which row_tiles tiles cover; else they follow each other.
    """
    tile = tl.program_id(0) // word_tiles
    i_word = tl.program_id(0) % word_tiles
    if STACKED:
        group = tile // row_tiles
        start, end, first = tl.load(table_ptr + group * 3), tl.load(table_ptr + group * 3 + 1), group * row_tiles
        size = group.to(tl.int64) * cols * out_words
        p_out, p_out_scale = out_ptr + size, out_scale_ptr + size // 2
        storage, own_words = 0, out_words
    else:
        group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
        storage = first * TILE_ROWS
        p_out, p_out_scale = out_ptr + storage, out_scale_ptr + storage // 2
        own_words = out_words - storage
    start64 = start.to(tl.int64)
    transpose_tile(
        tile - first,
        i_word,
        qdata_ptr + start64 * words,
        scale_ptr + start64 * (words // 2),
        p_out,
        p_out_scale,
        tl.where(group == groups, 0, end - start),
        cols,
        words,
        own_words,
        words,
        words // 2,
        out_words,
        out_words // 2,
        TILE_ROWS,
        TILE_WORDS,
    )
