"""quantize(x) and quantize(x.T) from one read of x: both operands that a training step needs of a tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels import scaling as sc
from halfbyte.kernels.amax import row_col_amax
from halfbyte.kernels.quantize import (
    allocate,
    hardware_fp8,
    operand_arguments,
    quantize,
)
from halfbyte.kernels.tiles import quantize_col_tile, quantize_row_tile
from halfbyte.kernels.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, ceil_div, check_scale_layout, matrix_shape, swizzle
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, Spec

TILES = (128, 128, 8)  # rows, columns and warps of a program: whole rotation groups and tiles of swizzled scales


VARYING = tuple(f"{side}_{name}" for side in ("row", "col") for name in ("stream", "first_block", "sign_stream")) + ("col_tiles",)


@triton.jit(do_not_specialize=VARYING)
def quantize_row_col_kernel(
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
    rows,
    cols,
    row_blocks,
    col_blocks,
    stride_r,
    stride_c,
    row_stream,
    row_first_block,
    row_blocks_per_row,
    row_sign_stream,
    col_stream,
    col_first_block,
    col_blocks_per_row,
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
    SWIZZLED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """One program quantizes a TR x TC tile both ways; its second read of the tile comes from the cache."""
    i_row = tl.program_id(0) // col_tiles * TR
    i_col = tl.program_id(0) % col_tiles * TC
    quantize_col_tile(
        i_row // COL.group,
        i_col,
        x_ptr,
        col_q_ptr,
        col_scale_ptr,
        col_amax_ptr,
        col_draw_ptr,
        col_sign_ptr,
        rows,
        cols,
        col_blocks,
        stride_r,
        stride_c,
        col_stream,
        col_first_block,
        col_blocks_per_row,
        col_sign_stream,
        (col_span, col_floor, col_inverse, col_unit),
        COL,
        SWIZZLED,
        TR // COL.group,
        TC,
    )
    quantize_row_tile(
        i_row,
        i_col // ROW.group,
        x_ptr,
        row_q_ptr,
        row_scale_ptr,
        row_amax_ptr,
        row_draw_ptr,
        row_sign_ptr,
        rows,
        cols,
        row_blocks,
        stride_r,
        stride_c,
        row_stream,
        row_first_block,
        row_blocks_per_row,
        row_sign_stream,
        (row_span, row_floor, row_inverse, row_unit),
        ROW,
        SWIZZLED,
        TR,
        TC // ROW.group,
    )


def quantize_row_col(
    x: Tensor,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    scale_layout: str = LINEAR,
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x, row_spec), quantize(x.T, col_spec)); equal 16x16 specs share one quantization.

    Args:
        x: bf16, fp16 or fp32 [..., K]; flattened to a matrix first.
        draw: the row's random bytes; the column uses the next offset.

    Returns:
        Blocks of [rows, K] and of [K, rows]; None where the spec is None.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if row_spec is not None and row_spec == col_spec and row_spec.is_tile:
        return _tiles(x, row_spec, draw, row_amax, scale_layout)
    common = {"sign_draw": sign_draw, "scale_layout": scale_layout}
    col_draw = draw.next() if draw is not None else None
    row_amax, col_amax = _complete_amaxes(x, (row_spec, col_spec), (row_amax, col_amax), sign_draw)
    if row_spec is None or col_spec is None or x.numel() == 0 or x.stride(1) != 1:
        row = quantize(x, row_spec, draw=draw, amax=row_amax, **common) if row_spec is not None else None
        col = quantize(x.T, col_spec, draw=col_draw, amax=col_amax, **common) if col_spec is not None else None
        return row, col
    row = allocate(x.shape, row_spec, scale_layout, x.device)
    col = allocate(x.T.shape, col_spec, scale_layout, x.device)
    _launch(
        x,
        (row_spec, col_spec),
        row.swizzled,
        operand_arguments(row_spec, row, row_amax, draw, sign_draw),
        operand_arguments(col_spec, col, col_amax, col_draw, sign_draw),
        (row.blocks, col.blocks),
    )
    return Blocks(row.qdata, row.block_scale, row_amax), Blocks(col.qdata, col.block_scale, col_amax)


def _tiles(
    x: Tensor, spec: Spec, draw: Draw | None, amax: Tensor | None, scale_layout: str
) -> tuple[Blocks, Blocks]:
    row = quantize(x, spec, draw=draw, amax=amax)
    col = Blocks(*transpose(row.qdata, row.block_scale, *x.shape), row.amax)
    if scale_layout == LINEAR:
        return row, col
    return row._replace(block_scale=swizzle(row.block_scale)), col._replace(block_scale=swizzle(col.block_scale))


def _complete_amaxes(
    x: Tensor, specs: tuple[Spec | None, Spec | None], given: tuple[Tensor | None, Tensor | None], sign_draw: Draw | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the amaxes that were not given, both from one read if possible; empty for MXFP8, None without a spec."""
    needed = [spec if amax is None else None for spec, amax in zip(specs, given, strict=True)]
    computed = row_col_amax(x, *needed, sign_draw)
    return tuple(
        torch.empty(0, dtype=torch.float32, device=x.device) if isinstance(spec, MXFP8) else old if old is not None else new
        for spec, old, new in zip(specs, given, computed, strict=True)
    )


def _launch(
    x: Tensor, specs: tuple[Spec, Spec], swizzled: bool, row_arguments: tuple, col_arguments: tuple, blocks: tuple[int, int]
) -> None:
    hardware = hardware_fp8(x.device)
    tile_rows, tile_cols, num_warps = TILES
    col_tiles = ceil_div(x.shape[1], tile_cols)
    row_pointers, row_numbers, row_constants = row_arguments
    col_pointers, col_numbers, col_constants = col_arguments
    quantize_row_col_kernel[(ceil_div(x.shape[0], tile_rows) * col_tiles,)](
        x,
        *row_pointers,
        *col_pointers,
        *x.shape,
        *blocks,
        *x.stride(),
        *row_numbers,
        *col_numbers,
        *row_constants,
        *col_constants,
        col_tiles,
        ROW=sc.rule_of(specs[0], hardware),
        COL=sc.rule_of(specs[1], hardware),
        SWIZZLED=swizzled,
        TR=tile_rows,
        TC=tile_cols,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
