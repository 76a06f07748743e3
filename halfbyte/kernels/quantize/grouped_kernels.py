"""Kernels on tokens in groups and on the weights of experts: a tile finds its group, then works as in a tensor alone.

`quantize_row_tile` and `quantize_col_tile` know nothing of groups: their rows, blocks and random bits are moved to
where the group's lie. Rows of the tail and of the padding are read as zeros, whose codes and scales are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap, philox
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.operands import Places, Pointers, StridedMatrix, WrittenOperand, varying
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.unpack.transpose import Extent, Moved, MovedStrides, transpose_tile


@triton.constexpr_function
def units_of_block(element, decoded):
    """Return how many bf16 values, or words of codes, a stored block has."""
    length = 32 if element else 16
    return length if decoded else (length // 16) ** 2


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
def quantize_rows(
    group, start, end, local, i_col, x, side, groups, RULE: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, known
):
    """Quantize TR x TC values, from row `local` of a group and column i_col on, along rows; side: a WrittenOperand."""
    start64 = start.to(tl.int64)
    first = start64 * side.blocks
    UNITS: tl.constexpr = units_of_block(RULE.element, RULE.decoded)
    i_group = i_col // RULE.group
    p_x = x.ptr + start64 * x.stride_r
    to = Pointers(
        side.to.q_ptr + first * UNITS,
        side.to.scale_ptr if RULE.decoded else side.to.scale_ptr + first,
        side.to.amax_ptr + start if RULE.row_amax else side.to.amax_ptr + group,
        None if side.to.draw_ptr is None else side.to.draw_ptr + group * 2,
        None if side.to.sign_ptr is None else side.to.sign_ptr + group * 2,
    )
    places = Places(side.places.stream, 0, side.blocks, side.places.sign_stream)
    out = WrittenOperand(to, side.blocks, places, side.constants)
    tokens = StridedMatrix(p_x, end - start, tl.where(group == groups, 0, x.cols), x.stride_r, x.stride_c)
    quantize_row_tile(local, i_group, tokens, out, RULE, False, TR, TC // RULE.group, *known)


@triton.jit
def quantize_cols(
    group, start, end, local, i_col, x, side, groups, storage,
    RULE: tl.constexpr, STACKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, known,
):  # fmt: skip
    """Quantize the same along columns.

    storage: where the group's blocks start along the columns of the col orientation, unless STACKED.
    """
    p_q, p_scale = side.to.q_ptr, side.to.scale_ptr
    start64 = start.to(tl.int64)
    in_group = tl.where(group == groups, 0, end - start)
    if STACKED:
        size = group.to(tl.int64) * x.cols * side.blocks
        UNITS: tl.constexpr = units_of_block(RULE.element, RULE.decoded)
        p_q, p_scale = p_q + size * UNITS, p_scale + size
        rows, per_row = in_group, side.blocks
        own_cols = tl.where(group == groups, 0, x.cols)  # there is nothing behind the last matrix
    else:
        own_cols = x.cols
        rows, per_row = storage + in_group, (in_group + RULE.group - 1) // RULE.group * (RULE.group // 16)
    i_group = (storage + local) // RULE.group
    tokens = StridedMatrix(x.ptr + (start64 - storage) * x.stride_r, rows, own_cols, x.stride_r, x.stride_c)
    to = Pointers(
        p_q,
        p_scale,
        side.to.amax_ptr + (group.to(tl.int64) * x.cols if RULE.row_amax else group),
        None if side.to.draw_ptr is None else side.to.draw_ptr + group * 2,
        None if side.to.sign_ptr is None else side.to.sign_ptr + group * 2,
    )
    places = Places(side.places.stream, (tl.zeros_like(start64) - storage) // 16, per_row, side.places.sign_stream)
    out = WrittenOperand(to, side.blocks, places, side.constants)
    quantize_col_tile(i_group, i_col, tokens, out, RULE, False, TR // RULE.group, TC, *known)
    if (RULE.clamped or not RULE.full) and not (STACKED or RULE.decoded or RULE.element != ""):
        clear_padding(p_scale, storage // 16, per_row, local // 16, i_col, x.cols, side.blocks, TR // 16, TC)


@triton.jit
def quantize_tile(
    group, start, end, local, i_col, x, row, col, groups, storage,
    ROW: tl.constexpr, COL: tl.constexpr, STACKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    row_known, col_known,
):  # fmt: skip
    """Quantize a tile along columns, rows or both; the second read comes from the cache.

    Rows come first where lanes lie along them: such a read asks for whole lines.
    """
    ROWS_FIRST: tl.constexpr = ROW is not None and ROW.along
    if ROWS_FIRST:
        quantize_rows(group, start, end, local, i_col, x, row, groups, ROW, TR, TC, row_known)
    if COL is not None:
        quantize_cols(group, start, end, local, i_col, x, col, groups, storage, COL, STACKED, TR, TC, col_known)
    if ROW is not None and not ROWS_FIRST:
        quantize_rows(group, start, end, local, i_col, x, row, groups, ROW, TR, TC, row_known)


@triton.jit
def column_of_step(i_col, step, TC: tl.constexpr, LOOP: tl.constexpr):
    """Return where tile `step` of LOOP begins; the compiler sees no progression, for which it would keep addresses."""
    if LOOP == 1:
        return i_col
    return pm.unaligned(i_col + step * TC)


@triton.jit
def quantize_run_of_rows(
    group, start, end, local, i_col, x, side, groups, known,
    RULE: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Quantize LOOP tiles beside each other along rows, each in PARTS of TR / PARTS rows."""
    for step in range(LOOP * PARTS):
        i_here, here = column_of_step(i_col, step // PARTS, TC, LOOP), local + step % PARTS * (TR // PARTS)
        if PARTS == 1 or here < end - start:
            quantize_rows(group, start, end, here, i_here, x, side, groups, RULE, TR // PARTS, TC, known)


@triton.jit
def quantize_run_of_cols(
    group, start, end, local, i_col, x, side, groups, storage, known,
    RULE: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Quantize LOOP tiles beside each other along columns."""
    for step in range(LOOP):
        i_here = column_of_step(i_col, step, TC, LOOP)
        quantize_cols(group, start, end, local, i_here, x, side, groups, storage, RULE, False, TR, TC, known)


@triton.jit
def quantize_drawn_tiles(
    group, start, end, local, i_col, x, row, col, groups, storage,
    ROW: tl.constexpr, COL: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Quantize LOOP tiles beside each other where both rules draw, as Draws with one base.

    Keys and factors are computed once for all tiles, and the divisions are chosen once. All rows go before all columns,
    or after them: a loop over both keeps twice the addresses, and half as many programs on a multiprocessor.
    """
    # Divisions that check their range are calls, around which half as many rows fit the registers of the rest.
    PARTS: tl.constexpr = 2 if ROW.along and TR >= 32 else 1
    base = philox.load_base(row.to.draw_ptr + group * 2)
    row_amax, col_amax = tl.load(row.to.amax_ptr + group), tl.load(col.to.amax_ptr + group)
    row_draw, col_draw = philox.words_of(base, row.places.stream), philox.words_of(base, col.places.stream)
    regular = sc.is_regular(row_amax, row.constants) & sc.is_regular(col_amax, col.constants)
    # Blocks count from the group's first; along columns no more than these, padding included.
    regular &= philox.are_low(0, row.blocks, end - start) & philox.are_low(0, (end - start) // 16 + COL.group, x.cols)
    low_row_draw, low_col_draw = philox.low_key(row_draw), philox.low_key(col_draw)
    if regular:
        for part in tl.static_range(2):
            if (part == 0) == ROW.along:
                of_row = (sc.regular_factors(row_amax, row.constants), None, low_row_draw)
                quantize_run_of_rows(group, start, end, local, i_col, x, row, groups, of_row, ROW, TR, TC, LOOP, 1)
            else:
                of_col = (sc.regular_factors(col_amax, col.constants), None, low_col_draw)
                quantize_run_of_cols(
                    group, start, end, local, i_col, x, col, groups, storage, of_col, COL, TR, TC, LOOP
                )
    else:  # names of its own: a variable that both branches assign has one type
        for part in tl.static_range(2):
            if (part == 0) == ROW.along:
                rows_known = (sc.irregular_factors(row_amax, row.constants), None, row_draw)
                quantize_run_of_rows(
                    group, start, end, local, i_col, x, row, groups, rows_known, ROW, TR, TC, LOOP, PARTS
                )
            else:
                cols_known = (sc.irregular_factors(col_amax, col.constants), None, col_draw)
                quantize_run_of_cols(
                    group, start, end, local, i_col, x, col, groups, storage, cols_known, COL, TR, TC, LOOP
                )


@triton.jit
def clear_rows(q_ptr, scale_ptr, i_row, end, i_block, blocks, UNITS: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Store zeros for N blocks of R rows, those before `end`, of an orientation [rows, blocks]; UNITS: of a block."""
    row = i_row + tl.arange(0, R)
    unit = i_block * UNITS + tl.arange(0, N * UNITS)
    block = i_block + tl.arange(0, N)
    p_row = row.to(tl.int64)[:, None] * blocks
    zero = tl.zeros((R, N * UNITS), q_ptr.dtype.element_ty)
    tl.store(q_ptr + p_row * UNITS + unit[None, :], zero, mask=(row < end)[:, None] & (unit < blocks * UNITS)[None, :])
    if scale_ptr is not None:
        mask = (row < end)[:, None] & (block < blocks)[None, :]
        tl.store(scale_ptr + p_row + block[None, :], tl.zeros((R, N), tl.uint8), mask=mask)


@triton.jit
def clear_tile(
    group, start, end, local, i_col, row, col, groups, cols, storage,
    ROW: tl.constexpr, COL: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Store zeros where a tile of tokens holds none: what pads a group in the col orientation, and the tail."""
    if COL is not None:
        LENGTH: tl.constexpr = 16 if COL.element == "" else 32
        UNITS: tl.constexpr = LENGTH if COL.decoded else LENGTH // 16 * LENGTH // 16
        block = (storage + local) // LENGTH
        scale_ptr = None if COL.decoded else col.to.scale_ptr
        clear_rows(col.to.q_ptr, scale_ptr, i_col, cols, block, col.blocks, UNITS, TC, TR // LENGTH)
    if ROW is not None:
        WIDTH: tl.constexpr = 16 if ROW.element == "" else 32
        PARTS: tl.constexpr = WIDTH if ROW.decoded else WIDTH // 16 * WIDTH // 16
        last = tl.where(group == groups, end, start + local)
        scale_ptr = None if ROW.decoded else row.to.scale_ptr
        clear_rows(row.to.q_ptr, scale_ptr, start + local, last, i_col // WIDTH, row.blocks, PARTS, TR, TC // WIDTH)


@jit(do_not_specialize=(*varying("places.row", "places.col"), "groups", "col_tiles"))
def grouped_quantize_kernel(
    x_ptr, to, table_ptr, tile_group_ptr, groups, sizes, places, constants, col_tiles,
    ROW: tl.constexpr, COL: tl.constexpr, FULL_ROW: tl.constexpr, FULL_COL: tl.constexpr, STACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program quantizes TR x TC values of one group along the rows, the columns or both; TR divides TILE_ROWS.

    LOOP: how many such tiles beside each other it quantizes, where both operands draw.

    STACKED: the col orientation of each group is a matrix of its own; else all groups follow each other in its columns.
    FULL_ROW, FULL_COL: the rules for tiles without a ragged edge; None where the columns have one, or where ROW and COL
    serve all tiles.
    ROW, COL: the rules for tiles with one.
    """
    overlap.begin(OVERLAP)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    row = WrittenOperand(to.row, sizes.blocks.row, places.row, constants.row)
    col = WrittenOperand(to.col, sizes.blocks.col, places.col, constants.col)
    PARTS: tl.constexpr = TILE_ROWS // TR
    FULL: tl.constexpr = FULL_ROW is not None or FULL_COL is not None
    line = pm.divide(tl.program_id(0), col_tiles)
    i_col = (tl.program_id(0) - line * col_tiles.count) * (TC * LOOP)
    group, start, end, first = group_of_tile(line // PARTS, tile_group_ptr, table_ptr)
    local = (line // PARTS - first) * TILE_ROWS + line % PARTS * TR
    storage = 0 if STACKED else first * TILE_ROWS
    in_group = tl.where(group == groups, 0, end - start)
    BOTH: tl.constexpr = ROW is not None and COL is not None and not (STACKED or FULL)
    DRAWN: tl.constexpr = BOTH and ROW.rounding == "stochastic" and COL.rounding == "stochastic"
    ONCE: tl.constexpr = DRAWN and not (ROW.row_amax or COL.row_amax)
    is_full = FULL and local + TR <= in_group
    known = (None, None, None)
    if FULL:  # noqa: SIM102  compiled one by one
        if is_full:
            quantize_tile(
                group, start, end, local, i_col, x, row, col, groups, storage, FULL_ROW, FULL_COL, STACKED, TR, TC,
                known, known,
            )  # fmt: skip
    if not is_full:
        if STACKED or local < in_group:
            if ONCE:
                quantize_drawn_tiles(
                    group, start, end, local, i_col, x, row, col, groups, storage, ROW, COL, TR, TC, LOOP
                )
            else:
                quantize_tile(
                    group, start, end, local, i_col, x, row, col, groups, storage, ROW, COL, STACKED, TR, TC,
                    known, known,
                )  # fmt: skip
        else:
            for step in range(LOOP):  # a tile at a time: all of them at once take the most registers of the kernel
                i_here = i_col + step * TC
                clear_tile(group, start, end, local, i_here, row, col, groups, x.cols, storage, ROW, COL, TR, TC)


@jit(do_not_specialize=("groups", "word_tiles"))
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
    word_tiles,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Transpose the 16x16 tiles of every group of tokens; words of 8 codes, in rows of `words` and of `out_words`."""
    tile = tl.program_id(0) // word_tiles
    i_word = tl.program_id(0) % word_tiles
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    storage = first * TILE_ROWS
    start64 = start.to(tl.int64)
    i_row = tile - first
    moved = Moved(
        qdata_ptr + start64 * words, scale_ptr + start64 * (words // 2), out_ptr + storage, out_scale_ptr + storage // 2
    )
    extent = Extent(tl.where(group == groups, 0, end - start), cols, words, out_words - storage)
    strides = MovedStrides(words, words // 2, out_words, out_words // 2)
    transpose_tile(i_row, i_word, moved, extent, strides, TILE_ROWS, TILE_WORDS)
