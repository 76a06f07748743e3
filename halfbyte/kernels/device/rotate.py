"""Device functions that rotate groups, tuples with element i of each in tensor i (docs/numerics.md section 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.ptx import has_ptx

FLIPPED = tl.constexpr("lop3.b32 $0, $2, 0x80008000, $1, 0x6A;")


@triton.jit
def flip_signs(xs, words):
    """Multiply a group by fresh Hadamard signs: the bits of `words`."""
    out = ()
    for i in tl.static_range(len(xs)):
        flip = (words[i // 32] << (31 - i % 32)) & 0x80000000
        out = out + ((xs[i].to(tl.uint32, bitcast=True) ^ flip).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def flip_pairs(pairs, words):
    """Multiply a group of `casts.bf16_pairs` by fresh Hadamard signs: the bits of `words`."""
    out = ()
    for i in tl.static_range(len(pairs)):
        # Of 16 signs those of even elements, and 16 bits further on those of odd ones.
        if i % 16 == 0:
            both = (words[i // 16] & 0xFFFF) | ((words[i // 16] << 15) & 0xFFFF0000)
        elif i % 8 == 0:
            both = (words[i // 16] >> 16) | ((words[i // 16] >> 1) & 0xFFFF0000)
        out = out + (pairs[i] ^ ((both << (15 - 2 * (i % 8))) & 0x80008000),)
    return out


@triton.jit
def flip_pair(pair, signs):
    """Multiply a word of two bf16 by the signs in the upper bits of two halves of `signs`."""
    if has_ptx():
        # One instruction: of two words with the same signs, the compiler masks them apart.
        pair, signs = tl.broadcast(pair, signs)
        return tl.inline_asm_elementwise(FLIPPED, "=r,r,r", [pair, signs], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        return pair ^ (signs & 0x80008000)


@triton.jit
def flip_rows(rows, words):
    """Multiply groups along columns by fresh signs, the bits of `words`; rows: tuples of words of two columns."""
    out = ()
    for i in tl.static_range(len(rows)):
        if i % 32 == 0:
            both = (words[i // 32] & 0xFFFF) | (words[i // 32] << 16)
        elif i % 16 == 0:
            both = (words[i // 32] >> 16) | (words[i // 32] & 0xFFFF0000)
        flipped = ()
        for k in tl.static_range(len(rows[i])):
            flipped = flipped + (flip_pair(rows[i][k], both << (15 - i % 16)),)
        out = out + (flipped,)
    return out


@triton.jit
def butterfly(xs, STRIDE: tl.constexpr, SIGNS: tl.constexpr):
    """One stage of the transform: (a, b) -> (a + b, a - b), b the element STRIDE further on.

    SIGNS: the signs of elements before the first stage, bits, left to the stages: a sum carries the sign of its first
    element, and b is added or subtracted as its sign differs from a's.
    """
    out = ()
    for i in tl.static_range(len(xs)):
        a, b = xs[i & ~STRIDE], xs[i | STRIDE]
        # Bits 0: whether this is the difference of a pair, and the signs at the starts of its two runs of STRIDE.
        if (i // STRIDE + (SIGNS >> (i & -2 * STRIDE)) + (SIGNS >> ((i & -2 * STRIDE) + STRIDE))) % 2 == 0:
            out = out + (a + b,)
        else:
            out = out + (a - b,)
    return out


@triton.jit
def is_second(x):
    """Return int32 0 and 1 [1, N] by turns, computed by the threads that hold x [R, N]."""
    return pm.like((tl.arange(0, x.shape[1]) & 1)[None, :], x).to(tl.int32)


@triton.jit
def of_neighbour(x):
    """Return x [R, N], elements 2 j and 2 j + 1 of every row exchanged: a shuffle where lanes lie along rows."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    other = tl.broadcast_to((1 - tl.arange(0, 2))[None, None, :], (R, N // 2, 2))
    return tl.reshape(tl.gather(tl.reshape(x, (R, N // 2, 2)), other, 2), (R, N))


@triton.jit
def last_stage(xs):
    """The stage whose pairs lie in neighbouring threads: the first has a and takes a + b, the second b and a - b."""
    side = 1.0 - 2.0 * is_second(xs[0]).to(tl.float32)
    out = ()
    for i in tl.static_range(len(xs)):
        out = out + (tl.fma(xs[i], side, of_neighbour(xs[i])),)
    return out


@triton.jit
def transform(xs, RULE: tl.constexpr, words):
    """Return the Hadamard transform of groups, without its factor, before which elements take their signs.

    Those that are given are left to the stages, so that all carry the sign of the first.

    Args:
        RULE: what has the group, fresh and signs of a `scales.Rule`.
        words: whose bits are fresh signs; empty if the elements have taken theirs.
    """
    if len(words) > 0:
        xs = flip_signs(xs, words)
    SIZE: tl.constexpr = RULE.group
    for stage in tl.static_range(7):
        if (1 << stage) < SIZE:
            xs = butterfly(xs, 1 << stage, RULE.signs)
    if RULE.paired:
        xs = last_stage(xs)
    return xs


@triton.jit
def apart(xs):
    """Exchange the middle two of every four members: neighbours are then two elements apart, and after it again not."""
    out = ()
    for i in tl.static_range(0, len(xs), 4):
        out = out + (xs[i], xs[i + 2], xs[i + 1], xs[i + 3])
    return out


@triton.jit
def rotate(xs, RULE: tl.constexpr, words, APART: tl.constexpr):
    """Rotate groups, fp32 tensors holding bf16 values. Returns `casts.bf16_pairs`.

    RULE, words: as in `transform`, with the norm of a Rule. APART: of elements two apart (`apart`).
    """
    ys = transform(xs, RULE, words)
    NORM: tl.constexpr = RULE.norm if RULE.signs % 2 == 0 else -RULE.norm
    SIZE: tl.constexpr = RULE.group
    scaled = ()
    for i in tl.static_range(SIZE):
        # + 0 turns -0 into +0; sums of bf16 values are multiples of 2^-133, so the product cannot underflow.
        scaled = scaled + (tl.fma(ys[i], NORM, 0.0),)
    return pm.bf16_pairs(apart(scaled) if APART else scaled)
