"""Device functions that choose the scale of a block by errors that are nearly those of docs/numerics.md section 5.

The choice is section 5's. How far a quick error can be from the defined one is bounded, and a block whose two least
errors lie closer than that is decided by the defined ones: one of some thousands, for which one warp waits.

Quotients are 2^-126 times what E2M1 rounds. What is below 1 is subnormal then, so that E2M1's numbers are those of fp32
whose mantissa ends after one bit, and rounding is an addition to the bits and a mask: ties go up, and below 1 the
product itself is rounded, both where either neighbour is as far. To keep all else normal, x is multiplied by the power
of two that moves A to 2^-30.

The bound (u = 2^-24; s = scale * A / f(6 * m8) without rounding): a step is s (1 + 3u), a quotient a = x / s (1 + 6u)
with u more below 1, and the defined quotient off by 5u. So where they round differently x / s lies within 31u of the
tie, whose neighbours' distances differ by 62u; with what y and the sums round, |d| is off by less than 112u * s and 2u
of itself, a sum by 30u of itself. So is a sum of magnitudes by less than 16 * 112u * s, one of squares, as
2 * 112u * s * |d| summed is at most e * sum + 16 * (112u * s)^2 / e for any e, here 2.8e-5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import rotate, tile_blocks
from halfbyte.kernels.device.decode import INTERPRETED
from halfbyte.kernels.device.ptx import has_ptx

MOST_CANDIDATES = 4  # codes of one word
MOST = tl.constexpr(MOST_CANDIDATES)
UNIT = tl.constexpr(2.0**-126)
RAISED = tl.constexpr(2.0**126)
HALF_STEP = tl.constexpr(0x00200000)
ONE_BIT = tl.constexpr(0xFFC00000)
SIX, SEVEN = tl.constexpr(6 * 2.0**-126), tl.constexpr(7 * 2.0**-126)
NO_STEP = tl.constexpr(2.0**30)  # in place of 0: far below every step, yet values are 2^-126 times small numbers of it
# Twice the bound of a sum, of itself and of s or s * s.
MAGNITUDES_RELATIVE, MAGNITUDES_ABSOLUTE = tl.constexpr(2.0**-17), tl.constexpr(2.0**-12)
SQUARES_RELATIVE, SQUARES_ABSOLUTE = tl.constexpr(2.0**-14), tl.constexpr(2.0**-14)
# Below, squares that section 5 adds may underflow; above 2^60 (`Factors.regular`) they may overflow.
LEAST_REGULAR, MOST_REGULAR = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)  # `Factors.regular`
LEAST_AMAX = tl.constexpr(2.0**-44)

# A pair of bf16 times a pair of powers of two; the second without signs.
SHIFTED, SHIFTED_MAGNITUDES = (
    tl.constexpr(f"{{.reg .b32 p, z; mov.b32 z, 0x80008000; {first} fma.rn.bf16x2 $0, p, $2, z;}}")
    for first in ("mov.b32 p, $1;", "and.b32 p, $1, 0x7FFF7FFF;")
)
SAME_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


class Shifted(NamedTuple):
    """Of an amax: the power of two; D times that and 2^126; whether all that is done with them is bounded."""

    shift: Any
    decode: Any
    moderate: Any


class Defined(NamedTuple):
    """What section 5's errors take: A, D and f(6 * m8)."""

    amax: Any
    decode: Any
    unit: Any


@triton.jit
def shifted_factors(factors):
    """Return `Shifted` of `scales.Factors`."""
    exponent = factors.amax.to(tl.uint32, bitcast=True) >> 23
    shift = ((224 - exponent) << 23).to(tl.float32, bitcast=True)
    moderate = (factors.amax > LEAST_AMAX) & factors.regular
    return Shifted(shift, (factors.decode * shift) * RAISED, moderate)


@triton.jit
def shifted_values(pairs, shift, SIGNED: tl.constexpr):
    """Return |x| * shift of 16 elements of `bf16_pairs`; SIGNED: or x * shift."""
    if not has_ptx():
        values = ()
        xs = pm.unpack_pairs(pairs, 0, 16)
        for i in tl.static_range(16):
            values = values + (tl.abs(xs[i]) * shift,)
        return values
    else:
        words = ()
        both = tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [shift], dtype=tl.uint32, is_pure=True, pack=1)
        for i in tl.static_range(8):
            pair, power = tl.broadcast(pairs[i], both)
            word = tl.inline_asm_elementwise(
                SHIFTED if SIGNED else SHIFTED_MAGNITUDES, "=r,r,r", [pair, power], dtype=tl.uint32, is_pure=True,
                pack=1,
            )  # fmt: skip
            words = words + (word,)
        return pm.unpack_pairs(words, 0, 16)


