"""Device functions of MS-EDEN (docs/numerics.md section 5): codes, sums of their projection, the corrected scale."""

from __future__ import annotations

import re

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import unpacking
from halfbyte.kernels.device.e2m1_conversion import E2M1_CAPABILITY, converted_word
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.stochastic import JOIN_SIGNS, joined_word

# 512 times the codes of the numbers $1 and $2, in the halves of a word: the bits of 2^-14 times them in fp16.
CODE_PAIR = tl.constexpr(
    "{.reg .b32 h, unit; cvt.rn.f16x2.f32 h, $2, $1; mov.b32 unit, 0x04000400; mul.rn.f16x2 $0, h, unit;}"
)
MAGIC_BITS = tl.constexpr(0x4B000000)

REGULAR_SQUARES = tl.constexpr(2.0**100)  # a larger sum of squares holds a y of 2^47: its scale is beyond E4M3
LEAST_NORMAL = tl.constexpr(2.0**-6)
CODE_ZERO = tl.constexpr(0x3C000000)  # the bits of fp32 that would be code 0 were E4M3 without subnormals: 2^-7

# The scale times the quotient of both sums: corrected twice, as its first result may be two units off. In s its bits,
# less those of 2^-7, in units of 2^-24 of the distance between neighbours, to which adding 2^24 - 1 - u carries where
# the fraction exceeds u: both are integers.
CORRECTED = (
    "rcp.approx.ftz.f32 r, products; neg.f32 m, products; fma.rn.f32 e, m, r, 0f3F800000; fma.rn.f32 r, r, e, r;"
    "mul.rn.f32 t, squares, r; fma.rn.f32 e, t, m, squares; fma.rn.f32 t, e, r, t;"
    "fma.rn.f32 e, t, m, squares; fma.rn.f32 t, r, e, t; mul.rn.f32 t, $13, t; min.f32 t, t, 0f43E00000;"
    "mov.b32 s, t; shl.b32 s, s, 4;"
)


def _block(apart: bool) -> str:
    """Return PTX that leaves in $0, $1 the codes of 16 elements, and in $2 that of their corrected scale.

    $3 to $10: words of two elements, neighbours or, `apart`, two apart. $11: the largest of them, Inf or NaN where
    codes are 0 and the scale NaN. $12: encode. $13: the scale. $14: a random word.

    y and q are 2^-14 times what they are, so that q in fp16 is 512 times a code; of sums the quotient alone counts.
    What is said twice is for warps of which a y reaches 7, so that it has to be held at 6, or a scale lies below 2^-5:
    corrected it may be subnormal, or a block have no code but 0. Nowhere else the sum of y * q is 0. Where a y is 2^47
    or more, the sum of squares or what is divided is Inf or NaN, or the scale is beyond the last one.
    """
    text = (
        "{.reg .pred some, not; .reg .f32 y, m, t, squares, products, encode, r, e, q<16>;"
        f".reg .b32 w, s, one, a, b, even, odd, h<4>; {unpacking.REGISTERS} mul.rn.f32 encode, $12, 0f38800000;"
        f"mov.u32 one, {unpacking.PROGRAM_Z}; add.u32 one, one, 0x3F800000;"
        "mul.rn.f32 y, $11, encode; setp.geu.f32 some, y, 0f39E00000; setp.lt.or.f32 some, $13, 0f3D000000, some;"
        "vote.sync.any.pred some, some, -1; @!some bra $$L_plain_${:uid};"
    )
    for held in (True, False):
        text += "".join(_element(i, apart, held) for i in range(16)) + CORRECTED
        if held:
            text += "setp.lt.f32 some, t, 0f3C800000; min.f32 t, t, 0f3C800000; mul.rn.f32 t, t, 0f50000000;"
            text += "cvt.rpi.s32.f32 w, t; add.u32 w, w, 0xC0000000; selp.b32 s, w, s, some;"
        text += "shr.u32 w, $14, 8; sub.u32 s, s, w; add.u32 s, s, 0x40FFFFFF; shr.u32 $2, s, 24;"
        if held:
            text += "setp.eq.f32 not, products, 0f00000000; selp.b32 $2, 0, $2, not;"
            text += "setp.geu.f32 not, $11, 0f7F800000; selp.b32 $2, 0x7F, $2, not;"
            text += "selp.b32 $0, 0, $0, not; selp.b32 $1, 0, $1, not; bra $$L_done_${:uid}; $$L_plain_${:uid}:"
    return text + "$$L_done_${:uid}:}"


