"""Device functions from values to codes: casts and packing (docs/numerics.md section 1).

A block is a tuple of 16 tensors (MXFP8: 32, a rotated group: up to 128), element i of every block in tensor i, so that
a thread owns whole blocks: maxima, sums, butterflies and packing are arithmetic between registers, without shuffles or
shared memory, and the same code serves blocks along rows and along columns.

Everything is exact in Triton's interpreter and on every GPU. Where NVIDIA's GPUs have one instruction for what portable
Triton says in several, it is inline assembly beside the portable form, which serves the interpreter and other GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from halfbyte import formats
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.layout import ceil_div

FLT_MAX = tl.constexpr(formats.FLT_MAX)
E2M1_MAX = tl.constexpr(formats.E2M1.max)
E4M3_MAX = tl.constexpr(formats.E4M3.max)
E5M2_MAX = tl.constexpr(formats.E5M2.max)
INF = tl.constexpr(float("inf"))

MAGIC = tl.constexpr(8388608.0)  # 2^23: from here to 2^24 a float's low bits are an integer
MAGIC_SEVEN = tl.constexpr(0x4B000007)  # the bits of 2^23 + 7
PACK_BIAS = tl.constexpr(0xFB000000)  # what the exponents of 8 magic numbers add to a packed word: 0x4B000000 * 0x11

# Four fp32 values to four bytes: two conversions, each of the upper and the lower operand, joined.
E4M3_WORD, E5M2_WORD = (
    tl.constexpr(
        "{.reg .b16 low, high;"
        f"cvt.rn.satfinite.{name}x2.f32 low, $2, $1; cvt.rn.satfinite.{name}x2.f32 high, $4, $3;"
        "mov.b32 $0, {low, high};}"
    )
    for name in ("e4m3", "e5m2")
)

WORDS = tl.constexpr((tl.uint32, tl.uint32, tl.uint32, tl.uint32))  # what inline assembly with four outputs returns

# The maximum of |x| of two pairs of bf16, NaN if one is; the second, from sm_86 on, is one instruction whose signs mean
# nothing.
PAIR_ABS_MAX = tl.constexpr(
    (
        "{.reg .b32 a, b; and.b32 a, $1, 0x7FFF7FFF; and.b32 b, $2, 0x7FFF7FFF; max.NaN.bf16x2 $0, a, b;}",
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
    )
)

MAX_OF_HALVES = tl.constexpr("{.reg .b32 t; prmt.b32 t, $1, $1, 0x1032; max.NaN.xorsign.abs.bf16x2 $0, $1, t;}")

# |x| * encode with the absolute value as an operand modifier; 16 times a word plus 8 times a sign bit plus a code.
MULTIPLY_ABS = tl.constexpr("{.reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2;}")
# `least_lines` of |$1| * $2 in one operation: Triton's passes take a time that grows with the square of their number.
LEAST_LINE = tl.constexpr(
    "{.reg .f32 a, f, g, h; .reg .b32 s, t; abs.f32 a, $1; mul.rn.f32 a, a, $2;"
    "fma.rn.f32 f, a, 0f40000000, 0f4B000000; add.rn.f32 g, a, 0f4B000002; fma.rn.f32 h, a, 0f3F000000, 0f4B000004;"
    "mov.b32 s, f; mov.b32 t, g; min.u32 s, s, t; mov.b32 t, h; min.u32 $0, s, t;}"
)

# 8 nibbles of the sign of $1 to $8 and the code of $9 to $16, bits of 2^23 + code, the last shifted in first.
PACK_NIBBLES = tl.constexpr(
    "{.reg .b32 w, t, x; mov.b32 w, 0;"
    + "".join(f"mov.b32 x, ${i}; shf.l.wrap.b32 t, x, w, 1; mad.lo.u32 w, t, 8, ${i + 8};" for i in range(8, 0, -1))
    + "sub.u32 $0, w, 0xFB000000;}"
)

# What the IEEE reciprocal does where its range check passes: one step of Newton.
REGULAR_RECIPROCAL = tl.constexpr(
    "{.reg .f32 r, e, n; rcp.approx.ftz.f32 r, $1; neg.f32 n, $1; fma.rn.f32 e, n, r, 0f3F800000;"
    "fma.rn.f32 $0, r, e, r;}"
)

# One fp32 value to an E4M3 code.
E4M3_CONVERSION = tl.constexpr(
    "{.reg .b16 t; .reg .f32 z; mov.f32 z, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 t, z, $1; cvt.u32.u16 $0, t;}"
)


@triton.jit
def to_fp32(x):
    """Return bf16, fp16 or fp32 values as fp32."""
    if not has_ptx() and x.dtype == tl.bfloat16:  # the interpreter's conversion is wrong for subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def small_float(a, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the codes (int32) of fp32 a >= 0 in a small format, nearest even; `a` is at most the format's maximum."""
    bits = a.to(tl.int32, bitcast=True)
    DROP: tl.constexpr = 23 - MANTISSA
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    # Adding a number whose last bit is the smallest subnormal rounds to multiples of it.
    SHIFT: tl.constexpr = 23 + 1 - BIAS - MANTISSA
    subnormal = (a + 2.0**SHIFT).to(tl.int32, bitcast=True) - ((127 + SHIFT) << 23)
    return tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal)


