"""quantize(x) and quantize(x.T) from one read of x: both operands that a training step needs of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_ROWS
from halfbyte.kernels.amax.plain import row_col_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import philox
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import both_small, strips
from halfbyte.kernels.quantize.lines import (
    Output,
    allocate,
    divisor,
    is_full,
    is_packed,
    operand_arguments,
    quantize,
)
from halfbyte.kernels.quantize.wide import WIDE
from halfbyte.kernels.unpack.dequantize import decode
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, ceil_div, check_scale_layout, matrix_shape, round_up, swizzle
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, Spec


class Tile(NamedTuple):
    """What one program covers at once, its warps, and `Rule.words`."""

    rows: int
    cols: int
    num_warps: int
    words: int


def tile_for(row: sc.Rule, col: sc.Rule) -> Tile:
    """Return the tile that was fastest on an H200 for a pair of rules, grown to whole groups both ways."""
    if "stochastic" in (row.rounding, col.rounding) or col.group > 16:
        best = Tile(64, 64, 4, 1) if not col.element else Tile(64, 64, 2, 1)
    else:
        best = Tile(64, 64, 2, 2)
    return best._replace(rows=max(best.rows, col.group), cols=max(best.cols, row.group))


def runs_along(row: sc.Rule, col: sc.Rule) -> bool:
    """Say whether `Rule.along` was faster for both of a pair of rules; others were not timed."""
    return row_runs_along(row, col) and col.group == 16


def row_runs_along(row: sc.Rule, col: sc.Rule) -> bool:
    """Say whether `Rule.along` was faster for the rows of whole tiles; MXFP8 columns go through shared memory."""
    plain = all(not (r.candidates or r.row_amax or r.decoded) for r in (row, col)) and not row.element
    return plain and row.group == 16 and (col.group == 16 or col.element != "") and row.packed and row.full


def widened(tile: Tile, row: sc.Rule, col: sc.Rule, cols: int) -> Tile:
    """Return `tile` with twice the columns and warps where that was faster: a store then fills more of a line."""
    timed = row_runs_along(row._replace(full=True), col) and row.rounding == col.rounding == "nearest"
    if not timed or cols % (2 * tile.cols):
        return tile
    return tile._replace(cols=2 * tile.cols, num_warps=2 * tile.num_warps)


LOOPS = ((8192, 2),)
"""(from how many tiles on, tiles of one program at most), where both operands draw and are stored as codes."""


def loop_of(loops: tuple[tuple[int, int], ...], rules: Sequence[sc.Rule | None], row_tiles: int, col_tiles: int) -> int:
    """Return how many tiles beside each other are a program, a divisor of col_tiles; loops: as `LOOPS`, most first."""
    for rule in rules:
        if rule is None or rule.rounding != "stochastic" or rule.row_amax or rule.decoded:
            return 1
    most = next((loop for least, loop in loops if row_tiles * col_tiles >= least), 1)
    return next(loop for loop in range(most, 0, -1) if col_tiles % loop == 0)


VARYING = tuple(f"{side}_{name}" for side in ("row", "col") for name in ("stream", "first_block", "sign_stream")) + (
    "col_tiles",
    "magic",
    "shift",
)


@triton.jit
def quantize_both(
    i_row, i_col, x_ptr, row, col, row_numbers, col_numbers, rows, cols, stride_r, stride_c, row_known, col_known,
    ROW: tl.constexpr, COL: tl.constexpr, SWIZZLED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Quantize TR x TC values both ways, rows first where lanes lie along them: such a read asks for whole lines.

    row, col: pointers to codes, scales, amax, draw and signs.
    row_numbers, col_numbers: blocks, stream, first_block, blocks_per_row, sign_stream and constants.
    row_known, col_known: what a program has already: factors, values and words of the draw, or None.
    """
    for part in tl.static_range(2):
        if (part == 0) == ROW.along:
            quantize_row_tile(
                i_row, i_col // ROW.group, x_ptr, *row, rows, cols, row_numbers[0], stride_r, stride_c,
                row_numbers[1], row_numbers[2], row_numbers[3], row_numbers[4], row_numbers[5],
                ROW, SWIZZLED, TR, TC // ROW.group, *row_known,
            )  # fmt: skip
        else:
            quantize_col_tile(
                i_row // COL.group, i_col, x_ptr, *col, rows, cols, col_numbers[0], stride_r, stride_c,
                col_numbers[1], col_numbers[2], col_numbers[3], col_numbers[4], col_numbers[5],
                COL, SWIZZLED, TR // COL.group, TC, *col_known,
            )  # fmt: skip


