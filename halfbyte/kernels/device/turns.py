"""Device functions that quantize by quick errors in turns of a loop: less code, and stores that wait for others."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device import tiles
from halfbyte.kernels.device.loads import block_address, load_col_pairs, masked_load
from halfbyte.kernels.device.unpacking import numbers_of_pairs


@triton.jit
def gather_row_tile(
    i_row, i_group, out, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr, factors, loaded, gathered
):
    """Quantize [R, N] blocks of whole 16x16 tiles as `quantize_row_tile`, but store no scales.

    Returns:
        `gathered`, bytes of the scales of three tiles before, with those of this one.
    """
    amax = pm.max_of_pairs(loaded, RULE.hardware)
    xs = numbers_of_pairs(loaded, 0, 16, RULE)
    words, scales = tiles.quantize_group(xs, amax, factors, out.constants, None, 0, RULE, 0, loaded)
    line, block = tl.arange(0, R)[:, None], tl.arange(0, N)[None, :]
    tl.store(block_address(out.to.q_ptr, i_row, i_group, line, block, out.blocks), words[0])
    return (gathered >> 8) | (scales[0].to(tl.uint32) << 24)


@triton.jit
def store_gathered(out, gathered, i_row, i_group):
    """Store what `gather_row_tile` gathered of four tiles beside each other, of two blocks a row [R, 2].

    A store of eight bytes a row in place of four of two: it was these that took time, not instructions.
    """
    R: tl.constexpr = gathered.shape[0]
    block = tl.broadcast_to(tl.arange(0, 2)[None, :], (R, 2))
    other = tl.gather(gathered, block ^ 1, 1)
    even = tl.where(block == 0, gathered, other >> 16)
    odd = tl.where(block == 0, other, gathered >> 16)
    low = (even & 0xFF) | ((odd & 0xFF) << 8)
    high = (even & 0xFF00) | ((odd & 0xFF00) << 8)
    to = block_address(out.to.scale_ptr, i_row, i_group, tl.arange(0, R)[:, None], 4 * block, out.blocks)
    tl.store(to.to(tl.pointer_type(tl.uint32)), low | (high << 8))


@triton.jit
def quantize_columns_in_turn(
    i_group, i_col, x, out, RULE: tl.constexpr, SWIZZLED: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Quantize a tile of a packed x as `quantize_col_tile`, the two columns of a thread's words by turns of one loop.

    RULE: with quick errors, which take pairs of neighbours of a column.
    """
    loaded = pm.nth(load_col_pairs(x, i_group, i_col, RULE, N, C), 0)
    of_tensor = sc.operand_factors(out.to.amax_ptr, out.constants, RULE)
    first_col = i_col + 2 * tl.arange(0, C // 2)
    # Zeros each: of two names of one tensor a loop carries only one.
    before, word = tl.zeros((N, C // 2), tl.int64), tl.zeros((N, C // 2), tl.int64)
    scale_before, scale = tl.zeros((N, C // 2), tl.uint8), tl.zeros((N, C // 2), tl.uint8)
    for k in range(2):
        factors = of_tensor  # a name of its own: what a loop changes has one type
        if RULE.row_amax:
            col64 = (first_col + k).to(tl.int64)
            amax_of_col = masked_load(out.to.amax_ptr + col64, col64 < x.cols, RULE.full)
            factors = sc.tensor_factors(amax_of_col[None, :], out.constants, False)
        pairs = pm.pairs_of_half(loaded, k)
        xs = numbers_of_pairs(pairs, 0, 16, RULE)
        amax = None
        if RULE.norm != 0.0:
            xs = tiles.rotate_group(xs, out.to.sign_ptr, out.places.sign_stream, True, RULE)
        else:
            amax = pm.max_of_pairs(pairs, RULE.hardware)
        words, scales = tiles.quantize_group(xs, amax, factors, out.constants, None, 0, RULE, 1, pairs)
        if RULE.along:
            tiles.store_blocks(out, words[0], scales[0], i_col, 2 * tl.arange(0, C // 2) + k, i_group, False)
        else:
            before, scale_before = word, scale
            word, scale = words[0], scales[0]
    if not RULE.along:
        words = pm.interleave(((before,), (word,)), N, C)
        scales = pm.interleave(((scale_before,), (scale,)), N, C)
        tiles.store_columns(out, words, scales, i_group, i_col + tl.arange(0, C), x.cols, RULE, SWIZZLED)
