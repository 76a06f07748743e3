"""quantize(x) and quantize(x.T) from one read of x: both operands that a training step needs of a tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import row_col_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import philox
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import both_small, one
from halfbyte.kernels.quantize.both_route import Pair, pair
from halfbyte.kernels.quantize.lines import allocate, divisor, operand_arguments
from halfbyte.kernels.quantize.route import APART, SHARED, One
from halfbyte.kernels.route import Choice
from halfbyte.kernels.unpack.dequantize import decode
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, swizzle
from halfbyte.spec import MXFP8

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


def quantize(request: Pair) -> tuple[Blocks, Blocks]:
    """Return (quantize(x, row), quantize(x.T, col)); equal 16x16 specs share one quantization.

    Returns:
        Blocks of [rows, K] and of [K, rows]; a transient one holds bf16 element * block_scale as qdata, and no scales.
    """
    choice = pair(request)
    if choice.kernel == SHARED:
        return _tiles(request)
    if choice.kernel == "quantize_row_col_small_kernel":
        return both_small.quantize(choice)
    amaxes = _complete_amaxes(request)
    sides = request.side(0, amaxes[0]), request.side(1, amaxes[1])
    if choice.kernel == APART:
        return one.quantize(sides[0]), one.quantize(sides[1])
    return _launch(choice, sides)


def _tiles(request: Pair) -> tuple[Blocks, Blocks]:
    spec, shape = request.row, request.x.shape
    row = one.quantize(One(request.x, spec, request.draw, None, request.row_amax, of=SHARED))
    col = Blocks(*transpose(row.qdata, row.block_scale, *shape), row.amax)
    sides = []
    for blocks, cols, is_transient in ((row, shape[1], request.transient[0]), (col, shape[0], request.transient[1])):
        if is_transient:
            blocks = Blocks(decode(blocks, spec, cols).values, blocks.block_scale.new_empty(0), blocks.amax)
        elif request.scale_layout != LINEAR:
            blocks = blocks._replace(block_scale=swizzle(blocks.block_scale))
        sides.append(blocks)
    return sides[0], sides[1]


def _complete_amaxes(request: Pair) -> tuple[Tensor | None, Tensor | None]:
    """Compute the amaxes that were not given, both from one read if possible; empty for MXFP8."""
    specs, given = (request.row, request.col), (request.row_amax, request.col_amax)
    needed = [spec if amax is None else None for spec, amax in zip(specs, given, strict=True)]
    computed = row_col_amax(request.x, *needed, request.sign_draw)
    amaxes: list[Tensor | None] = []
    for spec, old, new in zip(specs, given, computed, strict=True):
        if isinstance(spec, MXFP8):
            amaxes.append(torch.empty(0, dtype=torch.float32, device=request.x.device))
        else:
            amaxes.append(new if old is None else old)
    return amaxes[0], amaxes[1]


def _launch(choice: Choice, sides: tuple[One, One]) -> tuple[Blocks, Blocks]:
    x = sides[0].x
    row, col = (allocate(side.x.shape, side.spec, side.scale_layout, x.device, side.decoded) for side in sides)
    arguments = [
        operand_arguments(side.spec, out, side.amax, side.draw, side.sign_draw)
        for side, out in zip(sides, (row, col), strict=True)
    ]
    pointers, numbers, constants = zip(*arguments, strict=True)
    quantize_row_col_kernel[choice.grid](
        x,
        *pointers[0],
        *pointers[1],
        *x.shape,
        row.blocks,
        col.blocks,
        *x.stride(),
        *numbers[0],
        *numbers[1],
        *constants[0],
        *constants[1],
        *divisor(choice.facts),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["ROW"].hardware),
    )
    row_side, col_side = sides
    return Blocks(row.qdata, row.block_scale, row_side.amax), Blocks(col.qdata, col.block_scale, col_side.amax)
