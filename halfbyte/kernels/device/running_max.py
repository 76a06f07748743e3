"""Maxima that a kernel collects while it writes a tensor, so that quantizing it needs no pass of its own for amax.

A program writes `group` rows of y, in column tiles, and keeps max |y| and, after the rotation along columns, max |H y|
in registers. NaN and Inf stay in these maxima, which costs one instruction an element; only where the result is not
finite does the program read its part of y again and leave them out, as docs/numerics.md section 3 demands. Rounding is
monotone: the maximum of rotated values is rounded once, not every value.

Programs meet in a workspace of zeros: an atomic maximum each, then a ticket; the last one writes the results and leaves
zeros behind. So no launch is spent on clearing an output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import LANES as LANES_
from halfbyte.arithmetic import ROW_GROUP as ROW_GROUP_
from halfbyte.formats import f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import philox, rotate
from halfbyte.kernels.device.loads import masked_load
from halfbyte.kernels.prepared import keep
from halfbyte.rng import Draw, given_sign_bits
from halfbyte.spec import NVFP4

LANES = tl.constexpr(LANES_)
ROW_GROUP = tl.constexpr(ROW_GROUP_)
INF_BITS = tl.constexpr(0x7F800000)

TILE_ELEMENTS = LANES_ * ROW_GROUP_
SLOTS = 8  # a ticket and up to four maxima
ROW_SLOTS = tl.constexpr(2)  # a ticket and the maximum of a row


class Wanted(NamedTuple):
    """Which maxima of a tensor are collected.

    row: "", "tensor" for one, "row" for one of each row.
    col: "", "plain" for max |y| again, "rotated" for that of y.T after its rotation.
    group: rows of a program: the width of the rotation, or 16.
    norm, fresh, signs: of the rotation, as in scaling.Rule.
    paired: as there; no two threads share a group here.
    """

    row: str = ""
    col: str = ""
    group: int = ROW_GROUP_
    norm: float = 0.0
    fresh: bool = False
    signs: int = 0
    paired: bool = False

    @property
    def meets(self) -> bool:
        """Whether programs have something to tell each other."""
        return self.row == "tensor" or self.col != ""


def wanted_of(row: str, col: NVFP4 | None) -> Wanted:
    """Return what is collected for a row operand ("", "tensor" or "row") and a column operand with one amax."""
    if col is None:
        return Wanted(row)
    if col.rotation is None:
        return Wanted(row, "plain")
    size = col.rotation.size
    return Wanted(row, "rotated", size, f32(size**-0.5), col.needs_sign_rng, given_sign_bits(col.rotation))


class AmaxPair(NamedTuple):
    """Of a tensor and of its transpose, fp32."""

    row: Tensor
    col: Tensor


def allocate_amaxes(wanted: Wanted, rows: int, device: torch.device) -> AmaxPair:
    """Return unwritten amaxes; empty where nothing is wanted, zero for a tensor without elements."""
    shapes = (rows,) if wanted.row == "row" else () if wanted.row else (0,), () if wanted.col else (0,)
    row, col = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return AmaxPair(row, col)


@lru_cache(maxsize=64)
def _kept_workspace(device: torch.device, slots: int) -> Tensor:
    return torch.zeros(slots, dtype=torch.int32, device=device)


def _workspace(device: torch.device, slots: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return torch.zeros(slots, dtype=torch.int32, device=device)
    return keep(_kept_workspace(device, slots))


def workspace(wanted: Wanted, device: torch.device) -> Tensor | None:
    """Return zeros that kernels of the default stream share, one after the other; None if nothing meets there.

    Other streams and captured graphs run beside it and get zeros of their own, which cost them a fill. Nothing is kept
    that was allocated there: it may belong to a graph's memory pool, where inductor refuses what outlives its graph.
    """
    return _workspace(device, SLOTS) if wanted.meets else None


def workspace_of_rows(rows: int, device: torch.device) -> Tensor:
    """Return such zeros where the programs of each row meet, `ROW_SLOTS` for a row."""
    return _workspace(device, ROW_SLOTS.value * triton.next_power_of_2(rows))


def tickets(count: int, device: torch.device) -> Tensor:
    """Return such zeros where `count` groups of programs meet, one for each."""
    return _workspace(device, max(SLOTS, triton.next_power_of_2(count)))


def fresh_signs(wanted: Wanted, sign_draw: Draw | None) -> tuple[Tensor | None, int]:
    """Return where fresh signs are drawn, as kernels take it."""
    if not wanted.fresh:
        return None, 0
    assert sign_draw is not None, "fresh signs need a draw"
    return sign_draw.base, sign_draw.stream


@triton.jit
def wanted_sign_words(sign_ptr, sign_stream, WANTED: tl.constexpr):
    """Return the fresh sign bits of the rotation, or nothing."""
    words = ()
    if WANTED.fresh:
        words = philox.sign_words(philox.draw_words(sign_ptr, sign_stream))
    return words


@triton.jit
def tile_at(c, cols, C: tl.constexpr, FULL: tl.constexpr):
    """Return the C columns of the tile at c; where tiles are FULL, one that would leave the row ends with it."""
    if FULL:
        c = tl.minimum(c, cols - C)
    return c + tl.arange(0, C)


@triton.jit
def load_group(ptr, row0, rows, col, stop, cols, GROUP: tl.constexpr, FULL: tl.constexpr):
    """Return GROUP rows of columns `col` [C] as stored, zero outside: all loads before anything waits for one.

    ptr: where row row0 begins. FULL: nothing is outside.
    """
    xs = ()
    for i in tl.static_range(GROUP):
        xs = xs + (masked_load(ptr + (i * cols + col), (col < stop) & (row0 + i < rows), FULL),)
    return xs


@triton.jit
def load_numbers(ptr, row0, rows, GROUP: tl.constexpr):
    """Return GROUP numbers, one for each row."""
    xs = ()
    for i in tl.static_range(GROUP):
        xs = xs + (tl.load(ptr + row0 + i, mask=row0 + i < rows, other=0.0),)
    return xs


@triton.jit
def raise_plain(plain, y, WANTED: tl.constexpr):
    """Raise max |y| [C] by a row of fp32 values as they are stored."""
    if WANTED.row == "tensor" or WANTED.col == "plain":
        plain = tl.maximum(plain, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    return plain


@triton.jit
def raise_rotated(rotated, stored, words, WANTED: tl.constexpr):
    """Raise max |H y| [C] by `group` rows, as they are stored."""
    if WANTED.col == "rotated":
        ys = ()
        for i in tl.static_range(len(stored)):
            ys = ys + (pm.to_fp32(stored[i]),)
        if stored[0].dtype != tl.bfloat16:
            ys = pm.unpack_pairs(pm.bf16_pairs(ys), 0, WANTED.group)
        rotated = raise_transformed(rotated, ys, words, WANTED)
    return rotated


@triton.jit
def raise_transformed(rotated, ys, words, WANTED: tl.constexpr):
    """Raise max |H y| [C] by `group` rows of bf16 values, in fp32."""
    if WANTED.col == "rotated":
        ys = rotate.transform(ys, WANTED, words)
        for i in tl.static_range(len(ys)):
            rotated = tl.maximum(rotated, tl.abs(ys[i]), propagate_nan=tl.PropagateNan.ALL)
    return rotated


@triton.jit
def finite_magnitude_bits(x):
    """Return |x| as int32 bits, 0 where it is not finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < INF_BITS, bits, 0)


