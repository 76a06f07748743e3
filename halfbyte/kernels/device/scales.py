"""Device functions from a block of values to its scale and codes (docs/numerics.md sections 3 and 5).

Blocks are tuples of 16 tensors as in `primitives`; a per-block number is one tensor of the same shape, [rows, blocks]
where blocks lie along rows and [blocks, columns] where they lie along columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.formats import E2M1, FLT_MAX, f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import eden, rotate, tile_blocks
from halfbyte.kernels.device.decode import E4M3_NAN, INTERPRETED
from halfbyte.kernels.device.e2m1_conversion import E2M1_CAPABILITY, converted_word
from halfbyte.kernels.device.e2m1_values import value_pairs
from halfbyte.kernels.device.nearest import (
    codes_of_numbers,
    limited_values,
    nearest_numbers,
    nearest_word,
    reaching,
    signed_values,
    with_signs,
    within_codes,
)
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.quick_errors import quick_choice
from halfbyte.kernels.device.quick_tiles import tile_choice
from halfbyte.kernels.device.stochastic import stochastic_word, upper_halves
from halfbyte.kernels.device.unpacking import numbers_of_pairs
from halfbyte.kernels.target import target_of
from halfbyte.rng import given_sign_bits
from halfbyte.spec import MXFP8, Eden, FourOverSix, Spec

XORSIGN_LEVEL = 89
"""The first `Rule.hardware` with minima of magnitudes that keep signs; GPUs have them from sm_86 on."""


@dataclass(frozen=True)
class Rule:  # no NamedTuple: Triton from 3.8 on takes those apart
    """What a kernel is compiled for: the parts of an NVFP4 spec that change its code.

    group: values that a thread quantizes together: 16, or the width of the rotation.
    paired: of a rotation along rows that is twice as wide as group: neighbours have its halves.
    errors: "exact" or "scaled", by which candidates are compared; "quick": exact ones by `quick_errors`.
    norm: f(1 / sqrt(width)) of a rotation, 0 without one.
    signs: where a rotation that does not draw them negates (`rng.given_sign_bits`).
    candidates: of FourOverSix, else empty.
    eden: MS-EDEN corrects the scale.
    drawn: every block draws random words, for its elements or, with eden, for its scale.
    hardware: 0, or from which capability on there is what the target has: 89 conversions to FP8, 90 launches that
        overlap (`overlap`), 100 conversions to E2M1 (`Target.level`).
    element: "e4m3" or "e5m2" for MXFP8, whose other fields but group do not count; empty for NVFP4.
    decoded: store element * block_scale in bf16 instead of codes and scales.
    values: of a packed x that is stored decoded: no codes are packed on the way. Where blocks lie along columns, what
        is stored lies as x does, [rows, cols] in place of its transpose.
    packed: x is bf16, its columns lie together, and 8 of them are 16 aligned bytes.
    words: how many words of two columns a thread reads where blocks lie along columns of a packed x.
    full: tiles have no ragged edge, so that nothing needs a mask.
    along: in tiles of several rows, lanes lie along the rows of x and of the operand when it is read and stored.
    clamped: of a packed x, with full: only rows may be missing, and the operand's storage has room for what they give.
        Row blocks repeat the last row, bit for bit; column blocks read zeros.
    multiplied: pairs are unpacked by products (`unpacking`), where signs are not those of what is unpacked.
    """

    rounding: str
    tile: bool
    row_amax: bool
    group: int
    norm: float
    fresh: bool
    candidates: tuple[float, ...]
    squares: bool
    errors: str
    hardware: int
    element: str = ""
    decoded: bool = False
    packed: bool = False
    words: int = 1
    full: bool = False
    along: bool = False
    clamped: bool = False
    eden: bool = False
    drawn: bool = False
    signs: int = 0
    values: bool = False
    paired: bool = False
    multiplied: bool = False

    @property
    def below(self) -> int:
        """How many candidates are smaller than the first, behind which they ascend."""
        return sum(ratio < self.candidates[0] for ratio in self.candidates)

    @property
    def joined(self) -> bool:
        """Whether codes to nearest are joined with signs that lie in pairs; else nibble after nibble is shifted in."""
        fits = XORSIGN_LEVEL <= self.hardware < E2M1_CAPABILITY.value
        return fits and self.rounding == "nearest" and not self.element

    @property
    def apart(self) -> bool:
        """Whether the pairs that a rotation gives hold elements two apart: their signs are joined in fewer steps."""
        return (self.drawn or self.joined) and not self.values


class Constants(NamedTuple):
    """fp32 constants of a spec that kernels take as arguments.

    span, floor, inverse, unit: f(m8 * m4), f(m8 * m4 / FLT_MAX), f(1 / m4) and f(6 * m8) of sections 3 and 5; MXFP8
    uses only inverse, f(1 / m) of section 6.
    """

    span: float
    floor: float
    inverse: float
    unit: float


class Factors(NamedTuple):
    """What an amax gives (section 3), scalars or broadcasting over blocks.

    amax, encode, decode: A, S and D. to_scale: S / fp4_max.
    poison: whether the amax is no valid maximum.
    regular: whether A lies between 2^-60 and 2^60, and f(m8 * m4) is no less than 1.
    inverse_unit: 1 / f(6 * m8).
    """

    amax: Any
    encode: Any
    to_scale: Any
    decode: Any
    poison: Any
    regular: Any
    inverse_unit: Any


SIXTH = tl.constexpr(f32(1 / E2M1.max))


def hardware_of(device: torch.device) -> int:
    """Return `Rule.hardware` of a device: what it converts to in hardware; nothing in Triton's interpreter."""
    return target_of(device).level


