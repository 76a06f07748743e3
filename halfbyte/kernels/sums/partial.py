"""Sums that programs have of their own, and what adds them up: no order of programs changes a bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import overlap
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div

PROGRAMS = 1024
"""That share a tensor at most: each adds up its tiles in registers, and meets the others once."""
NUM_WARPS = 8
STEP = 512


@triton.jit
def add_squares(sums, x):
    """Return fp64 sums [R, N, V] and the squares of fp32 values x [R, N, V, 2 V or 4 V]: they are exact, so that fma
    rounds once."""
    if x.shape[2] == sums.shape[2]:
        wide = x.to(tl.float64)
        sums = tl.fma(wide, wide, sums)
    else:
        even, odd = alternate(x)
        sums = add_squares(add_squares(sums, even), odd)
    return sums


@triton.jit
def add_magnitudes(sums, x):
    """Return fp64 sums [R, N, V] and the magnitudes of x [R, N, V, 2 V or 4 V]."""
    if x.shape[2] == sums.shape[2]:
        sums += tl.abs(x.to(tl.float64))
    else:
        even, odd = alternate(x)
        sums = add_magnitudes(add_magnitudes(sums, even), odd)
    return sums


@triton.jit
def alternate(x):
    """Return the even and the odd elements along the last of three dimensions, which a thread holds."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def ordered_bits(x):
    """Return int32 that are ordered as the magnitudes of fp32 values are; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of(bits):
    """Return the largest of `ordered_bits`, fp64 []."""
    return tl.max(tl.reshape(bits, (bits.numel,))).to(tl.float32, bitcast=True).to(tl.float64)


@jit
def add_parts_kernel(parts_ptr, out_ptr, programs, SUMS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr):
    """Write to out what `programs` found, parts [figures, programs]: of the first SUMS figures sums, else maxima."""
    overlap.begin(OVERLAP)
    figure = tl.program_id(0)
    first = parts_ptr + figure * programs
    if figure < SUMS:
        total = tl.zeros((STEP,), tl.float64)
        for start in range(0, programs, STEP):
            i = start + tl.arange(0, STEP)
            total += tl.load(first + i, mask=i < programs, other=0.0)
        tl.store(out_ptr + figure, tl.sum(total))
    else:  # magnitudes are ordered as their bits are, and NaN is the largest
        largest = tl.zeros((STEP,), tl.int64)
        for start in range(0, programs, STEP):
            i = start + tl.arange(0, STEP)
            part = tl.load(first + i, mask=i < programs, other=0.0)
            largest = tl.maximum(largest, part.to(tl.int64, bitcast=True))
        tl.store(out_ptr + figure, tl.max(largest).to(tl.float64, bitcast=True))


def shares(tiles: int) -> tuple[int, int]:
    """Return how many tiles a program takes, and how many programs there are."""
    each = ceil_div(tiles, PROGRAMS)
    return each, ceil_div(tiles, each)


def add_parts(parts: Tensor, sums: int) -> Tensor:
    """Return fp64 [figures] of what programs found, fp64 [figures, programs]: `sums` sums, then maxima."""
    figures, programs = parts.shape
    out = torch.empty(figures, dtype=torch.float64, device=parts.device)
    add_parts_kernel[(figures,)](
        parts, out, programs, SUMS=sums, STEP=STEP, **overlap.launch_options(parts.device), num_warps=4
    )
    return out
