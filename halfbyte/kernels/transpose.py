"""Transpose packed 16x16 tiles: nibbles and scales move, nothing is rounded (docs/numerics.md section 3)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.kernels.dequantize import as_words
from halfbyte.kernels.targets import CompileCase
from halfbyte.layout import ceil_div

TILE_ROWS = 64  # words of 8 rows: 512 rows, 256 contiguous bytes of output
TILE_WORDS = 32  # words of 8 columns: 256 columns, 128 contiguous bytes of input
NUM_WARPS = 8


@triton.jit
def swap_nibbles(a, b):
    """Exchange the odd nibbles of a with the even ones of b: one step of an 8x8 transpose."""
    return (a & 0x0F0F0F0F) | ((b & 0x0F0F0F0F) << 4), ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)


@triton.jit
def swap_bytes(a, b):
    return (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8), ((a >> 8) & 0x00FF00FF) | (b & -0x00FF0100)


@triton.jit
def swap_halves(a, b):
    return (a & 0x0000FFFF) | (b << 16), ((a >> 16) & 0x0000FFFF) | (b & -0x00010000)


@triton.jit
def load_row(qdata_ptr, qdata_stride, o_8r, row: tl.constexpr, o_word, rows, words):
    """Load row `row` of each group of 8 rows: int32 [TILE_ROWS, TILE_WORDS]; 0 outside."""
    o_row = o_8r * 8 + row
    mask = (o_row < rows)[:, None] & (o_word < words)[None, :]
    return tl.load(qdata_ptr + o_row.to(tl.int64)[:, None] * qdata_stride + o_word[None, :], mask=mask, other=0)


@triton.jit
def transpose_tile(
    i_row,
    i_word,
    qdata_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    rows,
    cols,
    words,
    out_words,
    qdata_stride,
    scale_stride,
    out_stride,
    out_scale_stride,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Each lane transposes 8x8 nibbles held in 8 words; the tile is turned when it is stored. Outside are zeros."""
    o_8r = i_row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    o_word = i_word * TILE_WORDS + tl.arange(0, TILE_WORDS)
    r0 = load_row(qdata_ptr, qdata_stride, o_8r, 0, o_word, rows, words)
    r1 = load_row(qdata_ptr, qdata_stride, o_8r, 1, o_word, rows, words)
    r2 = load_row(qdata_ptr, qdata_stride, o_8r, 2, o_word, rows, words)
    r3 = load_row(qdata_ptr, qdata_stride, o_8r, 3, o_word, rows, words)
    r4 = load_row(qdata_ptr, qdata_stride, o_8r, 4, o_word, rows, words)
    r5 = load_row(qdata_ptr, qdata_stride, o_8r, 5, o_word, rows, words)
    r6 = load_row(qdata_ptr, qdata_stride, o_8r, 6, o_word, rows, words)
    r7 = load_row(qdata_ptr, qdata_stride, o_8r, 7, o_word, rows, words)
    r0, r1 = swap_nibbles(r0, r1)
    r2, r3 = swap_nibbles(r2, r3)
    r4, r5 = swap_nibbles(r4, r5)
    r6, r7 = swap_nibbles(r6, r7)
    r0, r2 = swap_bytes(r0, r2)
    r1, r3 = swap_bytes(r1, r3)
    r4, r6 = swap_bytes(r4, r6)
    r5, r7 = swap_bytes(r5, r7)
    r0, r4 = swap_halves(r0, r4)
    r1, r5 = swap_halves(r1, r5)
    r2, r6 = swap_halves(r2, r6)
    r3, r7 = swap_halves(r3, r7)
    # One exchange through shared memory turns all eight words: [TILE_ROWS, TILE_WORDS, column].
    even, odd = tl.join(tl.join(r0, r4), tl.join(r2, r6)), tl.join(tl.join(r1, r5), tl.join(r3, r7))
    turned = tl.reshape(tl.join(even, odd), (TILE_ROWS, TILE_WORDS * 8))
    o_col = i_word * (TILE_WORDS * 8) + tl.arange(0, TILE_WORDS * 8)
    p_out = out_ptr + o_col.to(tl.int64)[None, :] * out_stride + o_8r[:, None]
    tl.store(p_out, turned, mask=(o_8r < out_words)[:, None] & (o_col < cols)[None, :])
    # Scales: the output's row c, block r is the input's row 16 r, block c // 16.
    o_tile = i_row * (TILE_ROWS // 2) + tl.arange(0, TILE_ROWS // 2)
    o_block = i_word * (TILE_WORDS // 2) + tl.arange(0, TILE_WORDS // 2)
    p_scale = scale_ptr + (o_tile * 16).to(tl.int64)[None, :] * scale_stride + o_block[:, None]
    scale = tl.load(p_scale, mask=(o_block * 2 < words)[:, None] & (o_tile * 16 < rows)[None, :], other=0)
    scale = tl.broadcast_to(scale[:, None, :], (TILE_WORDS // 2, 16, TILE_ROWS // 2))
    scale = tl.reshape(scale, (TILE_WORDS * 8, TILE_ROWS // 2))
    p_out = out_scale_ptr + o_col.to(tl.int64)[:, None] * out_scale_stride + o_tile[None, :]
    tl.store(p_out, scale, mask=(o_col < cols)[:, None] & (o_tile * 2 < out_words)[None, :])


@triton.jit(do_not_specialize=("rows", "cols", "scale_stride", "out_scale_stride"))
def transpose_kernel(
    qdata_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    rows,
    cols,
    words,
    out_words,
    qdata_stride,
    scale_stride,
    out_stride,
    out_scale_stride,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """One program transposes TILE_ROWS x TILE_WORDS words."""
    tiles = tl.cdiv(words, TILE_WORDS)
    transpose_tile(
        tl.program_id(0) // tiles,
        tl.program_id(0) % tiles,
        qdata_ptr,
        scale_ptr,
        out_ptr,
        out_scale_ptr,
        rows,
        cols,
        words,
        out_words,
        qdata_stride,
        scale_stride,
        out_stride,
        out_scale_stride,
        TILE_ROWS,
        TILE_WORDS,
    )


def transpose(qdata: Tensor, block_scale: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Transpose a tensor of 16x16 tiles without rounding.

    Args:
        qdata: uint8 [rows, ceil(cols/16) * 8].
        block_scale: one byte each, [rows, ceil(cols/16)], LINEAR, equal in the rows of a tile.
        rows, cols: the logical shape.

    Returns:
        qdata uint8 [cols, ceil(rows/16) * 8] and block_scale [cols, ceil(rows/16)].
    """
    blocks = ceil_div(rows, NVFP4_BLOCK)
    out = torch.empty(cols, blocks * 8, dtype=torch.uint8, device=qdata.device)
    out_scale = torch.empty(cols, blocks, dtype=block_scale.dtype, device=qdata.device)
    if out.numel() == 0:
        return out, out_scale
    words, out_words = as_words(qdata, torch.int32), out.view(torch.int32)
    scale = block_scale if block_scale.stride(1) == 1 else block_scale.contiguous()
    grid = (ceil_div(out_words.shape[1], TILE_ROWS) * ceil_div(words.shape[1], TILE_WORDS),)
    transpose_kernel[grid](
        words,
        scale.view(torch.uint8),
        out_words,
        out_scale.view(torch.uint8),
        rows,
        cols,
        words.shape[1],
        out_words.shape[1],
        words.stride(0),
        scale.stride(0),
        out_words.stride(0),
        out_scale.stride(0),
        TILE_ROWS=TILE_ROWS,
        TILE_WORDS=TILE_WORDS,
        num_warps=NUM_WARPS,
    )
    return out, out_scale


def compile_cases() -> list[CompileCase]:
    """Return the one configuration of `transpose`."""
    arguments = {
        **dict.fromkeys(("qdata_ptr", "out_ptr"), "*i32:16"),
        **dict.fromkeys(("scale_ptr", "out_scale_ptr"), "*u8:16"),
        **dict.fromkeys(("rows", "cols", "words", "out_words"), "i32:16"),
        **dict.fromkeys(("qdata_stride", "scale_stride", "out_stride", "out_scale_stride"), "i32:16"),
        "TILE_ROWS": TILE_ROWS,
        "TILE_WORDS": TILE_WORDS,
    }
    return [CompileCase(transpose_kernel, arguments, num_warps=NUM_WARPS)]