@triton.jit
def quick_error(xs, step, encode, BEYOND: tl.constexpr, SQUARED: tl.constexpr):
    """Return the error of a scale, and of shifted values.

    step: s, times shift and 2^126; encode: its reciprocal. BEYOND: some values round beyond the last code.
    """
    even, odd = tl.zeros_like(step), tl.zeros_like(step)
    for i in tl.static_range(16):
        if SQUARED:
            a = xs[i] * encode
        else:
            a = pm.scaled_magnitude(xs[i], encode)
        held = a
        if BEYOND:
            held = tl.minimum(a, SIX)
        bits = (held.to(tl.uint32, bitcast=True) + HALF_STEP) & ONE_BIT
        q = bits.to(tl.float32, bitcast=True)
        if SQUARED:
            d = tl.fma(q, 0.0 - step, xs[i])
            even, odd = odd, tl.fma(d, d, even)
        else:
            even, odd = odd, even + tl.abs(q - a)
    if SQUARED:
        return even + odd
    else:
        return (even + odd) * step


@triton.jit
def quick_choice(pairs, largest, base, factors, constants, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr):
    """Return the code of the scale of least error.

    Args:
        pairs: 8 `bf16_pairs`; APART: of elements two apart.
        largest: max |x|, of the tile. base: the standard scale before it is rounded.
        factors, constants: `scales.Factors` and `scales.Constants`.
        AXIS: along which the blocks of a tile lie.
    """
    by = shifted_factors(factors)
    values = shifted_values(pairs, by.shift, not RULE.squares)
    COUNT: tl.constexpr = len(RULE.candidates)
    # Bytes of no candidate are the first's once more.
    FIRST: tl.constexpr = 0x01010101 - (0x01010100 & ((1 << 8 * COUNT) - 1))
    errors = ()
    for i in tl.static_range(COUNT):
        code = pm.e4m3_code(base * RULE.candidates[i], RULE.hardware)
        step = tl.maximum(pm.e4m3_positive(code) * by.decode, NO_STEP)
        encode = pm.quick_reciprocal(step)
        error = quick_error(values, step, encode, RULE.candidates[i] < RULE.candidates[0], RULE.squares)
        if RULE.tile:
            error = tile_blocks.tree_sum(error, AXIS)
        errors = errors + (error,)
        if i == 0:
            codes, code_of_best, best, most = code * FIRST, code, error, step
            beyond = largest * (by.shift * encode)
            second = tl.full(error.shape, pm.INF, tl.float32)
        else:
            codes = codes | (code << (8 * i))
            if RULE.candidates[i] > RULE.candidates[0]:  # they ascend
                most = step
            error = tl.where(code == code_of_best, pm.INF, error)  # the same bytes
            better = error < best
            second = tl.minimum(second, tl.where(better, best, error))
            code_of_best = tl.where(better, code, code_of_best)
            best = tl.where(better, error, best)
    BLOCKS: tl.constexpr = 16 if RULE.tile else 1
    most = most * UNIT
    if RULE.squares:
        bound = tl.fma(best, 1 + SQUARES_RELATIVE, (most * most) * (SQUARES_ABSOLUTE * BLOCKS))
    else:
        bound = tl.fma(best, 1 + MAGNITUDES_RELATIVE, most * (MAGNITUDES_ABSOLUTE * BLOCKS))
    bound = tl.where(by.moderate, tl.where(beyond < SEVEN, bound, pm.INF), pm.INF)
    differ = codes != (codes & 0xFF) * 0x01010101
    bound = tl.where(differ & ((second > bound) == 0), bound, -1.0)
    defined = Defined(factors.amax, factors.decode, constants.unit)
    return decided_codes(pairs, codes, code_of_best, errors, bound, defined, RULE, AXIS, APART)