@triton.jit
def e4m3_code(a, HARDWARE: tl.constexpr):
    """Return E4M3 codes (uint32) of fp32 a >= 0, saturating. HARDWARE: the target has the conversion (sm_89 on).

    One value a conversion: ptxas of CUDA 12.8 takes garbage for a code where two pairs are converted and taken apart.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(E4M3_CONVERSION, "=r,f", [a], dtype=tl.uint32, is_pure=True, pack=1)
    return small_float(tl.minimum(a, E4M3_MAX), 3, 7).to(tl.uint32)


@triton.jit
def e4m3_positive(code):
    """Return the fp32 value of E4M3 codes (an unsigned type) that are neither negative nor NaN."""
    return (code.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def fp8_word(x0, x1, x2, x3, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """Return four E4M3 or E5M2 codes, nearest even and saturating, in a uint32 with x0 in the low byte."""
    if HARDWARE:
        CONVERT: tl.constexpr = E4M3_WORD if E4M3 else E5M2_WORD
        return tl.inline_asm_elementwise(CONVERT, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1)
    xs = (x0, x1, x2, x3)
    word = x0.to(tl.uint32, bitcast=True) & 0
    for i in tl.static_range(4):
        a = tl.minimum(tl.abs(xs[i]), E4M3_MAX if E4M3 else E5M2_MAX)
        code = small_float(a, 3 if E4M3 else 2, 7 if E4M3 else 15).to(tl.uint32)
        word |= (((xs[i].to(tl.uint32, bitcast=True) >> 24) & 0x80) | code) << (8 * i)
    return word


@triton.jit
def scaled_magnitude(x, encode):
    """Return |x| * encode."""
    if not has_ptx():
        return tl.abs(x) * encode
    x, encode = tl.broadcast(x, encode)
    return tl.inline_asm_elementwise(MULTIPLY_ABS, "=f,f,f", [x, encode], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def nearest_codes(xs, START: tl.constexpr, encode):
    """Return the bits of 2^23 + code for the E2M1 codes nearest to |x| * encode, 8 elements from START.

    The code is the rounded minimum of 2a, a + 2 and a / 2 + 4, the three slopes of E2M1; rounding is monotone, so each
    line may be rounded first, to even in the code as in the value.
    """
    out = ()
    lines = least_lines(xs, START, encode)
    for i in tl.static_range(8):
        out = out + (tl.minimum(lines[i], MAGIC_SEVEN),)
    return out


@triton.jit
def least_lines(xs, START: tl.constexpr, encode):
    """Return `nearest_codes` of what rounds to a code of E2M1, 8 elements from START."""
    out = ()
    for i in tl.static_range(START, START + 8):
        if has_ptx():
            x, factor = tl.broadcast(xs[i], encode)
            out = out + (
                tl.inline_asm_elementwise(LEAST_LINE, "=r,f,f", [x, factor], dtype=tl.uint32, is_pure=True, pack=1),
            )
        else:
            a = scaled_magnitude(xs[i], encode)
            low = tl.fma(a, 2.0, MAGIC).to(tl.uint32, bitcast=True)
            middle = (a + (MAGIC + 2.0)).to(tl.uint32, bitcast=True)
            high = tl.fma(a, 0.5, MAGIC + 4.0).to(tl.uint32, bitcast=True)
            out = out + (tl.minimum(tl.minimum(low, middle), high),)
    return out


@triton.jit
def nearest_value(a):
    """Return the number that the E2M1 code nearest to a >= 0 stands for."""
    return rounded_value(tl.minimum(a, E2M1_MAX), 1.0)


@triton.jit
def rounded_value(a, UNIT: tl.constexpr):
    """Return `nearest_value` of what rounds to a code of E2M1; both times UNIT, a power of two.

    The last bit of 2^22 times a number of a's binade is half the binade, the distance of E2M1 values there. What a has
    behind its first bits is taken off again; from 1.25 on, as below a power of two the last bit is half of it.
    """
    m = tl.maximum(a, 1.25 * UNIT)
    return tl.fma(m, 4194304.0, tl.fma(m, -4194304.0, a))


@triton.jit
def truncated_codes(xs, START: tl.constexpr, encode):
    """Return the bits of 2^23 + code of |x| * encode rounded toward zero, 8 elements from START."""
    out = ()
    for i in tl.static_range(START, START + 8):
        a = scaled_magnitude(xs[i], encode)
        low, middle, high = tl.floor(a * 2.0), tl.floor(a) + 2.0, tl.floor(a * 0.5) + 4.0
        code = tl.minimum(tl.minimum(low, middle), tl.minimum(high, 7.0)) + MAGIC
        out = out + (code.to(tl.uint32, bitcast=True),)
    return out


@triton.jit
def pack_word(xs, START: tl.constexpr, codes):
    """Return 8 nibbles as uint32, element START in the low one: the sign of x, the code of the bits 2^23 + code."""
    if has_ptx():
        given = part(xs, START, 8) + codes
        return tl.inline_asm_elementwise(
            PACK_NIBBLES, "=r,f,f,f,f,f,f,f,f,r,r,r,r,r,r,r,r", given, dtype=tl.uint32, is_pure=True, pack=1
        )
    word = xs[START].to(tl.uint32, bitcast=True) & 0
    for j in tl.static_range(8):
        bits = xs[START + 7 - j].to(tl.uint32, bitcast=True)
        word = (((word << 1) | (bits >> 31)) << 3) + codes[7 - j]
    return word - PACK_BIAS


@triton.jit
def bf16_pairs(xs):
    """Round an even number of fp32 tensors to bf16, two in a uint32, the first in its low half; Inf and NaN stay."""
    out = ()
    for i in tl.static_range(0, len(xs), 2):
        if not has_ptx():  # the interpreter's conversion truncates
            low, high = xs[i].to(tl.uint32, bitcast=True), xs[i + 1].to(tl.uint32, bitcast=True)
            low = tl.where(xs[i] == xs[i], (low + 0x7FFF + ((low >> 16) & 1)) >> 16, 0x7FC0)
            high = tl.where(xs[i + 1] == xs[i + 1], (high + 0x7FFF + ((high >> 16) & 1)) & 0xFFFF0000, 0x7FC00000)
            out = out + (low | high,)
        else:
            pair = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [xs[i + 1], xs[i]], dtype=tl.uint32, is_pure=True, pack=1
            )
            out = out + (pair,)
    return out


@triton.jit
def unpack_pairs(pairs, START: tl.constexpr, LENGTH: tl.constexpr):
    """Return LENGTH fp32 tensors from element START of `bf16_pairs`."""
    out = ()
    for i in tl.static_range(START // 2, (START + LENGTH) // 2):
        out = out + (
            (pairs[i] << 16).to(tl.float32, bitcast=True),
            (pairs[i] & 0xFFFF0000).to(tl.float32, bitcast=True),
        )
    return out


@triton.jit
def abs_max(xs):
    """Return max |x| over the elements of a block; NaN if one is NaN."""
    m = tl.abs(xs[0])
    for i in tl.static_range(1, len(xs)):
        m = tl.maximum(m, tl.abs(xs[i]), propagate_nan=tl.PropagateNan.ALL)
    return m


@triton.jit
def pair_abs_max(pairs, HARDWARE: tl.constexpr):
    """Return the two maxima of |x| of `bf16_pairs`, each over one half of all words, as a pair; NaN if one is NaN.

    HARDWARE: the target is sm_89 or later, as for FP8.
    """
    if not has_ptx():
        return pair_of(abs_max(unpack_halves(pairs, False)), abs_max(unpack_halves(pairs, True)))
    return pair_max(pairs, HARDWARE) & 0x7FFF7FFF


@triton.jit
def pair_max(pairs, HARDWARE: tl.constexpr):
    """Return `pair_abs_max` with signs that mean nothing; where there is PTX."""
    m = pairs[0]
    for i in tl.static_range(1, len(pairs)):
        m = tl.inline_asm_elementwise(
            PAIR_ABS_MAX[1 if HARDWARE else 0], "=r,r,r", [m, pairs[i]], dtype=tl.uint32, is_pure=True, pack=1
        )
    return m


@triton.jit
def max_of_pairs(pairs, HARDWARE: tl.constexpr):
    """Return max |x| over all values of `bf16_pairs` as fp32; NaN if one is NaN. HARDWARE: as in `pair_abs_max`."""
    if not has_ptx() or not HARDWARE:
        return max_of_pair(pair_abs_max(pairs, HARDWARE))
    m = pair_max(pairs, HARDWARE)
    m = tl.inline_asm_elementwise(MAX_OF_HALVES, "=r,r", [m], dtype=tl.uint32, is_pure=True, pack=1)
    return (m & 0x7FFF0000).to(tl.float32, bitcast=True)


@triton.jit
def pair_of(low, high):
    """Return two fp32 tensors that hold bf16 values as one pair."""
    return (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def unpack_halves(pairs, UPPER: tl.constexpr):
    """Return the lower or the upper value of every pair as fp32."""
    out = ()
    for i in tl.static_range(len(pairs)):
        if UPPER:
            out = out + ((pairs[i] & 0xFFFF0000).to(tl.float32, bitcast=True),)
        else:
            out = out + ((pairs[i] << 16).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def pairs_of_half(words, which):
    """Return `bf16_pairs` of the upper values of words if `which` is 1, of the lower ones if it is 0."""
    out = ()
    for i in tl.static_range(0, len(words), 2):
        if not has_ptx():
            shift = 16 - 16 * which
            out = out + (((words[i] << shift) & 0xFFFF0000) >> 16 | ((words[i + 1] << shift) & 0xFFFF0000),)
        else:
            low, selector = tl.broadcast(words[i], tl.full((), 0x5410, tl.int32) + which * 0x2222)
            out = out + (
                tl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, words[i + 1], selector], dtype=tl.uint32,
                    is_pure=True, pack=1,
                ),
            )  # fmt: skip
    return out


@triton.jit
def max_of_pair(m):
    """Return the larger of the two values of a pair as fp32; NaN if one is NaN."""
    low, high = (m << 16).to(tl.float32, bitcast=True), (m & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    """Return fp32 1 / x, rounded to nearest."""
    if not has_ptx():
        return tl.div_rn(x * 0 + 1.0, x)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def regular_reciprocal(x):
    """Return fp32 1 / x, rounded to nearest, for |x| between 2^-100 and 2^100, Inf or NaN for 0, else anything."""
    if not has_ptx():
        return tl.where(x == 0, INF, tl.div_rn(x * 0 + 1.0, tl.where(x == 0, 1.0, x)))
    return tl.inline_asm_elementwise(REGULAR_RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_reciprocal(x):
    """Return fp32 1 / x, off by an ulp at most, for |x| between 2^-100 and 2^100, Inf for 0."""
    if not has_ptx():
        return tl.where(x == 0, INF, tl.div_rn(x * 0 + 1.0, tl.where(x == 0, 1.0, x)))
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quotient(x, d):
    """Return fp32 x / d, rounded to nearest, where x, d and the result lie between 2^-100 and 2^100."""
    if not has_ptx():
        return tl.div_rn(x, x * 0 + d)
    return quotient_by(x, d, regular_reciprocal(d))


@triton.jit
def quotient_by(x, d, r):
    """Return `quotient` (x, d) from r, the rounded reciprocal of d."""
    if not has_ptx():
        return tl.div_rn(x, x * 0 + d)
    # What IEEE division does where its range check passes: one correction of x times the reciprocal.
    q = x * r
    return tl.fma(r, tl.fma(q, -d, x), q)


class Divisor(NamedTuple):
    """A number by which kernels divide: Granlund and Montgomery's multiplication, 30 bits wide."""

    count: int
    magic: int
    shift: int

    @classmethod
    def of(cls, count: int) -> Divisor:
        """Return what dividing by `count` takes."""
        bits = (count - 1).bit_length()
        return cls(count, ceil_div(1 << (30 + bits), count), 30 + bits)


