"""Rearrange block scales between LINEAR and SWIZZLED_32_4_4 (docs/numerics.md section 8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.targets import CompileCase
from halfbyte.layout import ceil_div, swizzled_numel

TILES = 8  # tiles of 128 x 4 scales a program moves: 4 KiB
NUM_WARPS = 4


@triton.jit(do_not_specialize=("rows", "cols"))
def swizzle_kernel(
    scale_ptr,
    out_ptr,
    rows,
    cols,
    linear_stride,
    INVERSE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Move TILES tiles of 128 x 4 scales side by side, in the order of the swizzled buffer."""
    tile_columns = tl.cdiv(cols, 4)
    programs = tl.cdiv(tile_columns, TILES)
    i_row, i_tile = tl.program_id(0) // programs, tl.program_id(0) % programs * TILES
    o = tl.arange(0, TILES * 512)
    tile = i_tile + o // 512
    row = i_row * 128 + (o % 512) // 16 + (o % 16) // 4 * 32
    col = tile * 4 + o % 4
    inside = (row < rows) & (col < cols)
    o_linear = row.to(tl.int64) * linear_stride + col
    o_swizzled = (i_row.to(tl.int64) * tile_columns + i_tile) * 512 + o
    if INVERSE:
        tl.store(out_ptr + o_linear, tl.load(scale_ptr + o_swizzled, mask=inside, other=0), mask=inside)
    else:
        scale = tl.load(scale_ptr + o_linear, mask=inside, other=0)
        tl.store(out_ptr + o_swizzled, scale, mask=tile < tile_columns)


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
    return _launch(linear, out, rows, cols, linear.stride(0), inverse=False)


def unswizzle(block_scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the LINEAR [rows, cols] scales of a SWIZZLED_32_4_4 buffer; equal to `layout.unswizzle`.

    Args:
        block_scale: one-byte dtype [round_up(rows, 128) * round_up(cols, 4)].
        rows, cols: the logical shape.
    """
    assert block_scale.numel() == swizzled_numel(rows, cols), "not the buffer of this shape"
    out = torch.empty(rows, cols, dtype=block_scale.dtype, device=block_scale.device)
    return _launch(block_scale.contiguous(), out, rows, cols, cols, inverse=True)


def _launch(scale: Tensor, out: Tensor, rows: int, cols: int, linear_stride: int, *, inverse: bool) -> Tensor:
    if out.numel() == 0:
        return out
    grid = (ceil_div(rows, SWIZZLE_ROWS) * ceil_div(ceil_div(cols, SWIZZLE_COLS), TILES),)
    swizzle_kernel[grid](
        scale.view(torch.uint8),
        out.view(torch.uint8),
        rows,
        cols,
        linear_stride,
        INVERSE=inverse,
        TILES=TILES,
        num_warps=NUM_WARPS,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Return the configurations of `swizzle` and `unswizzle`."""
    arguments = {
        **dict.fromkeys(("scale_ptr", "out_ptr"), "*u8:16"),
        **dict.fromkeys(("rows", "cols", "linear_stride"), "i32:16"),
        "TILES": TILES,
    }
    return [CompileCase(swizzle_kernel, {**arguments, "INVERSE": i}, num_warps=NUM_WARPS) for i in (False, True)]
