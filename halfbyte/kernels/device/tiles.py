"""Device functions that quantize one tile of x: blocks along its rows, or along its columns, as section 2 stores them.

`rows` and `cols` below are those of x in memory; a tile whose blocks lie along columns writes quantize(x.T), so its
output has a row for each column of x. Stored words are int64: one per NVFP4 block, four per MXFP8 block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import philox, rotate
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.decode import swizzled_offset
from halfbyte.kernels.device.e2m1_values import decoded_pairs, side_by_side
from halfbyte.kernels.device.loads import (
    block_address,
    lines_from,
    load_col_groups,
    load_col_pairs,
    load_row_groups,
    load_row_pairs,
    masked_load,
    masked_store,
    rows_of_tile,
)
from halfbyte.kernels.device.mxfp8 import quantize_mxfp8_block
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.unpacking import numbers_of_halves, numbers_of_pairs


@triton.jit
def own_sign_words(x, sign_ptr, sign_stream, RULE: tl.constexpr):
    """Return the words whose bits are the signs of a group, for the threads that hold x [R, N]."""
    words = philox.sign_words(philox.draw_words(sign_ptr, sign_stream))
    if RULE.paired:
        second = rotate.is_second(x) != 0
        w0, w1, w2, w3 = words
        return tl.where(second, w2, w0), tl.where(second, w3, w1)
    else:
        return words


@triton.jit
def rotate_group(xs, sign_ptr, sign_stream, NARROW: tl.constexpr, RULE: tl.constexpr):
    """Round to bf16 unless x is NARROW (bf16) already, and rotate: return `bf16_pairs`."""
    if not NARROW:
        xs = pm.unpack_pairs(pm.bf16_pairs(xs), 0, RULE.group)
    words = ()
    if RULE.fresh:
        words = own_sign_words(xs[0], sign_ptr, sign_stream, RULE)
    return rotate.rotate(xs, RULE, words, RULE.apart)


@triton.jit
def rotate_packed_group(pairs, sign_ptr, sign_stream, RULE: tl.constexpr):
    """Rotate groups of a packed x whose signs are drawn: return `bf16_pairs`."""
    pairs = rotate.flip_pairs(pairs, own_sign_words(pairs[0], sign_ptr, sign_stream, RULE))
    return rotate.rotate(numbers_of_pairs(pairs, 0, RULE.group, RULE), RULE, (), RULE.apart)


@triton.jit
def store_scale(scale_ptr, scale, i, j, inside, rows, blocks, SWIZZLED: tl.constexpr, FULL: tl.constexpr):
    """Store scales (i, j) of a [rows, blocks] matrix; `i` and `j` broadcast to `scale`."""
    if SWIZZLED:
        # The launch covers whole 128x4 tiles of scales: zeros in their padding.
        padded = (j < tl.cdiv(blocks, 4) * 4) & (i < tl.cdiv(rows, 128) * 128)
        if not FULL:
            scale = tl.where(inside, scale, 0).to(tl.uint8)
        masked_store(scale_ptr + swizzled_offset(i, j, blocks), scale, padded, FULL)
    else:
        masked_store(scale_ptr + i.to(tl.int64) * blocks + j, scale, inside, FULL)


@triton.jit
def store_decoded(out_ptr, words, scale, block, inside, RULE: tl.constexpr):
    """Store one block per entry of `scale` as bf16 values; `block` int64: its index in `out`, words: its codes."""
    LENGTH: tl.constexpr = 16 if RULE.element == "" else 32
    if RULE.element == "":
        factor = dc.e4m3_value(scale.to(tl.int32))
    else:
        factor = dc.e8m0_value(scale.to(tl.int32))
    for piece in tl.static_range(LENGTH // 8):
        if RULE.element == "":
            word = (words[0] >> (32 * piece)).to(tl.int32)
            values = dc.element_values(word, dc.NVFP4)
        else:
            values = dc.element_values(words[piece], dc.MXFP8_E4M3 if RULE.element == "e4m3" else dc.MXFP8_E5M2)
        pointers = out_ptr + (block * LENGTH)[:, :, None] + (piece * 8 + tl.arange(0, 8))[None, None, :]
        masked_store(pointers, dc.cast(values * factor[:, :, None], tl.bfloat16), inside[:, :, None], RULE.full)


@triton.jit
def turned(xs):
    """Return the transposes of a tuple of matrices."""
    out = ()
    for i in tl.static_range(len(xs)):
        out = out + (tl.trans(xs[i]),)
    return out


@triton.jit
def store_values(line_ptr, codes, scale, i_unit, units, in_line, FULL: tl.constexpr):
    """Store 8 E2M1 codes a word [L, U] times fp32 scale as bf16, from unit i_unit of 8 values of lines line_ptr [L]."""
    L: tl.constexpr = codes.shape[0]
    U: tl.constexpr = codes.shape[1]
    if not has_ptx():
        COUNT: tl.constexpr = 8
        values = tl.reshape(dc.cast(dc.e2m1_values(codes) * scale[:, :, None], tl.bfloat16), (L, U * 8))
    else:
        COUNT: tl.constexpr = 4
        line_ptr = line_ptr.to(tl.pointer_type(tl.uint32))
        values = tl.reshape(pm.join_group(decoded_pairs(codes, scale), L, U), (L, U * 4))
    place = i_unit * COUNT + tl.arange(0, U * COUNT)
    masked_store(line_ptr[:, None] + place[None, :], values, in_line[:, None] & (place < units * COUNT)[None, :], FULL)


@triton.jit
def store_decoded_lines(out_ptr, words, scales, i_block, line64, blocks, in_line, RULE: tl.constexpr):
    """Store groups as bf16 values, row line64 [L] of out each, from block i_block on; words, scales: tuples of [L, N].

    The codes of 8 values are a store of 16 bytes: they change threads, so that the stores of a warp fill whole sectors.
    """
    L: tl.constexpr = scales[0].shape[0]
    N: tl.constexpr = scales[0].shape[1]
    G: tl.constexpr = len(scales)
    codes = tl.reshape(pm.join_group(words, L, N), (L, N * len(words)))
    scale = tl.reshape(pm.join_group(scales, L, N), (L, N * G)).to(tl.int32)
    PER_BLOCK: tl.constexpr = 2 if RULE.element == "" else 4
    UNITS: tl.constexpr = N * G * PER_BLOCK  # of 8 values
    LENGTH: tl.constexpr = PER_BLOCK * 8
    factor = dc.e4m3_value(scale) if RULE.element == "" else dc.e8m0_value(scale)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (L, N * G, PER_BLOCK)), (L, UNITS))
    line_ptr = out_ptr + line64 * blocks * LENGTH
    if RULE.element == "":
        codes = tl.reshape(tl.join((codes & 0xFFFFFFFF).to(tl.uint32), (codes >> 32).to(tl.uint32)), (L, UNITS))
        codes = codes.to(tl.int32, bitcast=True)
        store_values(line_ptr, codes, factor, i_block * PER_BLOCK, blocks * PER_BLOCK, in_line, RULE.full)
    else:
        values = dc.element_values(codes, dc.MXFP8_E4M3 if RULE.element == "e4m3" else dc.MXFP8_E5M2)
        values = tl.reshape(dc.cast(values * factor[:, :, None], tl.bfloat16), (L, UNITS * 8))
        col = i_block * LENGTH + tl.arange(0, UNITS * 8)
        inside = in_line[:, None] & (col < blocks * LENGTH)[None, :]
        masked_store(line_ptr[:, None] + col[None, :], values, inside, RULE.full)


@triton.jit
def quantize_group(xs, amax, factors, constants, draw, block, RULE: tl.constexpr, AXIS: tl.constexpr, pairs=None):
    """Quantize a group: return the words of its codes and its scales; if RULE.values `bf16_pairs` and no scales.

    Args:
        xs: RULE.group fp32 tensors, or half as many `bf16_pairs` after a rotation.
        amax: max |x| of the group's only block, before a rotation; None after one.
        draw: of `draw_words`, if RULE.drawn.
        block: int64, the position of the group's first block among random numbers.
        pairs: the words of a packed x whose unrotated values xs are, if they lie along its rows.
    """
    words = ()
    scales = ()
    if RULE.element != "":
        words, scale = quantize_mxfp8_block(xs, amax, constants, RULE)
        scales = (scale,)
    else:
        random = ()
        for g in tl.static_range(RULE.group // 16):
            if RULE.drawn:
                random = philox.block_words(block + g, draw)
            block_xs = xs
            signs = pairs
            if RULE.norm != 0.0:
                signs = pm.part(xs, g * 8, 8)
                amax = pm.max_of_pairs(signs, RULE.hardware)
                block_xs = numbers_of_pairs(xs, g * 16, 16, RULE)
                if RULE.apart:
                    block_xs = rotate.apart(block_xs)
            if RULE.values:
                words = words + sc.block_values(block_xs, amax, factors, constants, random, RULE, AXIS, signs)
            else:
                codes, scale = sc.quantize_block(
                    block_xs, amax, factors, constants, random, RULE, AXIS, signs, RULE.apart and RULE.norm != 0.0
                )
                words = words + (codes,)
                scales = scales + (scale,)
    return words, scales


@triton.jit
def store_row_values(out, words, row64, i_group, in_row, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Store the values of N groups of R rows; words change threads, so that the stores fill whole sectors."""
    LENGTH: tl.constexpr = N * RULE.group // 2
    values = tl.reshape(join_words(words, R, N), (R, LENGTH))
    word = i_group * (RULE.group // 2) + tl.arange(0, LENGTH)
    line_ptr = out.to.q_ptr.to(tl.pointer_type(tl.uint32)) + row64 * (out.blocks * 8)
    inside = in_row[:, None] & (word < out.blocks * 8)[None, :]
    masked_store(line_ptr[:, None] + word[None, :], values, inside, RULE.full)


@triton.jit
def join_words(words, R: tl.constexpr, N: tl.constexpr):
    """Join 8 or 16 tensors [R, N] into [R, N, count], in one thread."""
    if len(words) == 8:
        return pm.join_group(words, R, N)
    else:
        even, odd = (), ()
        for i in tl.static_range(len(words) // 2):
            even = even + (words[2 * i],)
            odd = odd + (words[2 * i + 1],)
        return tl.reshape(tl.join(pm.join_group(even, R, N), pm.join_group(odd, R, N)), (R, N, len(words)))


@triton.jit
def store_column_values(out, columns, i_group, i_col, cols, RULE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Store the values of neighbouring columns as x lies; columns: of each one that a thread has.

    out.blocks: of a column, so that there are RULE.group rows for each group.
    """
    COUNT: tl.constexpr = len(columns) // 2
    SHARE: tl.constexpr = C // (2 * COUNT)
    SIZE: tl.constexpr = RULE.group
    word = ((i_col + 2 * COUNT * tl.arange(0, SHARE)) // 2)[:, None] + tl.arange(0, COUNT)[None, :]
    row = tl.arange(0, N) * SIZE
    stride = tl.cast(cols, tl.int64) // 2
    to = out.to.q_ptr.to(tl.pointer_type(tl.uint32)) + i_group * SIZE * stride
    to = to + row.to(tl.int64)[:, None, None] * stride + word[None, :, :]
    inside = (i_group + tl.arange(0, N) < out.blocks * 16 // SIZE)[:, None, None] & (word * 2 < cols)[None, :, :]
    step = tl.cast(pm.unaligned(cols // 2), tl.int64)
    if COUNT > 1:
        step = stride
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (side_by_side(columns[2 * k], columns[2 * k + 1]),)
    for i in tl.static_range(SIZE):
        words = ()
        for k in tl.static_range(COUNT):
            words = words + (rows[k][i],)
        masked_store(to, pm.join_group(words, N, SHARE), inside, RULE.full)
        to = to + step


@triton.jit
def first_block(places, i_line, i_group, RULE: tl.constexpr):
    """Return where among random numbers a tile's first block lies, int64."""
    return places.first_block + tl.cast(i_line, tl.int64) * places.blocks_per_row + i_group * (RULE.group // 16)


@triton.jit
def read_row_tile(i_row, i_group, x, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Return what a thread reads of N groups of R rows: words of two values of a packed x, else fp32 values."""
    row = rows_of_tile(i_row, x.rows, RULE, R)
    o_row = row.to(tl.int64) * x.stride_r
    o_col = (i_group + tl.arange(0, N)) * RULE.group
    if RULE.packed:
        return load_row_pairs(x, i_row, i_group, RULE, R, N, 1)
    else:
        return load_row_groups(x.ptr, o_row, row < x.rows, o_col, x.cols, x.stride_c, RULE.group)


@triton.jit
def quantize_row_tile(
    i_row, i_group, x, out, RULE: tl.constexpr, SWIZZLED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    factors=None, loaded=None, draw=None,
):  # fmt: skip
    """Quantize N groups of R rows along the rows of x, a StridedMatrix; out: a WrittenOperand.

    factors: of `operand_factors`, if a program has them already; loaded: of `read_row_tile`, draw: of `draw_words`,
    likewise.
    """
    row = rows_of_tile(i_row, x.rows, RULE, R)
    in_row = row < x.rows
    row64 = row.to(tl.int64)
    # Before anything that waits for the amax: reads of x are what takes time.
    if loaded is None:
        loaded = read_row_tile(i_row, i_group, x, RULE, R, N)
    if RULE.row_amax:
        amax_of_row = masked_load(out.to.amax_ptr + row64, in_row, RULE.full)
        factors = sc.tensor_factors(amax_of_row[:, None], out.constants, False)
    elif factors is None:
        factors = sc.operand_factors(out.to.amax_ptr, out.constants, RULE)
    xs = loaded
    if RULE.packed:
        xs = numbers_of_pairs(loaded, 0, RULE.group, RULE)
    amax = None
    if RULE.fresh and RULE.packed:
        xs = rotate_packed_group(loaded, out.to.sign_ptr, out.places.sign_stream, RULE)
    elif RULE.norm != 0.0:
        xs = rotate_group(xs, out.to.sign_ptr, out.places.sign_stream, x.ptr.dtype.element_ty == tl.bfloat16, RULE)
    elif RULE.packed:
        amax = pm.max_of_pairs(loaded, RULE.hardware)
    else:
        amax = pm.abs_max(xs)
    block = 0
    if RULE.drawn:
        base = first_block(out.places, i_row, i_group, RULE) + (tl.arange(0, N) * (RULE.group // 16))[None, :]
        line = lines_from(i_row, x.rows, RULE, R)[:, None]
        block = pm.like(pm.wide_sum(base, line, out.places.blocks_per_row), xs[0])
        if draw is None:
            draw = philox.draw_words(out.to.draw_ptr, out.places.stream)
    pairs = None
    if RULE.packed:
        pairs = loaded
    words, scales = quantize_group(xs, amax, factors, out.constants, draw, block, RULE, 0, pairs)
    if RULE.values:
        store_row_values(out, words, row64, i_group, in_row, RULE, R, N)
    else:
        store_rows(out, words, scales, i_row, i_group, x.rows, RULE, SWIZZLED)


@triton.jit
def store_rows(out, words, scales, i_row, i_group, rows, RULE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Store the words and scales of groups from i_group on of rows from i_row on, each [R, N]."""
    R: tl.constexpr = scales[0].shape[0]
    N: tl.constexpr = scales[0].shape[1]
    row = rows_of_tile(i_row, rows, RULE, R)
    in_row, row64 = row < rows, row.to(tl.int64)
    if RULE.decoded:
        i_block = i_group * len(scales)
        store_decoded_lines(out.to.q_ptr, words, scales, i_block, row64, out.blocks, in_row, RULE)
    elif RULE.errors == "quick" and RULE.tile and RULE.full and not SWIZZLED:
        line, block = tl.arange(0, R)[:, None], tl.arange(0, N)[None, :]
        tl.store(block_address(out.to.q_ptr, i_row, i_group, line, block, out.blocks), words[0])
        tl.store(block_address(out.to.scale_ptr, i_row, i_group, line, block, out.blocks), scales[0])
    elif RULE.along:
        line = lines_from(i_row, rows, RULE, R)
        store_blocks(out, tl.trans(words[0]), tl.trans(scales[0]), i_row, line, i_group, RULE.drawn and RULE.clamped)
    else:
        W: tl.constexpr = len(words)
        G: tl.constexpr = len(scales)
        place = i_group + tl.arange(0, N)
        if R == 1 and W == 1:
            # Halved, groups hide from the compiler that they lie together: it would move words between threads, so
            # that each stores two at once. With several rows it would then lay a warp along the rows.
            place = (i_group * 2 + 2 * tl.arange(0, N)) // 2
        word = place[None, :, None] * W + tl.arange(0, W)[None, None, :]
        inside = in_row[:, None, None] & (word < out.blocks * (W // G))
        pointers = out.to.q_ptr + row64[:, None, None] * (out.blocks * (W // G)) + word
        masked_store(pointers, pm.join_group(words, R, N), inside, RULE.full)
        block = place[None, :, None] * G + tl.arange(0, G)[None, None, :]
        inside = in_row[:, None, None] & (block < out.blocks)
        scale = pm.join_group(scales, R, N)
        store_scale(out.to.scale_ptr, scale, row[:, None, None], block, inside, rows, out.blocks, SWIZZLED, RULE.full)


@triton.jit
def quantize_col_tile(
    i_group, i_col, x, out, RULE: tl.constexpr, SWIZZLED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    factors=None, loaded=None, draw=None,
):  # fmt: skip
    """Quantize N groups of C columns along the columns of x, a StridedMatrix; out: a WrittenOperand.

    A packed x is read in words of two columns, RULE.words of them a thread. factors, loaded, draw: of `operand_factors`
    and, for a packed x, of `load_col_pairs`, and of `draw_words`, if a program has them already.
    """
    SHARE: tl.constexpr = 2 * RULE.words if RULE.packed else 1  # columns of a thread
    group = i_group + tl.arange(0, N)
    first_col = i_col + SHARE * tl.arange(0, C // SHARE)
    if not RULE.packed:
        xs = load_col_groups(
            x.ptr, group * RULE.group, x.rows, first_col, first_col < x.cols, x.stride_r, x.stride_c, RULE.group
        )
    elif loaded is None:
        loaded = load_col_pairs(x, i_group, i_col, RULE, N, C)
    flipped: tl.constexpr = RULE.packed and RULE.fresh
    if flipped:
        words = philox.sign_words(philox.draw_words(out.to.sign_ptr, out.places.sign_stream))
        loaded = rotate.flip_rows(loaded, words)
    if factors is None:
        factors = sc.operand_factors(out.to.amax_ptr, out.constants, RULE)
    if RULE.drawn and draw is None:
        draw = philox.draw_words(out.to.draw_ptr, out.places.stream)
    columns_words = ()
    columns_scales = ()
    for k in tl.static_range(SHARE):
        col64 = (first_col + k).to(tl.int64)
        if RULE.row_amax:
            amax = masked_load(out.to.amax_ptr + col64, col64 < x.cols, RULE.full)
            factors = sc.tensor_factors(amax[None, :], out.constants, False)
        amax = None
        if RULE.packed:
            pairs = pm.nth(loaded, k // 2)
            if RULE.norm != 0.0:
                xs = numbers_of_halves(pairs, k % 2 == 1, RULE)
            else:  # the signs are those of xs
                xs = pm.unpack_halves(pairs, k % 2 == 1)
        if flipped:
            xs = rotate.rotate(xs, RULE, (), RULE.apart)
        elif RULE.norm != 0.0:
            xs = rotate_group(xs, out.to.sign_ptr, out.places.sign_stream, x.ptr.dtype.element_ty == tl.bfloat16, RULE)
        elif RULE.packed:
            if k % 2 == 0:
                amax_pair = pm.pair_abs_max(pairs, RULE.hardware)
                amax = (amax_pair << 16).to(tl.float32, bitcast=True)
            else:
                amax = (amax_pair & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            amax = pm.abs_max(xs)
        block = 0
        if RULE.drawn:
            base = first_block(out.places, i_col, i_group, RULE) + (tl.arange(0, N) * (RULE.group // 16))[:, None]
            local = (SHARE * tl.arange(0, C // SHARE) + k)[None, :]
            block = pm.like(pm.wide_sum(base, local, out.places.blocks_per_row), xs[0])
        words, scales = quantize_group(xs, amax, factors, out.constants, draw, block, RULE, 1)
        if RULE.values:
            columns_words = columns_words + (words,)
        elif RULE.along:
            if RULE.decoded:
                store_columns(out, words, scales, i_group, first_col + k, x.cols, RULE, SWIZZLED)
            else:
                line = SHARE * tl.arange(0, C // SHARE) + k
                store_blocks(out, words[0], scales[0], i_col, line, i_group, RULE.drawn and RULE.clamped)
        else:
            columns_words = columns_words + (words,)
            columns_scales = columns_scales + (scales,)
    if RULE.values:
        store_column_values(out, columns_words, i_group, i_col, x.cols, RULE, N, C)
    elif not RULE.along:
        words = pm.interleave(columns_words, N, C)
        scales = pm.interleave(columns_scales, N, C)
        col = i_col + tl.arange(0, C)
        store_columns(out, words, scales, i_group, col, x.cols, RULE, SWIZZLED)


@triton.jit
def store_blocks(out, word, scale, i_line, line, i_block, ONE_INDEX: tl.constexpr):
    """Store a word of codes and a scale [N, L] for N blocks from i_block on of lines i_line + line [L].

    Addresses are numbers: the compiler, which does not see that blocks lie together, moves no word between threads.
    ONE_INDEX: they are formed from one index of the block, which takes fewer instructions where registers are scarce.
    """
    first = tl.cast(i_line, tl.int64) * out.blocks + i_block
    block = tl.arange(0, word.shape[0])[:, None]
    line = line[None, :]
    if ONE_INDEX:
        index = pm.wide_sum(first + block, line, out.blocks)
        tl.store(out.to.q_ptr + index, word)
        tl.store(out.to.scale_ptr + index, scale)
    else:
        q_address = (out.to.q_ptr + first).to(tl.int64) + block * 8
        tl.store(pm.wide_sum(q_address, line, out.blocks * 8).to(out.to.q_ptr.dtype), word)
        scale_address = (out.to.scale_ptr + first).to(tl.int64) + block
        tl.store(pm.wide_sum(scale_address, line, out.blocks).to(out.to.scale_ptr.dtype), scale)


@triton.jit
def store_columns(out, words, scales, i_group, col, cols, RULE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Store the words and scales of N groups from i_group on of columns col [C], each [N, C], as lines."""
    N: tl.constexpr = scales[0].shape[0]
    C: tl.constexpr = col.shape[0]
    in_col = col < cols
    if RULE.decoded:
        i_block, col64 = i_group * len(scales), col.to(tl.int64)
        store_decoded_lines(out.to.q_ptr, turned(words), turned(scales), i_block, col64, out.blocks, in_col, RULE)
    else:
        group = i_group + tl.arange(0, N)
        W: tl.constexpr = len(words)
        G: tl.constexpr = len(scales)
        word = group[:, None, None] * W + tl.arange(0, W)[None, None, :]
        inside = in_col[None, :, None] & (word < out.blocks * (W // G))
        pointers = out.to.q_ptr + col.to(tl.int64)[None, :, None] * (out.blocks * (W // G)) + word
        masked_store(pointers, pm.join_group(words, N, C), inside, RULE.full)
        block = group[:, None, None] * G + tl.arange(0, G)[None, None, :]
        inside = in_col[None, :, None] & (block < out.blocks)
        scale = pm.join_group(scales, N, C)
        store_scale(out.to.scale_ptr, scale, col[None, :, None], block, inside, cols, out.blocks, SWIZZLED, RULE.full)
