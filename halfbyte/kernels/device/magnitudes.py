"""What the kernels of maxima share: magnitudes as bits, singly and in pairs, and how work is divided among programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.decode import INTERPRETED
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div

INF_BITS = tl.constexpr(0x7F800000)

# The pair of maxima of a pair of magnitudes and of a pair of bf16 values.
RAISE_PAIR = tl.constexpr("{.reg .b32 b; and.b32 b, $2, 0x7FFF7FFF; max.NaN.bf16x2 $0, $1, b;}")


@triton.jit
def finite_max(xs):
    """Return max |x| over the finite elements of a group, as int32 bits."""
    m = tl.zeros_like(xs[0])
    for i in tl.static_range(len(xs)):
        a = tl.abs(xs[i])
        m = tl.maximum(m, tl.where(a < float("inf"), a, 0.0))
    return m.to(tl.int32, bitcast=True)


@triton.jit
def raised(m, words):
    """Raise pairs m of bf16 magnitudes by the magnitudes of pairs `words`; Inf and NaN are the largest."""
    if not has_ptx():
        low, high = tl.maximum(m & 0xFFFF, words & 0x7FFF), tl.maximum(m >> 16, (words >> 16) & 0x7FFF)
        return low | (high << 16)
    return tl.inline_asm_elementwise(RAISE_PAIR, "=r,r,r", [m, words], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def largest_pair(words):
    """Return [T] pairs of the largest magnitudes in words [T, N]."""
    if INTERPRETED:  # slow in reductions by a function
        return tl.max(words & 0x7FFF, axis=1) | (tl.max((words >> 16) & 0x7FFF, axis=1) << 16)
    return tl.reduce(words & 0x7FFF7FFF, 1, raised)


@triton.jit
def larger_bits(m):
    """Return the larger magnitude of each pair as the int32 bits of its fp32 value."""
    return tl.maximum(m << 16, m & 0xFFFF0000).to(tl.int32)


@triton.jit
def magnitude_bits(x):
    """Return |x| as the int32 bits of its fp32 value."""
    return pm.to_fp32(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_bits(bits):
    return tl.where(bits < INF_BITS, bits, 0)


def is_packed(x: Tensor) -> bool:
    """Say whether x is read in words of two bf16, 16 bytes at a time."""
    aligned = x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0 and (x.stride(0) % 8 == 0 or x.shape[0] == 1)
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


def parts_of(units: int, beside: int, per_sm: int, device: torch.device) -> int:
    """Return how many programs share `units` of work where `beside` such runs of units lie beside each other."""
    wanted = max(1, target_of(device).multiprocessors * per_sm // beside)
    return ceil_div(units, ceil_div(units, min(units, wanted)))  # equal shares
