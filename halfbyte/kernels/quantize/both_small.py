"""Both orientations of a small tensor in two launches that leave nothing to clear.

The first launch stores the maxima that its programs find, each its own. Every program of the second reads all of them
while it waits for its tile, and quantizes that tile along one of the two orientations: programs of 64 threads, so that
a tensor of half a million values keeps all multiprocessors busy. No program waits for another, and no workspace of
zeros is filled before (`running_max` needs one, and a launch that fills it where a graph is captured).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.rotated import amax_rotated_kernel
from halfbyte.kernels.amax.route import RotatedTile, amax_rule
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.loads import load_col_pairs
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.both_route import STRIP_LINES, Pair
from halfbyte.kernels.quantize.lines import allocate, operand_arguments
from halfbyte.kernels.route import Choice
from halfbyte.layout import LINEAR, Blocks
from halfbyte.spec import NVFP4

STRIP = RotatedTile(lines=STRIP_LINES, vec=1, packed=True, num_warps=4, per_sm=0)  # of a program of the first launch

VARYING = tuple(f"{side}_{name}" for side in ("row", "col") for name in ("stream", "first_block", "sign_stream"))


@triton.jit
def merged(partial_ptr, out_ptr, is_first, PROGRAMS: tl.constexpr):
    """Return the largest of fp32 [PROGRAMS]; one program writes it."""
    amax = tl.max(tl.load(partial_ptr + tl.arange(0, PROGRAMS)), axis=0)
    if is_first:
        tl.store(out_ptr, amax)
    return amax


@jit(do_not_specialize=VARYING)
def quantize_row_col_small_kernel(
    x_ptr, row_q_ptr, row_scale_ptr, row_partial_ptr, row_draw_ptr, row_sign_ptr, col_q_ptr, col_scale_ptr,
    col_partial_ptr, col_draw_ptr, col_sign_ptr, row_amax_ptr, col_amax_ptr, rows, cols, row_blocks, col_blocks,
    stride_r, stride_c, row_stream, row_first_block, row_blocks_per_row, row_sign_stream, col_stream, col_first_block,
    col_blocks_per_row, col_sign_stream, row_span, row_floor, row_inverse, row_unit, col_span, col_floor, col_inverse,
    col_unit, ROW: tl.constexpr, COL: tl.constexpr, PROGRAMS: tl.constexpr, R: tl.constexpr, RN: tl.constexpr,
    CN: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program quantizes CN groups of C columns along columns, or, further on, RN groups of R rows along rows."""
    overlap.begin(OVERLAP)
    beside = cols // C
    col_programs = rows // (CN * COL.group) * beside
    if tl.program_id(0) < col_programs:
        constants = (col_span, col_floor, col_inverse, col_unit)
        i_group = tl.program_id(0) // beside * CN
        i_col = tl.program_id(0) % beside * C
        columns = load_col_pairs(x_ptr, i_group, i_col, rows, cols, stride_r, COL, CN, C)
        amax = merged(col_partial_ptr, col_amax_ptr, tl.program_id(0) == 0, PROGRAMS)
        quantize_col_tile(
            i_group, i_col, x_ptr, col_q_ptr, col_scale_ptr, col_partial_ptr, col_draw_ptr, col_sign_ptr, rows, cols,
            col_blocks, stride_r, stride_c, col_stream, col_first_block, col_blocks_per_row, col_sign_stream,
            constants, COL, False, CN, C, sc.tensor_factors(amax, constants, True), columns,
        )  # fmt: skip
    else:
        constants = (row_span, row_floor, row_inverse, row_unit)
        tile = tl.program_id(0) - col_programs
        beside = cols // (RN * ROW.group)
        i_row = tile // beside * R
        i_group = tile % beside * RN
        words = read_row_tile(i_row, i_group, x_ptr, rows, cols, stride_r, stride_c, ROW, R, RN)
        amax = merged(row_partial_ptr, row_amax_ptr, tile == 0, PROGRAMS)
        quantize_row_tile(
            i_row, i_group, x_ptr, row_q_ptr, row_scale_ptr, row_partial_ptr, row_draw_ptr, row_sign_ptr, rows, cols,
            row_blocks, stride_r, stride_c, row_stream, row_first_block, row_blocks_per_row, row_sign_stream,
            constants, ROW, False, R, RN, sc.tensor_factors(amax, constants, True), words,
        )  # fmt: skip


def quantize(choice: Choice) -> tuple[Blocks, Blocks]:
    """Return (quantize(x, row), quantize(x.T, col)); the bytes of `both`."""
    pair: Pair = choice.request
    x, sides = pair.x, (pair.side(0, None), pair.side(1, None))
    rows, cols = x.shape
    partial = _partial_amaxes(choice)
    row_amax, col_amax = (torch.empty((), dtype=torch.float32, device=x.device) for _ in sides)
    outputs = [allocate(side.x.shape, side.spec, LINEAR, x.device, side.decoded) for side in sides]
    arguments = [
        operand_arguments(side.spec, out, found, side.draw, side.sign_draw)
        for side, out, found in zip(sides, outputs, partial, strict=True)
    ]
    pointers, numbers, constants = zip(*arguments, strict=True)
    quantize_row_col_small_kernel[choice.grid](
        x,
        *pointers[0],
        *pointers[1],
        row_amax,
        col_amax,
        rows,
        cols,
        outputs[0].blocks,
        outputs[1].blocks,
        *x.stride(),
        *numbers[0],
        *numbers[1],
        *constants[0],
        *constants[1],
        **choice.constants,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )
    amaxes = row_amax, col_amax
    row, col = (Blocks(out.qdata, out.block_scale, amax) for out, amax in zip(outputs, amaxes, strict=True))
    return row, col


def _partial_amaxes(choice: Choice) -> Tensor:
    """Return fp32 [2, programs] whose maxima are the amax of x and that of x.T after the rotation of the column."""
    pair: Pair = choice.request
    assert isinstance(pair.col, NVFP4), "the column is rotated"
    x, sign_draw, rule = pair.x, pair.sign_draw, amax_rule(pair.col)
    (rows, cols), count, strips = x.shape, choice.constants["PROGRAMS"], choice.facts
    out = torch.empty(2, count, dtype=torch.float32, device=x.device)
    amax_rotated_kernel[(count,)](
        x,
        out[1],
        out[0],
        None,
        sign_draw.base if sign_draw is not None and rule.fresh else None,
        sign_draw.stream if sign_draw is not None and rule.fresh else 0,
        rows,
        cols,
        *x.stride(),
        strips,
        count // strips,
        count,
        RULE=rule,
        BOTH=True,
        PACKED=True,
        FULL=cols % (2 * STRIP.lines) == 0 and rows % rule.group == 0,
        T=STRIP.lines,
        VEC=STRIP.vec,
        PARTIAL=True,
        num_warps=STRIP.num_warps,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )
    return out