@jit(do_not_specialize=VARYING)
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
    magic,
    shift,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    LOOP: tl.constexpr,
):
    """One program quantizes LOOP tiles of TR x TC beside each other both ways, of which it reads each twice.

    The second read comes from the cache. Where both operands draw, as Draws with one base, and are stored as codes,
    keys and factors are computed once for all tiles, and the divisions are chosen once.
    """
    begin(ROW.hardware >= OVERLAP_CAPABILITY)
    outer = pm.divide(tl.program_id(0), magic, shift)
    i_row = outer * TR
    i_col = (tl.program_id(0) - outer * col_tiles) * (TC * LOOP)
    row = (row_q_ptr, row_scale_ptr, row_amax_ptr, row_draw_ptr, row_sign_ptr)
    col = (col_q_ptr, col_scale_ptr, col_amax_ptr, col_draw_ptr, col_sign_ptr)
    row_constants = (row_span, row_floor, row_inverse, row_unit)
    col_constants = (col_span, col_floor, col_inverse, col_unit)
    row_numbers = (row_blocks, row_stream, row_first_block, row_blocks_per_row, row_sign_stream, row_constants)
    col_numbers = (col_blocks, col_stream, col_first_block, col_blocks_per_row, col_sign_stream, col_constants)
    DRAWN: tl.constexpr = ROW.rounding == "stochastic" and COL.rounding == "stochastic"
    if DRAWN and not (ROW.row_amax or COL.row_amax or ROW.decoded or COL.decoded):
        base, row_amax, col_amax = philox.load_base(row_draw_ptr), tl.load(row_amax_ptr), tl.load(col_amax_ptr)
        row_draw, col_draw = philox.words_of(base, row_stream), philox.words_of(base, col_stream)
        if sc.is_regular(row_amax) & sc.is_regular(col_amax):
            row_factors = sc.regular_factors(row_amax, row_constants)
            col_factors = sc.regular_factors(col_amax, col_constants)
            for step in range(LOOP):
                quantize_both(
                    i_row, i_col + step * TC, x_ptr, row, col, row_numbers, col_numbers, rows, cols, stride_r, stride_c,
                    (row_factors, None, row_draw), (col_factors, None, col_draw), ROW, COL, SWIZZLED, TR, TC,
                )  # fmt: skip
        else:
            for step in range(LOOP):
                quantize_both(
                    i_row, i_col + step * TC, x_ptr, row, col, row_numbers, col_numbers, rows, cols, stride_r, stride_c,
                    (None, None, row_draw), (None, None, col_draw), ROW, COL, SWIZZLED, TR, TC,
                )  # fmt: skip
    else:
        quantize_both(
            i_row, i_col, x_ptr, row, col, row_numbers, col_numbers, rows, cols, stride_r, stride_c,
            (None, None, None), (None, None, None), ROW, COL, SWIZZLED, TR, TC,
        )  # fmt: skip


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
    transient: tuple[bool, bool] = (False, False),
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x, row_spec), quantize(x.T, col_spec)); equal 16x16 specs share one quantization.

    Args:
        x: bf16, fp16 or fp32 [..., K]; flattened to a matrix first.
        draw: the row's random bytes; the column uses the next offset.
        transient: whether row and col are returned decoded: bf16 element * block_scale as qdata, and no scales.

    Returns:
        Blocks of [rows, K] and of [K, rows]; None where the spec is None.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if row_spec is not None and row_spec == col_spec and row_spec.is_tile:
        return _tiles(x, row_spec, draw, row_amax, scale_layout, transient)
    common = {"sign_draw": sign_draw, "scale_layout": scale_layout}
    col_draw = draw.next() if draw is not None else None
    if row_amax is None and col_amax is None and both_small.fits(x, row_spec, col_spec, scale_layout):
        return both_small.quantize(x, (row_spec, col_spec), (draw, col_draw), sign_draw, transient)
    row_amax, col_amax = _complete_amaxes(x, (row_spec, col_spec), (row_amax, col_amax), sign_draw)
    apart = row_spec is None or col_spec is None or max(row_spec.alignment, col_spec.alignment) >= WIDE
    if apart or x.numel() == 0 or x.stride(1) != 1:
        row = col = None
        if row_spec is not None:
            row = quantize(x, row_spec, draw=draw, amax=row_amax, decoded=transient[0], **common)
        if col_spec is not None:
            col = quantize(x.T, col_spec, draw=col_draw, amax=col_amax, decoded=transient[1], **common)
        return row, col
    row = allocate(x.shape, row_spec, scale_layout, x.device, transient[0])
    col = allocate(x.T.shape, col_spec, scale_layout, x.device, transient[1])
    hardware = sc.hardware_of(x.device)
    _launch(
        x,
        sc.rule_of(row_spec, hardware),
        sc.rule_of(col_spec, hardware),
        (row, col),
        operand_arguments(row_spec, row, row_amax, draw, sign_draw),
        operand_arguments(col_spec, col, col_amax, col_draw, sign_draw),
    )
    return Blocks(row.qdata, row.block_scale, row_amax), Blocks(col.qdata, col.block_scale, col_amax)


