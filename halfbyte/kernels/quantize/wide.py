"""Quantize after a rotation of 64 or 128: a group is one row of a tensor, which a thread holds in its registers.

The bytes are those of `quantize`; `rotate_wide` says why such groups are no tuples. After the rotation their blocks of
16 lie beside each other, and everything goes on as for any operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.amax.rotated import load_groups, narrowed
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import philox
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.tiles import store_decoded, store_scale
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.route import Lines
from halfbyte.kernels.route import Choice


@triton.jit
def split_blocks(x):
    """Return 16 tensors [T, SIZE / 16]: element i of every block of x [T, SIZE]."""
    T: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1] // 16
    even, odd = tl.split(tl.reshape(x, (T, B, 8, 2)))
    evens, odds = pm.split_eight(even, T, B), pm.split_eight(odd, T, B)
    out = ()
    for i in tl.static_range(8):
        out = out + (evens[i], odds[i])
    return out


@triton.jit
def quantize_lines(
    pairs, row, group, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
    blocks_per_row, constants, factors,
    RULE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Quantize rotated groups, pairs [T, SIZE / 2], group [T] of rows row [T] of the operand; outputs [rows, blocks].

    Four blocks at a time: the values of all eight of a group of 128 are more than a thread's registers.
    """
    if RULE.group == 128:
        T: tl.constexpr = pairs.shape[0]
        first, second = tl.split(tl.permute(tl.reshape(pairs, (T, 2, 32)), (0, 2, 1)))
        quantize_part(
            first, row, group * 2, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
            blocks_per_row, constants, factors, RULE, SWIZZLED,
        )  # fmt: skip
        quantize_part(
            second, row, group * 2 + 1, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
            blocks_per_row, constants, factors, RULE, SWIZZLED,
        )  # fmt: skip
    else:
        quantize_part(
            pairs, row, group, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
            blocks_per_row, constants, factors, RULE, SWIZZLED,
        )  # fmt: skip


@triton.jit
def quantize_part(
    pairs, row, group, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
    blocks_per_row, constants, factors,
    RULE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Quantize 64 values as `quantize_lines` does; group: in units of 64."""
    B: tl.constexpr = pairs.shape[1] // 8
    in_row = row < rows
    if RULE.row_amax:
        factors = sc.tensor_factors(tl.load(amax_ptr + row, mask=in_row, other=0.0)[:, None], constants, False)
    block = group[:, None] * B + tl.arange(0, B)[None, :]
    random = ()
    if RULE.rounding == "stochastic":
        random = philox.block_words(
            first_block + row[:, None] * blocks_per_row + block, philox.draw_words(draw_ptr, stream)
        )
    xs = split_blocks(rw.unpacked(pairs))
    codes, scale = sc.quantize_block(xs, pm.abs_max(xs), factors, constants, random, RULE, 0, None, False)
    inside = in_row[:, None] & (block < blocks)
    place = row[:, None] * blocks + block
    if RULE.decoded:
        store_decoded(q_ptr, (codes,), scale, place, inside, RULE)
    else:
        tl.store(q_ptr + place, codes, mask=inside)
        store_scale(scale_ptr, scale, row[:, None], block, inside, rows, blocks, SWIZZLED, False)


@jit(do_not_specialize=("stream", "first_block", "sign_stream", "tiles"))
def quantize_wide_kernel(
    x_ptr, q_ptr, scale_ptr, amax_ptr, draw_ptr, sign_ptr, rows, cols, blocks, stride_r, stride_c, stream, first_block,
    blocks_per_row, sign_stream, span, floor, inverse, unit, groups, tiles,
    RULE: tl.constexpr, SWIZZLED: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Quantize T groups of a [rows, cols] operand; groups: of a row; outputs [rows, blocks].

    COLUMNS: rows of the operand lie beside each other in memory, and T of them share a program; PACKED: in words of
    two bf16. Else a program takes T groups in the order of memory.
    """
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    constants = (span, floor, inverse, unit)
    factors = sc.operand_factors(amax_ptr, constants, RULE)
    flips = rw.sign_flips(sign_ptr, sign_stream, SIZE, RULE.fresh)
    pid = tl.program_id(0).to(tl.int64)
    if COLUMNS:
        first = pid // tiles
        row = pid % tiles * T + tl.max_contiguous(tl.arange(0, T), 1)  # a thread holds whole groups
        group = first + tl.zeros((T,), tl.int64)
        stride = tl.cast(stride_c, tl.int64)
        x = pm.to_fp32(load_groups(x_ptr, first * SIZE, cols, row, rows, stride, 1, SIZE, False))
    else:
        place = tl.program_id(0) * T + tl.arange(0, T)
        line, group = place // groups, place % groups  # 2^31 groups are 2^37 values
        row = line.to(tl.int64)
        if PACKED:
            # Pieces of 16 bytes, the last dimension but one in registers: a thread reads whole groups.
            word_ptr = x_ptr.to(tl.pointer_type(tl.uint32)) + row * (stride_r // 2)
            piece, j = tl.arange(0, SIZE // 8), tl.arange(0, 4)
            word = (group * (SIZE // 2))[:, None, None] + (piece[:, None] * 4 + j[None, :])[None, :, :]
            inside = (row < rows)[:, None, None] & (word * 2 < cols)
            x = rw.unpacked(tl.reshape(tl.load(word_ptr[:, None, None] + word, mask=inside, other=0), (T, SIZE // 2)))
        else:
            col = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            inside = (row < rows)[:, None] & (col < cols)
            x = pm.to_fp32(tl.load(x_ptr + row[:, None] * stride_r + col * stride_c, mask=inside, other=0))
    pairs = rw.rotated(narrowed(x, NARROW), flips, RULE.norm)
    quantize_lines(
        pairs, row, group, q_ptr, scale_ptr, amax_ptr, draw_ptr, stream, rows, blocks, first_block,
    blocks_per_row, constants, factors,
        RULE, SWIZZLED,
    )  # fmt: skip


def launch(choice: Choice, arguments: tuple) -> None:
    """Launch what `route.one` chose.

    Args:
        choice: of a wide rotation.
        arguments: of `lines.operand_arguments`.
    """
    lines: Lines = choice.facts
    pointers, numbers, constants = arguments
    quantize_wide_kernel[choice.grid](
        lines.x,
        *pointers,
        *lines.x.shape,
        lines.blocks,
        *lines.x.stride(),
        *numbers,
        *constants,
        lines.blocks * 16 // choice.constants["RULE"].group,
        lines.beside,
        **choice.constants,
        enable_fp_fusion=False,
    )