def rule_of(spec: Spec, hardware: int) -> Rule:
    """Return what kernels are compiled for; hardware: as in `Rule`."""
    if isinstance(spec, MXFP8):
        return Rule("nearest", False, False, spec.block_length, 0.0, False, (), False, "", hardware, spec.element)
    chosen = isinstance(spec.scaling, FourOverSix)
    return Rule(
        rounding=spec.rounding,
        tile=spec.is_tile,
        row_amax=spec.has_row_amax,
        group=spec.alignment,
        norm=f32(spec.alignment**-0.5) if spec.rotation else 0.0,
        fresh=spec.needs_sign_rng,
        candidates=tuple(map(f32, spec.scaling.candidates)) if chosen else (),
        squares=chosen and spec.scaling.error == "mse",
        errors=spec.scaling.error_math if chosen else "",
        hardware=hardware,
        eden=isinstance(spec.scaling, Eden),
        drawn=spec.needs_rng,
        signs=given_sign_bits(spec.rotation),
    )


def constants_of(spec: Spec) -> Constants:
    """Return the fp32 constants of a spec."""
    if isinstance(spec, MXFP8):
        return Constants(0.0, 0.0, f32(1 / spec.format.element.max), 0.0)
    span = spec.divisor
    return Constants(f32(span), f32(span / FLT_MAX), f32(1 / spec.fp4_max), f32(E2M1.max * spec.e4m3_max))


@triton.jit
def tensor_factors(amax, constants, SCALAR: tl.constexpr):
    """Return the `Factors` of an amax."""
    # One comparison for negative numbers, Inf and NaN; + 0 turns -0 into +0.
    poison = (amax + 0.0).to(tl.uint32, bitcast=True) >= 0x7F800000
    clean = tl.where(poison, 0.0, amax)
    a = tl.maximum(clean, constants.floor)
    regular = (a > 8.673617379884035e-19) & (a < 1.152921504606847e18) & (constants.span >= 1.0)
    if SCALAR:
        if regular:
            s = pm.quotient(constants.span, a)
            d = pm.regular_reciprocal(s)
        else:
            s, d = any_factors(clean, a, constants)
    else:
        s, d = any_factors(clean, a, constants)
    return Factors(a, s, s * constants.inverse, d, poison, regular, pm.regular_reciprocal(constants.unit))


@triton.jit
def is_regular(amax, constants):
    """Say whether amax lies between 2^-60 and 2^60 (`Factors.regular`): no division needs a range check."""
    bits = amax.to(tl.int32, bitcast=True)
    return (bits > 0x21800000) & (bits < 0x5D800000) & (constants.span >= 1.0)


@triton.jit
def regular_factors(amax, constants):
    """Return `tensor_factors` of an amax that `is_regular`; what depends on that is decided when compiling."""
    s = pm.quotient(constants.span, amax)
    inverse_unit = pm.regular_reciprocal(constants.unit)
    return Factors(amax, s, s * constants.inverse, pm.regular_reciprocal(s), False, True, inverse_unit)


@triton.jit
def irregular_factors(amax, constants):
    """Return `tensor_factors` of any amax; divisions that depend on them check their range."""
    poison = (amax + 0.0).to(tl.uint32, bitcast=True) >= 0x7F800000
    clean = tl.where(poison, 0.0, amax)
    a = tl.maximum(clean, constants.floor)
    s, d = any_factors(clean, a, constants)
    return Factors(a, s, s * constants.inverse, d, poison, False, pm.reciprocal(constants.unit))


