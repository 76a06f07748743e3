"""Rotation of groups that lie along the last dimension of one tensor, which a thread holds in its registers.

Of a tensor [T, SIZE] every stage of docs/numerics.md section 7 is a split into halves, one addition and one subtraction
of whole tensors, and a join. Reshapes, splits and joins only rename registers as long as a thread holds whole groups.
That is a dozen operations a stage whatever the width: tuples of 128 tensors mean thousands, and Triton's choice of
layouts, which follows every chain of operations from every load, takes minutes for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import philox
from halfbyte.kernels.device.ptx import has_ptx

# A bf16 value $1 and a flip $2: one instruction where a shift would be one and the flip another.
FLIPPED = tl.constexpr("mad.lo.u32 $0, $1, 65536, $2;")


@triton.constexpr_function
def repeats_after_16(signs):
    """Return whether 128 bits are eight times the same 16."""
    return signs == (signs & 0xFFFF) * ((1 << 128) // 0xFFFF)


@triton.jit
def sign_flips(sign_ptr, sign_stream, RULE: tl.constexpr):
    """Return uint32 [RULE.group]: the sign bit where the Hadamard sign of an element is minus.

    Of a RULE that is paired, whose signs repeat after a half unless they are fresh, those of the first half.
    """
    SIZE: tl.constexpr = RULE.group
    SHORT: tl.constexpr = repeats_after_16(RULE.signs)
    i = tl.arange(0, SIZE)
    if RULE.fresh:
        first, second, third, fourth = philox.sign_words(philox.draw_words(sign_ptr, sign_stream))
        low, high = tl.where(i & 32 == 0, first, second), tl.where(i & 32 == 0, third, fourth)
        bit = tl.where(i & 64 == 0, low, high) >> (i & 31).to(tl.uint32)
    elif SHORT:
        bit = tl.full((SIZE,), RULE.signs & 0xFFFF, tl.uint32) >> (i & 15).to(tl.uint32)
    else:
        word = tl.full((SIZE,), RULE.signs & 0xFFFFFFFF, tl.uint32)
        for k in tl.static_range(1, 4):
            word = tl.where(i // 32 == k, tl.full((SIZE,), (RULE.signs >> 32 * k) & 0xFFFFFFFF, tl.uint32), word)
        bit = word >> (i & 31).to(tl.uint32)
    return (bit & 1) << 31


@triton.jit
def fresh_halves(sign_ptr, sign_stream, T: tl.constexpr):
    """Return `sign_flips` [T, 64] of fresh signs for the halves of groups of 128, by turns.

    A thread makes one or two of them, and all are read from shared memory, four at once: two instructions each less.
    """
    first, second, third, fourth = philox.sign_words(philox.draw_words(sign_ptr, sign_stream))
    i = tl.arange(0, 128)
    low, high = tl.where(i & 32 == 0, first, second), tl.where(i & 32 == 0, third, fourth)
    word = tl.where(i & 64 == 0, low, high)
    flips = (word >> (i & 31).to(tl.uint32) & 1) << 31
    flips = tl.max(tl.broadcast_to(flips[:, None], (128, 2)), axis=1)  # else every thread computes its own
    return tl.reshape(tl.broadcast_to(tl.reshape(flips, (1, 2, 64)), (T // 2, 2, 64)), (T, 64))


@triton.jit
def flipped(x, flips):
    """Return fp32 x [T, SIZE] times the signs of `sign_flips`, [SIZE] or [T, SIZE]."""
    if len(flips.shape) == 1:
        flips = flips[None, :]
    return (x.to(tl.uint32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)


@triton.jit
def raised_and_flipped(bits, flips):
    """Return the fp32 values of the low halves of uint32 bits, bf16, times signs."""
    if has_ptx():
        bits = tl.inline_asm_elementwise(FLIPPED, "=r,r,r", [bits, flips], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        bits = (bits << 16) ^ flips
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def flipped_bf16(x, flips):
    """Return bf16 x [T, SIZE] times signs, [SIZE] or [T, SIZE], as fp32."""
    if len(flips.shape) == 1:
        flips = tl.broadcast_to(flips[None, :], x.shape)
    return raised_and_flipped(x.to(tl.uint16, bitcast=True).to(tl.uint32), flips)


@triton.jit
def flipped_words(words, flips):
    """Return the fp32 values [T, 2 N] of pairs of bf16 [T, N] times signs, [2 N] or [T, 2 N]."""
    T: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    if len(flips.shape) == 1:
        flips = tl.broadcast_to(flips[None, :], (T, 2 * N))
    even, odd = tl.split(tl.reshape(flips, (T, N, 2)))
    low, high = raised_and_flipped(words, even), ((words & 0xFFFF0000) ^ odd).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (T, 2 * N))


@triton.jit
def stage(x, STRIDE: tl.constexpr):
    """One stage of the transform of fp32 [T, SIZE]: (a, b) -> (a + b, a - b), b the element STRIDE further on."""
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(x, (T, SIZE // (2 * STRIDE), 2, STRIDE)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (T, SIZE))


@triton.jit
def stages(x, END: tl.constexpr):
    """Return x [T, SIZE] after the stages of stride 1 to END / 2."""
    for s in tl.static_range(7):
        if (1 << s) < END:
            x = stage(x, 1 << s)
    return x


@triton.jit
def rows_exchanged(x):
    """Return x [T, SIZE] with the rows 2 t and 2 t + 1 exchanged: a shuffle where lanes lie along T."""
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    other = tl.broadcast_to((1 - tl.arange(0, 2))[None, :, None], (T // 2, 2, SIZE))
    return tl.reshape(tl.gather(tl.reshape(x, (T // 2, 2, SIZE)), other, 1), (T, SIZE))


@triton.jit
def rotated_pairs(x, flips, RULE: tl.constexpr):
    """Rotate groups [T, SIZE], fp32 or bf16. Returns pairs [T, SIZE / 2], RULE.apart of elements two apart.

    flips: of `sign_flips`, or None if x, fp32, has taken its signs.
    RULE.paired: rows 2 t and 2 t + 1 are the halves of a group, of which the last stage makes sums and differences.
    """
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    if flips is None:
        y = stages(x, SIZE)
    elif x.dtype == tl.bfloat16:
        y = stages(flipped_bf16(x, flips), SIZE)
    else:
        y = stages(flipped(x, flips), SIZE)
    if RULE.paired:
        side = (1 - 2 * (tl.arange(0, T) & 1)).to(tl.float32)[:, None]
        y = tl.fma(y, side, rows_exchanged(y))
    y = tl.fma(y, RULE.norm, 0.0)  # + 0 turns -0 into +0
    if RULE.apart:
        low, high = tl.split(tl.permute(tl.reshape(y, (T, SIZE // 4, 2, 2)), (0, 1, 3, 2)))
        return tl.reshape(pm.bf16_pairs((low, high))[0], (T, SIZE // 2))
    else:
        low, high = tl.split(tl.reshape(y, (T, SIZE // 2, 2)))
        return pm.bf16_pairs((low, high))[0]


@triton.jit
def unpacked(words):
    """Return the fp32 values [T, 2 N] of pairs of bf16 [T, N]."""
    low, high = (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def nan_max(a, b):
    """Return the larger of two fp32 values, NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_rotated(x, flips):
    """Return fp32 [T]: max |H x| of groups [T, SIZE] before the factor 1 / sqrt(SIZE); not finite if an element is not.

    Of the last stage's a + b and a - b the larger magnitude is |a| + |b|, rounding being monotone.
    """
    return largest_transformed(flipped(x, flips), False)


@triton.jit
def largest_transformed(x, PAIRED: tl.constexpr):
    """Return `largest_rotated` of x that has taken its signs; PAIRED: two rows are halves of a group."""
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    if PAIRED:
        y = stages(x, SIZE)
        larger = tl.abs(y) + tl.abs(rows_exchanged(y))
    else:
        y = stages(x, SIZE // 2)
        a, b = tl.split(tl.permute(tl.reshape(y, (T, 2, SIZE // 2)), (0, 2, 1)))
        larger = tl.abs(a) + tl.abs(b)
    if dc.INTERPRETED:  # slow in reductions by a function
        return tl.max(larger.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    return tl.reduce(larger, 1, nan_max)
