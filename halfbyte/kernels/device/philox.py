"""Device functions for random words: Philox4x32-10, keyed by a Draw, counted by blocks (docs/numerics.md section 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device.casts import WORDS
from halfbyte.kernels.device.ptx import has_ptx

# A round: two products of 64 bits; the compiler multiplies 64-bit numbers where it is not told that words do.
PHILOX_ROUND = tl.constexpr(
    "{.reg .b64 p, q; .reg .b32 a, b; mul.wide.u32 p, $4, 0xD2511F53; mul.wide.u32 q, $6, 0xCD9E8D57;"
    "mov.b64 {$3, a}, p; mov.b64 {$1, b}, q; lop3.b32 $0, b, $5, $8, 0x96; lop3.b32 $2, a, $7, $9, 0x96;}"
)

MULTIPLIERS = tl.constexpr((0xD2511F53, 0xCD9E8D57))
PRODUCT = tl.constexpr("{.reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p;}")
TWO_WORDS = tl.constexpr((tl.uint32, tl.uint32))
LOW_BLOCKS = tl.constexpr(1 << 32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32-10; counters and keys uint32."""
    return rounds(c0, c1, c2, c3, k0, k1, 10)


@triton.jit
def rounds(c0, c1, c2, c3, k0, k1, COUNT: tl.constexpr):
    """Return the four words that COUNT rounds make of counters and keys."""
    for _ in tl.static_range(COUNT):
        if not has_ptx():
            p0 = c0.to(tl.uint64) * 0xD2511F53
            p1 = c2.to(tl.uint64) * 0xCD9E8D57
            c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
            c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
            c1 = p1.to(tl.uint32)
            c3 = p0.to(tl.uint32)
        else:
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                PHILOX_ROUND, "=&r,=&r,=&r,=&r,r,r,r,r,r,r", [c0, c1, c2, c3, k0, k1], dtype=WORDS, is_pure=True, pack=1
            )
        k0, k1 = next_keys(k0, k1)
    return c0, c1, c2, c3


@triton.jit
def next_keys(k0, k1):
    """Return the keys of the next round; in 64 bits, as the interpreter warns where uint32 wraps."""
    return (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32), (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)


class Base(NamedTuple):
    """A Draw's base, int64."""

    seed: Any
    offset: Any


class Key(NamedTuple):
    """Words of a seed and an offset, uint32: half the counter and the key of what is drawn."""

    seed_low: Any
    seed_high: Any
    offset_low: Any
    offset_high: Any


class LowKey(NamedTuple):
    """A key of blocks below 2^32, and what two rounds make of the words of a counter but the lowest."""

    seed_low: Any
    seed_high: Any
    offset_high: Any
    c1: Any
    low: Any
    high: Any


@triton.jit
def load_base(base_ptr):
    """Return the Base at int64 [2]."""
    return Base(tl.load(base_ptr), tl.load(base_ptr + 1))


@triton.jit
def words_of(base, stream):
    """Return the Key of a Base and a Draw's stream."""
    offset = base.offset + stream
    return Key(low_word(base.seed), high_word(base.seed), low_word(offset), high_word(offset))


@triton.jit
def draw_words(base_ptr, stream):
    """Return `words_of` a Draw's int64 [2] base and its stream."""
    return words_of(load_base(base_ptr), stream)


@triton.jit
def low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def product(x, WHICH: tl.constexpr):
    """Return the lower and the upper word of uint32 x times a multiplier of Philox, with PTX."""
    factor = tl.full((), MULTIPLIERS[WHICH], tl.uint32)
    return tl.inline_asm_elementwise(PRODUCT, "=&r,=&r,r,r", [x, factor], dtype=TWO_WORDS, is_pure=True, pack=1)


@triton.jit
def are_low(first_block, blocks_per_row, rows):
    """Whether all blocks of `rows` rows from first_block on are below 2^32, so that a LowKey serves them."""
    first = tl.cast(first_block, tl.int64)
    return (first >= 0) & (first + tl.cast(rows, tl.int64) * blocks_per_row <= LOW_BLOCKS)


@triton.jit
def low_key(key):
    """Return the LowKey of a Key; without PTX the key itself."""
    if has_ptx():
        c1, high1 = product(key.offset_low, 1)
        low, high = product(high1 ^ key.seed_low, 0)
        return LowKey(key.seed_low, key.seed_high, key.offset_high, c1, low, high)
    else:
        return key


@triton.jit
def block_words(block, key):
    """Return the four Philox words of each block; block int64, key from draw_words or `low_key`."""
    if len(key) == 4:
        return philox(low_word(block), high_word(block), key.offset_low, key.offset_high, key.seed_low, key.seed_high)
    else:
        return words_of_low(low_word(block), key)


@triton.jit
def words_of_low(low, key):
    """Return `block_words` of blocks low, uint32, with a LowKey: two products fewer."""
    low0, high0 = product(low, 0)
    k0, k1 = key.seed_low, key.seed_high
    low1, high1 = product(high0 ^ key.offset_high ^ k1, 1)
    k0, k1 = next_keys(k0, k1)
    c0, c1, c2, c3 = high1 ^ key.c1 ^ k0, low1, key.high ^ low0 ^ k1, key.low
    k0, k1 = next_keys(k0, k1)
    return rounds(c0, c1, c2, c3, k0, k1, 8)


@triton.jit
def sign_words(key):
    """Return the 128 sign bits of a fresh rotation as four uint32."""
    zero = key.seed_low & 0
    return philox(zero, zero, key.offset_low, key.offset_high ^ 0x80000000, key.seed_low, key.seed_high)
