"""Device functions that choose the scale of a block by errors that are nearly those of docs/numerics.md section 5.

The choice is section 5's. How far a quick error can be from the defined one is bounded, and a block whose two least
errors lie closer than that is decided by the defined ones (`near_errors`): one of some thousands.

Quotients are 2^-126 times what E2M1 rounds. What is below 1 is subnormal then, so that E2M1's numbers are those of fp32
whose mantissa ends after one bit, and rounding is an addition to the bits and a mask: ties go up, and below 1 the
product itself is rounded, both where either neighbour is as far. To keep all else normal, x is multiplied by the power
of two that moves A to 2^-30.

The bound (u = 2^-24; s = scale * A / f(6 * m8) without rounding): a step is s (1 + 3u), a quotient a = x / s (1 + 6u)
with u more below 1, and the defined quotient off by 5u. So where they round differently x / s lies within 31u of the
tie, whose neighbours' distances differ by 62u; with what y and the sums round, |d| is off by less than 112u * s and 2u
of itself, a sum by 30u of itself. So is a sum of magnitudes by less than 16 * 112u * s, one of squares, as
2 * 112u * s * |d| summed is at most e * sum + 16 * (112u * s)^2 / e for any e, here 2.8e-5. The last seven bits of an
error are its scale's code, so that the least of several brings its code along: that is less than 2^-16 of itself more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import near_errors as near
from halfbyte.kernels.device.near_errors import NO_BOUND, NO_ERROR
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.unpacking import times

UNIT = tl.constexpr(2.0**-126)
RAISED = tl.constexpr(2.0**126)
HALF_STEP = tl.constexpr(0x00200000)
ONE_BIT = tl.constexpr(0xFFC00000)
SIX_AND_HALF = tl.constexpr(0x01E00000)  # the bits of six, and half a step
SIX, SEVEN = tl.constexpr(6 * 2.0**-126), tl.constexpr(7 * 2.0**-126)
NO_STEP = tl.constexpr(2.0**30)  # in place of 0: far below every step, yet values are 2^-126 times small numbers of it
# Twice the bound of a sum, of itself and of s or s * s; twice what the code in its last bits is of it.
MAGNITUDES_RELATIVE, MAGNITUDES_ABSOLUTE = tl.constexpr(2.0**-17), tl.constexpr(2.0**-12)
SQUARES_RELATIVE, SQUARES_ABSOLUTE = tl.constexpr(2.0**-14), tl.constexpr(2.0**-14)
CODE_RELATIVE = tl.constexpr(2.0**-15)
# Below, squares that section 5 adds may underflow; above 2^60 (`Factors.regular`) they may overflow.
LEAST_AMAX = tl.constexpr(2.0**-44)

SAME_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
ERROR_WITH_CODE = tl.constexpr("lop3.b32 $0, $1, 0xFFFFFF80, $2, 0xEA;")


class Shifted(NamedTuple):
    """Of an amax: the power of two; D times that and 2^126; 7 * 2^-126, or -Inf where what is done is not bounded.

    one: 1, which the compiler is not to know.
    """

    shift: Any
    decode: Any
    seven: Any
    one: Any


@triton.jit
def shifted_factors(factors):
    """Return `Shifted` of `scales.Factors`."""
    bits = factors.amax.to(tl.uint32, bitcast=True)
    shift = ((224 - (bits >> 23)) << 23).to(tl.float32, bitcast=True)
    moderate = (factors.amax > LEAST_AMAX) & factors.regular
    return Shifted(shift, (factors.decode * shift) * RAISED, tl.where(moderate, SEVEN, -pm.INF), (bits >> 31) + 1)


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
        return values_shifted_by(pairs, shift_pair(shift), SIGNED)


@triton.jit
def shift_pair(shift):
    """Return a pair of bf16 `shift`, as a uint32."""
    if not has_ptx():
        bits = shift.to(tl.uint32, bitcast=True)
        return bits | (bits >> 16)
    return tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [shift], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def values_shifted_by(pairs, both, SIGNED: tl.constexpr):
    """Return `shifted_values`; both: of `shift_pair`."""
    if not has_ptx():
        return shifted_values(pairs, (both & 0xFFFF0000).to(tl.float32, bitcast=True), SIGNED)
    power = both & 0xFFFF0000
    values = ()
    for i in tl.static_range(16):
        value = times(pairs[i // 2], power, i % 2 == 1)
        values = values + (value if SIGNED else tl.abs(value),)
    return values


@triton.jit
def quick_error(xs, step, encode, one, BEYOND: tl.constexpr, SQUARED: tl.constexpr):
    """Return the error of a scale, and of shifted values; arguments as of `error_sum`."""
    error = error_sum(xs, step, encode, one, BEYOND, SQUARED, False)
    if not SQUARED:
        error = error * step
    return error


@triton.jit
def error_sum(
    xs, step, encode, one, BEYOND: tl.constexpr, SQUARED: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Return the error of a scale, and of shifted values; of magnitudes divided by step.

    step: s, times shift and 2^126; encode: its reciprocal. one: 1; times it, bits are added to on the pipe of products,
    where there is room: the other one has masks and maxima. BEYOND: some values round beyond the last code. AT_ONCE:
    these are held by the addition itself, on the pipe of maxima.
    """
    even, odd = tl.zeros_like(step), tl.zeros_like(step)
    for i in tl.static_range(16):
        if SQUARED:
            a = xs[i] * encode
        else:
            a = pm.scaled_magnitude(xs[i], encode)
        if BEYOND and AT_ONCE:
            bits = tl.minimum(a.to(tl.int32, bitcast=True) + HALF_STEP, SIX_AND_HALF).to(tl.uint32) & ONE_BIT
        else:
            held = a
            if BEYOND:
                held = tl.minimum(a, SIX)
            bits = (held.to(tl.uint32, bitcast=True) * one + HALF_STEP) & ONE_BIT
        q = bits.to(tl.float32, bitcast=True)
        if SQUARED:
            d = tl.fma(q, 0.0 - step, xs[i])
            even, odd = odd, tl.fma(d, d, even)
        else:
            even, odd = odd, even + tl.abs(q - a)
    return even + odd


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
    errors = ()
    for i in tl.static_range(len(RULE.candidates)):
        code = pm.e4m3_code(base * RULE.candidates[i], RULE.hardware)
        step = tl.maximum(pm.e4m3_positive(code) * by.decode, NO_STEP)
        encode = pm.quick_reciprocal(step)
        error = quick_error(values, step, encode, by.one, RULE.candidates[i] < RULE.candidates[0], RULE.squares)
        if i == 0:
            beyond = largest * (by.shift * encode)
        if i == 0 or RULE.candidates[i] > RULE.candidates[0]:  # they ascend
            most = step
        errors = errors + (with_code(error, code),)
    if not has_ptx():
        errors = without_doubles(errors, RULE)
    best, second = least_two(errors)
    bound = bound_of(best, most, RULE)
    bound = tl.where(beyond < by.seven, bound, NO_BOUND)
    defined = near.Defined(factors.amax, factors.decode, constants.unit)
    return near.decided_code(pairs, errors, near.Near(best, second, bound), defined, RULE, AXIS, APART)


