"""Device functions from stored bytes to values, in integer arithmetic: exact on every GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte import formats
from halfbyte.kernels.device.ptx import has_ptx

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

NVFP4 = tl.constexpr(0)
MXFP8_E4M3 = tl.constexpr(1)
MXFP8_E5M2 = tl.constexpr(2)

NO_FACTOR = tl.constexpr(0)
TENSOR_FACTOR = tl.constexpr(1)
ROW_FACTOR = tl.constexpr(2)

E4M3_NAN = tl.constexpr(formats.E4M3.nan_code)
E8M0_NAN = tl.constexpr(formats.E8M0_NAN)
SWIZZLE_ROWS = tl.constexpr(formats.SWIZZLE_ROWS)
SWIZZLE_COLS = tl.constexpr(formats.SWIZZLE_COLS)


@triton.jit
def e4m3_value(code):
    """Return the fp32 value of E4M3 codes (int32)."""
    # Exponent and mantissa at the top of fp32's fields are 2^120 too small, subnormals included.
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == E4M3_NAN, float("nan"), value)


@triton.jit
def e5m2_value(code):
    """Return the fp32 value of E5M2 codes (int32): the upper byte of an fp16."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e8m0_value(code):
    """Return the fp32 value of E8M0 codes (int32): 2^(code - 127), a subnormal for code 0."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == E8M0_NAN, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def e2m1_values(words):
    """Return the fp32 values of the 8 E2M1 codes of each int32 word: [..., 8], the low nibble first."""
    top = words[:, :, None] << (28 - 4 * tl.arange(0, 8))[None, None, :]
    bits = (top & -0x80000000) | ((top >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: E2M1's exponent bias is 1, fp32's 127


@triton.jit
def element_values(words, FORMAT: tl.constexpr):
    """Return the fp32 values of the 8 elements of each word [R, W]: [R, W, 8]. NVFP4 int32, MXFP8 int64 words."""
    if FORMAT == NVFP4:
        return e2m1_values(words)
    codes = ((words[:, :, None] >> (8 * tl.arange(0, 8)).to(tl.int64)[None, None, :]) & 0xFF).to(tl.int32)
    return e4m3_value(codes) if FORMAT == MXFP8_E4M3 else e5m2_value(codes)


@triton.jit
def swizzled_offset(i, j, cols):
    """Return where scale (i, j) of a matrix with `cols` scales a row lies in the SWIZZLED_32_4_4 buffer."""
    tiles = tl.cdiv(cols, SWIZZLE_COLS)
    tile = (i // SWIZZLE_ROWS).to(tl.int64) * tiles + j // SWIZZLE_COLS
    within = i % SWIZZLE_ROWS
    return tile * (SWIZZLE_ROWS * SWIZZLE_COLS) + (within % 32) * 16 + (within // 32) * SWIZZLE_COLS + j % SWIZZLE_COLS


@triton.jit
def clamped_amax(amax, floor):
    """Return A of docs/numerics.md section 3: amax, no smaller than f(m8 * m4 / FLT_MAX)."""
    return tl.maximum(amax, floor)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Round fp32 to `dtype`, nearest even; Inf and NaN stay."""
    # The interpreter truncates: by hand there, and wherever nobody has seen what the conversion does.
    if not has_ptx() and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
