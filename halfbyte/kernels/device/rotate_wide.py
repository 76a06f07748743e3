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


@triton.constexpr_function
def repeats_after_16(signs):
    """Return whether 128 bits are eight times the same 16."""
    return signs == (signs & 0xFFFF) * ((1 << 128) // 0xFFFF)


@triton.jit
def sign_flips(sign_ptr, sign_stream, RULE: tl.constexpr):
    """Return uint32 [RULE.group]: the sign bit where the Hadamard sign of an element is minus."""
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
def flipped(x, flips):
    """Return fp32 x [T, SIZE] times the signs of `sign_flips`."""
    return (x.to(tl.uint32, bitcast=True) ^ flips[None, :]).to(tl.float32, bitcast=True)


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
def rotated_pairs(x, flips, norm):
    """Rotate groups [T, SIZE], fp32 holding bf16 values; norm = f(1 / sqrt(SIZE)). Returns pairs [T, SIZE / 2]."""
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    y = tl.fma(stages(flipped(x, flips), SIZE), norm, 0.0)  # + 0 turns -0 into +0
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
    T: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    y = stages(flipped(x, flips), SIZE // 2)
    a, b = tl.split(tl.permute(tl.reshape(y, (T, 2, SIZE // 2)), (0, 2, 1)))
    larger = tl.abs(a) + tl.abs(b)
    if dc.INTERPRETED:  # slow in reductions by a function
        return tl.max(larger.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    return tl.reduce(larger, 1, nan_max)
