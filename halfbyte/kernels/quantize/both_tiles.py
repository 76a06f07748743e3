"""Both orientations of a weight in 16x16 tiles from one launch: what is turned stays within a tile.

A thread holds 8 columns of a tile's 16 rows, which are two blocks of 8x8 nibbles: it turns them in registers. A warp
holds four tiles below each other and four side by side: its loads fill sectors along rows, and its stores of the
transpose, 8 bytes of each of four tiles, fill them along columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.both_route import Pair
from halfbyte.kernels.quantize.strips import load_strips, quantize_loaded, store_strips
from halfbyte.kernels.route import Choice
from halfbyte.kernels.unpack.transpose import transpose_eight
from halfbyte.layout import Blocks


class TilePointers(NamedTuple):
    """What is written: codes int32 and scales, or values, of rows; codes int64 and scales of columns.

    Of rows, q_ptr and scale_ptr are None or values_ptr is.
    """

    q_ptr: Any
    scale_ptr: Any
    values_ptr: Any
    col_q_ptr: Any
    col_scale_ptr: Any


@triton.jit
def store_turned(codes, code, to, line, lines, i_strip):
    """Store codes of 16 rows and the scales of their tiles as columns, of which each has `lines` blocks."""
    L: tl.constexpr = codes[0].shape[0]
    W: tl.constexpr = codes[0].shape[1]
    above = transpose_eight(pm.part(codes, 0, 8))
    below = transpose_eight(pm.part(codes, 8, 8))
    scale = tl.reshape(tl.broadcast_to(code.to(tl.uint8)[:, :, None], (L, W // 2, 2)), (L, W))
    column = (i_strip + tl.arange(0, W)[None, :]).to(tl.int64) * 8
    for j in tl.static_range(8):
        place = (column + j) * lines + line + tl.arange(0, L)[:, None]
        low = above[j].to(tl.uint32, bitcast=True).to(tl.uint64)
        both = low | (below[j].to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        tl.store(to.col_q_ptr + place, both.to(tl.int64, bitcast=True))
        tl.store(to.col_scale_ptr + place, scale)


@jit(do_not_specialize=("col_tiles", "lines"))
def quantize_tiles_both_kernel(
    x_ptr, to, amax_ptr, cols, constants, col_tiles, lines, RULE: tl.constexpr, L: tl.constexpr, W: tl.constexpr
):
    """One program quantizes L tiles below each other and W / 2 side by side, both ways.

    The last programs move left and up until they are whole; what two programs quantize gets equal bytes.
    """
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    i_line = pm.divide(tl.program_id(0), col_tiles)
    per_row = cols // 8
    i_strip = tl.minimum((tl.program_id(0) - i_line * col_tiles.count) * W, per_row - W)
    line = tl.minimum(i_line * L, lines - L)
    first = line.to(tl.int64) * 16 * per_row + i_strip
    words = load_strips(x_ptr, first, per_row, L, W)
    codes, code = quantize_loaded(words, sc.operand_factors(amax_ptr, constants, RULE), RULE)
    store_strips(codes, code, first, per_row, to.q_ptr, to.scale_ptr, to.values_ptr)
    store_turned(codes, code, to, line, lines, i_strip)


def quantize_tiles_both(choice: Choice) -> tuple[Blocks, Blocks]:
    """Return (quantize(x), quantize(x.T)), the former decoded if it is transient."""
    pair: Pair = choice.request
    x, row = pair.x, pair.row
    rows, cols = x.shape
    amax = operand_amax(x, row.spec, None) if row.amax is None else row.amax
    size, dtype = (cols, torch.bfloat16) if row.transient else (cols // 2, torch.uint8)
    qdata = x.new_empty((rows, size), dtype=dtype)
    scale = x.new_empty(0 if row.transient else (rows, cols // 16), dtype=torch.uint8)
    turned, turned_scale = (x.new_empty((cols, rows // n), dtype=torch.uint8) for n in (2, 16))
    to = TilePointers(
        None if row.transient else qdata.view(torch.int32),
        None if row.transient else scale,
        qdata if row.transient else None,
        turned.view(torch.int64),
        turned_scale,
    )
    quantize_tiles_both_kernel[choice.grid](
        x,
        to,
        amax,
        cols,
        sc.constants_of(row.spec),
        pm.Divisor.of(choice.facts),
        rows // 16,
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )
    return Blocks(qdata, scale, amax), Blocks(turned, turned_scale, amax)