@triton.jit
def divide(n, by):
    """Return n // by.count for 0 <= n < 2^30; by: a Divisor."""
    return ((n.to(tl.int64) * by.magic) >> by.shift).to(tl.int32)


@triton.jit
def split_eight(x, R: tl.constexpr, N: tl.constexpr):
    """Split [R, N, 8], the last dimension in one thread, into 8 tensors [R, N]."""
    even, odd = tl.split(tl.reshape(x, (R, N, 4, 2)))
    even_0, even_1 = tl.split(tl.reshape(even, (R, N, 2, 2)))
    odd_0, odd_1 = tl.split(tl.reshape(odd, (R, N, 2, 2)))
    x0, x4 = tl.split(even_0)
    x2, x6 = tl.split(even_1)
    x1, x5 = tl.split(odd_0)
    x3, x7 = tl.split(odd_1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def split_four(x, R: tl.constexpr, N: tl.constexpr):
    """Split [R, N, 4], the last dimension in one thread, into 4 tensors [R, N]."""
    even, odd = tl.split(tl.reshape(x, (R, N, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def part(xs, START: tl.constexpr, LENGTH: tl.constexpr):
    """Return LENGTH members of a tuple from START."""
    out = ()
    for i in tl.static_range(START, START + LENGTH):
        out = out + (xs[i],)
    return out


@triton.jit
def chosen(condition, xs, ys):
    """Return members of xs where `condition`, else those of ys."""
    out = ()
    for i in tl.static_range(len(xs)):
        out = out + (tl.where(condition, xs[i], ys[i]),)
    return out


@triton.jit
def like(index, x):
    """Return int64 `index`, computed by the threads that hold x: else random words would move between threads."""
    bits = x.to(tl.uint32, bitcast=True)
    if not has_ptx():
        zero = bits & 0
    else:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [bits], dtype=tl.uint32, is_pure=True, pack=1)
    return index + zero.to(tl.int64)


@triton.jit
def wide_sum(base, n, stride):
    """Return base + n * stride in int64, neither n nor stride negative: one instruction where stride is int32."""
    stride = tl.full((), 0, tl.int32) + stride
    if not has_ptx() or stride.dtype == tl.int64:
        return base + n * stride.to(tl.int64)
    return tl.inline_asm_elementwise(
        "mad.wide.u32 $0, $2, $3, $1;", "=l,l,r,r", [base, n, stride], dtype=tl.int64, is_pure=True, pack=1
    )


@triton.jit
def unaligned(index):
    """Return a scalar; what divides it is hidden from the compiler, whose stores from there are of one element each."""
    if not has_ptx():
        return index
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def nth(tuples, N: tl.constexpr):
    """Return the members N of tuples."""
    out = ()
    for i in tl.static_range(len(tuples)):
        out = out + (tuples[i][N],)
    return out


@triton.jit
def interleave(columns, N: tl.constexpr, C: tl.constexpr):
    """Return tuples of tensors [N, C] from one tuple [N, C / count] for each of `count` neighbouring columns."""
    if len(columns) == 1:
        return columns[0]
    else:
        out = ()
        for i in tl.static_range(len(columns[0])):
            out = out + (tl.reshape(join_group(nth(columns, i), N, C // len(columns)), (N, C)),)
        return out


@triton.jit
def join_group(parts, R: tl.constexpr, N: tl.constexpr):
    """Join 1, 2, 4 or 8 tensors [R, N] into [R, N, count], in one thread."""
    COUNT: tl.constexpr = len(parts)
    for _ in tl.static_range(3):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                joined = joined + (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = joined
    return tl.reshape(parts[0], (R, N, COUNT))
