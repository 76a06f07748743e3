"""Transpose packed 16x16 tiles: nibbles and scales move, nothing is rounded (docs/numerics.md section 3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.launch import jit
from halfbyte.kernels.unpack.dequantize import as_words
from halfbyte.layout import ceil_div

# Of a program that moves codes and scales.
TILE_ROWS = 64  # words of 8 rows: 512 rows, 256 contiguous bytes of output
TILE_WORDS = 32  # words of 8 columns: 256 columns, 128 contiguous bytes of input

# Of a program that moves codes alone: whole lines of 128 bytes on both sides, four such programs on an SM.
CODE_ROWS = 32
CODE_WORDS = 32
NUM_WARPS = 8

# Units of scales of a program that moves scales alone: with words of 4 scales, 128 contiguous bytes of output.
SCALE_ROWS = 32
SCALE_COLUMNS = 8

SWAP_BYTES = tl.constexpr("prmt.b32 $0, $2, $3, 0x6240; prmt.b32 $1, $2, $3, 0x7351;")
SWAP_HALVES = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


class Moved(NamedTuple):
    """Codes in words of 8 and scales, as they are and transposed."""

    qdata_ptr: Any
    scale_ptr: Any
    out_ptr: Any
    out_scale_ptr: Any


class Extent(NamedTuple):
    """The logical shape, and words of a row of codes, as they are and transposed."""

    rows: Any
    cols: Any
    words: Any
    out_words: Any


class MovedStrides(NamedTuple):
    """Of the rows of what is Moved, in its elements."""

    qdata: Any
    scale: Any
    out: Any
    out_scale: Any


@triton.jit
def swap_nibbles(a, b):
    """Exchange the odd nibbles of a with the even ones of b: one step of an 8x8 transpose."""
    return (a & 0x0F0F0F0F) | ((b & 0x0F0F0F0F) << 4), ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)


@triton.jit
def permute(a, b, ASSEMBLY: tl.constexpr):
    """Return the results of two byte permutations of int32 words."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,r,r", [a, b], (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def swap_bytes(a, b):
    if not has_ptx():
        return (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8), ((a >> 8) & 0x00FF00FF) | (b & -0x00FF0100)
    return permute(a, b, SWAP_BYTES)


@triton.jit
def swap_halves(a, b):
    if not has_ptx():
        return (a & 0x0000FFFF) | (b << 16), ((a >> 16) & 0x0000FFFF) | (b & -0x00010000)
    return permute(a, b, SWAP_HALVES)


@triton.jit
def load_row(qdata_ptr, qdata_stride, o_8r, row: tl.constexpr, o_word, rows, words, FULL: tl.constexpr):
    """Load row `row` of each group of 8 rows: int32 [TILE_ROWS, TILE_WORDS]; 0 outside."""
    o_row = o_8r * 8 + row
    pointers = qdata_ptr + o_row.to(tl.int64)[:, None] * qdata_stride + o_word[None, :]
    return masked_load(pointers, (o_row < rows)[:, None] & (o_word < words)[None, :], FULL)


@triton.jit
def load_eight(qdata_ptr, qdata_stride, o_8r, o_word, rows, words, FULL: tl.constexpr):
    """Load all rows of each group of 8 as `load_row` does."""
    loaded = ()
    for row in tl.static_range(8):
        loaded = loaded + (load_row(qdata_ptr, qdata_stride, o_8r, row, o_word, rows, words, FULL),)
    return loaded


@triton.jit
def transpose_eight(rows):
    """Return columns of 8 nibbles as words, of a tuple of 8 rows likewise."""
    r0, r1, r2, r3, r4, r5, r6, r7 = rows
    r0, r1, r2, r3 = swap_nibbles(r0, r1) + swap_nibbles(r2, r3)
    r4, r5, r6, r7 = swap_nibbles(r4, r5) + swap_nibbles(r6, r7)
    r0, r2, r1, r3 = swap_bytes(r0, r2) + swap_bytes(r1, r3)
    r4, r6, r5, r7 = swap_bytes(r4, r6) + swap_bytes(r5, r7)
    r0, r4, r1, r5 = swap_halves(r0, r4) + swap_halves(r1, r5)
    r2, r6, r3, r7 = swap_halves(r2, r6) + swap_halves(r3, r7)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def transpose_codes(
    i_row, i_word, moved, extent, strides, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, FULL: tl.constexpr
):
    """Each lane transposes 8x8 nibbles held in 8 words; the tile is turned when it is stored. Outside are zeros.

    FULL: nothing of the tile is outside.
    """
    o_8r = i_row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    o_word = i_word * TILE_WORDS + tl.arange(0, TILE_WORDS)
    p_q, rows, words = moved.qdata_ptr, extent.rows, extent.words
    loaded = load_eight(p_q, strides.qdata, o_8r, o_word, rows, words, FULL)
    r0, r1, r2, r3, r4, r5, r6, r7 = transpose_eight(loaded)
    # One exchange through shared memory turns all eight words: [TILE_ROWS, TILE_WORDS, column].
    even, odd = tl.join(tl.join(r0, r4), tl.join(r2, r6)), tl.join(tl.join(r1, r5), tl.join(r3, r7))
    turned = tl.reshape(tl.join(even, odd), (TILE_ROWS, TILE_WORDS * 8))
    o_col = i_word * (TILE_WORDS * 8) + tl.arange(0, TILE_WORDS * 8)
    p_out = moved.out_ptr + o_col.to(tl.int64)[None, :] * strides.out + o_8r[:, None]
    masked_store(p_out, turned, (o_8r < extent.out_words)[:, None] & (o_col < extent.cols)[None, :], FULL)


@triton.jit
def transpose_tile(i_row, i_word, moved, extent, strides, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr):
    """Transpose TILE_ROWS x TILE_WORDS words and their scales, which may start at any byte."""
    transpose_codes(i_row, i_word, moved, extent, strides, TILE_ROWS, TILE_WORDS, False)
    # Scales: the output's row c, block r is the input's row 16 r, block c // 16.
    o_col = i_word * (TILE_WORDS * 8) + tl.arange(0, TILE_WORDS * 8)
    o_tile = i_row * (TILE_ROWS // 2) + tl.arange(0, TILE_ROWS // 2)
    o_block = i_word * (TILE_WORDS // 2) + tl.arange(0, TILE_WORDS // 2)
    p_scale = moved.scale_ptr + (o_tile * 16).to(tl.int64)[None, :] * strides.scale + o_block[:, None]
    inside = (o_block * 2 < extent.words)[:, None] & (o_tile * 16 < extent.rows)[None, :]
    scale = tl.load(p_scale, mask=inside, other=0)
    scale = tl.broadcast_to(scale[:, None, :], (TILE_WORDS // 2, 16, TILE_ROWS // 2))
    scale = tl.reshape(scale, (TILE_WORDS * 8, TILE_ROWS // 2))
    p_out = moved.out_scale_ptr + o_col.to(tl.int64)[:, None] * strides.out_scale + o_tile[None, :]
    tl.store(p_out, scale, mask=(o_col < extent.cols)[:, None] & (o_tile * 2 < extent.out_words)[None, :])


@triton.jit
def load_scales(pointers, scale_stride, o_tile, k: tl.constexpr, in_blocks, rows, UNIT: tl.constexpr):
    """Load a unit of scales of tile k of each UNIT tiles: [tiles, blocks]; 0 outside."""
    row = (o_tile * UNIT + k) * 16
    inside = (row < rows)[:, None] & in_blocks[None, :]
    return tl.load(pointers + row.to(tl.int64)[:, None] * scale_stride, mask=inside, other=0)


@triton.jit
def transpose_scales(
    i_program, moved, extent, strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr
):
    """Transpose the scales of ROWS x COLUMNS units of UNIT x UNIT tiles, a word or a byte of one each.

    FULL: cols is a multiple of 16.
    """
    rows, cols, scale_stride = extent.rows, extent.cols, strides.scale
    across = tl.cdiv(rows, 16 * UNIT * ROWS)
    o_tile = i_program % across * ROWS + tl.arange(0, ROWS)
    o_block = i_program // across * COLUMNS + tl.arange(0, COLUMNS)
    in_blocks = o_block * (16 * UNIT) < cols
    p_scale = moved.scale_ptr + o_block[None, :]
    r0 = load_scales(p_scale, scale_stride, o_tile, 0, in_blocks, rows, UNIT)
    units = (r0,)
    if UNIT == 4:
        r1 = load_scales(p_scale, scale_stride, o_tile, 1, in_blocks, rows, UNIT)
        r2 = load_scales(p_scale, scale_stride, o_tile, 2, in_blocks, rows, UNIT)
        r3 = load_scales(p_scale, scale_stride, o_tile, 3, in_blocks, rows, UNIT)
        r0, r1 = swap_bytes(r0, r1)
        r2, r3 = swap_bytes(r2, r3)
        r0, r2 = swap_halves(r0, r2)
        r1, r3 = swap_halves(r1, r3)
        units = (r0, r1, r2, r3)
    p_out = moved.out_scale_ptr + o_tile[:, None]
    inside = (o_tile * (16 * UNIT) < rows)[:, None] & in_blocks[None, :]
    for b in tl.static_range(UNIT):
        for c in tl.static_range(16):
            col = (o_block * UNIT + b) * 16 + c
            mask = inside if FULL else inside & (col < cols)[None, :]
            tl.store(p_out + col.to(tl.int64)[None, :] * strides.out_scale, units[b], mask=mask)


@jit(do_not_specialize=("extent.rows", "extent.cols", "strides.scale", "strides.out_scale", "scale_programs"))
def transpose_kernel(
    moved, extent, strides, scale_programs,
    TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    UNIT: tl.constexpr, FULL: tl.constexpr, STACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program transposes TILE_ROWS x TILE_WORDS words, or, spread among these, some scales.

    STACKED: of matrix program_id(1) of those that follow each other.
    """
    overlap.begin(OVERLAP)
    if STACKED:
        matrix = tl.program_id(1).to(tl.int64)
        moved = Moved(
            moved.qdata_ptr + matrix * extent.rows * strides.qdata,
            moved.scale_ptr + matrix * extent.rows * strides.scale,
            moved.out_ptr + matrix * extent.cols * strides.out,
            moved.out_scale_ptr + matrix * extent.cols * strides.out_scale,
        )
    i_program = tl.program_id(0)
    every = tl.num_programs(0) // scale_programs
    i_scale = i_program // every
    if (i_program % every == every - 1) & (i_scale < scale_programs):
        transpose_scales(i_scale, moved, extent, strides, SCALE_ROWS, SCALE_COLUMNS, UNIT, FULL)
    else:
        i_tile = i_program - tl.minimum(i_scale, scale_programs)
        tiles = tl.cdiv(extent.words, TILE_WORDS)
        transpose_codes(i_tile // tiles, i_tile % tiles, moved, extent, strides, TILE_ROWS, TILE_WORDS, FULL)


def transpose(
    qdata: Tensor, block_scale: Tensor, rows: int, cols: int, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Transpose a tensor of 16x16 tiles without rounding, or several.

    Args:
        qdata: uint8 [rows, ceil(cols/16) * 8], or contiguous [E, rows, ceil(cols/16) * 8].
        block_scale: one byte each, [rows, ceil(cols/16)], LINEAR, equal in the rows of a tile; or [E, ...] likewise.
        rows, cols: the logical shape of a matrix.
        into: what to write, contiguous, of the shapes and dtypes of what is returned; None: new memory.

    Returns:
        qdata uint8 [cols, ceil(rows/16) * 8] and block_scale [cols, ceil(rows/16)], or [E, ...].
    """
    tiles, blocks = ceil_div(rows, NVFP4_BLOCK), ceil_div(cols, NVFP4_BLOCK)
    matrices = qdata.shape[:-2]
    if into is None:
        out = torch.empty(*matrices, cols, tiles * 8, dtype=torch.uint8, device=qdata.device)
        out_scale = torch.empty(*matrices, cols, tiles, dtype=block_scale.dtype, device=qdata.device)
    else:
        out, out_scale = into
    if out.numel() == 0:
        return out, out_scale
    words, out_words = as_words(qdata.flatten(0, -2), torch.int32), out.view(torch.int32).flatten(0, -2)
    scale = block_scale.flatten(0, -2)
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    aligned = tiles % 4 == blocks % 4 == scale.stride(0) % 4 == scale.data_ptr() % 4 == 0
    unit, unit_dtype = (4, torch.int32) if aligned else (1, torch.uint8)
    scale, scale_words = (t.view(torch.uint8).view(unit_dtype) for t in (scale, out_scale.flatten(0, -2)))
    scale_programs = ceil_div(tiles, unit * SCALE_ROWS) * ceil_div(blocks, unit * SCALE_COLUMNS)
    tile_programs = ceil_div(out_words.shape[1], CODE_ROWS) * ceil_div(words.shape[1], CODE_WORDS)
    transpose_kernel[(tile_programs + scale_programs, *matrices)](
        Moved(words, scale, out_words, scale_words),
        Extent(rows, cols, words.shape[1], out_words.shape[1]),
        MovedStrides(*(t.stride(0) for t in (words, scale, out_words, scale_words))),
        scale_programs,
        TILE_ROWS=CODE_ROWS,
        TILE_WORDS=CODE_WORDS,
        SCALE_ROWS=SCALE_ROWS,
        SCALE_COLUMNS=SCALE_COLUMNS,
        UNIT=unit,
        FULL=rows % (8 * CODE_ROWS) == cols % (8 * CODE_WORDS) == 0,
        STACKED=bool(matrices),
        **overlap.launch_options(qdata.device),
        num_warps=NUM_WARPS,
    )
    return out, out_scale