@triton.jit
def any_factors(clean, a, constants):
    s = tl.where(clean == 0, 1.0, tl.minimum(tl.div_rn(a * 0 + constants.span, a), pm.FLT_MAX))
    return s, pm.reciprocal(s)


@triton.jit
def operand_factors(amax_ptr, constants, RULE: tl.constexpr):
    """Return `tensor_factors` of an operand with one amax; nothing if each row or none has one."""
    if RULE.row_amax or RULE.element != "":
        return ()
    else:
        return tensor_factors(tl.load(amax_ptr), constants, True)


@triton.jit
def encode_scale(scale, factors, RULE: tl.constexpr, UNIT: tl.constexpr):
    """Return min(1 / (scale * D), FLT_MAX) for an E4M3 scale that is no NaN.

    UNIT: a power of two by which the scale is divided and the result multiplied.
    """
    LIMIT: tl.constexpr = pm.FLT_MAX * UNIT
    product = scale * factors.decode
    if RULE.row_amax:
        return tl.minimum(pm.reciprocal(product), LIMIT)
    else:
        if factors.regular:  # one condition a program: no range to check in each block
            encode = pm.regular_reciprocal(product)
            if not RULE.eden:  # whose scales are 2^-9 at least
                encode = tl.minimum(encode, LIMIT)  # of NaN too, where the scale is 0
        else:
            encode = tl.minimum(pm.reciprocal(product), LIMIT)
        return encode


