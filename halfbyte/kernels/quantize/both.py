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
from halfbyte.kernels.device.operands import StridedMatrix, WrittenOperand, arguments_of_both, varying
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.device.turns import quantize_columns_in_turn
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import both_small, both_tiles, one
from halfbyte.kernels.quantize.both_route import Pair, choose_pair
from halfbyte.kernels.quantize.lines import output_of, written
from halfbyte.kernels.quantize.route import APART, SHARED
from halfbyte.kernels.quantize.strips_route import is_packed
from halfbyte.kernels.route import Choice
from halfbyte.kernels.unpack.dequantize import decode
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, Operand, check_scale_layout, matrix_shape, swizzle
from halfbyte.sides import Side


@triton.jit
def quantize_both(
    i_row, i_col, x, row, col, row_known, col_known, ROW: tl.constexpr, COL: tl.constexpr, SWIZZLED: tl.constexpr,
    TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Quantize TR x TC values both ways, rows first where lanes lie along them: such a read asks for whole lines.

    x: a StridedMatrix. row, col: a WrittenOperand each.
    row_known, col_known: what a program has already: factors, values and words of the draw, or None.
    """
    for part in tl.static_range(2):
        if (part == 0) == ROW.along:
            quantize_row_tile(i_row, i_col // ROW.group, x, row, ROW, SWIZZLED, TR, TC // ROW.group, *row_known)
        else:
            quantize_col_tile(i_row // COL.group, i_col, x, col, COL, SWIZZLED, TR // COL.group, TC, *col_known)


@triton.jit
def quantize_in_turns(
    i_row, i_col, x, row, col, ROW: tl.constexpr, COL: tl.constexpr, SWIZZLED: tl.constexpr, TR: tl.constexpr,
    TC: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Quantize TR x TC values both ways; of a side with candidates a thread has one block a turn, TURNS of rows."""
    if len(ROW.candidates) > 0:
        R: tl.constexpr = TR // TURNS
        factors = sc.operand_factors(row.to.amax_ptr, row.constants, ROW)
        for turn in range(TURNS):
            i_here = i_row + turn * R
            quantize_row_tile(i_here, i_col // ROW.group, x, row, ROW, SWIZZLED, R, TC // ROW.group, factors)
    else:
        quantize_row_tile(i_row, i_col // ROW.group, x, row, ROW, SWIZZLED, TR, TC // ROW.group)
    if len(COL.candidates) > 0:
        quantize_columns_in_turn(i_row // COL.group, i_col, x, col, COL, SWIZZLED, TR // COL.group, TC)
    else:
        quantize_col_tile(i_row // COL.group, i_col, x, col, COL, SWIZZLED, TR // COL.group, TC)


@triton.jit
def quantize_run(
    i_row, i_col, x, row, col, row_known, col_known, ROW: tl.constexpr, COL: tl.constexpr, SWIZZLED: tl.constexpr,
    TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Quantize LOOP tiles beside each other both ways."""
    for step in range(LOOP):
        i_step = i_col + step * TC
        quantize_both(i_row, i_step, x, row, col, row_known, col_known, ROW, COL, SWIZZLED, TR, TC)


@jit(do_not_specialize=(*varying("places.row", "places.col"), "col_tiles"))
def quantize_row_col_kernel(
    x_ptr, mean_ptr, to, sizes, places, constants, col_tiles, ROW: tl.constexpr, COL: tl.constexpr,
    SWIZZLED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, LOOP: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program quantizes LOOP tiles of TR x TC beside each other both ways, of which it reads each twice.

    mean_ptr: bf16 [cols] that is taken off a packed x first, or None.
    The second read comes from the cache. What an amax gives is computed once for all tiles, and one branch decides
    which divisions they need; where both operands draw, as Draws with one base, they share what they load of it.
    """
    begin(ROW.hardware >= OVERLAP_CAPABILITY)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c, mean_ptr)
    row = WrittenOperand(to.row, sizes.blocks.row, places.row, constants.row)
    col = WrittenOperand(to.col, sizes.blocks.col, places.col, constants.col)
    outer = pm.divide(tl.program_id(0), col_tiles)
    i_row = outer * TR
    i_col = (tl.program_id(0) - outer * col_tiles.count) * (TC * LOOP)
    DRAWN: tl.constexpr = ROW.drawn and COL.drawn
    CODES: tl.constexpr = ROW.decoded == ROW.values and COL.decoded == COL.values  # or their values, made in registers
    PLAIN: tl.constexpr = not (ROW.row_amax or COL.row_amax or ROW.element or COL.element)
    # Of others the code would be as long again, and compile as long.
    BRANCHES: tl.constexpr = DRAWN or (
        ROW.joined and COL.joined and ROW.full and not (ROW.candidates or COL.candidates)
    )
    if TURNS > 0:
        quantize_in_turns(i_row, i_col, x, row, col, ROW, COL, SWIZZLED, TR, TC, TURNS)
    elif CODES and PLAIN and BRANCHES:
        loaded, row_draw, col_draw = None, None, None
        if DRAWN:
            base = philox.load_base(row.to.draw_ptr)
            row_draw, col_draw = philox.words_of(base, row.places.stream), philox.words_of(base, col.places.stream)
        elif ROW.along and LOOP == 1:
            loaded = read_row_tile(i_row, i_col // ROW.group, x, ROW, TR, TC // ROW.group)
        row_amax, col_amax = tl.load(row.to.amax_ptr), tl.load(col.to.amax_ptr)
        regular = sc.is_regular(row_amax, row.constants) & sc.is_regular(col_amax, col.constants)
        low_row_draw, low_col_draw = row_draw, col_draw
        if DRAWN:
            regular &= philox.are_low(row.places.first_block, row.places.blocks_per_row, x.rows)
            regular &= philox.are_low(col.places.first_block, col.places.blocks_per_row, x.cols)
            low_row_draw, low_col_draw = philox.low_key(row_draw), philox.low_key(col_draw)
        if regular:
            row_factors = sc.regular_factors(row_amax, row.constants)
            col_factors = sc.regular_factors(col_amax, col.constants)
            of_row, of_col = (row_factors, loaded, low_row_draw), (col_factors, None, low_col_draw)
            quantize_run(i_row, i_col, x, row, col, of_row, of_col, ROW, COL, SWIZZLED, TR, TC, LOOP)
        else:  # names of its own: a variable that both branches assign has one type
            row_known, col_known = (None, loaded, row_draw), (None, None, col_draw)
            quantize_run(i_row, i_col, x, row, col, row_known, col_known, ROW, COL, SWIZZLED, TR, TC, LOOP)
    else:
        known = (None, None, None)
        quantize_both(i_row, i_col, x, row, col, known, known, ROW, COL, SWIZZLED, TR, TC)


def quantize_row_col(x: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
    """Quantize both orientations; a transient one is returned decoded, as Blocks(values bf16, no scales, amax)."""
    if row is not None and col is not None:
        return quantize_rows_and_cols(x, row, col)
    # What a forward that nobody differentiates asks for.
    of_row = None if row is None else one.quantize_side(x, row)
    return of_row, None if col is None else one.quantize_side(x.reshape(matrix_shape(x.shape)).T, col)


def quantize_rows_and_cols(x: Tensor, row: Side, col: Side) -> tuple[Blocks, Blocks]:
    """Return (quantize(x), quantize(x.T)); equal 16x16 specs share one quantization.

    Args:
        x: bf16, fp16 or fp32 [..., K]; flattened to a matrix first.
        row, col: what is asked for, scales in one layout; a transient one is returned decoded: bf16
            element * block_scale as qdata, and no scales.

    Returns:
        Blocks of [rows, K] and of [K, rows]; the values of the latter lie as x does where `lies_as_x` says so.
    """
    check_scale_layout(row.scale_layout)
    assert row.scale_layout == col.scale_layout, "one kernel stores scales in one layout"
    x = x.reshape(matrix_shape(x.shape))
    if Pair(x, row, col).col_lies_as_x and not is_packed(x):  # what it returns is promised by the shape alone
        x = x.clone(memory_format=torch.contiguous_format)
    choice = choose_pair(Pair(x, row, col))
    if choice.kernel == "quantize_tiles_both_kernel":
        return both_tiles.quantize_tiles_both(choice)
    if choice.kernel == SHARED:
        return _tiles(x, row, col)
    if choice.kernel == "quantize_row_col_small_kernel":
        return both_small.quantize_both_small(choice)
    row, col = _with_amaxes(x, row, col)
    if choice.kernel == APART:
        of_row, of_col = one.quantize_side(x, row, APART), one.quantize_side(x.T, col, APART)
        if Pair(x, row, col).col_lies_as_x:  # as promised, though there are none
            of_col = of_col._replace(qdata=of_col.qdata.new_empty(of_col.qdata.shape[::-1]).T)
        return of_row, of_col
    return launch_both(choice, x, None, row, col)


def _tiles(x: Tensor, row: Side, col: Side) -> tuple[Blocks, Blocks]:
    codes = one.quantize_side(x, Side(row.spec, row.draw, amax=row.amax), SHARED)
    turned = Blocks(*transpose(codes.qdata, codes.block_scale, *x.shape), codes.amax)
    both = []
    for blocks, side, cols in ((codes, row, x.shape[1]), (turned, col, x.shape[0])):
        if side.transient:
            values = decode(Operand(blocks, side.spec, cols)).values
            blocks = blocks.decoded(values)
        elif side.scale_layout != LINEAR:
            blocks = blocks._replace(block_scale=swizzle(blocks.block_scale))
        both.append(blocks)
    return both[0], both[1]


def _with_amaxes(x: Tensor, row: Side, col: Side) -> tuple[Side, Side]:
    """Return both sides with the amaxes that were not given, from one read if possible; empty for MXFP8."""
    needed = [side.spec if side.amax is None else None for side in (row, col)]
    known = []
    for side, amax in zip((row, col), row_col_amax(x, *needed, row.sign_draw), strict=True):
        if not side.spec.format.has_amax:
            amax = torch.empty(0, dtype=torch.float32, device=x.device)
        elif side.amax is not None:
            amax = side.amax
        known.append(side._replace(amax=amax))
    return known[0], known[1]


def launch_both(choice: Choice, x: Tensor, mean: Tensor | None, row: Side, col: Side) -> tuple[Blocks, Blocks]:
    """Quantize both ways by one kernel, with the amaxes that the sides hold; mean: as the kernel takes it."""
    outputs = output_of(x, row), output_of(x.T, col, turned=choice.constants["COL"].values)
    operands = (written(side, out, side.amax) for side, out in zip((row, col), outputs, strict=True))
    x, *numbers = arguments_of_both(x, *operands)
    quantize_row_col_kernel[choice.grid](
        x,
        mean,
        *numbers,
        pm.Divisor.of(choice.facts),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["ROW"].hardware),
    )
    of_row, of_col = (
        Blocks(out.qdata, out.block_scale, side.amax) for out, side in zip(outputs, (row, col), strict=True)
    )
    return of_row, of_col
