"""Quantize after a rotation of 64 or 128: a group is one row of a tensor, which a thread holds in its registers.

The bytes are those of `quantize`; `rotate_wide` says why such groups are no tuples. After the rotation their blocks of
16 lie beside each other, and everything goes on as for any operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.amax.rotated import load_groups, narrowed
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import philox, rotate
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device import wide_lines as wl
from halfbyte.kernels.device.operands import StridedMatrix, WrittenOperand, arguments_of, varying
from halfbyte.kernels.device.tiles import store_decoded, store_scale
from halfbyte.kernels.device.unpacking import numbers_of_pairs
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.route import Lines
from halfbyte.kernels.route import Choice


@triton.jit
def halves(x):
    """Return the left and the right half of x [T, N]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def rejoined(left, right):
    """Return [T, 2 N] of two halves [T, N]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def quantize_lines(
    pairs, row, group, out, rows, factors, RULE: tl.constexpr, SWIZZLED: tl.constexpr, HALVED: tl.constexpr
):
    """Quantize rotated groups, pairs [T, SIZE / 2], group [T] of rows row [T] of the operand; out: a WrittenOperand.

    Four blocks at a time, HALVED two: the values of all eight of a group of 128 are more than a thread's registers.
    """
    if RULE.group == 128:
        first, second = halves(pairs)
        quantize_part(first, row, group * 2, out, rows, factors, RULE, SWIZZLED, HALVED)
        quantize_part(second, row, group * 2 + 1, out, rows, factors, RULE, SWIZZLED, HALVED)
    else:
        quantize_part(pairs, row, group, out, rows, factors, RULE, SWIZZLED, HALVED)


@triton.jit
def quantize_part(
    pairs, row, group, out, rows, factors, RULE: tl.constexpr, SWIZZLED: tl.constexpr, HALVED: tl.constexpr
):
    """Quantize 64 values as `quantize_lines` does; group: in units of 64."""
    B: tl.constexpr = pairs.shape[1] // 8
    in_row = row < rows
    if RULE.row_amax:
        amax = tl.load(out.to.amax_ptr + row, mask=in_row, other=0.0)
        factors = sc.tensor_factors(amax[:, None], out.constants, False)
    block = group[:, None] * B + tl.arange(0, B)[None, :]
    if HALVED:
        left, right = halves(pairs)
        left_block, right_block = halves(block)
        left_codes, left_scale = quantize_blocks(left, row, left_block, out, factors, RULE)
        right_codes, right_scale = quantize_blocks(right, row, right_block, out, factors, RULE)
        codes, scale = rejoined(left_codes, right_codes), rejoined(left_scale, right_scale)
    else:
        codes, scale = quantize_blocks(pairs, row, block, out, factors, RULE)
    inside = in_row[:, None] & (block < out.blocks)
    place = row[:, None] * out.blocks + block
    if RULE.decoded:
        store_decoded(out.to.q_ptr, (codes,), scale, place, inside, RULE)
    else:
        tl.store(out.to.q_ptr + place, codes, mask=inside)
        store_scale(out.to.scale_ptr, scale, row[:, None], block, inside, rows, out.blocks, SWIZZLED, False)


@triton.jit
def quantize_blocks(pairs, row, block, out, factors, RULE: tl.constexpr):
    """Return the codes and scales [T, B] of rotated pairs [T, 8 B], blocks `block` [T, B] of rows row [T]."""
    B: tl.constexpr = pairs.shape[1] // 8
    random = ()
    if RULE.drawn:
        random = philox.block_words(
            out.places.first_block + row[:, None] * out.places.blocks_per_row + block,
            philox.draw_words(out.to.draw_ptr, out.places.stream),
        )
    signs = pm.split_eight(tl.reshape(pairs, (pairs.shape[0], B, 8)), pairs.shape[0], B)
    xs, amax = numbers_of_pairs(signs, 0, 16, RULE), pm.max_of_pairs(signs, RULE.hardware)
    if RULE.apart:
        xs = rotate.apart(xs)
    return sc.quantize_block(xs, amax, factors, out.constants, random, RULE, 0, signs, RULE.apart)


@jit(do_not_specialize=(*varying("places"), "tiles"))
def quantize_wide_kernel(
    x_ptr, to, sizes, places, constants, groups, tiles,
    RULE: tl.constexpr, SWIZZLED: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Quantize T groups of a [rows, cols] operand; groups: of a row; tiles: programs beside each other, a Divisor.

    COLUMNS: rows of the operand lie beside each other in memory, and T of them share a program, or T / 2 if
    RULE.paired, of which neighbouring threads have the halves of a group; PACKED: in words of
    two bf16. Else a program takes T groups in the order of memory.
    """
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x.ptr.dtype.element_ty == tl.bfloat16
    if not RULE.row_amax:
        amax = tl.load(out.to.amax_ptr)  # what it gives is computed after the reads of x, where registers are free
    if COLUMNS:
        outer = pm.divide(tl.program_id(0), tiles)
        first = outer.to(tl.int64)
        stride = tl.cast(x.stride_c, tl.int64)
        if RULE.paired:
            i_row = (tl.program_id(0) - outer * tiles.count).to(tl.int64) * (T // 2)
            row = i_row + tl.arange(0, T) // 2
            group = first * 2 + (tl.arange(0, T) & 1)
            start = (x.ptr + first * (2 * SIZE) * stride + row) + (tl.arange(0, T) & 1) * (SIZE * stride)
            values = tl.load(start[:, None] + (tl.arange(0, SIZE) * stride)[None, :])
            if not (NARROW and RULE.fresh):
                values = pm.to_fp32(values)
        else:
            i_row = (tl.program_id(0) - outer * tiles.count).to(tl.int64) * T
            row = i_row + tl.max_contiguous(tl.arange(0, T), 1)  # a thread holds whole groups
            group = first + tl.zeros((T,), tl.int64)
            values = pm.to_fp32(load_groups(x.ptr, first * SIZE, x.cols, row, x.rows, stride, 1, SIZE, RULE.full))
    else:
        place = tl.program_id(0) * T + tl.arange(0, T)
        line, group = place // groups, place % groups  # 2^31 groups are 2^37 values
        row = line.to(tl.int64)
        if PACKED:
            values = rw.unpacked(wl.load_row_lines(x, row, x.rows, group * SIZE, x.cols, False, SIZE, True))
        else:
            col = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            inside = (row < x.rows)[:, None] & (col < x.cols)
            values = pm.to_fp32(tl.load(x.ptr + row[:, None] * x.stride_r + col * x.stride_c, mask=inside, other=0))
    flips = wl.flips_of_lines(out.to.sign_ptr, out.places.sign_stream, RULE, T)
    if not NARROW:
        values = narrowed(values, NARROW)
    pairs = rw.rotated_pairs(values, flips, RULE)
    factors = ()
    if not RULE.row_amax:
        factors = sc.tensor_factors(amax, out.constants, True)
    # MS-EDEN keeps two numbers of an element: four blocks take 213 registers, two fit 168.
    quantize_lines(pairs, row, group, out, x.rows, factors, RULE, SWIZZLED, RULE.eden)


def launch(choice: Choice, out: WrittenOperand) -> None:
    """Launch what `route.choose_one_side` chose.

    Args:
        choice: of a wide rotation.
        out: of the operand.
    """
    lines: Lines = choice.facts
    groups = lines.blocks * 16 // choice.constants["RULE"].group
    quantize_wide_kernel[choice.grid](
        *arguments_of(lines.x, out), groups, pm.Divisor.of(lines.beside), **choice.constants, enable_fp_fusion=False
    )
