"""A device function from E2M1 codes to bf16 values, two at a time: what a quantize kernel stores decoded."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device.casts import WORDS

# 8 E2M1 codes $4 times a scale to four pairs of bf16. Shifted, codes j and j + 4 are the bits of a pair of bf16 that is
# 2^126 too small; 2^119 and the scale times 2^7, $5, make up for it. Both products are exact; zeros keep their signs.
DECODE_CODES = tl.constexpr(
    "{.reg .b32 s, z, c, p0, p1, p2, p3; mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00;"
    + "".join(
        f"{shift} {pair}, $4, {by}; shl.b32 s, $4, {12 - 4 * i}; and.b32 s, s, z;"
        f"lop3.b32 {pair}, {pair}, 0x01C001C0, s, 0xEA;"
        f"fma.rn.bf16x2 {pair}, {pair}, c, z; fma.rn.bf16x2 {pair}, {pair}, $5, z;"
        for i, (pair, shift, by) in enumerate(
            (("p0", "shl.b32", 6), ("p1", "shl.b32", 2), ("p2", "shr.u32", 2), ("p3", "shr.u32", 6))
        )
    )
    + "prmt.b32 $0, p0, p1, 0x5410; prmt.b32 $1, p2, p3, 0x5410;"
    "prmt.b32 $2, p0, p1, 0x7632; prmt.b32 $3, p2, p3, 0x7632;}"
)
SAME_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@triton.jit
def decoded_pairs(codes, scale):
    """Return the bf16 pairs of 8 E2M1 codes (int32 words) times fp32 E4M3 scales; where there is PTX."""
    pair = tl.inline_asm_elementwise(SAME_PAIR, "=r,f", [scale * 128.0], dtype=tl.uint32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        DECODE_CODES, "=&r,=&r,=&r,=&r,r,r", [codes, pair], dtype=WORDS, is_pure=True, pack=1
    )
