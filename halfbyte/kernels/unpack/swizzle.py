"""Rearrange block scales between LINEAR and SWIZZLED_32_4_4 (docs/numerics.md section 8)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div, swizzled_numel

TILES = 8  # tiles of 128 x 4 scales a program moves: 4 KiB, whole 32-byte sectors of the linear rows
NUM_WARPS = 4


@jit(do_not_specialize=("rows", "cols"))
def swizzle_kernel(
    linear_ptr,
    words_ptr,
    rows,
    cols,
    linear_stride,
    INVERSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Move TILES tiles of 128 x 4 scales side by side; one int32 word holds the 4 scales of a row of a tile.

    ALIGNED: linear_ptr is int32 too, its rows whole words; else bytes.
    """
    tile_columns = tl.cdiv(cols, 4)
    programs = tl.cdiv(tile_columns, TILES)
    i_row, i_tile = tl.program_id(0) // programs, tl.program_id(0) % programs * TILES
    o = tl.arange(0, TILES * 128)
    # In the order of what is stored: scattered stores cost more than scattered loads.
    tile = o % TILES if INVERSE else o // 128
    within = o // TILES if INVERSE else (o % 128) // 4 + o % 4 * 32
    p_words = words_ptr + (i_row.to(tl.int64) * tile_columns + i_tile + tile) * 128 + within % 32 * 4 + within // 32
    tile += i_tile
    row = i_row * 128 + within
    in_tile = tile < tile_columns
    in_rows = in_tile & (row < rows)
    p_linear = linear_ptr + row.to(tl.int64) * linear_stride + (tile if ALIGNED else tile * 4)
    if INVERSE:
        word = tl.load(p_words, mask=in_rows, other=0)
        if ALIGNED:
            tl.store(p_linear, word, mask=in_rows)
        else:
            for byte in tl.static_range(4):
                tl.store(p_linear + byte, (word >> (8 * byte)).to(tl.uint8), mask=in_rows & (tile * 4 + byte < cols))
    else:
        if ALIGNED:
            word = tl.load(p_linear, mask=in_rows, other=0)
        else:
            word = tl.zeros((TILES * 128,), tl.int32)
            for byte in tl.static_range(4):
                scale = tl.load(p_linear + byte, mask=in_rows & (tile * 4 + byte < cols), other=0)
                word |= scale.to(tl.int32) << (8 * byte)
        tl.store(p_words, word, mask=in_tile)


def swizzle(block_scale: Tensor) -> Tensor:
    """Rearrange LINEAR block scales into the SWIZZLED_32_4_4 buffer; equal to `layout.swizzle`.

    Args:
        block_scale: one-byte dtype [rows, cols].

    Returns:
        Same dtype [round_up(rows, 128) * round_up(cols, 4)], zeros in the padding.
    """
    rows, cols = block_scale.shape
    linear = block_scale if block_scale.stride(1) == 1 or cols == 0 else block_scale.contiguous()
    out = torch.empty(swizzled_numel(rows, cols), dtype=block_scale.dtype, device=block_scale.device)
    _launch(linear, out, inverse=False)
    return out


def unswizzle(block_scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the LINEAR [rows, cols] scales of a SWIZZLED_32_4_4 buffer; equal to `layout.unswizzle`.

    Args:
        block_scale: one-byte dtype [round_up(rows, 128) * round_up(cols, 4)].
        rows, cols: the logical shape.
    """
    assert block_scale.numel() == swizzled_numel(rows, cols), "not the buffer of this shape"
    out = torch.empty(rows, cols, dtype=block_scale.dtype, device=block_scale.device)
    _launch(out, block_scale if block_scale.data_ptr() % 4 == 0 else block_scale.clone(), inverse=True)
    return out


def _launch(linear: Tensor, swizzled: Tensor, *, inverse: bool) -> None:
    """Move scales between linear [rows, cols], any row stride, and the buffer."""
    rows, cols = linear.shape
    if linear.numel() == 0:
        return
    linear, swizzled = linear.view(torch.uint8), swizzled.view(torch.uint8)
    aligned = cols % 4 == linear.stride(0) % 4 == linear.data_ptr() % 4 == 0
    linear = linear.view(torch.int32) if aligned else linear
    assert swizzled.data_ptr() % 4 == 0, "the buffer does not start on a word"
    grid = (ceil_div(rows, SWIZZLE_ROWS) * ceil_div(ceil_div(cols, SWIZZLE_COLS), TILES),)
    swizzle_kernel[grid](
        linear,
        swizzled.view(torch.int32),
        rows,
        cols,
        linear.stride(0),
        INVERSE=inverse,
        ALIGNED=aligned,
        TILES=TILES,
        num_warps=NUM_WARPS,
    )
