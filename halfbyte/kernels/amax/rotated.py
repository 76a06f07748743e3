"""The largest finite magnitude after a rotation along rows of x, alone or beside the plain one, from one read.

A thread holds whole groups of values, of as many columns as fit into its registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.decode import cast
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4

PLAIN = sc.rule_of(NVFP4(), hardware=0)


class RotatedAmaxTile(NamedTuple):
    """What a program reads at once, as measured on an H200.

    size: bytes that a thread reads of each row of a group.
    per_sm: programs for each multiprocessor, if the tensor is large: about as many as run at once.
    """

    size: int
    num_warps: int
    per_sm: int


ROTATED_TILES = {
    16: RotatedAmaxTile(8, 4, 5),
    32: RotatedAmaxTile(4, 4, 5),
    64: RotatedAmaxTile(4, 4, 3),
    128: RotatedAmaxTile(2, 4, 3),
}


class RotatedTile(NamedTuple):
    """What a program of a rotation's maximum reads at once.

    lines: columns, or words of two (packed); vec: how many of them a thread reads.
    num_warps, per_sm: as in `Tile`.
    """

    lines: int
    vec: int
    packed: bool
    num_warps: int
    per_sm: int


@triton.jit
def load_groups(x_ptr, g, rows, line, lines, stride_r, stride_l, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Return [T, SIZE]: rows g to g + SIZE of lines `line` [T], 0 outside; FULL: nothing is."""
    row = g + tl.arange(0, SIZE)
    pointers = x_ptr + row[None, :] * stride_r + line[:, None] * stride_l
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=(line < lines)[:, None] & (row < rows)[None, :], other=0)


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


