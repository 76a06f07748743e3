"""Device functions from a block of values to its MXFP8 scale and elements (docs/numerics.md section 6)."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.decode import E8M0_NAN


@triton.jit
def fp8_codes(xs, START: tl.constexpr, encode, RULE: tl.constexpr):
    """Return the codes of four elements from START in the low half of an int64."""
    x0, x1, x2, x3 = pm.part(xs, START, 4)
    word = pm.fp8_word(x0 * encode, x1 * encode, x2 * encode, x3 * encode, RULE.element == "e4m3", RULE.hardware)
    return word.to(tl.int64)


@triton.jit
def quantize_mxfp8_block(xs, block_amax, constants, RULE: tl.constexpr):
    """Quantize 32 elements (section 6): return four int64 words of element bytes and the E8M0 scale as uint8."""
    poison = (block_amax < pm.INF) == 0
    bits = (tl.where(poison, 0.0, block_amax) * constants.inverse).to(tl.int32, bitcast=True)
    # The smallest exponent whose power of two is at least the value; up to 2^-127 it is 0.
    exponent = tl.where(bits <= 0x00400000, 0, (bits + 0x007FFFFF) >> 23)
    inverse = 254 - exponent
    encode = tl.where(inverse == 0, 0x00400000, inverse << 23).to(tl.float32, bitcast=True)
    words = ()
    for w in tl.static_range(4):
        low, high = fp8_codes(xs, 8 * w, encode, RULE), fp8_codes(xs, 8 * w + 4, encode, RULE)
        words = words + (tl.where(poison, 0, low | (high << 32)),)
    return words, tl.where(poison, E8M0_NAN, exponent).to(tl.uint8)
