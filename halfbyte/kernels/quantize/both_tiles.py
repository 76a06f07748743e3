"""Both orientations of a weight in 16x16 tiles from one launch: bytes move within a tile, so a program has all it needs.

A thread holds 8 columns of a tile's 16 rows, which are two blocks of 8x8 nibbles: it turns them in registers and stores
the 8 bytes of each column. Four programs fill a sector of the transpose, and the L2 cache puts it together: that serves
weights, which fit there. The maximum of a small weight comes from programs that each store their own, so that there is
no workspace of zeros to fill; every program here reads all of them while it waits for its tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.both_route import Pair
from halfbyte.kernels.quantize.strips import load_strips, quantize_loaded, store_strips, strip_at
from halfbyte.kernels.route import Choice
from halfbyte.kernels.unpack.transpose import transpose_eight
from halfbyte.layout import Blocks
from halfbyte.spec import NVFP4


class TilePointers(NamedTuple):
    """What is written: codes int32 and scales, or values, of rows; codes int64 and scales of columns; the amax.

    Of rows, q_ptr and scale_ptr are None or values_ptr is; amax_ptr is None where the amax is given.
    """

    q_ptr: Any
    scale_ptr: Any
    values_ptr: Any
    col_q_ptr: Any
    col_scale_ptr: Any
    amax_ptr: Any


@triton.jit
def store_turned(codes, code, to, line, lines, i_strip, W: tl.constexpr):
    """Store codes of 16 rows and the scales of their tiles as columns, of which each has `lines` blocks."""
    above = transpose_eight(pm.part(codes, 0, 8))
    below = transpose_eight(pm.part(codes, 8, 8))
    scale = tl.reshape(tl.broadcast_to(code.to(tl.uint8)[:, :, None], (1, W // 2, 2)), (1, W))
    column = (i_strip + tl.arange(0, W)[None, :]).to(tl.int64) * 8
    for j in tl.static_range(8):
        place = (column + j) * lines + line
        low = above[j].to(tl.uint32, bitcast=True).to(tl.uint64)
        both = low | (below[j].to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        tl.store(to.col_q_ptr + place, both.to(tl.int64, bitcast=True))
        tl.store(to.col_scale_ptr + place, scale)


@jit(do_not_specialize=("col_tiles", "lines"))
def quantize_tiles_both_kernel(
    x_ptr, to, known_ptr, cols, constants, col_tiles, lines,
    RULE: tl.constexpr, W: tl.constexpr, MOVES: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """One program quantizes W / 2 tiles side by side, both ways.

    known_ptr: fp32 [KNOWN], whose maximum is the amax. MOVES: as in `strip_at`.
    """
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    line, i_strip = strip_at(cols, col_tiles, W, MOVES)
    per_row = cols // 8
    first = line.to(tl.int64) * 16 * per_row + i_strip
    words = load_strips(x_ptr, first, per_row, W)
    if KNOWN == 1:
        amax = tl.load(known_ptr)
    else:
        amax = tl.max(tl.load(known_ptr + tl.arange(0, KNOWN)), axis=0)
    if to.amax_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(to.amax_ptr, amax)
    codes, code = quantize_loaded(words, sc.tensor_factors(amax, constants, True), RULE, W)
    store_strips(codes, code, first, per_row, to.q_ptr, to.scale_ptr, to.values_ptr, W)
    store_turned(codes, code, to, line, lines, i_strip, W)


def quantize_tiles_both(choice: Choice) -> tuple[Blocks, Blocks]:
    """Return (quantize(x), quantize(x.T)), the former decoded if it is transient."""
    pair: Pair = choice.request
    x, row, known = pair.x, pair.row, choice.constants["KNOWN"]
    rows, cols = x.shape
    given = row.amax if row.amax is not None else operand_amax(x, row.spec, None) if known == 1 else _maxima(x, known)
    amax = given if known == 1 else torch.empty((), dtype=torch.float32, device=x.device)
    q, q_col = (x.new_empty((n, width // 2), dtype=torch.uint8) for n, width in ((rows, cols), (cols, rows)))
    scale, scale_col = (x.new_empty((n, width // 16), dtype=torch.uint8) for n, width in ((rows, cols), (cols, rows)))
    if row.transient:
        q, scale = torch.empty_like(x), x.new_empty(0, dtype=torch.uint8)
    to = TilePointers(
        None if row.transient else q.view(torch.int32),
        None if row.transient else scale,
        q if row.transient else None,
        q_col.view(torch.int64),
        scale_col,
        None if known == 1 else amax,
    )
    quantize_tiles_both_kernel[choice.grid](
        x,
        to,
        given,
        cols,
        sc.constants_of(row.spec),
        pm.Divisor.of(choice.facts),
        rows // 16,
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )
    return Blocks(q, scale, amax), Blocks(q_col, scale_col, amax)


def _maxima(x: Tensor, count: int) -> Tensor:
    """Return fp32 [count]: the largest finite magnitude of each of as many parts of x."""
    return operand_amax(x.view(count, -1), NVFP4(outer="row"), None)
