"""Rows of a tile as a kernel of fused layers rounds and stores them, and their maxima: bf16 rows two in a word.

One conversion rounds two rows, on a faster pipe than that of one value, and one instruction raises both their maxima.
PAIRED says whether rows lie so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.loads import masked_store
from halfbyte.kernels.device.magnitudes import larger_bits, raised


@triton.jit
def no_maxima(C: tl.constexpr, PAIRED: tl.constexpr):
    """Return plain maxima [C] of no rows."""
    return tl.zeros((C,), tl.uint32 if PAIRED else tl.float32)


@triton.jit
def rounded_rows(ys, dtype: tl.constexpr):
    """Round an even number of rows of fp32 values [C]: of bf16 two in a word, else each by itself."""
    if dtype == tl.bfloat16:
        return pm.bf16_pairs(ys)
    else:
        out = ()
        for i in tl.static_range(len(ys)):
            out = out + (dc.cast(ys[i], dtype),)
        return out


@triton.jit
def stored_row(stored, i: tl.constexpr, PAIRED: tl.constexpr):
    """Return row i of `rounded_rows`, as it is stored."""
    if PAIRED:
        word = stored[i // 2]
        half = word >> 16 if i % 2 else word & 0xFFFF
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return stored[i]


@triton.jit
def store_two(ptr, stored, i: tl.constexpr, row0, rows, cols, col, stop, PAIRED: tl.constexpr, FULL: tl.constexpr):
    """Store rows i and i + 1 of a group, as they are rounded, at columns `col` before `stop`; ptr: of its row 0."""
    for j in tl.static_range(2):
        inside = (col < stop) & (row0 + i + j < rows)
        masked_store(ptr + ((i + j) * cols + col), stored_row(stored, j, PAIRED), inside, FULL)


@triton.jit
def raise_plain_rows(plain, stored, PAIRED: tl.constexpr, WANTED: tl.constexpr):
    """Raise plain maxima by `rounded_rows`."""
    if WANTED.row == "tensor" or WANTED.col == "plain":
        for i in tl.static_range(len(stored)):
            if PAIRED:
                plain = raised(plain, stored[i])
            else:
                plain = rm.raise_plain(plain, pm.to_fp32(stored[i]), WANTED)
    return plain


@triton.jit
def raise_rotated_rows(rotated, stored, words, PAIRED: tl.constexpr, WANTED: tl.constexpr):
    """Raise max |H y| [C] by the `rounded_rows` of a whole group."""
    if PAIRED:
        rotated = rm.raise_transformed(rotated, pm.unpack_pairs(stored, 0, WANTED.group), words, WANTED)
    else:
        rotated = rm.raise_rotated(rotated, stored, words, WANTED)
    return rotated


@triton.jit
def plain_values(plain, PAIRED: tl.constexpr):
    """Return plain maxima as fp32 [C]."""
    if PAIRED:
        plain = larger_bits(plain).to(tl.float32, bitcast=True)
    return plain
