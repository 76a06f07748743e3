"""Device functions that choose the scale of a 16x16 tile by quick errors, where its blocks lie below each other.

What all 16 blocks of a tile would compute alike is shared among them: rows 4 c to 4 c + 3 compute the scale of
candidate c, and their lanes end up with the sum of its errors. Each exchange of errors passes half of them on and keeps
the other half, so four sums over 16 rows take five shuffles in place of 16.

In most warps no two errors lie close, and that is all: one branch of the program leads to what decides else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import near_errors as near
from halfbyte.kernels.device import quick_errors as quick
from halfbyte.kernels.device.near_errors import NO_BOUND, NO_ERROR
from halfbyte.kernels.device.nearest import HELD_BELOW
from halfbyte.kernels.device.ptx import has_ptx

OTHER_LANE = tl.constexpr("{.reg .b32 t; mov.u32 t, %laneid; and.b32 t, t, 15; xor.b32 $0, t, $1;}")  # of 16, than $1
SWAPS = tl.constexpr({bit: f"shfl.sync.bfly.b32 $0, $1, {bit}, 0x1f, -1;" for bit in (4, 8)})
OF_SIXTEEN = 0x101F  # `near_errors.OF_EIGHT` of sixteen
OF_CANDIDATE = tl.constexpr(tuple(f"shfl.sync.idx.b32 $0, $1, {4 * i}, {OF_SIXTEEN}, -1;" for i in range(4)))
HIDDEN_ONE = tl.constexpr("{.reg .b32 t; mov.b32 t, $1; shr.u32 t, t, 31; add.u32 $0, t, 1;}")

SIXTEEN_FLOATS = tl.constexpr((tl.float32,) * 16)
NO_VALUES = tl.constexpr("".join(f"mov.f32 ${i}, 0f00000000;" for i in range(16)))
NO_VALUES_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 16 + ["r"]))


def _tile_words() -> str:
    """Return PTX that gives $0 and $1, the codes of 16 elements without signs.

    $2 to $17: shifted values. $18 to $25: the pairs they were. $26: the largest of the tile, shifted. $27, $28: scale
    and D. $29, $30: their product, shifted, and its reciprocal. $31: 1 or 1.25.

    Where no value lies at a tie, a code is the integer part of line + 1/2 (`stochastic`): of two values by one
    conversion. Ties that go down, to the even code, are 0.25, 1.25, 2.5 and 5 times scale * D; only the bf16 nearest to
    a multiple can be there, which is the same for all values of a tile. In a warp with such a tile, or where values
    reach 15, lines are rounded as `casts.least_lines` says, but the third is 6 + a / 10: it too is 6.5 at 5, and 7.5
    only at 15, so that few values need to be held below 6. Its factor is the number below 1 / 10: times 5 it stays
    below 1/2, times the number behind 5 it does not.
    """
    text = (
        "{.reg .pred some, tie; .reg .f32 v<16>, by, unit, limit, f, g, h;"
        ".reg .b32 pair, p, s, t, even, odd, h<4>, a, b; mul.rn.f32 by, $30, 0f7E800000; mul.rn.f32 limit, $26, by;"
        "setp.geu.f32 some, limit, 0f41700000; mul.rn.f32 f, $29, $31; cvt.rn.bf16x2.f32 p, f, f; shl.b32 p, p, 16;"
        "mov.b32 f, p; mul.rn.f32 f, f, $30; setp.eq.or.f32 tie, f, $31, some; vote.sync.any.pred tie, tie, -1;"
        "vote.sync.any.pred some, some, -1; @!tie bra $$L_no_ties_${:uid};"
    )
    text += "".join(f"mov.f32 v{i}, ${i + 2};" for i in range(16))
    text += "@!some bra $$L_in_range_${:uid}; mul.rn.f32 unit, $27, $28;"
    text += HELD_BELOW.format(unit="unit")
    for i in range(8):
        text += f"min.xorsign.abs.bf16x2 p, ${18 + i}, pair; shl.b32 t, p, 16; mov.b32 v{2 * i}, t;"
        text += f"and.b32 t, p, 0xFFFF0000; mov.b32 v{2 * i + 1}, t;"
    text += "rcp.rn.f32 by, unit; min.f32 by, by, 0f7F7FFFFF; $$L_in_range_${:uid}:"
    for word in range(2):
        for i in range(8):
            text += f"abs.f32 f, v{8 * word + i}; mul.rn.f32 f, f, by; fma.rn.f32 g, f, 0f40000000, 0f4B000000;"
            text += "add.rn.f32 h, f, 0f4B000002; mov.b32 s, g; mov.b32 t, h; min.u32 s, s, t;"
            text += "fma.rn.f32 h, f, 0f3DCCCCCC, 0f4B000006; mov.b32 t, h;"
            text += f"min.u32 {'odd' if i % 2 else 'even'}, s, t;"
            text += f"mad.lo.u32 h{i // 2}, odd, 16, even;" if i % 2 else ""
        text += f"prmt.b32 a, h0, h1, 0x0040; prmt.b32 b, h2, h3, 0x0040; prmt.b32 ${word}, a, b, 0x5410;"
    text += "bra $$L_done_${:uid}; $$L_no_ties_${:uid}:"
    text += "mul.rn.f32 by, by, 0f38800000;"
    for word in range(2):
        at = 2 + 8 * word
        for i, (low, high) in enumerate(((0, 2), (1, 3), (4, 6), (5, 7))):
            text += f"abs.f32 f, ${at + low}; abs.f32 g, ${at + high}; mul.rn.f32 f, f, by; mul.rn.f32 g, g, by;"
            text += f"cvt.rz.f16x2.f32 h{i}, g, f; mov.b32 t, 0x0EFF0EFF; min.f16x2 h{i}, h{i}, t;"
        text += "prmt.b32 even, h0, h2, 0x7531; prmt.b32 odd, h1, h3, 0x7531;"
        text += "add.u32 even, even, 0x01010101; add.u32 odd, odd, 0x01010101; shr.u32 even, even, 1;"
        text += f"mad.lo.u32 ${word}, odd, 8, even;"
    return text + "$$L_done_${:uid}:}"


TILE_WORDS = tl.constexpr(_tile_words())
TILE_WORDS_OPERANDS = tl.constexpr(",".join(["=&r"] * 2 + ["f"] * 16 + ["r"] * 8 + ["f"] * 6))
TWO_WORDS = tl.constexpr((tl.uint32, tl.uint32))


@triton.jit
def row_in_tile(A: tl.constexpr, B: tl.constexpr):
    """Return which of its tile's 16 blocks each of [A, B] is."""
    return tl.broadcast_to((tl.arange(0, A) & 15)[:, None], (A, B))


