"""Device functions of MS-EDEN (docs/numerics.md section 5): codes, sums of their projection, the corrected scale."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.e2m1_conversion import E2M1_CAPABILITY, converted_word
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.stochastic import joined_word

# 512 times the codes of the numbers $1 and $2, in the halves of a word: the bits of 2^-14 times them in fp16.
CODE_PAIR = tl.constexpr(
    "{.reg .b32 h, unit; cvt.rn.f16x2.f32 h, $2, $1; mov.b32 unit, 0x04000400; mul.rn.f16x2 $0, h, unit;}"
)
MAGIC_BITS = tl.constexpr(0x4B000000)

REGULAR_SQUARES = tl.constexpr(2.0**100)  # a larger sum of squares holds a y of 2^47: its scale is beyond E4M3
LEAST_NORMAL = tl.constexpr(2.0**-6)
CODE_ZERO = tl.constexpr(0x3C000000)  # the bits of fp32 that would be code 0 were E4M3 without subnormals: 2^-7


@triton.jit
def projected_codes(xs, signs, encode, RULE: tl.constexpr, APART: tl.constexpr):
    """Return the 16 nearest codes as two words, the sum of y * y and that of y * q over elements 0 to 15 in order.

    y = x * encode, and q is what its code stands for: every product and every sum is rounded. signs, APART: as in
    `scales.quantize_block`.
    """
    words = ()
    for start in tl.static_range(0, 16, 8):
        codes = ()
        for first in tl.static_range(start, start + 8, 4):
            qs = ()
            for i in tl.static_range(first, first + 4):
                y = tl.abs(xs[i] * encode)
                q = pm.nearest_value(y)
                if i == 0:
                    squares, products = y * y, y * q
                else:
                    squares += y * y
                    products += y * q
                qs = qs + (q,)
            codes = codes + codes_of_values(qs)  # at once: two words in place of four registers
        if RULE.hardware >= E2M1_CAPABILITY:
            words = words + (converted_word(xs, start, encode),)
        elif has_ptx():
            words = words + (joined_word(codes, pm.part(signs, start // 2, 4), APART),)
        else:
            words = words + (pm.pack_word(xs, start, codes),)
    return words, squares, products


@triton.jit
def codes_of_values(qs):
    """Return the codes of four numbers q >= 0 as `joined_word` takes them, or without PTX as `pack_word` does."""
    out = ()
    if has_ptx():
        for i in tl.static_range(2):
            pair = tl.inline_asm_elementwise(
                CODE_PAIR, "=r,f,f", [qs[i], qs[i + 2]], dtype=tl.uint32, is_pure=True, pack=1
            )
            out = out + (pair,)
    else:
        for i in tl.static_range(4):  # E2M1's exponent bias is 1, fp32's 127
            bits = (qs[i] * 1.1754943508222875e-38).to(tl.uint32, bitcast=True) >> 22
            out = out + (bits + MAGIC_BITS,)
    return out


@triton.jit
def stored_code(scale, squares, products, word):
    """Return the E4M3 code (uint32) of scale * (squares / products), rounded up or down as a random word decides."""
    if has_ptx():
        r = pm.regular_reciprocal(products)
        ratio = pm.quotient_by(squares, products, r)
        # Once more: its first result may be two units off before it is corrected.
        ratio = tl.fma(r, tl.fma(ratio, -products, squares), ratio)
    else:
        ratio = tl.div_rn(squares, tl.where(products == 0, 1.0, products))
    t = scale * ratio
    t = tl.where((squares < REGULAR_SQUARES) & (t < pm.E4M3_MAX), t, pm.E4M3_MAX)
    # In units of 2^-24 of the distance between neighbours. Below 2^-10 t may hold half a unit: rounded up it still lies
    # above the same draws.
    normal = (t.to(tl.int32, bitcast=True) - CODE_ZERO) << 4
    subnormal = tl.ceil(tl.minimum(t, LEAST_NORMAL) * 8589934592.0).to(tl.int32)  # 2^33
    steps = tl.where(t < LEAST_NORMAL, subnormal, normal).to(tl.uint32)
    # Up where the fraction exceeds u: both are integers, so adding 2^24 - 1 - u carries.
    code = (steps + 0xFFFFFF - (word >> 8)) >> 24
    return computed_here(tl.where(products == 0, 0, code))


@triton.jit
def computed_here(x):
    """Return uint32 x, computed here: else the compiler puts it off until it is stored and keeps its parts."""
    if not has_ptx():
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=False, pack=1)
