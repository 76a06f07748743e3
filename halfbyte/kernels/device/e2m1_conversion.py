"""The conversion to E2M1 that sm_100 and later have in hardware."""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_CAPABILITY = tl.constexpr(100)  # the first that converts to E2M1, nearest even, in hardware

# Eight fp32 values to eight E2M1 codes: each conversion takes the upper nibble of its byte first.
E2M1_CONVERSION = tl.constexpr(
    "{.reg .b8 b0, b1, b2, b3;"
    + "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))
    + "mov.b32 $0, {b0, b1, b2, b3};}"
)


@triton.jit
def converted_word(xs, START: tl.constexpr, encode):
    """Return the E2M1 codes nearest to x * encode as uint32, 8 elements from START, by the target's own conversion."""
    vs = ()
    for i in tl.static_range(START, START + 8):
        vs = vs + (xs[i] * encode,)
    return tl.inline_asm_elementwise(
        E2M1_CONVERSION,
        "=r,f,f,f,f,f,f,f,f",
        vs,
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
