"""Dequantize NVFP4 and MXFP8: from codes and scales to values, in one pass (docs/numerics.md sections 3 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels import decode as dc
from halfbyte.kernels.targets import CompileCase, dtype_name
from halfbyte.layout import LINEAR, Blocks, check_scale_layout
from halfbyte.spec import MXFP8, NVFP4, Spec

WORD_VALUES = 8  # values per loaded word: an int32 of NVFP4 codes, an int64 of MXFP8 elements

TILES = ((512, 1, 4), (256, 2, 4), (128, 4, 4), (64, 4, 2), (32, 4, 1))
"""(words of a row, rows, warps) of a program: the widest tile that a row fills."""


class Decoded(NamedTuple):
    """A GEMM operand: values [rows, K] and what its factor g = max(amax, f(divisor / FLT_MAX)) * f(1 / divisor) needs.

    values: bf16, fp16 or fp32; of a quantized operand element * block_scale, exact in bf16 (MXFP8: within its range).
    amax: fp32 [] or [rows]; None means a factor of 1.
    divisor: e4m3_max * fp4_max of the spec.
    """

    values: Tensor
    amax: Tensor | None = None
    divisor: float = 1.0


@triton.jit(do_not_specialize=("rows", "blocks", "scale_stride"))
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
):
    """One program writes STEPS rows of BLOCK_WORDS words; a word becomes one 16-byte store of bf16."""
    BLOCK_LENGTH: tl.constexpr = 2 if FORMAT == dc.NVFP4 else 4  # words that share a scale
    column_tiles = tl.cdiv(blocks * BLOCK_LENGTH, BLOCK_WORDS)
    i_row = tl.program_id(0) // column_tiles * STEPS
    i_word = tl.program_id(0) % column_tiles * BLOCK_WORDS
    o_word = i_word + tl.arange(0, BLOCK_WORDS)
    o_col = i_word * 8 + tl.arange(0, BLOCK_WORDS * 8)
    o_block = o_word // BLOCK_LENGTH
    in_words = o_block < blocks
    in_cols = o_col < cols
    for step in tl.static_range(STEPS):
        row = i_row + step
        in_rows = row < rows
        row64 = row.to(tl.int64)
        words = tl.load(qdata_ptr + row64 * qdata_stride + o_word, mask=in_words & in_rows, other=0)
        if SWIZZLED:
            p_scale = scale_ptr + dc.swizzled_offset(row, o_block, blocks)
        else:
            p_scale = scale_ptr + row64 * scale_stride + o_block
        codes = tl.load(p_scale, mask=in_words & in_rows, other=0).to(tl.int32)
        scale = dc.e4m3_value(codes) if FORMAT == dc.NVFP4 else dc.e8m0_value(codes)
        if FACTOR != dc.NO_FACTOR:
            amax = tl.load(amax_ptr + (row64 if FACTOR == dc.ROW_FACTOR else 0), mask=in_rows, other=0.0)
            a = dc.clamped_amax(amax, floor)
            # Above 2^100 scale * A may overflow though the product with the constant does not: move 2^16 between them.
            large = a >= 1.2676506002282294e30
            scale = ((scale * tl.where(large, 1.0 / 65536, 1.0)) * a) * (inverse * tl.where(large, 65536.0, 1.0))
        values = dc.element_values(words[None, :], FORMAT) * scale[None, :, None]
        y = tl.reshape(values, (BLOCK_WORDS * 8,))
        tl.store(out_ptr + row64 * out_stride + o_col, dc.cast(y, out_ptr.dtype.element_ty), mask=in_cols & in_rows)


def dequantize(
    blocks: Blocks,
    spec: Spec,
    cols: int,
    dtype: torch.dtype = torch.float32,
    scale_layout: str = LINEAR,
) -> Tensor:
    """Return the values that the bytes stand for, computed in fp32 and rounded once.

    Args:
        blocks: the operand's bytes, qdata [rows, bytes] with contiguous rows.
        spec: NVFP4 or MXFP8.
        cols: logical columns; padding is dropped.
        dtype: bf16, fp16 or fp32.
        scale_layout: "linear" or "swizzled_32_4_4".

    Returns:
        dtype [rows, cols].

    Raises:
        ValueError: scale_layout is unknown.
    """
    return _launch(blocks, spec, cols, dtype, scale_layout, with_factor=True)


def decode(
    blocks: Blocks,
    spec: Spec,
    cols: int,
    scale_layout: str = LINEAR,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoded:
    """Return the operand as a GEMM reads it: element * block_scale, the fp32 factor still apart.

    Args:
        blocks: the operand's bytes.
        cols: logical columns; the values keep the padding that takes part in the GEMM.
        dtype: bf16 and fp32 hold every NVFP4 product exactly, and so does fp16.

    Returns:
        values dtype [rows, padded columns].
    """
    length = spec.block_length
    padded = _blocks_per_row(blocks.qdata, spec) * length
    assert padded - length < cols or spec.rotation is not None or cols == 0, "cols does not match qdata"
    values = _launch(blocks, spec, padded, dtype, scale_layout, with_factor=False)
    if isinstance(spec, MXFP8):
        return Decoded(values)
    return Decoded(values, blocks.amax, spec.e4m3_max * spec.fp4_max)


def _blocks_per_row(qdata: Tensor, spec: Spec) -> int:
    return qdata.shape[1] * (2 if isinstance(spec, NVFP4) else 1) // spec.block_length


def as_words(qdata: Tensor, word: torch.dtype) -> Tensor:
    """Return qdata [rows, bytes] as [rows, words], copying only rows that do not start on a word."""
    if qdata.stride(1) != 1 or qdata.stride(0) % word.itemsize or qdata.data_ptr() % word.itemsize:
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    return qdata.view(word)


def _launch(
    blocks: Blocks, spec: Spec, cols: int, dtype: torch.dtype, scale_layout: str, *, with_factor: bool
) -> Tensor:
    check_scale_layout(scale_layout)
    nvfp4 = isinstance(spec, NVFP4)
    rows, per_row = blocks.qdata.shape[0], _blocks_per_row(blocks.qdata, spec)
    out = torch.empty(rows, cols, dtype=dtype, device=blocks.qdata.device)
    if out.numel() == 0:
        return out
    words = as_words(blocks.qdata, torch.int32 if nvfp4 else torch.int64)
    scale = blocks.block_scale.view(torch.uint8)
    if nvfp4 and with_factor:
        factor = dc.ROW_FACTOR if spec.outer == "row" else dc.TENSOR_FACTOR
    else:
        factor = dc.NO_FACTOR
    divisor = spec.e4m3_max * spec.fp4_max if nvfp4 else 1.0
    form = dc.NVFP4 if nvfp4 else dc.MXFP8_E4M3 if spec.element == "e4m3" else dc.MXFP8_E5M2
    width, steps, warps = next((tile for tile in TILES if tile[0] <= words.shape[1]), TILES[-1])
    grid = (triton.cdiv(rows, steps) * triton.cdiv(words.shape[1], width),)
    dequantize_kernel[grid](
        words,
        scale,
        blocks.amax if factor != dc.NO_FACTOR else None,
        out,
        rows,
        cols,
        per_row,
        words.stride(0),
        scale.stride(0),
        out.stride(0),
        f32(divisor / FLT_MAX),
        f32(1 / divisor),
        FORMAT=form,
        FACTOR=factor,
        SWIZZLED=scale_layout != LINEAR,
        BLOCK_WORDS=width,
        STEPS=steps,
        num_warps=warps,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Return what `dequantize` and `decode` launch: every tile, format, factor, scale layout and output width."""
    return [
        _case(dc.NVFP4, dc.NO_FACTOR, False, torch.bfloat16, TILES[0]),
        _case(dc.NVFP4, dc.TENSOR_FACTOR, True, torch.bfloat16, TILES[1]),
        _case(dc.NVFP4, dc.ROW_FACTOR, False, torch.float32, TILES[2]),
        _case(dc.MXFP8_E4M3, dc.NO_FACTOR, False, torch.bfloat16, TILES[3]),
        _case(dc.MXFP8_E5M2, dc.NO_FACTOR, True, torch.float32, TILES[4]),
    ]


def _case(form: int, factor: int, swizzled: bool, dtype: torch.dtype, tile: tuple[int, int, int]) -> CompileCase:
    arguments = {
        "qdata_ptr": "*i32:16" if form == dc.NVFP4 else "*i64:16",
        "scale_ptr": "*u8:16",
        "amax_ptr": "*fp32:16" if factor != dc.NO_FACTOR else None,
        "out_ptr": f"*{dtype_name(dtype)}:16",
        **dict.fromkeys(("rows", "cols", "blocks", "qdata_stride", "scale_stride", "out_stride"), "i32:16"),
        **dict.fromkeys(("floor", "inverse"), "fp32"),
        "FORMAT": form,
        "FACTOR": factor,
        "SWIZZLED": swizzled,
        "BLOCK_WORDS": tile[0],
        "STEPS": tile[1],
    }
    return CompileCase(dequantize_kernel, arguments, num_warps=tile[2])