@triton.jit
def settle(
    plain, rotated, y_ptr, row0, rows, col0, cols, stride, words, WANTED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Return the finite maxima of a program's part of y, columns col0 to cols, as int32 bits."""
    m_plain = tl.max(plain.to(tl.int32, bitcast=True), axis=0)
    m_rotated = tl.max(rotated.to(tl.int32, bitcast=True), axis=0)
    if WANTED.col == "rotated":
        m = tl.fma(m_rotated.to(tl.float32, bitcast=True), WANTED.norm, 0.0)
        m_rotated = pm.to_fp32(dc.cast(m, tl.bfloat16)).to(tl.int32, bitcast=True)
    if (m_plain >= INF_BITS) | (m_rotated >= INF_BITS):
        tl.debug_barrier()  # what other threads wrote is read now
        GROUP: tl.constexpr = WANTED.group
        NARROW: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
        bits_plain = tl.zeros((C,), tl.int32)
        bits_rotated = tl.zeros((C,), tl.int32)
        for c in range(col0, cols, C):
            col = c + tl.arange(0, C)
            for i in range(GROUP):
                pointers = y_ptr + (row0 + i).to(tl.int64) * stride + col
                y = pm.to_fp32(tl.load(pointers, mask=(col < cols) & (row0 + i < rows), other=0.0))
                bits_plain = tl.maximum(bits_plain, finite_magnitude_bits(y))
            if WANTED.col == "rotated":
                stored = load_group(y_ptr + row0.to(tl.int64) * stride, row0, rows, col, cols, stride, GROUP, False)
                ys = ()
                for i in tl.static_range(GROUP):
                    ys = ys + (pm.to_fp32(stored[i]),)
                if not NARROW:
                    ys = pm.unpack_pairs(pm.bf16_pairs(ys), 0, GROUP)
                ys = pm.unpack_pairs(rotate.rotate(ys, WANTED, words, False), 0, GROUP)
                for i in tl.static_range(GROUP):
                    bits_rotated = tl.maximum(bits_rotated, finite_magnitude_bits(ys[i]))
        m_plain = tl.max(bits_plain, axis=0)
        m_rotated = tl.max(bits_rotated, axis=0)
    return m_plain, m_rotated


@triton.jit
def store_row_maxima(row_ptr, y_ptr, row0, rows, cols, WANTED: tl.constexpr):
    """Write the finite maximum of each of a program's rows, which it has just written whole."""
    if WANTED.row == "row":
        tl.debug_barrier()
        for r in range(0, WANTED.group, ROW_GROUP):
            row = row0 + r + tl.arange(0, ROW_GROUP)
            m = tl.zeros((ROW_GROUP, LANES), tl.int32)
            for c in range(0, cols, LANES):
                col = c + tl.arange(0, LANES)
                pointers = y_ptr + row.to(tl.int64)[:, None] * cols + col[None, :]
                y = tl.load(pointers, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
                m = tl.maximum(m, finite_magnitude_bits(pm.to_fp32(y)))
            tl.store(row_ptr + row, tl.max(m, axis=1).to(tl.float32, bitcast=True), mask=row < rows)


@triton.jit
def arrives_last(ticket_ptr, programs):
    """Say whether this program is the last of `programs` that meet at a ticket of 0, which it leaves behind.

    It sees what all of them stored before.
    """
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.atomic_xchg(ticket_ptr, 0, sem="relaxed")
    return is_last


@triton.jit
def publish(maxima, outs, space_ptr, programs):
    """Merge int32 maxima of all programs; the last one writes them to `outs` and clears the workspace."""
    for j in tl.static_range(len(maxima)):
        tl.atomic_max(space_ptr + 1 + j, maxima[j], sem="relaxed")
    ticket = tl.atomic_add(space_ptr, 1, sem="acq_rel")
    if ticket == programs - 1:
        for j in tl.static_range(len(maxima)):
            m = tl.atomic_xchg(space_ptr + 1 + j, 0, sem="relaxed")
            tl.store(outs[j], m.to(tl.float32, bitcast=True))
        tl.atomic_xchg(space_ptr, 0, sem="relaxed")


@triton.jit
def publish_wanted(m_plain, m_rotated, amaxes, space_ptr, programs, WANTED: tl.constexpr):
    """Publish the maxima of one tensor that are wanted."""
    maxima = ()
    outs = ()
    if WANTED.row == "tensor":
        maxima = maxima + (m_plain,)
        outs = outs + (amaxes.row,)
    if WANTED.col == "plain":
        maxima = maxima + (m_plain,)
        outs = outs + (amaxes.col,)
    if WANTED.col == "rotated":
        maxima = maxima + (m_rotated,)
        outs = outs + (amaxes.col,)
    if len(maxima) > 0:
        publish(maxima, outs, space_ptr, programs)