@jit(do_not_specialize=("sign_stream", "strips", "parts", "programs"))
def amax_rotated_kernel(
    x_ptr, out_ptr, plain_ptr, space_ptr, sign_ptr, sign_stream, rows, cols, stride_r, stride_c, strips, parts,
    programs, RULE: tl.constexpr, BOTH: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
    T: tl.constexpr, VEC: tl.constexpr, PARTIAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of x.T after a rotation along its rows, or of the rows of that (out zero before); with BOTH that of x too.

    A program takes a strip of T columns (PACKED: words of two) and every parts-th group of rows in it. PARTIAL: what
    each program finds is an output, out and plain [programs]; a program without a group finds 0. For a large x it is
    not placed while the kernel before it drains: that cost 7 %.
    """
    overlap.begin(OVERLAP)
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    SHARE: tl.constexpr = 2 if PACKED else 1
    strip = tl.program_id(0) % strips
    first = (tl.program_id(0) // strips).to(tl.int64) * SIZE
    step = tl.cast(parts, tl.int64) * SIZE
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
    flips = rw.sign_flips(sign_ptr, sign_stream, SIZE, RULE.fresh)
    plain = tl.zeros((T,), tl.uint32)
    top = tl.zeros((T,), tl.float32)
    second = tl.zeros((T,), tl.float32)
    for g in range(first, end, step):
        x = load_groups(src_ptr, g, end, line, lines, stride, stride_c, SIZE, FULL)
        halves = column_halves(x, PACKED)
        if BOTH:
            if PACKED:
                plain = mg.raised(plain, mg.largest_pair(x))
            else:
                plain = tl.maximum(plain, tl.max(mg.magnitude_bits(x), axis=1).to(tl.uint32))
        top = rw.nan_max(top, rw.largest_rotated(narrowed(halves[0], NARROW), flips))
        if PACKED:
            second = rw.nan_max(second, rw.largest_rotated(narrowed(halves[1], NARROW), flips))
    # The factor and the rounding keep the order: they are applied to the maxima alone.
    bits = mg.magnitude_bits(cast(tl.fma(top, RULE.norm, 0.0), tl.bfloat16))
    more = mg.magnitude_bits(cast(tl.fma(second, RULE.norm, 0.0), tl.bfloat16))
    plain_bits = mg.larger_bits(plain) if PACKED else plain.to(tl.int32)
    if tl.max(tl.maximum(tl.maximum(bits, more), plain_bits), axis=0) >= mg.INF_BITS:
        bits = tl.zeros((T,), tl.int32)
        more = tl.zeros((T,), tl.int32)
        plain_bits = tl.zeros((T,), tl.int32)
        for g in range(first, end, step):
            halves = column_halves(load_groups(src_ptr, g, end, line, lines, stride, stride_c, SIZE, FULL), PACKED)
            for k in tl.static_range(SHARE):
                plain_bits = tl.maximum(plain_bits, tl.max(mg.finite_bits(mg.magnitude_bits(halves[k])), axis=1))
                y = rw.unpacked(rw.rotated_pairs(narrowed(halves[k], NARROW), flips, RULE.norm))
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
        rm.publish(maxima, outs, space_ptr, programs)


def amax_rule(spec: NVFP4) -> sc.Rule:
    """Return what the amax kernels are compiled for: nothing of the spec counts but its rows and its rotation."""
    rule = sc.rule_of(spec, hardware=0)
    return PLAIN._replace(row_amax=rule.row_amax, group=rule.group, norm=rule.norm, fresh=rule.fresh)


def rotated_tile(rule: sc.Rule, packed: bool, hardware: int) -> RotatedTile:
    """Return the tile of a rotation's maximum.

    A thread holds whole groups, of as many columns as fit into its registers. Blackwell's assembler keeps fewer of
    them, and 128 fresh signs beside 128 values are too much for all but sm_90: there a thread reads one column or, of
    groups of 128, half of one. These tiles are compiled and compared, not measured.

    Args:
        rule: its group and fresh count.
        packed: whether x may be read in words.
        hardware: as `Rule.hardware`.
    """
    size, num_warps, per_sm = ROTATED_TILES[rule.group]
    if rule.group == 128 and (hardware >= 100 or (rule.fresh and hardware < 90)):
        return RotatedTile(32, 1, False, 2, 8)
    if rule.group >= 32 and hardware >= 100:
        return RotatedTile(128, 1, False, 4, per_sm)
    packed = packed and size >= 4
    vec = size // 4 if packed else 1
    return RotatedTile(32 * num_warps * vec, vec, packed, num_warps, per_sm)


def launch_rotated(x: Tensor, rule: sc.Rule, sign_draw: Draw | None, both: bool) -> tuple[Tensor, Tensor]:
    """Return the amax of rotated x.T, fp32 [] or [cols], and with `both` that of x [], else nothing.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        rule: of `amax_rule`.
        sign_draw: the place of fresh signs.
        both: whether the plain amax of x is wanted.
    """
    assert not rule.fresh or sign_draw is not None, "fresh signs need a draw"
    rows, cols = x.shape
    tile = rotated_tile(rule, mg.reads_pairs(x), sc.hardware_of(x.device))
    tile_cols = tile.lines * (2 if tile.packed else 1)
    strips = ceil_div(cols, tile_cols)
    parts = mg.parts_of(ceil_div(rows, rule.group), strips, tile.per_sm, x.device)
    new = torch.zeros if rule.row_amax else torch.empty
    out = new((cols,) if rule.row_amax else (), dtype=torch.float32, device=x.device)
    plain = torch.empty((), dtype=torch.float32, device=x.device)
    amax_rotated_kernel[(strips * parts,)](
        x,
        out,
        plain if both else None,
        None if rule.row_amax and not both else rm.workspace(rm.Wanted("tensor"), x.device),
        sign_draw.base if rule.fresh else None,
        sign_draw.stream if rule.fresh else 0,
        rows,
        cols,
        *x.stride(),
        strips,
        parts,
        strips * parts,
        RULE=rule,
        BOTH=both,
        PACKED=tile.packed,
        FULL=cols % tile_cols == 0 and rows % rule.group == 0,
        T=tile.lines,
        VEC=tile.vec,
        PARTIAL=False,
        OVERLAP=False,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    return out, plain
