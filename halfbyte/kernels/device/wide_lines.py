"""Device functions that read lines of groups for wide rotations (`rotate_wide`): one group, or half of one, a thread.

Lines of whole tiles are read without masks: of tokens in groups only a group's last tile has rows that are not its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device.decode import cast


@triton.jit
def line_of(T: tl.constexpr, PAIRED: tl.constexpr):
    """Return int32 [T] twice: the line that a thread's group lies in, and which half of a group of it, 0 or 1."""
    if PAIRED:
        return tl.arange(0, T) // 2, tl.arange(0, T) & 1
    else:
        return tl.max_contiguous(tl.arange(0, T), 1), tl.zeros((T,), tl.int32)  # a thread holds whole groups


@triton.jit
def load_row_lines(x, row, end, col, cols, whole, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return [T, SIZE] from column `col` [T] of row `row` [T] on, or PACKED their words [T, SIZE / 2]; else 0.

    x: a StridedMatrix. end, cols: where rows and columns end; whole: whether all lie before that.
    """
    T: tl.constexpr = row.shape[0]
    if PACKED:
        # Pieces of 16 bytes, the last dimension but one in registers: a thread reads whole groups.
        # In units of those, which tells the compiler that they are aligned where a row's length does not.
        first = x.ptr.to(tl.pointer_type(tl.uint32)) + (row.to(tl.int64) * (x.stride_r // 8) + col // 8) * 4
        piece = tl.arange(0, SIZE // 8)
        pointers = first[:, None, None] + (piece[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, :]
        if whole:
            words = tl.load(pointers)
        else:
            # Packed rows end with a piece: a mask of words would cut 16 bytes into four loads.
            left = tl.where(row < end, (cols - col) // 8, 0)
            words = tl.load(pointers, mask=(piece[None, :] < left[:, None])[:, :, None], other=0)
        return tl.reshape(words, (T, SIZE // 2))
    else:
        step = tl.arange(0, SIZE)
        pointers = (x.ptr + (row.to(tl.int64) * x.stride_r + col * x.stride_c))[:, None]
        pointers = pointers + (step * x.stride_c)[None, :]
        if whole:
            values = tl.load(pointers)
        else:
            inside = (row < end)[:, None] & (col[:, None] + step[None, :] < cols)
            values = tl.load(pointers, mask=inside, other=0)
        return values


@triton.jit
def load_col_lines(x, row, end, col, cols, whole, SIZE: tl.constexpr):
    """Return [T, SIZE]: rows `row` [T] and further on of column `col` [T]; for the rest `load_row_lines`."""
    first = x.ptr + (row.to(tl.int64) * x.stride_r + col.to(tl.int64) * x.stride_c)
    if whole:
        values = tl.load(below(first, x.stride_r, SIZE))
    else:
        # What is left of the group serves masks in int32.
        inside = (col < cols)[:, None] & (tl.arange(0, SIZE)[None, :] < (end - row)[:, None])
        values = tl.load(below(first, x.stride_r, SIZE), mask=inside, other=0)
    return values


@triton.jit
def below(first, stride, SIZE: tl.constexpr):
    """Return the addresses [T, SIZE] of SIZE rows from `first` [T] on: where they are used, else all are kept."""
    return first[:, None] + (tl.arange(0, SIZE) * tl.cast(stride, tl.int64))[None, :]


@triton.jit
def flipped_lines(values, flips, NARROW: tl.constexpr, PACKED: tl.constexpr):
    """Return fp32 of what was loaded, rounded to bf16 unless it is (NARROW), times the signs of `flips`."""
    if PACKED:
        return rw.flipped_words(values, flips)
    elif NARROW:
        return rw.flipped_bf16(values, flips)
    else:
        return rw.flipped(pm.to_fp32(cast(pm.to_fp32(values), tl.bfloat16)), flips)


@triton.jit
def flips_of_lines(sign_ptr, sign_stream, RULE: tl.constexpr, T: tl.constexpr):
    """Return the flips of T lines, [RULE.group] if all have the same, else [T, RULE.group]."""
    if RULE.paired and RULE.fresh:
        return rw.fresh_halves(sign_ptr, sign_stream, T)
    else:
        return rw.sign_flips(sign_ptr, sign_stream, RULE)
