"""Device functions that round 8 values to E2M1 codes by random bytes (docs/numerics.md section 4).

On the code axis E2M1 is line(a) = min(2a, a + 2, a / 2 + 4), and a code is the integer part of line + u. The bits of
an fp16 that holds a * 2^-14 are 512 * line(a): its subnormals are the first slope, its first two exponents the others.
So one conversion that truncates, of two values at once, gives two lines in a word, and adding twice a random byte to
each leaves the codes in bits 9 to 11. Truncation moves no line across a multiple of 1/512.

Below 1/2 the definition rounds a + u / 2 to nearest, which reaches 1/2 from 2^-26 below: a gets 2^-26 more, rounded
toward zero, which changes no larger a.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.ptx import has_ptx

# 512 * line of |x| * encode, at most 7, plus twice a random byte: values $1 and $2 in the halves of a word, with two
# bytes of the random word $4: 0 and 2, or 1 and 3; then 0 and 1, or 2 and 3.
CUT_PAIR, CUT_NEIGHBORS = (
    tl.constexpr(
        tuple(
            "{.reg .f32 a, b; .reg .b32 h, r, seven;"
            "abs.f32 a, $1; abs.f32 b, $2; mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3;"
            "fma.rz.f32 a, a, 0f38800000, 0f2B800000; fma.rz.f32 b, b, 0f38800000, 0f2B800000;"  # 2^-14, 2^-40
            "cvt.rz.f16x2.f32 h, b, a; mov.b32 seven, 0x0E000E00; min.f16x2 h, h, seven;"
            f"prmt.b32 r, $4, 0, {select}; mad.lo.u32 $0, r, 2, h;}}"
            for select in selects
        )
    )
    for selects in (("0x4240", "0x4341"), ("0x4140", "0x4342"))
)
# The signs of 8 elements for bits 3 of the nibbles of w, which they replace. That of element i is the upper bit of half
# i % 2 of operand 1 + i / 2; where operands hold elements two apart instead, (0, 2), (1, 3) and so on, it takes half as
# many steps to gather them. Of even elements a sign fills its byte.
JOIN_SIGNS = tuple(
    f"{gather} lop3.b32 a, even, odd, 0x0F0F0F0F, 0xE4; lop3.b32 $0, a, w, 0x88888888, 0xE4;"
    for gather in (
        "prmt.b32 a, $1, $2, 0x7351; prmt.b32 b, $3, $4, 0x7351;"
        "prmt.b32 even, a, b, 0xDC98; prmt.b32 odd, a, b, 0x7632;",
        "prmt.b32 even, $1, $3, 0xFDB9; prmt.b32 odd, $2, $4, 0x7531;",
    )
)
# Bytes 1 and 3 of $5 to $8 are the codes of elements 0 and 2, 1 and 3, 4 and 6, 5 and 7, shifted by one, over four zero
# bits: gathered, the odd ones are added over the even ones without a carry.
JOIN = tl.constexpr(
    tuple(
        "{.reg .b32 w, a, b, even, odd; prmt.b32 even, $5, $7, 0x7531; prmt.b32 odd, $6, $8, 0x7531;"
        f"shr.u32 even, even, 1; mad.lo.u32 w, odd, 8, even; {signs}}}"
        for signs in JOIN_SIGNS
    )
)
UPPER_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")


@triton.jit
def upper_halves(xs):
    """Return words of the upper halves of two fp32 tensors each, the first in the low half."""
    out = ()
    for i in tl.static_range(0, len(xs), 2):
        low, high = xs[i].to(tl.uint32, bitcast=True), xs[i + 1].to(tl.uint32, bitcast=True)
        if not has_ptx():
            out = out + ((low >> 16) | (high & 0xFFFF0000),)
        else:
            out = out + (
                tl.inline_asm_elementwise(UPPER_HALVES, "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1),
            )
    return out


@triton.jit
def portable_codes(xs, START: tl.constexpr, encode, random):
    """Return the bits of 2^23 + code of |x| * encode rounded by random bytes, 8 elements from START."""
    out = ()
    for i in tl.static_range(START, START + 8):
        a = pm.scaled_magnitude(xs[i], encode)
        word = random[i % 16 // 4]
        u = (((word >> (8 * (i % 4))) & 0xFF) | 0x47000000).to(tl.float32, bitcast=True) - 32768.0
        low, middle, high = tl.floor((a + u * 0.5) * 2.0), tl.floor(a + u) + 2.0, tl.floor(a * 0.5 + u) + 4.0
        code = tl.minimum(tl.minimum(low, middle), tl.minimum(high, 7.0)) + pm.MAGIC
        out = out + (code.to(tl.uint32, bitcast=True),)
    return out


@triton.jit
def stochastic_word(xs, signs, START: tl.constexpr, encode, random, APART: tl.constexpr):
    """Return the codes of x * encode rounded by random bytes, 8 elements from START, the first in the low nibble.

    Args:
        xs: 16 fp32 tensors.
        signs: 8 words; the upper bits of the halves of word k are the signs of elements 2k and 2k + 1, or if APART, of
            the elements that `pm.apart` brings there.
        random: the Philox words of each block, byte i % 4 of word i // 4 for element i.
    """
    if not has_ptx():
        return pm.pack_word(xs, START, portable_codes(xs, START, encode, random))
    pairs = ()
    for i in tl.static_range(START, START + 8, 4):
        for k in tl.static_range(2):
            pairs = pairs + (
                tl.inline_asm_elementwise(
                    CUT_PAIR[k],
                    "=r,f,f,f,r",
                    [xs[i + k], xs[i + k + 2], encode, random[i // 4]],
                    dtype=tl.uint32,
                    is_pure=True,
                    pack=1,
                ),
            )
    return joined_word(pairs, pm.part(signs, START // 2, 4), APART)


@triton.jit
def joined_word(pairs, signs, APART: tl.constexpr):
    """Return 8 codes from four words with two each, 512 times a code and less than 512 more, and four words of signs.

    The words hold elements 0 and 2, 1 and 3, 4 and 6, 5 and 7; signs, APART: as in `stochastic_word`.
    """
    return tl.inline_asm_elementwise(
        JOIN[1 if APART else 0], "=r,r,r,r,r,r,r,r,r", signs + pairs, dtype=tl.uint32, is_pure=True, pack=1
    )
