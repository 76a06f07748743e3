"""Quantize whole 16x16 tiles by quick errors: two neighbouring blocks a lane, one after the other.

A warp that takes 16 rows and two blocks of each writes codes of 16 bytes a row, and scales of two: parts of sectors. So
it takes four blocks a row in two turns, first and third, then second and fourth. A lane has neighbours then, whose
codes and scales it stores at once. What is read for the next turn stays in its registers, as the loop has both turns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.loads import block_address, load_row_pairs
from halfbyte.kernels.device.operands import StridedMatrix, WrittenOperand, arguments_of, varying
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.quick_tiles import tile_factors
from halfbyte.kernels.device.tiles import quantize_group
from halfbyte.kernels.device.unpacking import numbers_of_pairs
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.route import Lines
from halfbyte.kernels.route import Choice

STORE_BOTH = tl.constexpr("{st.global.v2.b64 [$1], {$2, $3}; mov.b32 $0, 0;}")


@triton.jit
def quantize_turn(loaded, out, factors, RULE: tl.constexpr):
    """Return the codes and the scales of one block a lane, `loaded` as 8 `bf16_pairs`."""
    amax = pm.max_of_pairs(loaded, RULE.hardware)
    xs = numbers_of_pairs(loaded, 0, 16, RULE)
    words, scales = quantize_group(xs, amax, factors, out.constants, None, 0, RULE, 0, loaded)
    return words[0], scales[0].to(tl.uint32)


@triton.jit
def store_neighbours(out, i_row, i_group, first, codes, scales):
    """Store the codes and scales of two turns, two tensors [R, N] each, from row i_row and block i_group + first on."""
    left, right = codes
    left_scale, right_scale = scales
    R: tl.constexpr = left.shape[0]
    N: tl.constexpr = left.shape[1]
    line, block = tl.arange(0, R)[:, None], first + 2 * tl.arange(0, N)[None, :]
    to = block_address(out.to.q_ptr, i_row, i_group, line, block, out.blocks)
    if has_ptx():  # a store of two tensors: of a joined one the compiler would move values between lanes
        given = (to.to(tl.int64), left, right)
        tl.inline_asm_elementwise(STORE_BOTH, "=r,l,l,l", given, dtype=tl.uint32, is_pure=False, pack=1)
    else:
        tl.store(to, left)
        tl.store(to + 1, right)
    to = block_address(out.to.scale_ptr, i_row, i_group, line, block, out.blocks)
    tl.store(to.to(tl.pointer_type(tl.uint16)), (left_scale | (right_scale << 8)).to(tl.uint16))


@jit(do_not_specialize=(*varying("places"), "tiles", "shares"))
def quantize_neighbours_kernel(
    x_ptr, to, sizes, places, constants, tiles, shares, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """One program quantizes 1, 2 or 4 steps beside each other of R rows and 2 N blocks; shares: a route.Shares.

    tiles: steps in a row, a Divisor. The longest programs are the first, so that all multiprocessors end together.
    """
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    program = tl.program_id(0)
    count = tl.where(program < shares.four, 4, tl.where(program < shares.four + shares.two, 2, 1))
    longer = tl.minimum(tl.maximum(program - shares.four, 0), shares.two)
    first = program + 3 * tl.minimum(program, shares.four) + longer
    outer = pm.divide(first, tiles)
    i_row, i_group = outer * R, (first - outer * tiles.count) * (2 * N)
    here = load_row_pairs(x, i_row, i_group, RULE, R, N, 2)
    factors = tile_factors(sc.operand_factors(out.to.amax_ptr, constants, RULE), RULE, R, N)
    for step in range(count):
        # What the next turn takes is read before this one quantizes; the last reads its own again, from the cache.
        second = load_row_pairs(x, i_row, i_group + step * (2 * N) + 1, RULE, R, N, 2)
        left, left_scale = quantize_turn(here, out, factors, RULE)
        here = load_row_pairs(x, i_row, i_group + tl.minimum(step + 1, count - 1) * (2 * N), RULE, R, N, 2)
        right, right_scale = quantize_turn(second, out, factors, RULE)
        store_neighbours(out, i_row, i_group, step * (2 * N), (left, right), (left_scale, right_scale))


def launch_neighbours(choice: Choice, out: WrittenOperand) -> None:
    """Launch what `route.choose_one_side` chose."""
    lines: Lines = choice.facts
    options = {**choice.constants, "enable_fp_fusion": False, **placed_early(choice.constants["RULE"].hardware)}
    quantize_neighbours_kernel[choice.grid](
        *arguments_of(lines.x, out), pm.Divisor.of(lines.beside), lines.shares, **options
    )