@triton.jit
def decided_codes(pairs, codes, code, errors, bound, by, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr):
    """Return `code`; where `bound` is not negative, that of `codes` whose defined error is the least.

    codes: of all candidates, the first in the low byte. errors: the quick ones, of which those beyond bound are out.
    """
    # Whether distances are squared, and twice whether pairs are of elements two apart.
    kinds = tl.full((), (1 if RULE.squares else 0) + (2 if APART else 0), tl.int32)
    if RULE.tile:
        if tl.max(tl.max((bound >= 0.0).to(tl.int32), axis=1), axis=0) != 0:
            code = tl.where(bound >= 0.0, defined_choice(pairs, codes, by, kinds, RULE, AXIS), code)
        return code
    elif INTERPRETED:
        return tl.where(bound >= 0.0, defined_choice(pairs, codes, by, kinds, RULE, AXIS), code)
    else:
        for _ in tl.static_range(MOST - len(RULE.candidates)):
            errors = errors + (errors[0] + pm.INF,)
        return tl.map_elementwise(contending_code, *pairs, codes, code, *errors, bound, *by, kinds)


@triton.jit
def contending_code(
    p0, p1, p2, p3, p4, p5, p6, p7, codes, code, e0, e1, e2, e3, bound, amax, decode, unit, kinds
):  # fmt: skip
    """Return `decided_codes` of one block: decide among those whose quick error is not beyond bound, mostly two."""
    if bound >= 0.0:
        best = tl.full((), -1.0, tl.float32)
        by = Defined(amax, decode, unit)
        for i in range(MOST):
            quick = tl.where(i == 0, e0, tl.where(i == 1, e1, tl.where(i == 2, e2, e3)))
            if (quick > bound) == 0:
                xs = values_of_turn((p0, p1, p2, p3, p4, p5, p6, p7), i, kinds)
                candidate = (codes >> (8 * i)) & 0xFF
                error = defined_error(xs, pm.e4m3_positive(candidate), by, kinds)
                if (error < best) | (best == -1.0):
                    code, best = candidate, error
    return code


@triton.jit
def defined_choice(pairs, codes, by, kinds, RULE: tl.constexpr, AXIS: tl.constexpr):
    """Return that of `codes` whose error, as section 5 defines it, is the least: the first of equals, and of NaN.

    AXIS: along which the blocks of a tile lie.
    """
    code = codes & 0xFF
    best = pm.e4m3_positive(code) * 0.0
    for i in range(len(RULE.candidates)):
        candidate = (codes >> (8 * i)) & 0xFF
        error = defined_error(values_of_turn(pairs, i, kinds), pm.e4m3_positive(candidate), by, kinds)
        if RULE.tile:
            error = tile_blocks.tree_sum(error, AXIS)
        better = (error < best) | (i == 0)
        code = tl.where(better, candidate, code)
        best = tl.where(better, error, best)
    return code


@triton.jit
def values_of_turn(pairs, i, kinds):
    """Return 16 fp32 tensors of 8 pairs, in each turn i of a loop: in front of it they would take registers."""
    words = ()
    for k in tl.static_range(8):
        word = pairs[k]
        if has_ptx():
            word, turn = tl.broadcast(word, tl.full((), 0, tl.int32) + i)
            word = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r,r", [word, turn], dtype=tl.uint32, is_pure=True, pack=1
            )
        words = words + (word,)
    values = pm.unpack_pairs(words, 0, 16)
    if kinds >= 2:
        values = rotate.apart(values)
    return values


@triton.jit
def defined_error(xs, scale, by, kinds):
    """Return section 5's error_math="exact" of a scale."""
    encode = tl.minimum(pm.reciprocal(scale * by.decode), pm.FLT_MAX)
    error = scale * 0.0
    inverse_unit = pm.regular_reciprocal(by.unit)
    for i in tl.static_range(16):
        x = tl.abs(xs[i])
        y = (pm.nearest_value(x * encode) * scale) * by.amax
        if INTERPRETED:  # of a tensor of blocks, whose rows may differ
            d = tl.div_rn(y, y * 0.0 + by.unit) - x
        elif (by.amax > LEAST_REGULAR) & (by.amax < MOST_REGULAR) & (by.unit >= 1.0):
            d = pm.quotient_by(y, by.unit, inverse_unit) - x
        else:
            d = tl.div_rn(y, y * 0.0 + by.unit) - x
        if kinds % 2 == 1:
            error += d * d
        else:
            error += tl.abs(d)
    return error
