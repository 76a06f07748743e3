"""Device functions that quantize one tile of x: blocks along its rows, or along its columns, as section 2 stores them.

`rows` and `cols` below are those of x in memory; a tile whose blocks lie along columns writes quantize(x.T), so its
output has a row for each column of x. Stored words are int64: one per NVFP4 block, four per MXFP8 block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels import decode as dc
from halfbyte.kernels import primitives as pm
from halfbyte.kernels import scaling as sc
from halfbyte.kernels.decode import swizzled_offset


@triton.jit
def load_row_groups(x_ptr, o_row, in_row, o_col, cols, stride_c, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [R, N]: element i of the groups that start in columns o_col [N] of rows o_row [R].

    Each thread loads whole groups in pieces of 16 bytes.
    """
    R: tl.constexpr = o_row.shape[0]
    N: tl.constexpr = o_col.shape[0]
    WIDTH: tl.constexpr = 4 if x_ptr.dtype.element_ty == tl.float32 else 8
    xs = ()
    for piece in tl.static_range(SIZE // WIDTH):
        col = o_col[None, :, None] + (piece * WIDTH + tl.arange(0, WIDTH))[None, None, :]
        pointers = x_ptr + o_row[:, None, None] + col.to(tl.int64) * stride_c
        x = pm.to_fp32(tl.load(pointers, mask=in_row[:, None, None] & (col < cols), other=0.0))
        if WIDTH == 8:
            xs = xs + pm.split_eight(x, R, N)
        else:
            xs = xs + pm.split_four(x, R, N)
    return xs


@triton.jit
def load_col_groups(x_ptr, o_row, rows, o_col, in_col, stride_r, stride_c, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [N, C]: element i of the groups that start in rows o_row [N], in columns o_col [C]."""
    xs = ()
    stride_r64 = tl.cast(stride_r, tl.int64)
    first = x_ptr + o_row.to(tl.int64)[:, None] * stride_r + o_col.to(tl.int64)[None, :] * stride_c
    for i in tl.static_range(SIZE):
        inside = (o_row + i < rows)[:, None] & in_col[None, :]
        xs = xs + (pm.to_fp32(tl.load(first + i * stride_r64, mask=inside, other=0.0)),)
    return xs


@triton.jit
def rotate_group(xs, sign_ptr, sign_stream, NARROW: tl.constexpr, RULE: tl.constexpr):
    """Round to bf16 unless x is NARROW (bf16) already, and rotate: return `bf16_pairs`."""
    if not NARROW:
        xs = pm.unpack_pairs(pm.bf16_pairs(xs), 0, RULE.group)
    words = ()
    if RULE.fresh:
        words = pm.sign_words(pm.draw_words(sign_ptr, sign_stream))
    return pm.rotate(xs, RULE.norm, RULE.group, RULE.fresh, words)


@triton.jit
def store_scale(scale_ptr, scale, i, j, inside, rows, blocks, SWIZZLED: tl.constexpr):
    """Store scales (i, j) of a [rows, blocks] matrix; `i` and `j` broadcast to `scale`."""
    if SWIZZLED:
        # The launch covers whole 128x4 tiles of scales: zeros in their padding.
        padded = (j < tl.cdiv(blocks, 4) * 4) & (i < tl.cdiv(rows, 128) * 128)
        tl.store(scale_ptr + swizzled_offset(i, j, blocks), tl.where(inside, scale, 0).to(tl.uint8), mask=padded)
    else:
        tl.store(scale_ptr + i.to(tl.int64) * blocks + j, scale, mask=inside)


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
        tl.store(pointers, dc.cast(values * factor[:, :, None], tl.bfloat16), mask=inside[:, :, None])


@triton.jit
def store_decoded_group(out_ptr, words, scales, group, row64, blocks, in_row, RULE: tl.constexpr):
    """Store the blocks of a group as bf16 values; group and row64 broadcast to a scale, out is [rows, blocks]."""
    G: tl.constexpr = len(scales)
    for g in tl.static_range(G):
        block = group * G + g
        own = words if RULE.element != "" else (words[g],)
        store_decoded(out_ptr, own, scales[g], row64 * blocks + block, in_row & (block < blocks), RULE)


@triton.jit
def quantize_row_tile(
    i_row,
    i_group,
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    draw_ptr,
    sign_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    stride_c,
    stream,
    first_block,
    blocks_per_row,
    sign_stream,
    constants,
    factors,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
):
    """Quantize N groups of R rows along the rows of x; outputs [rows, blocks]. factors: of `operand_factors`."""
    row = i_row + tl.arange(0, R)
    group = i_group + tl.arange(0, N)
    in_row = row < rows
    row64 = row.to(tl.int64)
    xs = load_row_groups(x_ptr, row64 * stride_r, in_row, group * RULE.group, cols, stride_c, RULE.group)
    if RULE.element != "":
        words, scale = sc.quantize_mxfp8_block(xs, constants, RULE)
        scales = (scale,)
    else:
        if RULE.row_amax:
            factors = sc.tensor_factors(tl.load(amax_ptr + row64, mask=in_row, other=0.0)[:, None], constants)
        if RULE.norm != 0.0:
            xs = rotate_group(xs, sign_ptr, sign_stream, x_ptr.dtype.element_ty == tl.bfloat16, RULE)
        words = ()
        scales = ()
        random = ()
        for g in tl.static_range(RULE.group // 16):
            if RULE.rounding == "stochastic":
                key = pm.draw_words(draw_ptr, stream)
                block = first_block + row64[:, None] * blocks_per_row + (group * (RULE.group // 16) + g)[None, :]
                random = pm.block_words(block, key)
            block_xs = pm.unpack_pairs(xs, g * 16, 16) if RULE.norm != 0.0 else xs
            codes, scale = sc.quantize_block(block_xs, factors, constants, random, RULE, 0)
            words = words + (codes,)
            scales = scales + (scale,)
    if RULE.decoded:
        store_decoded_group(q_ptr, words, scales, group[None, :], row64[:, None], blocks, in_row[:, None], RULE)
    else:
        W: tl.constexpr = len(words)
        G: tl.constexpr = len(scales)
        word = group[None, :, None] * W + tl.arange(0, W)[None, None, :]
        inside = in_row[:, None, None] & (word < blocks * (W // G))
        tl.store(q_ptr + row64[:, None, None] * (blocks * (W // G)) + word, pm.join_group(words, R, N), mask=inside)
        block = group[None, :, None] * G + tl.arange(0, G)[None, None, :]
        inside = in_row[:, None, None] & (block < blocks)
        store_scale(scale_ptr, pm.join_group(scales, R, N), row[:, None, None], block, inside, rows, blocks, SWIZZLED)


@triton.jit
def quantize_col_tile(
    i_group,
    i_col,
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    draw_ptr,
    sign_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    stride_c,
    stream,
    first_block,
    blocks_per_row,
    sign_stream,
    constants,
    factors,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """Quantize N groups of C columns along the columns of x; outputs [cols, blocks]."""
    group = i_group + tl.arange(0, N)
    col = i_col + tl.arange(0, C)
    in_col = col < cols
    col64 = col.to(tl.int64)
    xs = load_col_groups(x_ptr, group * RULE.group, rows, col, in_col, stride_r, stride_c, RULE.group)
    if RULE.element != "":
        words, scale = sc.quantize_mxfp8_block(xs, constants, RULE)
        scales = (scale,)
    else:
        if RULE.row_amax:
            factors = sc.tensor_factors(tl.load(amax_ptr + col64, mask=in_col, other=0.0)[None, :], constants)
        if RULE.norm != 0.0:
            xs = rotate_group(xs, sign_ptr, sign_stream, x_ptr.dtype.element_ty == tl.bfloat16, RULE)
        words = ()
        scales = ()
        random = ()
        for g in tl.static_range(RULE.group // 16):
            if RULE.rounding == "stochastic":
                key = pm.draw_words(draw_ptr, stream)
                block = first_block + col64[None, :] * blocks_per_row + (group * (RULE.group // 16) + g)[:, None]
                random = pm.block_words(block, key)
            block_xs = pm.unpack_pairs(xs, g * 16, 16) if RULE.norm != 0.0 else xs
            codes, scale = sc.quantize_block(block_xs, factors, constants, random, RULE, 1)
            words = words + (codes,)
            scales = scales + (scale,)
    if RULE.decoded:
        store_decoded_group(q_ptr, words, scales, group[:, None], col64[None, :], blocks, in_col[None, :], RULE)
    else:
        W: tl.constexpr = len(words)
        G: tl.constexpr = len(scales)
        word = group[:, None, None] * W + tl.arange(0, W)[None, None, :]
        inside = in_col[None, :, None] & (word < blocks * (W // G))
        tl.store(q_ptr + col64[None, :, None] * (blocks * (W // G)) + word, pm.join_group(words, N, C), mask=inside)
        block = group[:, None, None] * G + tl.arange(0, G)[None, None, :]
        inside = in_col[None, :, None] & (block < blocks)
        store_scale(scale_ptr, pm.join_group(scales, N, C), col[None, :, None], block, inside, cols, blocks, SWIZZLED)
