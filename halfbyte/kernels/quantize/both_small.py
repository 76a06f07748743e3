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

from halfbyte.kernels.amax.rotated import MeanAndSums, Split, amax_rotated_kernel
from halfbyte.kernels.amax.route import RotatedTile, amax_rule
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.loads import load_col_pairs
from halfbyte.kernels.device.operands import StridedMatrix, WrittenOperand, arguments_of_both, varying
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.both_route import STRIP_LINES, Pair
from halfbyte.kernels.quantize.lines import output_of, written
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks

STRIP = RotatedTile(lines=STRIP_LINES, vec=1, packed=True, num_warps=4, per_sm=0)  # of a program of the first launch


@triton.jit
def merged(partial_ptr, out_ptr, is_first, PROGRAMS: tl.constexpr):
    """Return the largest of fp32 [PROGRAMS]; one program writes it."""
    amax = tl.max(tl.load(partial_ptr + tl.arange(0, PROGRAMS)), axis=0)
    if is_first:
        tl.store(out_ptr, amax)
    return amax


@jit(do_not_specialize=varying("places.row", "places.col"))
def quantize_row_col_small_kernel(
    x_ptr, to, row_amax_ptr, col_amax_ptr, sizes, places, constants, ROW: tl.constexpr, COL: tl.constexpr,
    PROGRAMS: tl.constexpr, R: tl.constexpr, RN: tl.constexpr, CN: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program quantizes CN groups of C columns along columns, or, further on, RN groups of R rows along rows.

    to: its amax_ptr are the maxima of the programs before.
    """
    overlap.begin(OVERLAP)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    row = WrittenOperand(to.row, sizes.blocks.row, places.row, constants.row)
    col = WrittenOperand(to.col, sizes.blocks.col, places.col, constants.col)
    beside = x.cols // C
    col_programs = x.rows // (CN * COL.group) * beside
    if tl.program_id(0) < col_programs:
        i_group = tl.program_id(0) // beside * CN
        i_col = tl.program_id(0) % beside * C
        columns = load_col_pairs(x, i_group, i_col, COL, CN, C)
        amax = merged(col.to.amax_ptr, col_amax_ptr, tl.program_id(0) == 0, PROGRAMS)
        factors = sc.tensor_factors(amax, col.constants, True)
        quantize_col_tile(i_group, i_col, x, col, COL, False, CN, C, factors, columns)
    else:
        tile = tl.program_id(0) - col_programs
        beside = x.cols // (RN * ROW.group)
        i_row = tile // beside * R
        i_group = tile % beside * RN
        words = read_row_tile(i_row, i_group, x, ROW, R, RN)
        amax = merged(row.to.amax_ptr, row_amax_ptr, tile == 0, PROGRAMS)
        factors = sc.tensor_factors(amax, row.constants, True)
        quantize_row_tile(i_row, i_group, x, row, ROW, False, R, RN, factors, words)


def quantize_both_small(choice: Choice) -> tuple[Blocks, Blocks]:
    """Return (quantize(x), quantize(x.T)); the bytes of `both.quantize_rows_and_cols`."""
    x, row, col = choice.request
    sides = row, col
    partial = _partial_amaxes(choice)
    row_amax, col_amax = (torch.empty((), dtype=torch.float32, device=x.device) for _ in sides)
    outputs = output_of(x, row), output_of(x.T, col, turned=choice.constants["COL"].values)
    operands = (written(*operand) for operand in zip(sides, outputs, partial, strict=True))
    x, to, *numbers = arguments_of_both(x, *operands)
    quantize_row_col_small_kernel[choice.grid](
        x,
        to,
        row_amax,
        col_amax,
        *numbers,
        **choice.constants,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )
    amaxes = row_amax, col_amax
    of_row, of_col = (Blocks(out.qdata, out.block_scale, amax) for out, amax in zip(outputs, amaxes, strict=True))
    return of_row, of_col


def _partial_amaxes(choice: Choice) -> Tensor:
    """Return fp32 [2, programs] whose maxima are the amax of x and that of x.T after the rotation of the column."""
    pair: Pair = choice.request
    x, sign_draw, rule = pair.x, pair.col.sign_draw, amax_rule(pair.col.spec)
    (rows, cols), count, strips = x.shape, choice.constants["PROGRAMS"], choice.facts
    out = torch.empty(2, count, dtype=torch.float32, device=x.device)
    amax_rotated_kernel[(count,)](
        x,
        MeanAndSums(),
        out[1],
        out[0],
        None,
        sign_draw.base if sign_draw is not None and rule.fresh else None,
        sign_draw.stream if sign_draw is not None and rule.fresh else 0,
        rows,
        cols,
        *x.stride(),
        Split(strips, count // strips, count),
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
