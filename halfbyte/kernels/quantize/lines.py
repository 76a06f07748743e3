"""Quantize to NVFP4 or MXFP8 in one read of the input: scales, codes and layout in one kernel (docs/numerics.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.operands import Places, Pointers, StridedMatrix, WrittenOperand, arguments_of, varying
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.quick_tiles import tile_factors
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.device.turns import gather_row_tile, store_gathered
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import neighbours, wide
from halfbyte.kernels.quantize.route import Lines, OneSide
from halfbyte.kernels.route import Choice
from halfbyte.layout import LINEAR, Blocks, round_up, stored_shapes
from halfbyte.sides import Side

VARYING = (*varying("places"), "tiles")


@jit(do_not_specialize=VARYING)
def quantize_rows_kernel(
    x_ptr, to, sizes, places, constants, tiles, RULE: tl.constexpr, SWIZZLED: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, LOOP: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """One program quantizes LOOP tiles of R rows and N groups, beside each other or, DOWN, below each other."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    NEXT_ROW: tl.constexpr = R if DOWN else 0
    NEXT_GROUP: tl.constexpr = 0 if DOWN else N
    outer = pm.divide(tl.program_id(0), tiles)
    i_row = outer * (R + (LOOP - 1) * NEXT_ROW)
    i_group = (tl.program_id(0) - outer * tiles.count) * (N + (LOOP - 1) * NEXT_GROUP)
    loaded = read_row_tile(i_row, i_group, x, RULE, R, N)
    factors = sc.operand_factors(out.to.amax_ptr, constants, RULE)
    if RULE.errors == "quick" and RULE.tile:
        factors = tile_factors(factors, RULE, R, N)
    # Two tiles a turn: what is read for the next one then stays where it is.
    TURN: tl.constexpr = 2 if RULE.errors == "quick" and not RULE.tile and LOOP % 2 == 0 else 1
    # Tiles without a ragged edge, four a program, two blocks a row: their scales are stored together.
    EVEN: tl.constexpr = RULE.errors == "quick" and RULE.tile and RULE.full and not SWIZZLED and not DOWN
    GATHERS: tl.constexpr = EVEN and LOOP == 4 and N == 2
    gathered = tl.zeros((R, N), tl.uint32)
    for turn in range(LOOP // TURN):
        for i in tl.static_range(TURN):
            step = turn * TURN + i
            here = loaded
            if LOOP > 1:
                # The next tile is read before this one is quantized; the last reads itself again, from the cache.
                i_next = tl.minimum(step + 1, LOOP - 1)
                loaded = read_row_tile(i_row + i_next * NEXT_ROW, i_group + i_next * NEXT_GROUP, x, RULE, R, N)
            i_here, i_group_here = i_row + step * NEXT_ROW, i_group + step * NEXT_GROUP
            if GATHERS:
                gathered = gather_row_tile(i_here, i_group_here, out, RULE, R, N, factors, here, gathered)
            else:
                quantize_row_tile(i_here, i_group_here, x, out, RULE, SWIZZLED, R, N, factors, here)
    if GATHERS:
        store_gathered(out, gathered, i_row, i_group)


@jit(do_not_specialize=VARYING)
def quantize_cols_kernel(
    x_ptr, to, sizes, places, constants, tiles, RULE: tl.constexpr, SWIZZLED: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """One program quantizes N groups of C columns."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    tile = tl.program_id(0)
    outer = pm.divide(tile, tiles)
    quantize_col_tile(outer * N, (tile - outer * tiles.count) * C, x, out, RULE, SWIZZLED, N, C)


class Output(NamedTuple):
    """The tensors that a kernel fills, [rows, blocks] blocks; decoded: qdata is bf16 values, without scales."""

    qdata: Tensor
    block_scale: Tensor
    rows: int
    blocks: int
    swizzled: bool
    decoded: bool


def output_of(x: Tensor, side: Side, *, turned: bool = False) -> Output:
    """Return unwritten qdata and block_scale of what is asked for of x; turned: decoded values lie as those of x.T."""
    (rows, cols), (spec, _, _, _, scale_layout, decoded), device = x.shape, side, x.device
    blocks = round_up(cols, spec.alignment) // spec.block_length
    if decoded:
        shape = (rows, blocks * spec.block_length)
        values = torch.empty(shape[::-1] if turned else shape, dtype=torch.bfloat16, device=device)
        values = values.T if turned else values
        return Output(values, torch.empty(0, dtype=torch.uint8, device=device), rows, blocks, False, True)
    shapes, swizzled = stored_shapes(rows, cols, spec, scale_layout), scale_layout != LINEAR
    qdata, scale = (torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes[:2])
    return Output(qdata, scale, rows, blocks, swizzled, False)


def written(side: Side, out: Output, amax: Tensor) -> WrittenOperand:
    """Return what kernels take of one operand."""
    base = sign_base = None
    stream = first_block = blocks_per_row = sign_stream = 0
    if side.spec.needs_rng:
        assert side.draw is not None, "stochastic rounding needs a draw"
        base, stream, first_block, blocks_per_row = side.draw
        blocks_per_row = out.blocks if blocks_per_row is None else blocks_per_row
    if side.spec.needs_sign_rng:
        assert side.sign_draw is not None, "fresh signs need a draw"
        sign_base, sign_stream = side.sign_draw.base, side.sign_draw.stream
    qdata = out.qdata if out.decoded else out.qdata.view(torch.int64)
    to = Pointers(qdata, out.block_scale, amax, base, sign_base)
    places = Places(stream, first_block, blocks_per_row, sign_stream)
    return WrittenOperand(to, out.blocks, places, sc.constants_of(side.spec))


def quantize_any(choice: Choice) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        choice: of rows, columns or a wide rotation.

    Returns:
        Blocks of the [rows, K] matrix; MXFP8 has an empty amax.
    """
    x, side, _ = choice.request
    lines, amax, out = choice.facts, _amax(x, side), output_of(x, side)
    _launch(choice, written(side._replace(draw=lines.draw), _in_rows_of(lines, out), amax))
    return Blocks(out.qdata, out.block_scale, amax)


def without_values(request: OneSide) -> Blocks:
    """Return the operand of a tensor without values."""
    amax, out = _amax(request.x, request.side), output_of(request.x, request.side)
    return Blocks(out.qdata, out.block_scale, amax)


def _amax(x: Tensor, side: Side) -> Tensor:
    """Return the amax that is given or found; empty for a format without one."""
    if not side.spec.format.has_amax:
        return torch.empty(0, dtype=torch.float32, device=x.device)
    return operand_amax(x, side.spec, side.sign_draw) if side.amax is None else side.amax


def _in_rows_of(lines: Lines, out: Output) -> Output:
    """Return the same memory in rows as `lines` has them."""
    if lines.rows == out.rows:
        return out
    qdata, scale = (t.view(lines.rows, -1) if t.numel() else t for t in (out.qdata, out.block_scale))
    return Output(qdata, scale, lines.rows, lines.blocks, False, out.decoded)


def _launch(choice: Choice, out: WrittenOperand) -> None:
    if choice.kernel == "quantize_wide_kernel":
        wide.launch(choice, out)
        return
    if choice.kernel == "quantize_neighbours_kernel":
        neighbours.launch_neighbours(choice, out)
        return
    lines: Lines = choice.facts
    tiles = pm.Divisor.of(lines.beside)
    options = {**choice.constants, "enable_fp_fusion": False, **placed_early(choice.constants["RULE"].hardware)}
    if choice.kernel == "quantize_rows_kernel":
        quantize_rows_kernel[choice.grid](*arguments_of(lines.x, out), tiles, **options)
    else:
        quantize_cols_kernel[choice.grid](*arguments_of(lines.x, out), tiles, **options)
