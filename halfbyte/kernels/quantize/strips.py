"""Quantize matrices in 16x16 tiles, weights and those of experts, to codes or to decoded values.

A thread owns a strip of 8 columns, 16 bytes, in all rows of a tile, and two neighbouring threads share the tile: so
every load and store of a warp fills whole sectors. With a block of 16 columns a thread they are filled in halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import store_values
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks
from halfbyte.spec import Spec


@triton.jit
def to_strips(m):
    """Give every strip [L, W] the number of its tile [L, W // 2]."""
    L: tl.constexpr = m.shape[0]
    T: tl.constexpr = m.shape[1]
    return tl.reshape(tl.broadcast_to(m[:, :, None], (L, T, 2)), (L, 2 * T))


@triton.jit
def load_strips(x_ptr, first, per_row, L: tl.constexpr, W: tl.constexpr):
    """Return 16 rows of W strips of L lines of tiles from strip `first` of memory, as words of two values [L, W]."""
    strip = first + (tl.arange(0, L) * 16)[:, None] * per_row + tl.arange(0, W)[None, :]
    p_x = x_ptr.to(tl.pointer_type(tl.uint32)) + (strip * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    words = ()
    for r in tl.static_range(16):
        words = words + pm.split_four(tl.load(p_x + r * per_row * 4), L, W)
    return words


@triton.jit
def quantize_loaded(words, factors, RULE: tl.constexpr):
    """Return the codes of 16 rows, a tuple of int32 [L, W], and the scale bytes of the tiles [L, W // 2]."""
    L: tl.constexpr = words[0].shape[0]
    W: tl.constexpr = words[0].shape[1]
    m = pm.max_of_pair(pm.pair_abs_max(words, RULE.hardware))
    m = tl.where(((m < pm.INF) == 0) | factors.poison, pm.INF, m)
    m = tl.max(tl.reshape(m, (L, W // 2, 2)), axis=2)
    poison = m == pm.INF
    # The conversion saturates; what poison makes of scale and codes is replaced.
    code = pm.e4m3_code(m * factors.to_scale, RULE.hardware)
    encode = to_strips(sc.encode_scale(pm.e4m3_positive(code), factors, RULE, 1.0))
    code = tl.where(poison, dc.E4M3_NAN, code).to(tl.int32)
    poison = to_strips(poison.to(tl.int32)) != 0
    codes = ()
    for r in tl.static_range(16):
        xs = pm.unpack_pairs(pm.part(words, r * 4, 4), 0, 8)
        codes = codes + (tl.where(poison, 0, sc.pack_codes(xs, None, 0, encode, (), RULE, False)).to(tl.int32),)
    return codes, code


@triton.jit
def store_strips(codes, code, first, per_row, q_ptr, scale_ptr, values_ptr):
    """Store codes and scales, or values where q_ptr is None, of 16 rows from strip `first` of memory on."""
    L: tl.constexpr = codes[0].shape[0]
    W: tl.constexpr = codes[0].shape[1]
    line = tl.arange(0, L) * 16 * per_row
    if scale_ptr is not None:
        o_scale = (tl.arange(0, 16) * (per_row // 2))[None, :, None] + tl.arange(0, W // 2)[None, None, :]
        o_scale = (line // 2)[:, None, None] + o_scale
        tl.store(scale_ptr + first // 2 + o_scale, tl.broadcast_to(code.to(tl.uint8)[:, None, :], (L, 16, W // 2)))
    scale = to_strips(dc.e4m3_value(code))
    for r in tl.static_range(16):
        if q_ptr is not None:
            tl.store(q_ptr + first + line[:, None] + tl.arange(0, W)[None, :] + r * per_row, codes[r])
        if values_ptr is not None:
            p_values = values_ptr + (first + line + r * per_row) * 8
            store_values(p_values, codes[r], scale, 0, W, tl.full((L,), True, tl.int1), True)


@jit(do_not_specialize=("col_tiles", "row_tiles"))
def quantize_tiles_kernel(
    x_ptr, q_ptr, scale_ptr, values_ptr, amax_ptr, cols, constants, col_tiles, row_tiles,
    RULE: tl.constexpr, W: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """One program quantizes W / 2 tiles side by side; row_tiles.count of them below each other are an expert.

    Either q_ptr (int32, with scale_ptr) or values_ptr is None.
    MOVES: the last program of a row moves left until it is whole; what two programs quantize gets equal bytes.
    """
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    line = pm.divide(tl.program_id(0), col_tiles)
    per_row = cols // 8
    i_strip = (tl.program_id(0) - line * col_tiles.count) * W
    if MOVES:
        i_strip = tl.minimum(i_strip, per_row - W)
    first = line.to(tl.int64) * 16 * per_row + i_strip
    words = load_strips(x_ptr, first, per_row, 1, W)
    factors = sc.operand_factors(amax_ptr + pm.divide(line, row_tiles), constants, RULE)
    codes, code = quantize_loaded(words, factors, RULE)
    store_strips(codes, code, first, per_row, q_ptr, scale_ptr, values_ptr)


def quantize_strips(choice: Choice) -> Blocks:
    """Quantize one matrix along the last dimension."""
    x, side, _ = choice.request
    amax = operand_amax(x, side.spec, None) if side.amax is None else side.amax
    (qdata, *_), scale, _ = quantize_tiles(choice, x[None], side.spec, amax[None], decoded=side.transient)
    return Blocks(qdata, scale if side.transient else scale[0], amax)


def quantize_tiles(choice: Choice, w: Tensor, spec: Spec, amax: Tensor, *, decoded: bool) -> Blocks:
    """Quantize matrices that fit.

    Args:
        choice: of `strips_route.choose_strips`.
        w: bf16 [E, N, K].
        amax: fp32 [E].
        decoded: return element * block_scale, bf16 [E, N, K], as qdata, and no scales.

    Returns:
        Blocks of [E, N, K].
    """
    experts, rows, cols = w.shape
    size, dtype = (cols, torch.bfloat16) if decoded else (cols // 2, torch.uint8)
    qdata = w.new_empty((experts, rows, size), dtype=dtype)
    scale = w.new_empty(0 if decoded else (experts, rows, cols // 16), dtype=torch.uint8)
    quantize_tiles_kernel[choice.grid](
        w,
        None if decoded else qdata.view(torch.int32),
        None if decoded else scale,
        qdata if decoded else None,
        amax.contiguous(),
        cols,
        sc.constants_of(spec),
        pm.Divisor.of(choice.facts),
        pm.Divisor.of(rows // 16),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )
    return Blocks(qdata, scale, amax)
