"""Device functions that unpack pairs of bf16 by multiplying: on the pipe of products, where that of integers is full.

An fp32 number in whose lower half nothing is set is a bf16 one. A product of two pairs, of the wanted half twice by a
factor and zero, is the wanted half times the factor, and zero behind it. Inf becomes NaN, and a factor's product with
-0 is +0: for values of which neither decides a byte, those of NVFP4 blocks whose signs lie in the pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.ptx import has_ptx

REGISTERS = ".reg .b16 low, high; .reg .b32 pair, zero; mov.b32 zero, 0;"
PROGRAM_Z = "%ctaid.z"  # 0, as programs lie along x alone, which the compiler is not to know: it would shift


def half_times(out: str, pair: str, factor: str, upper: bool) -> str:
    """Return PTX that multiplies the lower or upper number of a pair by the upper one of `factor`, whose other is 0.

    Its registers are `REGISTERS`.
    """
    half = "high" if upper else "low"
    return (
        f"mov.b32 {{low, high}}, {pair}; mov.b32 pair, {{{half}, {half}}}; fma.rn.bf16x2 {out}, pair, {factor}, zero;"
    )


HALF = tl.constexpr(tuple(f"{{{REGISTERS} {half_times('$0', '$1', '$2', is_upper)}}}" for is_upper in (False, True)))
LOAD_ZERO = tl.constexpr(f"mov.u32 $0, {PROGRAM_Z};")


@triton.jit
def one():
    """Return the pair of bf16 (0, 1), uint32."""
    zero = tl.inline_asm_elementwise(LOAD_ZERO, "=r", [], dtype=tl.uint32, is_pure=True, pack=1)
    return zero + 0x3F800000


@triton.jit
def times(pair, factor, UPPER: tl.constexpr):
    """Return the lower or the upper number of a pair as fp32, times the upper one of a pair whose lower one is 0."""
    pair, factor = tl.broadcast(pair, factor)
    return tl.inline_asm_elementwise(
        HALF[1 if UPPER else 0], "=f,r,r", [pair, factor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def numbers_of_pairs(pairs, START: tl.constexpr, LENGTH: tl.constexpr, RULE: tl.constexpr):
    """Return `casts.unpack_pairs`, by products if RULE.multiplied."""
    if RULE.multiplied and has_ptx():
        factor = one()
        out = ()
        for i in tl.static_range(START // 2, (START + LENGTH) // 2):
            out = out + (times(pairs[i], factor, False), times(pairs[i], factor, True))
        return out
    else:
        return pm.unpack_pairs(pairs, START, LENGTH)


@triton.jit
def numbers_of_halves(pairs, UPPER: tl.constexpr, RULE: tl.constexpr):
    """Return `casts.unpack_halves`, by products if RULE.multiplied."""
    if RULE.multiplied and has_ptx():
        factor = one()
        out = ()
        for i in tl.static_range(len(pairs)):
            out = out + (times(pairs[i], factor, UPPER),)
        return out
    else:
        return pm.unpack_halves(pairs, UPPER)