def _tiles(
    x: Tensor,
    spec: Spec,
    draw: Draw | None,
    amax: Tensor | None,
    scale_layout: str,
    transient: tuple[bool, bool],
) -> tuple[Blocks, Blocks]:
    row = strips.quantize(x, spec, draw=draw, amax=amax)
    col = Blocks(*transpose(row.qdata, row.block_scale, *x.shape), row.amax)
    sides = []
    for blocks, cols, is_transient in ((row, x.shape[1], transient[0]), (col, x.shape[0], transient[1])):
        if is_transient:
            blocks = Blocks(decode(blocks, spec, cols).values, blocks.block_scale.new_empty(0), blocks.amax)
        elif scale_layout != LINEAR:
            blocks = blocks._replace(block_scale=swizzle(blocks.block_scale))
        sides.append(blocks)
    return sides[0], sides[1]


def _complete_amaxes(
    x: Tensor,
    specs: tuple[Spec | None, Spec | None],
    given: tuple[Tensor | None, Tensor | None],
    sign_draw: Draw | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the amaxes that were not given, both from one read if possible; empty for MXFP8, None without a spec."""
    needed = [spec if amax is None else None for spec, amax in zip(specs, given, strict=True)]
    computed = row_col_amax(x, *needed, sign_draw)
    amaxes: list[Tensor | None] = []
    for spec, old, new in zip(specs, given, computed, strict=True):
        if isinstance(spec, MXFP8):
            amaxes.append(torch.empty(0, dtype=torch.float32, device=x.device))
        else:
            amaxes.append(new if old is None else old)
    return amaxes[0], amaxes[1]


def _launch(
    x: Tensor,
    row: sc.Rule,
    col: sc.Rule,
    outputs: tuple[Output, Output],
    row_arguments: tuple,
    col_arguments: tuple,
) -> None:
    swizzled = outputs[0].swizzled or outputs[1].swizzled
    row, col = (
        rule._replace(decoded=out.decoded, packed=is_packed(x) and not rule.tile)
        for rule, out in zip((row, col), outputs, strict=True)
    )
    tile = tile_for(row, col) if swizzled else widened(tile_for(row, col), row, col, x.shape[1])
    tile_rows, tile_cols = tile.rows, tile.cols
    # Swizzled scales have padding that is zeroed: up to 128 rows, or four blocks of at most 32.
    rows, cols = (round_up(n, SWIZZLE_ROWS) if swizzled else n for n in x.shape)
    full = (rows, cols) == x.shape and is_full(x, outputs[0], row, (tile_rows, tile_cols // row.group))
    full = full and is_full(x.T, outputs[1], col, (tile_cols, tile_rows // col.group))
    row, col = (rule._replace(full=full, words=tile.words) for rule in (row, col))
    row_along, along = row_runs_along(row, col) and not swizzled, runs_along(row, col) and not swizzled
    row, col = row._replace(along=row_along), col._replace(along=along)
    row_pointers, row_numbers, row_constants = row_arguments
    col_pointers, col_numbers, col_constants = col_arguments
    col_tiles, row_tiles = ceil_div(cols, tile_cols), ceil_div(rows, tile_rows)
    loop = loop_of(LOOPS, (row, col), row_tiles, col_tiles)
    col_tiles //= loop
    quantize_row_col_kernel[(row_tiles * col_tiles,)](
        x,
        *row_pointers,
        *col_pointers,
        *x.shape,
        outputs[0].blocks,
        outputs[1].blocks,
        *x.stride(),
        *row_numbers,
        *col_numbers,
        *row_constants,
        *col_constants,
        *divisor(col_tiles),
        ROW=row,
        COL=col,
        SWIZZLED=swizzled,
        TR=tile_rows,
        TC=tile_cols,
        LOOP=loop,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
        **placed_early(row.hardware),
    )
