"""Device functions that decide between scales whose quick errors lie too close, by the errors of section 5.

Where there is PTX all lanes of a warp decide one block after the other, eight lanes a candidate and two values a lane:
a lane alone would take six times as many instructions, and the others would wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import rotate, tile_blocks
from halfbyte.kernels.device.ptx import has_ptx

MOST_CANDIDATES = 4  # as many as eight lanes fit into a warp
MOST = tl.constexpr(MOST_CANDIDATES)
# Bits in place of the error of no candidate, and of a bound that excludes it alone.
NO_ERROR, NO_BOUND = tl.constexpr(0xFFFFFFFF), tl.constexpr(0xFFFFFFFE)
LEAST_REGULAR, MOST_REGULAR = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)  # `Factors.regular`
# Lanes of eight, one behind the other: which and how segments are said to shfl.
OF_EIGHT, OF_ALL = 0x181F, 0x1F


class Near(NamedTuple):
    """Bits of the least two errors with their codes, and of what an error has to exceed to be out of question.

    Candidates with one code have one error, bit for bit: no other code is near then, though the two are.
    """

    best: Any
    second: Any
    bound: Any


class Defined(NamedTuple):
    """What section 5's errors take: A, D and f(6 * m8)."""

    amax: Any
    decode: Any
    unit: Any


def _shuffled(to: str, what: str, lane: str | int, lanes: int = OF_ALL) -> str:
    return f"shfl.sync.idx.b32 {to}, {what}, {lane}, {lanes}, -1;"


def _chosen(name: str, count: int, first_bit: int) -> str:
    """Return PTX that leaves in name0 that of `count` registers whose number is in bits of the lane."""
    steps = ((1 << bit, i) for bit in range(count.bit_length() - 1) for i in range(0, count, 2 << bit))
    return "".join(
        f"selp.b32 {name}{i}, {name}{i + step}, {name}{i}, bit{first_bit + step.bit_length() - 1};" for step, i in steps
    )


def _distance(x: str, squares: bool) -> str:
    """Return PTX that leaves in x how far it is from what it becomes, as section 5 adds it."""
    return (
        f"abs.f32 {x}, {x}; mul.rn.f32 a, {x}, encode; min.f32 a, a, 0f40C00000; max.f32 b, a, 0f3F800000;"
        "mov.b32 t, b; and.b32 t, t, 0x7F800000; mov.b32 b, t;"
        "fma.rn.f32 a, b, 0f4A800000, a; fma.rn.f32 a, b, 0fCA800000, a;"
        "mul.rn.f32 a, a, scale; mul.rn.f32 a, a, amax; div.rn.f32 a, a, $18;"
        f"sub.rn.f32 a, a, {x}; " + (f"mul.rn.f32 {x}, a, a;" if squares else f"abs.f32 {x}, a;")
    )


def _turn(apart: bool, squares: bool) -> str:
    """Return PTX that decides the block of lane `from`, and leaves its code in `code` of all lanes."""
    order = [(k, i) for k in range(8) for i in range(2)]
    if apart:
        order = [(k + j, i) for k in range(0, 8, 2) for i in range(2) for j in range(2)]
    text = "".join(_shuffled(f"w{i}", f"${i + 1}", "from") for i in range(8)) + _chosen("w", 8, 0)
    text += "".join(_shuffled(f"e{i}", f"${i + 9}", "from") for i in range(4)) + _chosen("e", 4, 3)
    for to, operand in (("amax", 16), ("encode", 17)):
        text += f"mov.b32 t, ${operand};" + _shuffled("t", "t", "from") + f"mov.b32 {to}, t;"
    text += _shuffled("t", "$15", "from") + "setp.le.u32 near, e0, t; and.b32 e0, e0, 127;"
    text += (
        "shl.b32 t, e0, 20; mov.b32 scale, t; mul.rn.f32 scale, scale, 0f7B800000; mul.rn.f32 encode, scale, encode;"
    )
    text += "rcp.rn.f32 encode, encode; min.f32 encode, encode, 0f7F7FFFFF; @!near mov.b32 e0, 128;"
    text += "shl.b32 t, w0, 16; mov.b32 x0, t; and.b32 t, w0, 0xFFFF0000; mov.b32 x1, t;"
    text += _distance("x0", squares) + _distance("x1", squares) + "mov.f32 error, 0f00000000;"
    text += "".join(
        f"mov.b32 t, x{i};" + _shuffled("t", "t", k, OF_EIGHT) + "mov.b32 a, t; add.rn.f32 error, error, a;"
        for k, i in order
    )
    # The first of equals, and of NaN, among those that are near.
    text += "setp.eq.u32 none, 0, 0; mov.b32 code, 0; mov.f32 least, 0f00000000;"
    for i in range(MOST_CANDIDATES):
        text += "mov.b32 t, error;" + _shuffled("t", "t", 8 * i) + "mov.b32 a, t;" + _shuffled("t", "e0", 8 * i)
        text += "setp.lt.or.f32 better, a, least, none; setp.lt.and.u32 better, t, 128, better;"
        text += "selp.f32 least, a, least, better; selp.b32 code, t, code, better; @better setp.ne.u32 none, 0, 0;"
    return text


