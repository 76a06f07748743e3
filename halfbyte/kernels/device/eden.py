"""Device functions of MS-EDEN (docs/numerics.md section 5): codes, sums of their projection, the corrected scale."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.ptx import has_ptx

REGULAR_SQUARES = tl.constexpr(2.0**100)  # a larger sum of squares holds a y of 2^47: its scale is beyond E4M3
LEAST_NORMAL = tl.constexpr(2.0**-6)
CODE_ZERO = tl.constexpr(0x3C000000)  # the bits of fp32 that would be code 0 were E4M3 without subnormals: 2^-7


@triton.jit
def projected_codes(xs, encode):
    """Return the 16 nearest codes as two words, the sum of y * y and that of y * q over elements 0 to 15 in order.

    y = x * encode, and q is what its code stands for: every product and every sum is rounded.
    """
    words = ()
    for start in tl.static_range(0, 16, 8):
        codes = ()
        for i in tl.static_range(start, start + 8):
            y = pm.scaled_magnitude(xs[i], encode)
            bits = pm.nearest_code(y)
            # What stands above the code leaves the word; E2M1's exponent bias is 1, fp32's 127.
            q = (bits << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
            if i == 0:
                squares, products = y * y, y * q
            else:
                squares += y * y
                products += y * q
            codes = codes + (bits,)
        words = words + (pm.pack_word(xs, start, codes),)
    return words, squares, products


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
    return settled(tl.where(products == 0, 0, code))


@triton.jit
def settled(x):
    """Return uint32 x, computed here: else the compiler puts off what is stored last, and keeps all that it is made of."""
    if not has_ptx():
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=False, pack=1)