@triton.jit
def from_row(x, row):
    """Return x [A, B] of other rows [A, B] of the same tiles."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    found = tl.gather(tl.reshape(x, (A // 16, 16, B)), tl.reshape(row, (A // 16, 16, B)), 1)
    return tl.reshape(found, (A, B))


@triton.jit
def rows_are_lanes(A: tl.constexpr, B: tl.constexpr):
    """Whether [A, B] are the lanes of a warp, of which two times 16 are a tile: shuffles need no number of a row then.

    The compiler lays 16 rows of two blocks so. Of one that does not, `tile_factors` makes NaN.
    """
    return has_ptx() and A == 16 and B == 2


@triton.jit
def of_candidate(x, row, NUMBER: tl.constexpr):
    """Return fp32 x [A, B] of rows 4 * NUMBER."""
    if rows_are_lanes(x.shape[0], x.shape[1]):
        return tl.inline_asm_elementwise(OF_CANDIDATE[NUMBER], "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return from_row(x, row * 0 + 4 * NUMBER)


@triton.jit
def exchanged(kept, passed, here, row, BIT: tl.constexpr):
    """Return the sums of two errors over rows whose number differs in a bit: where `here`, of the first."""
    mine, other = tl.where(here, kept, passed), tl.where(here, passed, kept)
    if rows_are_lanes(mine.shape[0], mine.shape[1]):
        other = tl.inline_asm_elementwise(SWAPS[BIT], "=f,f", [other], dtype=tl.float32, is_pure=True, pack=1)
    else:
        other = from_row(other, row ^ BIT)
    return mine + other


@triton.jit
def over_four(x, LEAST: tl.constexpr):
    """Return the sums of x [A, B] over rows 4 c to 4 c + 3; LEAST: the least of x over rows 4 apart."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (A // 16, 4, 4, B))
    x = tl.min(x, axis=1, keep_dims=True) if LEAST else tl.sum(x, axis=2, keep_dims=True)
    return tl.reshape(tl.broadcast_to(x, (A // 16, 4, 4, B)), (A, B))


@triton.jit
def own_ratio(row, RULE: tl.constexpr):
    """Return the candidate whose scale a row computes; rows without one take the first."""
    ratio = RULE.candidates[0]
    for i in tl.static_range(1, 4):
        ratio = tl.where(row < 4 * i, ratio, RULE.candidates[i if i < len(RULE.candidates) else 0])
    return ratio


class TileFactors(NamedTuple):
    """`scales.Factors` and what each row of a tile makes of them, or knows anyway.

    ratio: the row's candidate. shift: that of `quick_errors.Shifted`, Inf where errors have no bound; pair: two bf16 of
    it. step: its decode. tie: 1 or 1.25, at least one row each (`_tile_words`).
    """

    amax: Any
    encode: Any
    to_scale: Any
    decode: Any
    poison: Any
    regular: Any
    inverse_unit: Any
    ratio: Any
    shift: Any
    step: Any
    pair: Any
    tie: Any


@triton.jit
def tile_factors(factors, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Return `TileFactors` of blocks [R, N].

    Shuffled once in a program, the numbers stay in registers: else the compiler computes them anew in each turn.
    """
    row = row_in_tile(R, N)
    poison = factors.poison | (row < 0)
    if rows_are_lanes(R, N):
        poison |= tl.inline_asm_elementwise(OTHER_LANE, "=r,r", [row], dtype=tl.int32, is_pure=True, pack=1) != 0
    by = quick.shifted_factors(factors)
    zero = row.to(tl.float32) * 0.0
    ratio = from_row(own_ratio(row, RULE), row)
    shift = from_row(zero + tl.where(by.seven > 0, by.shift, pm.INF), row)
    step = from_row(zero + by.decode, row)
    pair = from_row(quick.shift_pair(zero + by.shift), row)
    tie = ratio
    THIRD: tl.constexpr = 2
    if RULE.candidates[0] != 1.0 or RULE.candidates[THIRD] != 1.25:
        tie = from_row(tl.where(row < 8, 1.0, 1.25), row)
    return TileFactors(
        factors.amax, factors.encode, factors.to_scale, factors.decode, poison, factors.regular,
        factors.inverse_unit, ratio, shift, step, pair, tie,
    )  # fmt: skip


@triton.jit
def hidden_one(x):
    """Return 1, which the compiler is not to know, for each of x >= 0."""
    if not has_ptx():
        return tl.full(x.shape, 1, tl.uint32)
    return tl.inline_asm_elementwise(HIDDEN_ONE, "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def error_of_row(values, step, encode, one, row, NUMBER: tl.constexpr, RULE: tl.constexpr):
    """Return `quick.error_sum` of the candidate whose step and encode rows 4 * NUMBER have."""
    encode = of_candidate(encode, row, NUMBER)
    if RULE.squares:
        step = of_candidate(step, row, NUMBER)
    return quick.error_sum(values, step, encode, one, RULE.candidates[NUMBER] < RULE.candidates[0], RULE.squares, True)


@triton.jit
def tile_choice(pairs, largest, base, factors, constants, RULE: tl.constexpr, AXIS: tl.constexpr):
    """Return the code of the scale of least error and, if RULE.joined, `tile_words`.

    The arguments are those of `quick_choice`, but factors: `TileFactors`. AXIS: 0.
    """
    COUNT: tl.constexpr = len(RULE.candidates)
    row = row_in_tile(base.shape[0], base.shape[1])
    values = quick.values_shifted_by(pairs, factors.pair, not RULE.squares)
    code = pm.e4m3_code(base * factors.ratio, RULE.hardware)
    step = tl.maximum(pm.e4m3_positive(code) * factors.step, quick.NO_STEP)
    encode = pm.quick_reciprocal(step)
    one = hidden_one(encode)  # of each lane: in a register that all share it costs moves
    halves = ()
    for i in tl.static_range(2):
        first = error_of_row(values, step, encode, one, row, i, RULE)
        second = first
        if i + 2 < COUNT:
            second = error_of_row(values, step, encode, one, row, i + 2, RULE)
        halves = halves + (exchanged(first, second, (row & 8) == 0, row, 8),)
    error = over_four(exchanged(halves[0], halves[len(halves) - 1], (row & 4) == 0, row, 4), False)
    if not RULE.squares:
        error = error * step
    own = quick.with_code(error, code)
    if COUNT == 3:
        own = tl.where(row < 12, own, NO_ERROR)
    best = over_four(own, True)
    LAST: tl.constexpr = COUNT - 1 if RULE.candidates[COUNT - 1] > RULE.candidates[0] else 0  # they ascend
    most = of_candidate(step, row, LAST)
    top = largest * factors.shift
    # Of the first candidate it is the quotient; of others what it would be, or a little more.
    far = (top * (encode * factors.ratio) < quick.SEVEN) == 0
    is_near = ((own <= quick.bound_of(best, most, RULE)) & (own != best)) | far
    code = best & 0x7F
    if tl.max(tl.ravel(is_near.to(tl.int32), can_reorder=True), axis=0) != 0:
        is_bounded = from_row(top * encode, row * 0) < quick.SEVEN
        code = code_beside_others(pairs, own, most, is_bounded, row, factors, constants, RULE, AXIS)
        # In few registers: what is rounded is made of the pairs then, as where something is beyond the last code.
        values, top = no_values(pairs), top * 0.0 + pm.INF
    words = ()
    if RULE.joined:
        words = tile_words(values, pairs, top, pm.e4m3_positive(code), factors)
    return code, words


@triton.jit
def no_values(pairs):
    """Return 16 fp32 tensors of the shape of `pairs` that mean nothing."""
    if not has_ptx():
        return pm.unpack_pairs(pairs, 0, 16)
    return tl.inline_asm_elementwise(
        NO_VALUES, NO_VALUES_CONSTRAINTS, [pairs[0]], dtype=SIXTEEN_FLOATS, is_pure=True, pack=1
    )


@triton.jit
def code_beside_others(pairs, own, most, is_bounded, row, factors, constants, RULE: tl.constexpr, AXIS: tl.constexpr):
    """Return the code of the scale of least error, of some tiles by the defined ones.

    own: errors with their codes, of candidate c in rows 4 c. most: the largest step. is_bounded: whether quick errors
    are.
    """
    errors = ()
    for i in tl.static_range(len(RULE.candidates)):
        errors = errors + (from_row(own, row * 0 + 4 * i),)
    errors = quick.without_doubles(errors, RULE)
    best, second = quick.least_two(errors)
    bound = tl.where(is_bounded, quick.bound_of(best, most, RULE), NO_BOUND)
    defined = near.Defined(factors.amax, factors.decode, constants.unit)
    return near.decided_code(pairs, errors, near.Near(best, second, bound), defined, RULE, AXIS, False)


@triton.jit
def tile_words(values, pairs, top, scale, factors):
    """Return the codes nearest to 16 elements, two words of them without signs.

    Args:
        values: `quick_errors.shifted_values` of pairs.
        top: the largest of the tile, shifted, or Inf where values mean nothing.
        scale: of the tile.
    """
    unit = scale * factors.step
    given = values + pairs + (top, scale, factors.decode, unit, pm.regular_reciprocal(unit), factors.tie)
    return tl.inline_asm_elementwise(TILE_WORDS, TILE_WORDS_OPERANDS, given, dtype=TWO_WORDS, is_pure=True, pack=1)
