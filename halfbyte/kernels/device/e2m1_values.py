"""Device functions to the bf16 values of E2M1 codes, two at a time: what a quantize kernel stores decoded.

From packed codes, or from values that are rounded where they are: then no code is ever packed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.casts import WORDS
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.stochastic import CUT_NEIGHBORS, portable_codes

# 8 E2M1 codes $4 times a scale to four pairs of bf16. Shifted, codes j and j + 4 are the bits of a pair of bf16 that is
# 2^126 too small; 2^119 and the scale times 2^7, $5, make up for it. Both products are exact; zeros keep their signs.
DECODE_CODES = tl.constexpr(
    "{.reg .b32 s, z, c, p0, p1, p2, p3; mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00;"
    + "".join(
        f"{shift} {pair}, $4, {by}; shl.b32 s, $4, {12 - 4 * i}; and.b32 s, s, z;"
        f"lop3.b32 {pair}, {pair}, 0x01C001C0, s, 0xEA;"
        f"fma.rn.bf16x2 {pair}, {pair}, c, z; fma.rn.bf16x2 {pair}, {pair}, $5, z;"
        for i, (pair, shift, by) in enumerate(
            (("p0", "shl.b32", 6), ("p1", "shl.b32", 2), ("p2", "shr.u32", 2), ("p3", "shr.u32", 6))
        )
    )
    + "prmt.b32 $0, p0, p1, 0x5410; prmt.b32 $1, p2, p3, 0x5410;"
    "prmt.b32 $2, p0, p1, 0x7632; prmt.b32 $3, p2, p3, 0x7632;}"
)
SAME_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@triton.jit
def decoded_pairs(codes, scale):
    """Return the bf16 pairs of 8 E2M1 codes (int32 words) times fp32 E4M3 scales; where there is PTX."""
    pair = tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [scale * 128.0], dtype=tl.uint32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        DECODE_CODES, "=&r,=&r,=&r,=&r,r,r", [codes, pair], dtype=WORDS, is_pure=True, pack=1
    )


# Two E2M1 codes in the halves of a word, as `DECODE_CODES` has them once they are shifted, with the upper bits of the
# halves of $2 as signs, times a scale: of bits of 2^23 + code $1 and $4; or of 512 times a code and less than 512 more.
NEAREST_VALUES = tl.constexpr(
    "{.reg .b32 p, z, c; mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00; prmt.b32 p, $1, $4, 0x5410; shl.b32 p, p, 6;"
    "lop3.b32 p, p, $2, z, 0xF8; fma.rn.bf16x2 p, p, c, z; fma.rn.bf16x2 $0, p, $3, z;}"
)
CUT_VALUES = tl.constexpr(
    "{.reg .b32 p, s, z, c; mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00; shr.u32 p, $1, 3; and.b32 s, $2, z;"
    "lop3.b32 p, p, 0x01C001C0, s, 0xEA; fma.rn.bf16x2 p, p, c, z; fma.rn.bf16x2 $0, p, $3, z;}"
)
# Of two words the lower halves, the upper halves.
HALVES = tl.constexpr(("prmt.b32 $0, $1, $2, 0x5410;", "prmt.b32 $0, $1, $2, 0x7632;"))


@triton.jit
def value_pairs(xs, signs, encode, scale, random, STOCHASTIC: tl.constexpr):
    """Return the bf16 values, E2M1 times a scale, of x * encode: 8 words of neighbours.

    Args:
        xs: 16 fp32 tensors; signs: 8 words with those of two neighbours in the upper bits of their halves.
        encode, scale: fp32 of each block; a scale that is NaN makes the values NaN.
        random: the Philox words of each block, if STOCHASTIC, else values are rounded to nearest.
    """
    if not has_ptx():
        return portable_pairs(xs, encode, scale, random, STOCHASTIC)
    else:
        out = ()
        pair = tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [scale * 128.0], dtype=tl.uint32, is_pure=True, pack=1)
        if STOCHASTIC:
            for i in tl.static_range(8):
                out = out + (cut_values(xs[2 * i], xs[2 * i + 1], encode, random[i // 2], signs[i], pair, i % 2),)
        else:
            codes = pm.nearest_codes(xs, 0, encode) + pm.nearest_codes(xs, 8, encode)
            for i in tl.static_range(8):
                given = [codes[2 * i], signs[i], pair, codes[2 * i + 1]]
                word = tl.inline_asm_elementwise(
                    NEAREST_VALUES, "=r,r,r,r,r", given, dtype=tl.uint32, is_pure=True, pack=1
                )
                out = out + (word,)
        return out


@triton.jit
def cut_values(x0, x1, encode, random, signs, pair, UPPER: tl.constexpr):
    """Return two neighbours rounded by the lower two bytes of a random word, or its UPPER ones, as `value_pairs`."""
    cut = tl.inline_asm_elementwise(
        CUT_NEIGHBORS[UPPER], "=r,f,f,f,r", [x0, x1, encode, random], dtype=tl.uint32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(CUT_VALUES, "=r,r,r,r", [cut, signs, pair], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def portable_pairs(xs, encode, scale, random, STOCHASTIC: tl.constexpr):
    """Return `value_pairs` without PTX; the signs are those of xs."""
    values = ()
    for half in tl.static_range(2):
        if STOCHASTIC:
            codes = portable_codes(xs, half * 8, encode, random)
        else:
            codes = pm.nearest_codes(xs, half * 8, encode)
        for i in tl.static_range(8):
            # The code is the upper part of a float that is 2^126 too small.
            magnitude = ((codes[i] & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale
            sign = xs[half * 8 + i].to(tl.uint32, bitcast=True) & 0x80000000
            bits = magnitude.to(tl.uint32, bitcast=True) | sign
            values = values + (bits.to(tl.float32, bitcast=True),)
    return pm.bf16_pairs(values)


@triton.jit
def side_by_side(left, right):
    """Return words of the values in rows 0, 1, 2 ... of two columns, of which words hold two rows each."""
    out = ()
    for i in tl.static_range(len(left)):
        if not has_ptx():
            out = out + ((left[i] & 0xFFFF) | (right[i] << 16), (left[i] >> 16) | (right[i] & 0xFFFF0000))
        else:
            for half in tl.static_range(2):
                word = tl.inline_asm_elementwise(
                    HALVES[half], "=r,r,r", [left[i], right[i]], dtype=tl.uint32, is_pure=True, pack=1
                )
                out = out + (word,)
    return out
