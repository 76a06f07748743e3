"""Device functions to the nearest codes of E2M1, or to what these stand for, where a `scales.Rule` is joined.

Values come in pairs, as they are read or as a rotation leaves them, and so do their signs: they are joined with 8 codes
at once. What is beyond the largest code is moved there in pairs too, before it is taken apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.e2m1_values import SAME_PAIR
from halfbyte.kernels.device.stochastic import JOIN_SIGNS
from halfbyte.kernels.device.unpacking import numbers_of_pairs

# 8 pairs $0 to $7; where a largest value of the warp, $17, reaches 7, they are held below $16 times 6, a limit from
# 6 / FLT_MAX on: where a scale is so small that encode is FLT_MAX.
HELD_BELOW = (
    "mul.rn.f32 limit, {unit}, 0f40C00000; max.f32 limit, limit, 0f00C00000; cvt.rn.bf16x2.f32 pair, limit, limit;"
)
HOLD_PAIRS = HELD_BELOW.format(unit="$16") + "".join(f"min.xorsign.abs.bf16x2 ${i}, ${i}, pair;" for i in range(8))
LIMIT_PAIRS = tl.constexpr(
    "{.reg .pred some; .reg .b32 pair; .reg .f32 limit; setp.geu.f32 some, $17, 0f40E00000;"
    "vote.sync.any.pred some, some, -1; @!some bra $$L_in_range_${:uid};" + HOLD_PAIRS + "$$L_in_range_${:uid}:}"
)
HOLD_ALL_PAIRS = tl.constexpr("{.reg .b32 pair; .reg .f32 limit;" + HOLD_PAIRS + "}")
EIGHT = tl.constexpr((tl.uint32,) * 8)
EIGHT_FLOATS = tl.constexpr((tl.float32,) * 8)
# Which threads of a warp have a value $1 that reaches $2, bits.
REACHING = tl.constexpr("{.reg .pred some; setp.geu.f32 some, $1, $2; vote.sync.ballot.b32 $0, some, -1;}")
# 8 values $0 to $7; where $16 is not 0 in a warp, they are held below a number.
LIMIT_ONES, LIMIT_SMALL = (
    tl.constexpr(
        "{.reg .pred some; setp.ne.u32 some, $16, 0; @!some bra $$L_in_range_${:uid};"
        + "".join(f"min.f32 ${i}, ${i}, {six};" for i in range(8))
        + "$$L_in_range_${:uid}:}"
    )
    for six in ("0f40C00000", "0f39C00000")  # 6, 6 * 2^-14
)
# Signs $1 to $4 and the bits of 2^23 + code, $5 to $12: two codes to a byte, bytes to a word.
JOIN_CODES = tl.constexpr(
    tuple(
        "{.reg .b32 w, a, b, even, odd, t0, t1, t2, t3;"
        + "".join(f"mad.lo.u32 t{i}, ${2 * i + 6}, 16, ${2 * i + 5};" for i in range(4))
        + "prmt.b32 a, t0, t1, 0x0040; prmt.b32 b, t2, t3, 0x0040; prmt.b32 w, a, b, 0x5410;"
        + f"{signs}}}"
        for signs in JOIN_SIGNS
    )
)
# Signs $1 to $4 and a word of codes, $5, whose bits 3 are anything.
JOIN_WORD = tl.constexpr(tuple(f"{{.reg .b32 w, a, b, even, odd; mov.b32 w, $5; {signs}}}" for signs in JOIN_SIGNS))
# Numbers of E2M1, 8 of them times 2^-14 or 1, to a word of codes: 2^-14 times two of them in fp16 are 512 codes in the
# halves of a word, elements 0 and 2, 1 and 3, 4 and 6, 5 and 7. Gathered, the odd ones are added over the even ones.
CODES_OF_SMALL, CODES_OF_NUMBERS = (
    tl.constexpr(
        "{.reg .b32 unit, even, odd, h0, h1, h2, h3; mov.b32 unit, 0x04000400;"
        + "".join(
            f"cvt.rn.f16x2.f32 h{i}, ${high}, ${low}; {by_unit.format(h=f'h{i}')}"
            for i, (low, high) in enumerate(((1, 3), (2, 4), (5, 7), (6, 8)))
        )
        + "prmt.b32 even, h0, h2, 0x7531; prmt.b32 odd, h1, h3, 0x7531;"
        "shr.u32 even, even, 1; mad.lo.u32 $0, odd, 8, even;}"
    )
    for by_unit in ("", "mul.rn.f16x2 {h}, {h}, unit;")
)
# A pair of numbers $1 with the signs of the pair $2, times a pair of scales; -0 keeps its sign.
SIGNED_VALUES = tl.constexpr(
    "{.reg .b32 p, z; mov.b32 z, 0x80008000; lop3.b32 p, $1, $2, z, 0xF8; fma.rn.bf16x2 $0, p, $3, z;}"
)


@triton.jit
def limited_pairs(pairs, largest, unit):
    """Return 8 `bf16_pairs` with what is beyond 6 * unit, fp32 of each block, moved there; NaN becomes a number.

    largest: the block's max |x| * encode: below 7 everything has a nearest code. unit: scale * D, of which encode is
    the reciprocal. Rounded to bf16 the limit stays between 5 and 7 units, all of which have the last code.
    """
    return tl.inline_asm_elementwise(
        LIMIT_PAIRS,
        "=r,=r,=r,=r,=r,=r,=r,=r,0,1,2,3,4,5,6,7,f,f",
        pairs + (unit, largest),
        dtype=EIGHT,
        is_pure=True,
        pack=1,
    )


@triton.jit
def held_pairs(pairs, unit):
    """Return `limited_pairs` without a vote: behind a branch that threads take alone there must be none."""
    return tl.inline_asm_elementwise(
        HOLD_ALL_PAIRS,
        "=r,=r,=r,=r,=r,=r,=r,=r,0,1,2,3,4,5,6,7,f",
        pairs + (unit,),
        dtype=EIGHT,
        is_pure=True,
        pack=1,
    )


@triton.jit
def within_codes(pairs, largest, unit, VOTED: tl.constexpr):
    """Return `limited_pairs`, or `held_pairs` unless VOTED."""
    if VOTED:
        return limited_pairs(pairs, largest, unit)
    else:
        return held_pairs(pairs, unit)


@triton.jit
def reaching(values, limit):
    """Return, for each warp, which of its threads have a value that reaches `limit` or is NaN: bits of a uint32."""
    values, limit = tl.broadcast(values, tl.full((), limit, tl.float32))
    return tl.inline_asm_elementwise(REACHING, "=r,f,f", [values, limit], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def limited_values(values, some, UNIT: tl.constexpr):
    """Return 8 fp32 tensors with what is beyond 6 * UNIT moved there, in warps of which `some` reach 7 * UNIT.

    some: of `reaching`. UNIT: 1 or 2^-14.
    """
    return tl.inline_asm_elementwise(
        LIMIT_ONES if UNIT == 1.0 else LIMIT_SMALL,
        "=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,6,7,r",
        values + (some,),
        dtype=EIGHT_FLOATS,
        is_pure=True,
        pack=1,
    )


@triton.jit
def nearest_word(xs, signs, START: tl.constexpr, encode, APART: tl.constexpr):
    """Return the codes nearest to x * encode as uint32, 8 elements from START, the first in the low nibble.

    Args:
        xs: 16 fp32 tensors, of which none rounds beyond the last code (`limited_pairs`).
        signs, APART: as in `stochastic.stochastic_word`.
    """
    codes = pm.least_lines(xs, START, encode)
    return tl.inline_asm_elementwise(
        JOIN_CODES[1 if APART else 0],
        "=r,r,r,r,r,r,r,r,r,r,r,r,r",
        pm.part(signs, START // 2, 4) + codes,
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def codes_of_numbers(qs, UNIT: tl.constexpr):
    """Return the codes of 8 numbers of E2M1, q >= 0 in fp32, in the nibbles of a word, but for their upper bits.

    UNIT: what the numbers are multiplied by, 1 or 2^-14: the latter saves a product.
    """
    CODES: tl.constexpr = CODES_OF_NUMBERS if UNIT == 1.0 else CODES_OF_SMALL
    return tl.inline_asm_elementwise(CODES, "=r,f,f,f,f,f,f,f,f", qs, dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def with_signs(word, signs, APART: tl.constexpr):
    """Return 8 codes with signs from four words in place of the upper bits."""
    return tl.inline_asm_elementwise(
        JOIN_WORD[1 if APART else 0], "=r,r,r,r,r,r", signs + (word,), dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def nearest_numbers(pairs, encode, RULE: tl.constexpr):
    """Return what 16 values of `bf16_pairs` times encode round to, as `bf16_pairs` without signs."""
    xs = numbers_of_pairs(pairs, 0, 16, RULE)
    qs = ()
    for i in tl.static_range(16):
        qs = qs + (pm.rounded_value(pm.scaled_magnitude(xs[i], encode), 1.0),)
    return pm.bf16_pairs(qs)


@triton.jit
def signed_values(numbers, signs, scale):
    """Return 8 words of numbers of E2M1 with the signs of 8 pairs, times fp32 scales, NaN where a scale is NaN."""
    pair = tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [scale], dtype=tl.uint32, is_pure=True, pack=1)
    out = ()
    for i in tl.static_range(8):
        given = [numbers[i], signs[i], pair]
        out = out + (
            tl.inline_asm_elementwise(SIGNED_VALUES, "=r,r,r,r", given, dtype=tl.uint32, is_pure=True, pack=1),
        )
    return out
