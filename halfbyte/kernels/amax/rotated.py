"""The largest finite magnitude after a rotation along rows of x, alone or beside the plain one, from one read.

A thread holds whole groups of values, of as many columns as fit into its registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.decode import cast
from halfbyte.kernels.device.loads import pairs_without
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice
from halfbyte.rng import Draw


@triton.jit
def load_groups(x_ptr, g, rows, line, lines, stride_r, stride_l, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Return [T, SIZE]: rows g to g + SIZE of lines `line` [T], 0 outside; FULL: nothing is."""
    row = g + tl.arange(0, SIZE)
    # The first row of a line, and steps that all lines share: one multiply-add for each address.
    pointers = (x_ptr + g * stride_r + line * stride_l)[:, None] + (tl.arange(0, SIZE) * stride_r)[None, :]
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=(line < lines)[:, None] & (row < rows)[None, :], other=0)


@triton.jit
def load_rest(x_ptr, mean, g, rows, line, lines, stride_r, stride_l, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Return `load_groups` less mean [T] of each line, words of two of both; None: as loaded."""
    x = load_groups(x_ptr, g, rows, line, lines, stride_r, stride_l, SIZE, FULL)
    if mean is None:
        return x
    else:
        rest = pairs_without(x, mean[:, None])
        if FULL:
            return rest
        return tl.where((g + tl.arange(0, SIZE) < rows)[None, :], rest, 0)


@triton.jit
def column_halves(x, PACKED: tl.constexpr):
    """Return the fp32 values of what was loaded: of two columns from packed words, else of one."""
    if PACKED:
        return (x << 16).to(tl.float32, bitcast=True), (x & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (pm.to_fp32(x),)


@triton.jit
def narrowed(x, NARROW: tl.constexpr):
    """Round fp32 values to bf16 unless they are (NARROW)."""
    if NARROW:
        return x
    return pm.to_fp32(cast(x, tl.bfloat16))


class Split(NamedTuple):
    """How programs share x: strips of columns, parts of the groups of rows in each, and how many there are together."""

    strips: int
    parts: int
    programs: int


class MeanAndSums(NamedTuple):
    """What else is done with x [rows, cols].

    mean_ptr: bf16 [cols] that is taken off PACKED x first, or None.
    sums_ptr: fp32 [split.parts, cols], where programs write the sums of their columns, or None.
    """

    mean_ptr: Any = None
    sums_ptr: Any = None


@jit(do_not_specialize=("sign_stream", "split"))
def amax_rotated_kernel(
    x_ptr, tokens, out_ptr, plain_ptr, space_ptr, sign_ptr, sign_stream, rows, cols, stride_r, stride_c, split,
    RULE: tl.constexpr, BOTH: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr, T: tl.constexpr,
    VEC: tl.constexpr, PARTIAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of x.T after a rotation along its rows, or of the rows of that (out zero before); with BOTH that of x too.

    tokens: a MeanAndSums.
    A program takes a strip of T columns (PACKED: words of two) and, in it, every split.parts-th group of rows. PARTIAL:
    what each program finds is an output, out and plain [programs]; a program without a group finds 0. For a large x it
    is not placed while the kernel before it drains: that cost 7 %.
    """
    overlap.begin(OVERLAP)
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    SHARE: tl.constexpr = 2 if PACKED else 1
    strip = tl.program_id(0) % split.strips
    first = (tl.program_id(0) // split.strips).to(tl.int64) * SIZE
    step = tl.cast(split.parts, tl.int64) * SIZE
    end = tl.cast(rows, tl.int64)
    # The hint keeps a thread's share of a row at VEC lines, so that it holds all rows of a group.
    line = strip.to(tl.int64) * T + tl.max_contiguous(tl.arange(0, T), VEC)
    lines = tl.cast(cols, tl.int64) // SHARE
    if PACKED:
        src_ptr = x_ptr.to(tl.pointer_type(tl.uint32))
        stride = tl.cast(stride_r, tl.int64) // 2
    else:
        src_ptr = x_ptr
        stride = tl.cast(stride_r, tl.int64)
    if tokens.mean_ptr is not None:
        mean = tl.load(tokens.mean_ptr.to(tl.pointer_type(tl.uint32)) + line, mask=line < lines, other=0)
    else:
        mean = None
    flips = rw.sign_flips(sign_ptr, sign_stream, RULE)
    plain = tl.zeros((T,), tl.uint32)
    top = tl.zeros((T,), tl.float32)
    second = tl.zeros((T,), tl.float32)
    total = tl.zeros((T,), tl.float32)
    second_total = tl.zeros((T,), tl.float32)
    for g0 in range(first, end, step):
        if tokens.mean_ptr is not None:  # the last rows first: the mean's kernel left them in the L2 cache
            g = first + (end - 1 - first) // step * step - (g0 - first)
        else:
            g = g0
        x = load_rest(src_ptr, mean, g, end, line, lines, stride, stride_c, SIZE, FULL)
        halves = column_halves(x, PACKED)
        if BOTH:
            if PACKED:
                plain = mg.raised(plain, mg.largest_pair(x))
            else:
                plain = tl.maximum(plain, tl.max(mg.magnitude_bits(x), axis=1).to(tl.uint32))
        for k in tl.static_range(SHARE):
            found = rw.largest_rotated(narrowed(halves[k], NARROW), flips)
            if k == 0:
                top = rw.nan_max(top, found)
            else:
                second = rw.nan_max(second, found)
            if tokens.sums_ptr is not None:
                if k == 0:
                    total += tl.sum(halves[k], axis=1)
                else:
                    second_total += tl.sum(halves[k], axis=1)
    if tokens.sums_ptr is not None:
        part = (tl.program_id(0) // split.strips).to(tl.int64)
        sum_ptr = tokens.sums_ptr + part * cols + line * SHARE
        tl.store(sum_ptr, total, mask=line < lines)
        if PACKED:
            tl.store(sum_ptr + 1, second_total, mask=line < lines)
    # The factor and the rounding keep the order: they are applied to the maxima alone.
    bits = mg.magnitude_bits(cast(tl.fma(top, RULE.norm, 0.0), tl.bfloat16))
    more = mg.magnitude_bits(cast(tl.fma(second, RULE.norm, 0.0), tl.bfloat16))
    plain_bits = mg.larger_bits(plain) if PACKED else plain.to(tl.int32)
    if tl.max(tl.maximum(tl.maximum(bits, more), plain_bits), axis=0) >= mg.INF_BITS:
        bits = tl.zeros((T,), tl.int32)
        more = tl.zeros((T,), tl.int32)
        plain_bits = tl.zeros((T,), tl.int32)
        for g in range(first, end, step):
            x = load_rest(src_ptr, mean, g, end, line, lines, stride, stride_c, SIZE, FULL)
            halves = column_halves(x, PACKED)
            for k in tl.static_range(SHARE):
                plain_bits = tl.maximum(plain_bits, tl.max(mg.finite_bits(mg.magnitude_bits(halves[k])), axis=1))
                y = rw.unpacked(rw.rotated_pairs(narrowed(halves[k], NARROW), flips, RULE))
                found = tl.max(mg.finite_bits(mg.magnitude_bits(y)), axis=1)
                if k == 0:
                    bits = tl.maximum(bits, found)
                else:
                    more = tl.maximum(more, found)
    if RULE.row_amax:
        col_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + line * SHARE
        tl.atomic_max(col_ptr, bits, mask=line < lines, sem="relaxed")
        if PACKED:
            tl.atomic_max(col_ptr + 1, more, mask=line < lines, sem="relaxed")
    maxima = ()
    outs = ()
    if not RULE.row_amax:
        maxima = maxima + (tl.max(tl.maximum(bits, more), axis=0),)
        outs = outs + (out_ptr,)
    if BOTH:
        maxima = maxima + (tl.max(plain_bits, axis=0),)
        outs = outs + (plain_ptr,)
    if PARTIAL:
        for i in tl.static_range(len(maxima)):
            tl.store(outs[i] + tl.program_id(0), maxima[i].to(tl.float32, bitcast=True))
    elif len(maxima) > 0:
        rm.publish(maxima, outs, space_ptr, split.programs)


def launch_rotated(
    choice: Choice, sign_draw: Draw | None, mean: Tensor | None = None, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the amax of rotated x.T, fp32 [] or [cols], and with BOTH that of x [], else nothing.

    Args:
        choice: of a rotation.
        sign_draw: the place of fresh signs.
        mean: bf16 [cols], taken off x first where it is read in words of two.
        sums: fp32 [parts, cols] for the sums of columns that each part of the rows finds; None: they are not wanted.
    """
    x, strips, parts = choice.facts
    rule, both = choice.constants["RULE"], choice.constants["BOTH"]
    assert not rule.fresh or sign_draw is not None, "fresh signs need a draw"
    rows, cols = x.shape
    new = torch.zeros if rule.row_amax else torch.empty
    out = new((cols,) if rule.row_amax else (), dtype=torch.float32, device=x.device)
    plain = torch.empty((), dtype=torch.float32, device=x.device)
    amax_rotated_kernel[choice.grid](
        x,
        MeanAndSums(mean, sums),
        out,
        plain if both else None,
        None if rule.row_amax and not both else rm.workspace(rm.Wanted("tensor"), x.device),
        sign_draw.base if rule.fresh else None,
        sign_draw.stream if rule.fresh else 0,
        rows,
        cols,
        *x.stride(),
        Split(strips, parts, strips * parts),
        **choice.constants,
        enable_fp_fusion=False,
    )
    return out, plain