def _decision(apart: bool, squares: bool) -> str:
    """Return PTX that gives $0, the code of each block.

    $1 to $8: 8 `bf16_pairs`; $9 to $12: bits of errors; $13 to $15: Near; $16 to $18: Defined.
    """
    others = "".join(
        f"setp.ne.u32 none, $13, ${i}; setp.le.and.u32 none, ${i}, $15, none; or.pred near, near, none;"
        for i in range(9, 9 + MOST_CANDIDATES)
    )
    bits = "".join(f"and.b32 t, lane, {1 << i}; setp.ne.u32 bit{i}, t, 0;" for i in range(5))
    return (
        "{.reg .pred near, none, better, bit<5>; .reg .b32 left, lane, from, t, code, w<8>, e<4>;"
        ".reg .f32 a, b, x<2>, amax, scale, encode, error, least;"
        "and.b32 $0, $13, 127; setp.le.u32 near, $14, $15; vote.sync.any.pred near, near, -1;"
        f"@!near bra $$L_decided_${{:uid}}; setp.ne.u32 near, 0, 0; {others} vote.sync.ballot.b32 left, near, -1;"
        "setp.eq.u32 none, left, 0; @none bra $$L_decided_${:uid};"
        f"mov.u32 lane, %laneid; {bits} $$L_next_${{:uid}}:"
        "brev.b32 t, left; clz.b32 from, t; add.u32 t, left, -1; and.b32 left, left, t;" + _turn(apart, squares) +
        "setp.eq.u32 near, lane, from; @near mov.b32 $0, code;"
        "setp.ne.u32 near, left, 0; @near bra $$L_next_${:uid}; $$L_decided_${:uid}:}"
    )  # fmt: skip


# By whether pairs are of elements two apart, and whether distances are squared.
DECISIONS = tl.constexpr(tuple(_decision(apart, squares) for apart in (False, True) for squares in (False, True)))


@triton.jit
def decided_code(pairs, errors, near, by, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr):
    """Return the code of the least error, and of blocks where another lies too close that of the least defined one.

    Args:
        pairs: 8 `bf16_pairs`; APART: of elements two apart.
        errors: bits of all candidates' errors, of which the last seven are their codes.
        near, by: a Near and a Defined.
        AXIS: along which the blocks of a tile lie.
    """
    code = near.best & 0x7F
    if has_ptx() and not RULE.tile:
        for _ in tl.static_range(MOST - len(RULE.candidates)):
            errors = errors + (tl.full(code.shape, NO_ERROR, tl.uint32),)
        KIND: tl.constexpr = (2 if APART else 0) + (1 if RULE.squares else 0)
        return tl.inline_asm_elementwise(
            DECISIONS[KIND], "=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f", pairs + errors + near + by, dtype=tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        is_near = near.second <= near.bound
        if tl.max(tl.max(is_near.to(tl.int32), axis=1), axis=0) != 0:
            code = tl.where(is_near, defined_choice(pairs, errors, by, RULE, AXIS, APART), code)
        return code


@triton.jit
def defined_choice(pairs, errors, by, RULE: tl.constexpr, AXIS: tl.constexpr, APART: tl.constexpr):
    """Return the code whose error, as section 5 defines it, is the least: the first of equals, and of NaN."""
    codes = errors[0] & 0x7F
    for i in tl.static_range(1, len(errors)):
        codes = codes | ((errors[i] & 0x7F) << (8 * i))
    code = codes & 0x7F
    best = pm.e4m3_positive(code) * 0.0 - 1.0
    for i in range(len(RULE.candidates)):
        candidate = (codes >> (8 * i)) & 0x7F
        error = defined_error(pairs, pm.e4m3_positive(candidate), by, RULE.squares, APART)
        if RULE.tile:
            error = tile_blocks.tree_sum(error, AXIS)
        better = ((error < best) | (best == -1.0)) & (candidate != 0x7F)
        code = tl.where(better, candidate, code)
        best = tl.where(better, error, best)
    return code


@triton.jit
def defined_error(pairs, scale, by, SQUARED: tl.constexpr, APART: tl.constexpr):
    """Return section 5's error_math="exact" of a scale; pairs, APART: as of `decided_code`."""
    encode = tl.minimum(pm.reciprocal(scale * by.decode), pm.FLT_MAX)
    inverse_unit = pm.regular_reciprocal(by.unit)
    error = scale * 0.0
    for turn in range(turns_of(by.amax, 4)):
        xs = pm.unpack_pairs((word_of_turn(pairs, turn, 0), word_of_turn(pairs, turn, 1)), 0, 4)
        if APART:
            xs = rotate.apart(xs)
        for i in tl.static_range(4):
            error += distance(tl.abs(xs[i]), encode, scale, inverse_unit, by, SQUARED)
    return error


@triton.jit
def masked_value(a):
    """Return `casts.nearest_value`, with a mask more: without it the compiler spills in kernels of tiles."""
    a = tl.minimum(a, pm.E2M1_MAX)
    binade = (tl.maximum(a, 1.0).to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(binade, -4194304.0, tl.fma(binade, 4194304.0, a))


@triton.jit
def distance(x, encode, scale, inverse_unit, by, SQUARED: tl.constexpr):
    """Return how far x >= 0 is from what it becomes, or the square of that."""
    y = (masked_value(x * encode) * scale) * by.amax
    if has_ptx() and (by.amax > LEAST_REGULAR) & (by.amax < MOST_REGULAR) & (by.unit >= 1.0):
        d = pm.quotient_by(y, by.unit, inverse_unit) - x
    else:
        d = tl.div_rn(y, y * 0.0 + by.unit) - x
    if SQUARED:
        return d * d
    else:
        return tl.abs(d)


@triton.jit
def turns_of(amax, COUNT: tl.constexpr):
    """Return COUNT, which the compiler is not to know: loops that it unrolls crowd the cache of instructions."""
    if has_ptx():
        return (amax.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) + COUNT
    else:
        return COUNT


@triton.jit
def word_of_turn(words, turn, FIRST: tl.constexpr):
    """Return member FIRST + 2 * turn of eight."""
    word = words[FIRST]
    for i in tl.static_range(1, 4):
        word = tl.where(turn == i, words[FIRST + 2 * i], word)
    return word