def _element(i: int, apart: bool, held: bool) -> str:
    """Return PTX that adds element i to the sums, and behind every eighth one joins a word of codes."""
    word, upper = (i // 4 * 2 + i % 2, i % 4 > 1) if apart else (i // 2, i % 2 == 1)
    text = unpacking.half_times("w", f"${word + 3}", "one", upper)
    text += "mov.b32 y, w; abs.f32 y, y; mul.rn.f32 y, y, encode;"
    text += "min.f32 t, y, 0f39C00000;" if held else "mov.f32 t, y;"
    text += f"max.f32 m, t, 0f38A00000; fma.rn.f32 q{i}, m, 0fCA800000, t; fma.rn.f32 q{i}, m, 0f4A800000, q{i};"
    if i == 0:
        text += "mul.rn.f32 squares, y, y; mul.rn.f32 products, y, q0;"
    else:
        text += "mul.rn.f32 t, y, y; add.rn.f32 squares, squares, t;"
        text += f"mul.rn.f32 t, y, q{i}; add.rn.f32 products, products, t;"
    if i % 4 > 1:
        pair = f"h{i % 8 // 4 * 2 + i % 2}"
        text += f"cvt.rn.f16x2.f32 {pair}, q{i}, q{i - 2};"
    if i % 8 == 7:
        text += "prmt.b32 even, h0, h2, 0x7531; prmt.b32 odd, h1, h3, 0x7531; shr.u32 even, even, 1;"
        text += "mad.lo.u32 w, odd, 8, even;"
        places = [i // 8, *(i // 2 + k for k in range(4))]
        text += re.sub(r"\$(\d)", lambda found: f"${places[int(found[1])]}", JOIN_SIGNS[apart])
    return text


BLOCK = tl.constexpr((_block(False), _block(True)))
THREE_WORDS = tl.constexpr((tl.uint32, tl.uint32, tl.uint32))


@triton.jit
def projected_block(pairs, largest, encode, scale, word, APART: tl.constexpr):
    """Return two words of codes and the code of the corrected scale of 8 `bf16_pairs`, 0 and NaN if `largest` is none.

    largest: max |x|. For the rest `projected_codes` and `stored_code`.
    """
    given = pairs + (largest, encode, scale, word)
    return tl.inline_asm_elementwise(
        BLOCK[1 if APART else 0], "=&r,=&r,=&r,r,r,r,r,r,r,r,r,f,f,f,r", given, dtype=THREE_WORDS, is_pure=True, pack=1
    )


@triton.jit
def projected_codes(xs, signs, encode, RULE: tl.constexpr, APART: tl.constexpr):
    """Return the 16 nearest codes as two words, the sum of y * y and that of y * q over elements 0 to 15 in order.

    y = x * encode, and q is what its code stands for: every product and every sum is rounded. signs, APART: as in
    `scales.quantize_block`.
    """
    words = ()
    for start in tl.static_range(0, 16, 8):
        codes = ()
        for first in tl.static_range(start, start + 8, 4):
            qs = ()
            for i in tl.static_range(first, first + 4):
                y = tl.abs(xs[i] * encode)
                q = pm.nearest_value(y)
                if i == 0:
                    squares, products = y * y, y * q
                else:
                    squares += y * y
                    products += y * q
                qs = qs + (q,)
            codes = codes + codes_of_values(qs)  # at once: two words in place of four registers
        if RULE.hardware >= E2M1_CAPABILITY:
            words = words + (converted_word(xs, start, encode),)
        elif has_ptx():
            words = words + (joined_word(codes, pm.part(signs, start // 2, 4), APART),)
        else:
            words = words + (pm.pack_word(xs, start, codes),)
    return words, squares, products


@triton.jit
def codes_of_values(qs):
    """Return the codes of four numbers q >= 0 as `joined_word` takes them, or without PTX as `pack_word` does."""
    out = ()
    if has_ptx():
        for i in tl.static_range(2):
            pair = tl.inline_asm_elementwise(
                CODE_PAIR, "=r,f,f", [qs[i], qs[i + 2]], dtype=tl.uint32, is_pure=True, pack=1
            )
            out = out + (pair,)
    else:
        for i in tl.static_range(4):  # E2M1's exponent bias is 1, fp32's 127
            bits = (qs[i] * 1.1754943508222875e-38).to(tl.uint32, bitcast=True) >> 22
            out = out + (bits + MAGIC_BITS,)
    return out


@triton.jit
def stored_code(scale, squares, products, word):
    """Return the E4M3 code (uint32) of scale * (squares / products), rounded up or down as a random word decides."""
    if has_ptx():
        r = pm.regular_reciprocal(products)
        ratio = pm.quotient_by(squares, products, r)
        # Once more: its first result may be two units off before it is corrected.
        ratio = tl.fma(r, tl.fma(ratio, -products, squares), ratio)
    else:
        ratio = tl.div_rn(squares, tl.where(products == 0, 1.0, products))
    t = scale * ratio
    t = tl.where((squares < REGULAR_SQUARES) & (t < pm.E4M3_MAX), t, pm.E4M3_MAX)
    # In units of 2^-24 of the distance between neighbours. Below 2^-10 t may hold half a unit: rounded up it still lies
    # above the same draws.
    normal = (t.to(tl.int32, bitcast=True) - CODE_ZERO) << 4
    subnormal = tl.ceil(tl.minimum(t, LEAST_NORMAL) * 8589934592.0).to(tl.int32)  # 2^33
    steps = tl.where(t < LEAST_NORMAL, subnormal, normal).to(tl.uint32)
    # Up where the fraction exceeds u: both are integers, so adding 2^24 - 1 - u carries.
    code = (steps + 0xFFFFFF - (word >> 8)) >> 24
    return computed_here(tl.where(products == 0, 0, code))


@triton.jit
def computed_here(x):
    """Return uint32 x, computed here: else the compiler puts it off until it is stored and keeps its parts."""
    if not has_ptx():
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=False, pack=1)
