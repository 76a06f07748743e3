"""Dequantize NVFP4 and MXFP8: from codes and scales to values, in one pass (docs/numerics.md sections 3 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.launch import jit
from halfbyte.kernels.unpack import route
from halfbyte.layout import LINEAR, Operand, blocks_per_row, check_scale_layout
from halfbyte.spec import Spec

FORMS = {"e2m1": dc.NVFP4, "e4m3": dc.MXFP8_E4M3, "e5m2": dc.MXFP8_E5M2}
"""What the kernel is compiled for, by the format's element."""


class Decoded(NamedTuple):
    """A GEMM operand: values [rows, K] and what its factor g = max(amax, f(divisor / FLT_MAX)) * f(1 / divisor) needs.

    values: bf16, fp16 or fp32; of a quantized operand element * block_scale, exact in bf16 (MXFP8: within its range).
    amax: fp32 [] or [rows]; None means a factor of 1.
    divisor: e4m3_max * fp4_max of the spec.
    """

    values: Tensor
    amax: Tensor | None = None
    divisor: float = 1.0


@triton.jit
def swizzled_scales(scale_ptr, row, o_block, blocks, mask, FULL: tl.constexpr):
    """Return the int32 codes of rows row, row + 32, row + 64 and row + 96: in each block column 16 bytes of four."""
    tiles = tl.cdiv(blocks, 4)
    first = (row // 128).to(tl.int64) * tiles * 128 + row % 32 * 4
    pointers = scale_ptr.to(tl.pointer_type(tl.int32)) + first + o_block // 4 * 128
    four = masked_load(pointers[:, None] + tl.arange(0, 4)[None, :], mask[:, None], FULL)
    bits = o_block % 4 * 8
    codes = ()
    for word in tl.static_range(4):
        codes = codes + ((column(four, word) >> bits) & 0xFF,)
    return codes


@triton.jit
def column(four, i: tl.constexpr):
    """Return column i of [N, 4]."""
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
    zero, one = tl.split(odd if i % 2 else even)
    return one if i // 2 else zero


@triton.jit
def factor(amax, floor, inverse):
    """Return the factors before A, A and that after it: scale * A may overflow though the product does not."""
    a = dc.clamped_amax(amax, floor)
    large = a >= 1.2676506002282294e30  # 2^100: 2^16 moves between the factors
    return tl.where(large, 1.0 / 65536, 1.0), a, inverse * tl.where(large, 65536.0, 1.0)


@jit(do_not_specialize=("rows", "blocks", "scale_stride"))
def dequantize_kernel(
    qdata_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    rows,
    cols,
    blocks,
    qdata_stride,
    scale_stride,
    out_stride,
    floor,
    inverse,
    FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program writes STEPS pieces of BLOCK_WORDS words; a word becomes one 16-byte store of bf16.

    The pieces follow each other in a row, or lie 32 rows apart if SWIZZLED. FULL: nothing of them is outside.
    """
    overlap.begin(OVERLAP)
    BLOCK_LENGTH: tl.constexpr = 2 if FORMAT == dc.NVFP4 else 4  # words that share a scale
    ROW_STEP: tl.constexpr = 32 if SWIZZLED else 0
    WORD_STEP: tl.constexpr = 0 if SWIZZLED else BLOCK_WORDS
    TILE_WORDS: tl.constexpr = BLOCK_WORDS if SWIZZLED else BLOCK_WORDS * STEPS
    column_tiles = tl.cdiv(blocks * BLOCK_LENGTH, TILE_WORDS)
    i_row = tl.program_id(0) // column_tiles
    row = i_row // 32 * 128 + i_row % 32 if SWIZZLED else i_row
    i_word = tl.program_id(0) % column_tiles * TILE_WORDS
    words = ()
    codes = ()
    for step in tl.static_range(STEPS):
        i = row + step * ROW_STEP
        o_word = i_word + step * WORD_STEP + tl.arange(0, BLOCK_WORDS)
        o_block = o_word // BLOCK_LENGTH
        mask = (o_block < blocks) & (i < rows)
        words = words + (masked_load(qdata_ptr + i.to(tl.int64) * qdata_stride + o_word, mask, FULL),)
        if not SWIZZLED:
            code = masked_load(scale_ptr + i.to(tl.int64) * scale_stride + o_block, mask, FULL)
            codes = codes + (code.to(tl.int32),)
    if SWIZZLED:
        o_block = (i_word + tl.arange(0, BLOCK_WORDS)) // BLOCK_LENGTH
        codes = swizzled_scales(scale_ptr, row, o_block, blocks, o_block < blocks, FULL)
    if FACTOR == dc.TENSOR_FACTOR:
        before, a, after = factor(tl.load(amax_ptr), floor, inverse)
    for step in tl.static_range(STEPS):
        i = row + step * ROW_STEP
        scale = dc.e4m3_value(codes[step]) if FORMAT == dc.NVFP4 else dc.e8m0_value(codes[step])
        if FACTOR == dc.ROW_FACTOR:
            before, a, after = factor(tl.load(amax_ptr + i, mask=i < rows, other=0.0), floor, inverse)
        if FACTOR != dc.NO_FACTOR:
            scale = ((scale * before) * a) * after
        values = dc.element_values(words[step][None, :], FORMAT) * scale[None, :, None]
        y = dc.cast(tl.reshape(values, (BLOCK_WORDS * 8,)), out_ptr.dtype.element_ty)
        o_col = (i_word + step * WORD_STEP) * 8 + tl.arange(0, BLOCK_WORDS * 8)
        masked_store(out_ptr + i.to(tl.int64) * out_stride + o_col, y, (o_col < cols) & (i < rows), FULL)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values that the bytes stand for, computed in fp32 and rounded once.

    Args:
        operand: codes, qdata [rows, bytes] with contiguous rows; padding beyond its logical columns is dropped.
        dtype: bf16, fp16 or fp32.

    Returns:
        dtype [rows, cols].

    Raises:
        ValueError: the scale layout is unknown.
    """
    return _launch(operand, operand.cols, dtype, with_factor=True)


def decode(operand: Operand, dtype: torch.dtype = torch.bfloat16) -> Decoded:
    """Return the operand as a GEMM reads it: element * block_scale, the fp32 factor still apart.

    Args:
        operand: codes; the values keep the padding that takes part in the GEMM.
        dtype: bf16 and fp32 hold every NVFP4 product exactly, and so does fp16.

    Returns:
        values dtype [rows, padded columns].
    """
    blocks, spec, cols, _ = operand
    length = spec.block_length
    padded = blocks_per_row(blocks.qdata, spec) * length
    assert padded - length < cols or spec.rotation is not None or cols == 0, "cols does not match qdata"
    return from_values(_launch(operand, padded, dtype, with_factor=False), blocks.amax, spec)


def plain(x: Tensor) -> Decoded:
    """Return an unquantized matrix as a GEMM operand."""
    return Decoded(x)


def from_values(values: Tensor, amax: Tensor, spec: Spec) -> Decoded:
    """Return a transient operand, whose values quantization returned, as a GEMM operand."""
    return Decoded(values, amax, spec.divisor) if spec.format.has_amax else Decoded(values)


def as_words(qdata: Tensor, word: torch.dtype) -> Tensor:
    """Return qdata [rows, bytes] as [rows, words], copying only rows that do not start on a word."""
    if qdata.stride(1) != 1 or qdata.stride(0) % word.itemsize or qdata.data_ptr() % word.itemsize:
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    return qdata.view(word)


def _launch(operand: Operand, cols: int, dtype: torch.dtype, *, with_factor: bool) -> Tensor:
    blocks, spec, _, scale_layout = operand
    check_scale_layout(scale_layout)
    rows, per_row = blocks.qdata.shape[0], blocks_per_row(blocks.qdata, spec)
    out = torch.empty(rows, cols, dtype=dtype, device=blocks.qdata.device)
    if out.numel() == 0:
        return out
    words = as_words(blocks.qdata, torch.int32 if spec.format.codes_per_byte == 2 else torch.int64)
    scale = blocks.block_scale.view(torch.uint8)
    factor = dc.ROW_FACTOR if spec.has_row_amax else dc.TENSOR_FACTOR
    if not (with_factor and spec.format.has_amax):
        factor = dc.NO_FACTOR
    swizzled = scale_layout != LINEAR
    if swizzled and scale.data_ptr() % 4:
        scale = scale.clone()  # words of four scales are read
    choice = route.choose_dequantize(route.Stored(words, scale, out, swizzled, factor == dc.ROW_FACTOR))
    words, scale, values = choice.facts
    dequantize_kernel[choice.grid](
        words,
        scale,
        blocks.amax if factor != dc.NO_FACTOR else None,
        values,
        *values.shape,
        per_row if swizzled else scale.shape[1],
        words.stride(0),
        scale.stride(0),
        values.stride(0),
        f32(spec.divisor / FLT_MAX),
        f32(1 / spec.divisor),
        FORMAT=FORMS[spec.format.element.name],
        FACTOR=factor,
        **choice.constants,
        **overlap.launch_options(out.device),
    )
    return out
