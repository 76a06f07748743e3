"""What a quantized operand lost: its codes are decoded beside the values that they were made of, in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import CLIPPED, OPERAND_SUMS
from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device.rotate_wide import stages
from halfbyte.kernels.launch import jit
from halfbyte.kernels.sums import partial
from halfbyte.kernels.unpack.dequantize import FORMS, as_words, factor
from halfbyte.layout import LINEAR, Operand, blocks_per_row, ceil_div


class Units(NamedTuple):
    """Rows and units of a tile: a thread holds a unit of 16 values, of NVFP4 a block."""

    rows: int
    units: int


ALONG_ROWS, ALONG_COLUMNS = Units(4, 64), Units(256, 1)  # by where neighbours in memory lie
WIDE_COLUMNS = Units(32, 8)  # of blocks or groups that are more than a unit


class Coded(NamedTuple):
    """An operand: words of 8 codes [rows, words], the bytes of its scales, its amax, and its rows' distances.

    floor, inverse: of its factor, as `unpack.dequantize.Decoded` says.
    """

    qdata_ptr: Any
    scale_ptr: Any
    amax_ptr: Any
    qdata_stride: Any
    scale_stride: Any
    floor: Any
    inverse: Any


@triton.jit
def load_units(values_ptr, stride_r, stride_c, row, col, in_row, cols, TURNED: tl.constexpr):
    """Return fp32 [R, U, 8]: 8 values from col [U] on, 0 outside; a thread holds all 8."""
    # Columns without alignment: the compiler gives a thread one row, and lanes lie along rows.
    step = tl.cast(pm.unaligned(stride_c) if TURNED else stride_c, tl.int64)
    near = tl.arange(0, 8)[None, None, :]
    first = values_ptr + row.to(tl.int64)[:, None] * stride_r + col.to(tl.int64)[None, :] * step
    mask = in_row[:, None, None] & (col[None, :, None] + near < cols)
    return pm.to_fp32(tl.load(first[:, :, None] + near.to(tl.int64) * step, mask=mask, other=0.0))


@triton.jit
def as_bf16(x):
    """Round fp32 values to bf16."""
    return pm.to_fp32(dc.cast(x, tl.bfloat16))


@triton.jit
def rotated_units(low, high, sign_ptr, norm):
    """Rotate groups of 16, whose halves are low and high [R, U, 8]."""
    R: tl.constexpr = low.shape[0]
    U: tl.constexpr = low.shape[1]
    sign = sign_ptr + tl.arange(0, 8)
    a = tl.reshape(as_bf16(low) * tl.load(sign)[None, None, :], (R * U, 8))
    b = tl.reshape(as_bf16(high) * tl.load(sign + 8)[None, None, :], (R * U, 8))
    a, b = stages(a, 8), stages(b, 8)
    pair = pm.bf16_pairs(((a + b) * norm, (a - b) * norm))[0]
    low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(low, (R, U, 8)), tl.reshape(high, (R, U, 8))


@triton.jit
def rotated_wide(low, high, sign_ptr, norm, SIZE: tl.constexpr):
    """Rotate groups of SIZE along rows of units, whose halves are low and high [R, U, 8]; by way of shared memory."""
    R: tl.constexpr = low.shape[0]
    U: tl.constexpr = low.shape[1]
    x = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (R, U * 16))
    x = as_bf16(x) * tl.load(sign_ptr + tl.arange(0, U * 16) % SIZE)[None, :]
    x = as_bf16(stages(x, SIZE) * norm)
    return tl.split(tl.permute(tl.reshape(x, (R, U, 2, 8)), (0, 1, 3, 2)))


@triton.jit
def scales_of_units(coded, row, unit, inside, clipped, FORMAT: tl.constexpr, FACTOR: tl.constexpr, SHARE: tl.constexpr):
    """Return of units [R, U] the bytes of their scales, what multiplies elements, and what saturated values exceed.

    SHARE: units that share a scale.
    """
    # Doubled and halved, units hide from the compiler that scales lie together: they stay where a thread's values are.
    o_scale = (unit * 2 // (2 * SHARE))[None, :]
    pointers = coded.scale_ptr + row.to(tl.int64)[:, None] * coded.scale_stride + o_scale
    code = tl.load(pointers, mask=inside, other=0).to(tl.int32)
    value = dc.e4m3_value(code) if FORMAT == dc.NVFP4 else dc.e8m0_value(code)
    scale, most = value, clipped
    if FACTOR != dc.NO_FACTOR:
        if FACTOR == dc.ROW_FACTOR:
            amax = tl.load(coded.amax_ptr + row[:, None], mask=inside, other=0.0)
        else:
            amax = tl.load(coded.amax_ptr)
        before, a, after = factor(amax, coded.floor, coded.inverse)
        scale = ((scale * before) * a) * after
        most = dc.clamped_amax(amax, coded.floor) * coded.inverse * clipped
    return code, scale, tl.where(code == 0, float("inf"), value * most)


@triton.jit
def count(mask):
    """Return how many of the last of three dimensions hold: int32 [R, U]."""
    return tl.sum(mask.to(tl.int32), axis=2)


@jit
def operand_sums_kernel(
    values_ptr,
    coded,
    sign_ptr,
    maxima_ptr,
    parts_ptr,
    rows,
    cols,
    units,
    each,
    stride_r,
    stride_c,
    norm,
    clipped,
    FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    NOISE: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the OPERAND_SUMS of `each` tiles of R rows and U units, and the largest magnitude, to parts [10, programs].

    maxima: of blocks [rows, blocks], or None. NOISE: of all this the noise alone, parts [programs].
    """
    overlap.begin(OVERLAP)
    SHARE: tl.constexpr = 1 if FORMAT == dc.NVFP4 else 2
    programs, first = tl.num_programs(0), tl.program_id(0)
    beside = tl.cdiv(units, U)
    LANES: tl.constexpr = 2  # of a thread's sums: four took 8 bytes more than there were registers
    noise = tl.zeros((R, U, LANES), tl.float64)
    if not NOISE:
        signal, magnitude, deviation = noise, noise, noise
        nonzero = tl.zeros((R, U), tl.int32)
        underflow, saturated, filled, empty, largest = nonzero, nonzero, nonzero, nonzero, nonzero
    for tile in range(first * each, tl.minimum(first * each + each, tl.cdiv(rows, R) * beside)):
        row, unit = tile // beside * R + tl.arange(0, R), tile % beside * U + tl.arange(0, U)
        in_row = row < rows
        inside = in_row[:, None] & (unit < units)[None, :]
        low = load_units(values_ptr, stride_r, stride_c, row, unit * 16, in_row, cols, R > 32)
        high = load_units(values_ptr, stride_r, stride_c, row, unit * 16 + 8, in_row, cols, R > 32)
        if SIZE == 16:
            low, high = rotated_units(low, high, sign_ptr, norm)
        elif SIZE:
            low, high = rotated_wide(low, high, sign_ptr, norm, SIZE)
        code, scale, bound = scales_of_units(coded, row, unit, inside, clipped, FORMAT, FACTOR, SHARE)
        word_ptr = coded.qdata_ptr + row.to(tl.int64)[:, None] * coded.qdata_stride + unit[None, :] * 2
        bits = tl.zeros((R, U), tl.int32)
        for half in tl.static_range(2):
            v = high if half else low
            words = tl.load(word_ptr + half, mask=inside, other=0)
            q = dc.element_values(words, FORMAT) * scale[:, :, None]
            d = q - v
            noise = partial.add_squares(noise, d)
            if not NOISE:
                signal = partial.add_squares(signal, v)
                magnitude = partial.add_magnitudes(magnitude, v)
                deviation = partial.add_magnitudes(deviation, d)
                nonzero += count(v != 0)
                underflow += count((v != 0) & (q == 0))
                saturated += count(tl.abs(v) > bound[:, :, None])
                bits = tl.maximum(bits, tl.max(partial.ordered_bits(v), axis=2))
        if not NOISE:
            if SHARE == 2:
                pairs = tl.max(tl.reshape(bits, (R, U // 2, 2)), axis=2, keep_dims=True)
                bits = tl.reshape(tl.broadcast_to(pairs, (R, U // 2, 2)), (R, U))
            largest = tl.maximum(largest, bits)
            leads = inside & (unit % SHARE == 0)[None, :]
            of_block = bits.to(tl.float32, bitcast=True)
            filled += (leads & (of_block > 0)).to(tl.int32)
            empty += (leads & (of_block > 0) & (code == 0)).to(tl.int32)
            if maxima_ptr is not None:
                o_block = row.to(tl.int64)[:, None] * (units // SHARE) + (unit // SHARE)[None, :]
                tl.store(maxima_ptr + o_block, of_block, mask=leads)
    out = parts_ptr + first
    if NOISE:
        tl.store(out, tl.sum(noise))
    else:
        tl.store(out, tl.sum(signal))
        tl.store(out + programs, tl.sum(noise))
        tl.store(out + 2 * programs, tl.sum(magnitude))
        tl.store(out + 3 * programs, tl.sum(deviation))
        tl.store(out + 4 * programs, tl.sum(nonzero).to(tl.float64))
        tl.store(out + 5 * programs, tl.sum(underflow).to(tl.float64))
        tl.store(out + 6 * programs, tl.sum(saturated).to(tl.float64))
        tl.store(out + 7 * programs, tl.sum(filled).to(tl.float64))
        tl.store(out + 8 * programs, tl.sum(empty).to(tl.float64))
        tl.store(out + 9 * programs, partial.largest_of(largest))


def operand_sums(
    values: Tensor, operand: Operand, signs: Tensor | None = None, with_maxima: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `halfbyte.reference.operand_sums` does, in one pass, up to the order in which fp64 is added."""
    blocks, spec = operand.blocks, operand.spec
    shape = blocks.qdata.shape[0], blocks_per_row(blocks.qdata, spec)
    figures = len(OPERAND_SUMS)
    maxima = torch.empty(shape, device=values.device, dtype=torch.float32) if with_maxima else None
    if not blocks.qdata.numel():
        nothing = torch.zeros(figures + 1, dtype=torch.float64, device=values.device)
        return nothing[:figures], nothing[figures], maxima
    found = partial.add_parts(_parts(values, operand, signs, maxima, figures + 1), figures)
    return found[:figures], found[figures], maxima


def operand_noise(values: Tensor, operand: Operand, signs: Tensor | None = None) -> Tensor:
    """Do what `halfbyte.reference.operand_noise` does, up to the order in which fp64 is added."""
    if not operand.blocks.qdata.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return partial.add_parts(_parts(values, operand, signs, None, 1), 1)[0]


def _parts(values: Tensor, operand: Operand, signs: Tensor | None, maxima: Tensor | None, figures: int) -> Tensor:
    """Return what programs find, fp64 [figures, programs]; of one figure the noise."""
    blocks, spec, _, scale_layout = operand
    assert scale_layout == LINEAR, "scales of statistics are never swizzled"
    words = as_words(blocks.qdata, torch.int32 if spec.format.codes_per_byte == 2 else torch.int64)
    scale = blocks.block_scale.view(torch.uint8)
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    factors = spec.format.has_amax
    size, turned = 0 if signs is None else len(signs), values.stride(0) == 1 and values.stride(1) != 1
    tile = ALONG_ROWS if not turned else ALONG_COLUMNS if size <= 16 == spec.block_length else WIDE_COLUMNS
    units = words.shape[1] // 2
    each, programs = partial.shares(ceil_div(words.shape[0], tile.rows) * ceil_div(units, tile.units))
    parts = torch.empty(figures, programs, dtype=torch.float64, device=values.device)
    floor, inverse = (f32(spec.divisor / FLT_MAX), f32(1 / spec.divisor)) if factors else (0.0, 1.0)
    amax = blocks.amax if factors else None
    operand_sums_kernel[(programs,)](
        values,
        Coded(words, scale, amax, words.stride(0), scale.stride(0), floor, inverse),
        signs,
        maxima,
        parts,
        words.shape[0],
        values.shape[1],
        units,
        each,
        values.stride(0),
        values.stride(1),
        1.0 if signs is None else f32(size**-0.5),
        f32(CLIPPED * spec.format.element.max),
        FORMAT=FORMS[spec.format.element.name],
        FACTOR=(dc.ROW_FACTOR if spec.has_row_amax else dc.TENSOR_FACTOR) if factors else dc.NO_FACTOR,
        SIZE=size,
        NOISE=figures == 1,
        R=tile.rows,
        U=tile.units,
        **overlap.launch_options(values.device),
        num_warps=partial.NUM_WARPS,
        enable_fp_fusion=False,
    )
    return parts