@triton.jit
def with_code(error, code):
    """Return the bits of an error whose last seven are those of a code."""
    if not has_ptx():
        return (error.to(tl.uint32, bitcast=True) & 0xFFFFFF80) | code
    error, code = tl.broadcast(error, code)
    return tl.inline_asm_elementwise(ERROR_WITH_CODE, "=r,f,r", [error, code], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def without_doubles(errors, RULE: tl.constexpr):
    """Return errors with NO_ERROR in place of those whose code is that of the next smaller candidate."""
    out = ()
    for i in tl.static_range(len(errors)):
        error = errors[i]
        if i == 0 and RULE.below > 0:
            error = tl.where(error == errors[RULE.below], NO_ERROR, error)
        elif i == RULE.below + 1:
            error = tl.where(error == errors[0], NO_ERROR, error)
        elif i > 1:
            error = tl.where(error == errors[i - 1], NO_ERROR, error)
        out = out + (error,)
    return out


@triton.jit
def least_two(errors):
    """Return the least and the second of errors, which are compared as bits: NaN is beyond all."""
    best = errors[0]
    second = tl.full(best.shape, NO_ERROR, tl.uint32)
    for i in tl.static_range(1, len(errors)):
        second = tl.minimum(second, tl.maximum(best, errors[i]))
        best = tl.minimum(best, errors[i])
    return best, second


@triton.jit
def bound_of(best, step, RULE: tl.constexpr):
    """Return the bits of what another error has to exceed if `best` is to be the least.

    step: the largest of `quick_error`.
    """
    BLOCKS: tl.constexpr = 16 if RULE.tile else 1
    error = best.to(tl.float32, bitcast=True)
    if RULE.squares:
        step = step * UNIT
        bound = tl.fma(error, 1 + (SQUARES_RELATIVE + CODE_RELATIVE), (step * step) * (SQUARES_ABSOLUTE * BLOCKS))
    else:
        bound = tl.fma(error, 1 + (MAGNITUDES_RELATIVE + CODE_RELATIVE), step * (UNIT * MAGNITUDES_ABSOLUTE * BLOCKS))
    return bound.to(tl.uint32, bitcast=True)