@triton.jit
def candidate_error(
    xs, some, scale, encode, factors, constants, regular: tl.constexpr, UNIT: tl.constexpr, RULE: tl.constexpr
):
    """Return the error of one block scale, section 5's sum over elements 0 to 15 in order, and what they round to.

    That is two words of codes without signs, or 8 `bf16_pairs` if RULE.values; none unless RULE.joined.

    some: of `nearest.reaching`, if RULE.joined. scale, encode: divided and multiplied by UNIT, as rounded numbers are.
    regular: with error_math="exact", whether a power of two scales (q * scale) * A / f(6 * m8) exactly. Then the
    quotients of q = 1 and q = 1.5 give all others: for the binade p of q, p * y1 + (q - p) * more with
    more = 2 * (y15 - y1). Written as q * more + p * (y1 - more), only an exact sum is left to round.
    """
    error = tl.zeros_like(scale)
    if RULE.errors != "scaled" and regular:
        one = pm.quotient_by(scale * factors.amax, constants.unit, factors.inverse_unit)
        half_more = pm.quotient_by((scale * 1.5) * factors.amax, constants.unit, factors.inverse_unit) - one
        more = half_more * 2.0
        rest = one - more
    words = ()
    for half in tl.static_range(2):
        qs = ()
        for i in tl.static_range(half * 8, half * 8 + 8):
            qs = qs + (tl.abs(xs[i]) * encode,)
        if RULE.joined:
            qs = limited_values(qs, some, UNIT)
        rounded = ()
        for i in tl.static_range(8):
            x = tl.abs(xs[half * 8 + i])
            if RULE.joined:
                q = pm.rounded_value(qs[i], UNIT)
            else:
                q = pm.nearest_value(qs[i])
            rounded = rounded + (q,)
            if RULE.errors == "scaled":
                d = tl.fma(q, scale, x * -factors.encode)  # the product is exact
            elif regular:
                power = (q.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
                if INTERPRETED:  # its fma rounds twice
                    d = (power * one + (q - power) * more) - x
                else:
                    d = tl.fma(q, more, power * rest) - x
            else:
                y = (q * scale) * factors.amax
                d = tl.div_rn(y, tl.zeros_like(y) + constants.unit) - x  # y may be Inf: its product with 0 is NaN
            if RULE.squares:
                error += d * d
            else:
                error += tl.abs(d)
        if RULE.joined:  # at once: few registers in place of eight
            if RULE.values:
                words = words + pm.bf16_pairs(rounded)
            else:
                words = words + (codes_of_numbers(rounded, UNIT),)
    return error, words


@triton.jit
def are_regular(factors, RULE: tl.constexpr):
    """Say, for all factors of a program, whether nothing in the errors of section 5 can leave the normal range."""
    if RULE.row_amax:
        return tl.min(tl.min(factors.regular.to(tl.int32), axis=1), axis=0) != 0
    else:
        return factors.regular


@triton.jit
def standard_scale(block_amax, factors, RULE: tl.constexpr):
    """Return the scale of section 5 that candidates multiply."""
    if RULE.packed:  # bf16: right for every value
        return pm.quotient_by(block_amax, pm.E2M1_MAX, SIXTH) * factors.encode
    else:
        return tl.div_rn(block_amax, block_amax * 0 + pm.E2M1_MAX) * factors.encode


@triton.jit
def best_candidate(
    xs, pairs, block_amax, factors, constants, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr
):
    """Return `choose_candidate`, which is simpler for errors that `are_regular`, or `quick_choice`.

    pairs, APART: as signs of `quantize_block`.
    """
    if RULE.errors == "quick":
        base, rounded = standard_scale(block_amax, factors, RULE), ()
        if RULE.tile:
            code, rounded = tile_choice(pairs, block_amax, base, factors, constants, RULE, AXIS)
        else:
            code = quick_choice(pairs, block_amax, base, factors, constants, RULE, AXIS, APART)
        encode = encode_scale(pm.e4m3_positive(code), factors, RULE, 1.0)
    elif RULE.errors == "scaled" and (RULE.row_amax or not RULE.joined):  # noqa: SIM114  # nothing depends on it
        code, encode, rounded = choose_candidate(xs, block_amax, factors, constants, True, RULE, AXIS)
    elif are_regular(factors, RULE):
        code, encode, rounded = choose_candidate(xs, block_amax, factors, constants, True, RULE, AXIS)
    else:
        code, encode, rounded = choose_candidate(xs, block_amax, factors, constants, False, RULE, AXIS)
    return code, encode, rounded


@triton.jit
def choose_candidate(xs, block_amax, factors, constants, regular: tl.constexpr, RULE: tl.constexpr, AXIS: tl.constexpr):
    """Return scale code, encode factor and what elements round to, of the candidate of least error.

    The first wins ties and NaN. What they round to: as `candidate_error` returns it.
    """
    base = standard_scale(block_amax, factors, RULE)
    # Where nothing is too small for it, numbers are 2^-14 times what they are: bits of fp16 that hold codes.
    SCALED_ROWS: tl.constexpr = RULE.errors == "scaled" and RULE.row_amax
    SMALL: tl.constexpr = RULE.joined and regular and not RULE.values and not SCALED_ROWS
    UNIT: tl.constexpr = 2.0**-14 if SMALL else 1.0
    for i in tl.static_range(len(RULE.candidates)):
        code = pm.e4m3_code(base * RULE.candidates[i], RULE.hardware)
        scale = pm.e4m3_positive(code) * (1.0 / UNIT)
        encode = encode_scale(scale, factors, RULE, UNIT)
        some = None
        if RULE.joined:
            if i == 0 or RULE.candidates[i] < RULE.candidates[0]:  # a larger scale leads to smaller quotients
                some = reaching(block_amax * encode, 7.0 * UNIT)
                largest = some
            else:
                some = largest
        error, words = candidate_error(xs, some, scale, encode, factors, constants, regular, UNIT, RULE)
        if RULE.tile:
            error = tile_blocks.tree_sum(error, AXIS)
        if i == 0:
            best_code, best_encode, best_error, best_words = code, encode, error, words
        else:
            better = error < best_error
            best_code = tl.where(better, code, best_code)
            best_encode = tl.where(better, encode, best_encode)
            best_error = tl.where(better, error, best_error)
            best_words = pm.chosen(better, words, best_words)
    return best_code, best_encode, best_words


@triton.jit
def pack_codes(xs, signs, START: tl.constexpr, encode, random, RULE: tl.constexpr, APART: tl.constexpr):
    """Return the 8 codes from element START as a uint32, the first in the low nibble; for the rest `quantize_block`."""
    if RULE.rounding == "nearest" and RULE.hardware >= E2M1_CAPABILITY:
        return converted_word(xs, START, encode)
    elif RULE.joined and signs is not None:
        return nearest_word(xs, signs, START, encode, APART)
    elif RULE.rounding == "nearest":
        return pm.pack_word(xs, START, pm.nearest_codes(xs, START, encode))
    elif RULE.rounding == "stochastic":
        return stochastic_word(xs, signs, START, encode, random, APART)
    else:
        return pm.pack_word(xs, START, pm.truncated_codes(xs, START, encode))


@triton.jit
def scale_of_block(
    xs, signs, block_amax, factors, constants, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr
):
    """Return the E4M3 code of a block's scale, its encode factor, whether NaN stands for it, and what it rounds to.

    The last is that of `choose_candidate`, or nothing; the arguments are those of `quantize_block`.
    """
    poison = ((block_amax < pm.INF) == 0) | factors.poison
    if RULE.tile:
        block_amax = tile_blocks.over_tile(tl.where(poison, pm.INF, block_amax), AXIS)
        poison = block_amax == pm.INF
    if len(RULE.candidates) > 0:
        block_amax = tl.where(poison, 0.0, block_amax)
    if len(RULE.candidates) == 0:
        rounded = ()
        # The conversion saturates; what poison makes of scale and codes is replaced.
        code = pm.e4m3_code(block_amax * factors.to_scale, RULE.hardware)
        if RULE.eden:
            code = tl.maximum(code, 1)  # no correction would lead away from 0
        encode = encode_scale(pm.e4m3_positive(code), factors, RULE, 1.0)
    else:
        code, encode, rounded = best_candidate(xs, signs, block_amax, factors, constants, RULE, AXIS, APART)
    return code, encode, poison, rounded


@triton.jit
def quantize_block(
    xs, block_amax, factors, constants, random, RULE: tl.constexpr, AXIS: tl.constexpr, signs,
    APART: tl.constexpr,
):  # fmt: skip
    """Quantize 16 elements.

    Args:
        block_amax: max |x| of each block, NaN if one is NaN.
        factors: of `tensor_factors`, scalars or broadcasting over blocks.
        random: four Philox words of each block, if RULE.drawn.
        AXIS: along which the 16 blocks of a tile lie.
        signs: 8 words whose halves begin with the signs of xs, if there are such: a packed x, or rotated pairs.
        APART: whether these are of elements two apart.

    Returns:
        The 16 codes as int64 and the E4M3 scale as uint8.
    """
    code, encode, poison, rounded = scale_of_block(xs, signs, block_amax, factors, constants, RULE, AXIS, APART)
    if (RULE.drawn or len(rounded) > 0) and signs is None:
        signs = upper_halves(xs)
    # Words of two bf16 hold what is quantized, and no conversion to E2M1 takes fp32 instead.
    if RULE.eden and (RULE.packed or RULE.norm != 0.0) and has_ptx() and RULE.hardware < E2M1_CAPABILITY:
        scale, largest = pm.e4m3_positive(code), tl.where(factors.poison, pm.INF, block_amax)
        low, high, code = eden.projected_block(signs, largest, encode, scale, random[0], APART)
        return low.to(tl.int64) | (high.to(tl.int64) << 32), code.to(tl.uint8)
    if RULE.eden:
        words, squares, products = eden.projected_codes(xs, signs, encode, RULE, APART)
        low, high = words
        code = eden.stored_code(pm.e4m3_positive(code), squares, products, random[0])
        low, high = low.to(tl.int64), high.to(tl.int64)
    elif len(rounded) > 0:
        low, high = rounded
        low = with_signs(low, pm.part(signs, 0, 4), APART).to(tl.int64)
        high = with_signs(high, pm.part(signs, 4, 4), APART).to(tl.int64)
    else:
        if RULE.joined and signs is not None:
            unit = pm.e4m3_positive(code) * factors.decode
            signs = within_codes(signs, block_amax * encode, unit, RULE.errors != "quick")
            xs = numbers_of_pairs(signs, 0, 16, RULE)
            if APART:
                xs = rotate.apart(xs)
        low = pack_codes(xs, signs, 0, encode, random, RULE, APART).to(tl.int64)
        high = pack_codes(xs, signs, 8, encode, random, RULE, APART).to(tl.int64)
    return tl.where(poison, 0, low | (high << 32)), tl.where(poison, E4M3_NAN, code).to(tl.uint8)


@triton.jit
def block_values(xs, block_amax, factors, constants, random, RULE: tl.constexpr, AXIS: tl.constexpr, signs):
    """Return what 16 elements become, decoded, as 8 `bf16_pairs`; arguments as of `quantize_block`, none apart."""
    code, encode, poison, rounded = scale_of_block(xs, signs, block_amax, factors, constants, RULE, AXIS, False)
    if signs is None:
        signs = upper_halves(xs)
    scale = tl.where(poison, float("nan"), pm.e4m3_positive(code))
    if RULE.joined:
        if len(rounded) == 0:
            unit = pm.e4m3_positive(code) * factors.decode
            signs = within_codes(signs, block_amax * encode, unit, RULE.errors != "quick")
            rounded = nearest_numbers(signs, encode, RULE)
        return signed_values(rounded, signs, scale)
    return value_pairs(xs, signs, encode, scale, random, RULE.rounding == "stochastic")
