"""Kernels that cast many weights at once from flat pieces of their masters (docs/numerics.md section 9).

One launch serves a whole list. A program finds its piece or weight in a table of addresses and sizes, and works on N
blocks in each of the 16 rows of a row of tiles; a tile is never divided between programs of one launch, so only the
amaxes of whole weights meet in an atomic maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device import tile_blocks
from halfbyte.kernels.launch import jit
from halfbyte.kernels.unpack.transpose import Extent, Moved, MovedStrides, transpose_tile

# Columns of the table of pieces.
VALUES, CODES, START, STOP, ROWS, COLS, PITCH, TILE_COLS, FIRST_TILE, SLOT, FIRST_PROGRAM, FIRST_ROW, CHUNKS = (
    tl.constexpr(i) for i in range(13)
)
PIECE_FIELDS = tl.constexpr(13)

# Columns of the table of weights; the first five are addresses.
W_CODES, W_SCALE, W_AMAX, W_TURNED, W_TURNED_SCALE, W_ROWS, W_COLS, W_TILE_ROWS, W_TILE_COLS, W_FIRST_TILE = (
    tl.constexpr(i) for i in range(10)
)
W_SLOT, W_SWIZZLED, W_CHOSEN, W_SCALE_PROGRAM, W_TURN_PROGRAM = (tl.constexpr(i) for i in range(10, 15))
WEIGHT_FIELDS = tl.constexpr(15)

NO_ROUNDING, TO_BF16, TO_FP16 = (tl.constexpr(i) for i in range(3))


@triton.jit
def round_values(xs, ROUND: tl.constexpr):
    """Round 16 fp32 tensors to the weight's dtype."""
    if ROUND == TO_BF16:
        return pm.unpack_pairs(pm.bf16_pairs(xs), 0, 16)
    elif ROUND == TO_FP16:
        out = ()
        for i in tl.static_range(16):
            out = out + (xs[i].to(tl.float16).to(tl.float32),)
        return out
    else:
        return xs


@triton.jit
def find_program(table, programs, N: tl.constexpr):
    """Return the row of the table, the row of tiles and the blocks [N] of this program."""
    piece = table + tl.load(programs + tl.program_id(0)).to(tl.int64) * PIECE_FIELDS
    local = tl.program_id(0) - tl.load(piece + FIRST_PROGRAM)
    chunks = tl.load(piece + CHUNKS)
    tile_row = tl.load(piece + FIRST_ROW) + local // chunks
    return piece, tile_row, local % chunks * N + tl.arange(0, N)


@triton.jit
def element_is_inside(piece, row, col):
    """Whether elements (row, col), int64, belong to the piece and to the weight."""
    element = row * tl.load(piece + PITCH) + col
    inside = (element >= tl.load(piece + START)) & (element < tl.load(piece + STOP))
    return inside & (col < tl.load(piece + COLS)) & (row < tl.load(piece + ROWS))


@triton.jit
def load_piece(piece, tile_row, block, DTYPE: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return 16 fp32 tensors [16, N], zeros outside the piece, and whether a block is inside (if ALIGNED).

    ALIGNED: the piece consists of whole blocks, at addresses that are multiples of 16 bytes.
    """
    N: tl.constexpr = block.shape[0]
    row = (tile_row * 16 + tl.arange(0, 16))[:, None]
    start = tl.load(piece + START)
    pitch = tl.load(piece + PITCH)
    values = tl.load(piece + VALUES).to(tl.pointer_type(DTYPE))
    xs = ()
    if ALIGNED:
        start, pitch, values = tl.multiple_of(start, 16), tl.multiple_of(pitch, 16), tl.multiple_of(values, 16)
        inside = element_is_inside(piece, row, block[None, :] * 16)
        element = row * pitch + block[None, :] * 16 - start
        WIDTH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        for part in tl.static_range(16 // WIDTH):
            pointers = values + (element[:, :, None] + (part * WIDTH + tl.arange(0, WIDTH))[None, None, :])
            x = pm.to_fp32(tl.load(pointers, mask=inside[:, :, None], other=0.0))
            if WIDTH == 8:
                xs = xs + pm.split_eight(x, 16, N)
            else:
                xs = xs + pm.split_four(x, 16, N)
    else:
        inside = row >= 0
        for i in tl.static_range(16):
            col = block[None, :] * 16 + i
            mask = element_is_inside(piece, row, col)
            xs = xs + (pm.to_fp32(tl.load(values + (row * pitch + col - start), mask=mask, other=0.0)),)
    return round_values(xs, ROUND), inside


@triton.jit
def finite_block_max(xs):
    """Return max |x| over the finite elements of each block."""
    m = tl.zeros_like(xs[0])
    for i in tl.static_range(len(xs)):
        a = tl.abs(xs[i])
        m = tl.maximum(m, tl.where(a < pm.INF, a, 0.0))
    return m


@jit(do_not_specialize=("tiles",))
def amax_kernel(
    table, programs, amax_ptr, tiles, DTYPE: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr
):
    """amaxes [tiles + slots], zero before: of every tile (Inf if an element is not finite) and of every weight."""
    piece, tile_row, block = find_program(table, programs, N)
    xs, _inside = load_piece(piece, tile_row, block, DTYPE, ROUND, ALIGNED)
    m = pm.abs_max(xs)
    poison = (m < pm.INF) == 0
    tile = tl.max(tl.where(poison, pm.INF, m), axis=0)
    if tl.max(tl.max(poison.to(tl.int32), axis=1), axis=0) != 0:
        m = finite_block_max(xs)
    tile_cols = tl.load(piece + TILE_COLS)
    p_tile = amax_ptr + tl.load(piece + FIRST_TILE) + tile_row * tile_cols + block
    tl.store(p_tile, tile, mask=block < tile_cols)
    p_slot = (amax_ptr + tiles + tl.load(piece + SLOT)).to(tl.pointer_type(tl.int32))
    bits = tl.max(tl.max(m, axis=1), axis=0).to(tl.int32, bitcast=True)
    if bits > tl.load(p_slot):  # a stale value only costs an atomic
        tl.atomic_max(p_slot, bits, sem="relaxed")


@triton.jit
def piece_factors(piece, amax_ptr, tiles, constants):
    return sc.tensor_factors(tl.load(amax_ptr + tiles + tl.load(piece + SLOT)), constants, False)


@triton.jit
def load_constants(p_constants):
    """Return the Constants of a spec."""
    return sc.Constants(
        tl.load(p_constants), tl.load(p_constants + 1), tl.load(p_constants + 2), tl.load(p_constants + 3)
    )


@jit(do_not_specialize=("tiles",))
def choose_kernel(
    table, constants_ptr, programs, amax_ptr, scale_ptr, tiles,
    DTYPE: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr, RULE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The scales of whole tiles by candidates (section 5)."""
    piece, tile_row, block = find_program(table, programs, N)
    constants = load_constants(constants_ptr + tl.load(programs + tl.program_id(0)) * 4)
    xs, _inside = load_piece(piece, tile_row, block, DTYPE, ROUND, ALIGNED)
    factors = piece_factors(piece, amax_ptr, tiles, constants)
    m = pm.abs_max(xs)
    m = tile_blocks.over_tile(tl.where(m < pm.INF, m, pm.INF), 0)
    poison = m == pm.INF
    m = tl.where(poison, 0.0, m)
    code, _encode, _rounded = sc.best_candidate(xs, None, m, factors, constants, RULE, 0, False)
    code = tl.max(tl.where(poison, dc.E4M3_NAN, code).to(tl.int32), axis=0)
    tile_cols = tl.load(piece + TILE_COLS)
    p_scale = scale_ptr + tl.load(piece + FIRST_TILE) + tile_row * tile_cols + block
    tl.store(p_scale, code.to(tl.uint8), mask=block < tile_cols)


@triton.jit
def nibbles_below(count):
    """Return int64 words whose first `count` nibbles, 0 to 16, are 15."""
    return tl.where(count >= 16, -1, (tl.full(count.shape, 1, tl.int64) << (4 * tl.minimum(count, 15))) - 1)


@triton.jit
def own_nibbles(piece, row, col):
    """Return int64 words with 15 in the nibbles of the elements (row, col to col + 15) that are the piece's own.

    They lie together: a piece is a flat slice of the rows, of which the weight has the first COLS columns.
    """
    first = row * tl.load(piece + PITCH) + col
    begin = tl.minimum(tl.maximum(tl.load(piece + START) - first, 0), 16)
    end = tl.minimum(tl.load(piece + STOP) - first, tl.load(piece + COLS) - col)
    end = tl.maximum(tl.minimum(end, 16), begin)
    end = tl.where(row < tl.load(piece + ROWS), end, begin)
    return nibbles_below(end) & ~nibbles_below(begin)


@jit(do_not_specialize=("tiles",))
def cast_kernel(
    table, constants_ptr, programs, amax_ptr, scale_ptr, tiles,
    DTYPE: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The codes of pieces: whole words if ALIGNED, else their own nibbles of every byte."""
    piece, tile_row, block = find_program(table, programs, N)
    constants = load_constants(constants_ptr + tl.load(programs + tl.program_id(0)) * 4)
    xs, inside = load_piece(piece, tile_row, block, DTYPE, ROUND, ALIGNED)
    factors = piece_factors(piece, amax_ptr, tiles, constants)
    tile_cols = tl.load(piece + TILE_COLS)
    p_scale = scale_ptr + tl.load(piece + FIRST_TILE) + tile_row * tile_cols + block
    scale = tl.load(p_scale, mask=block < tile_cols, other=0)
    poison = scale == dc.E4M3_NAN
    product = pm.e4m3_positive(tl.where(poison, 0, scale).to(tl.uint8)) * factors.decode
    encode = tl.minimum(tl.div_rn(product * 0 + 1.0, product), pm.FLT_MAX)[None, :]
    low = pm.pack_word(xs, 0, pm.nearest_codes(xs, 0, encode)).to(tl.int64)
    high = pm.pack_word(xs, 8, pm.nearest_codes(xs, 8, encode)).to(tl.int64)
    word = tl.where(poison[None, :], 0, low | (high << 32))
    row = (tile_row * 16 + tl.arange(0, 16))[:, None]
    offset = row * tile_cols + block[None, :]
    if ALIGNED:
        tl.store(tl.load(piece + CODES).to(tl.pointer_type(tl.int64)) + offset, word, mask=inside)
    else:
        own = own_nibbles(piece, row, block[None, :] * 16)
        shift = (8 * tl.arange(0, 8)).to(tl.int64)[None, None, :]
        new = (word[:, :, None] >> shift) & 0xFF
        own = (own[:, :, None] >> shift) & 0xFF
        pointers = tl.load(piece + CODES).to(tl.pointer_type(tl.uint8)) + (
            offset[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        )
        old = tl.load(pointers, mask=(own != 0) & (own != 0xFF), other=0).to(tl.int64)
        tl.store(pointers, ((old & (0xFF - own)) | (new & own)).to(tl.uint8), mask=own != 0)


@jit(do_not_specialize=("tiles",))
def scale_kernel(
    table, constants_ptr, programs, amax_ptr, scale_ptr, tiles,
    COMPUTE: tl.constexpr, EXPAND: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scales of N tiles in a row of tiles: from amaxes (COMPUTE), to the weight's block scales and amax (EXPAND)."""
    index = tl.load(programs + tl.program_id(0)).to(tl.int64)
    weight = table + index * WEIGHT_FIELDS
    tile_cols = tl.load(weight + W_TILE_COLS)
    local = tl.program_id(0) - tl.load(weight + W_SCALE_PROGRAM)
    chunks = tl.cdiv(tile_cols, N)
    tile_row = local // chunks
    col = local % chunks * N + tl.arange(0, N)
    inside = col < tile_cols
    amax = tl.load(amax_ptr + tiles + tl.load(weight + W_SLOT))
    o_tile = tl.load(weight + W_FIRST_TILE) + tile_row * tile_cols + col
    if COMPUTE:
        code = tl.zeros((N,), tl.uint8)
        if tl.load(weight + W_CHOSEN) == 0:
            factors = sc.tensor_factors(amax, load_constants(constants_ptr + index * 4), False)
            m = tl.load(amax_ptr + o_tile, mask=inside, other=0.0)
            poison = m == pm.INF
            code = pm.e4m3_code(tl.minimum(tl.where(poison, 0.0, m) * factors.to_scale, pm.FLT_MAX), False)
            code = tl.where(poison, dc.E4M3_NAN, code).to(tl.uint8)
            tl.store(scale_ptr + o_tile, code, mask=inside)
        elif EXPAND:
            code = tl.load(scale_ptr + o_tile, mask=inside, other=0)
    else:
        code = tl.load(scale_ptr + o_tile, mask=inside, other=0)
    if EXPAND:
        row = tile_row * 16 + tl.arange(0, 16)
        p_scale = tl.load(weight + W_SCALE).to(tl.pointer_type(tl.uint8))
        mask = (row < tl.load(weight + W_ROWS))[:, None] & inside[None, :]
        code = tl.broadcast_to(code[None, :], (16, N))
        if tl.load(weight + W_SWIZZLED) != 0:
            tl.store(p_scale + dc.swizzled_offset(row[:, None], col[None, :], tile_cols), code, mask=mask)
        else:
            tl.store(p_scale + row[:, None] * tile_cols + col[None, :], code, mask=mask)
        tl.store(tl.load(weight + W_AMAX).to(tl.pointer_type(tl.float32)), amax)


@jit
def transpose_weights_kernel(table, programs, WIDE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr):
    """The other orientation of every weight, as in a tensor alone; scales as if they were LINEAR.

    WIDE: rows of codes start at multiples of 16 bytes in both orientations.
    """
    weight = table + tl.load(programs + tl.program_id(0)).to(tl.int64) * WEIGHT_FIELDS
    tile_rows, tile_cols = tl.load(weight + W_TILE_ROWS), tl.load(weight + W_TILE_COLS)
    if WIDE:
        tile_rows, tile_cols = tl.multiple_of(tile_rows, 2), tl.multiple_of(tile_cols, 2)
    ALIGNMENT: tl.constexpr = 16 if WIDE else 8
    local = tl.program_id(0) - tl.load(weight + W_TURN_PROGRAM)
    tiles = tl.cdiv(tile_cols * 2, TILE_WORDS)
    i_row, i_word = (local // tiles).to(tl.int32), (local % tiles).to(tl.int32)
    moved = Moved(
        tl.multiple_of(tl.load(weight + W_CODES).to(tl.pointer_type(tl.int32)), ALIGNMENT),
        tl.load(weight + W_SCALE).to(tl.pointer_type(tl.uint8)),
        tl.multiple_of(tl.load(weight + W_TURNED).to(tl.pointer_type(tl.int32)), ALIGNMENT),
        tl.load(weight + W_TURNED_SCALE).to(tl.pointer_type(tl.uint8)),
    )
    extent = Extent(
        tl.load(weight + W_ROWS).to(tl.int32),
        tl.load(weight + W_COLS).to(tl.int32),
        (tile_cols * 2).to(tl.int32),
        (tile_rows * 2).to(tl.int32),
    )
    strides = MovedStrides(tile_cols * 2, tile_cols, tile_rows * 2, tile_rows)
    transpose_tile(i_row, i_word, moved, extent, strides, TILE_ROWS, TILE_WORDS)


@jit
def turn_swizzled_kernel(table, programs, N: tl.constexpr):
    """The transposed scales of weights whose own are swizzled: program for a row of tiles, N tiles of it."""
    weight = table + tl.load(programs + tl.program_id(0)).to(tl.int64) * WEIGHT_FIELDS
    if tl.load(weight + W_SWIZZLED) == 0 or tl.load(weight + W_TURNED_SCALE) == 0:
        return
    tile_rows, tile_cols = tl.load(weight + W_TILE_ROWS), tl.load(weight + W_TILE_COLS)
    local = tl.program_id(0) - tl.load(weight + W_SCALE_PROGRAM)
    chunks = tl.cdiv(tile_cols, N)
    tile_row = local // chunks
    col = local % chunks * N + tl.arange(0, N)
    p_scale = tl.load(weight + W_SCALE).to(tl.pointer_type(tl.uint8))
    code = tl.load(p_scale + dc.swizzled_offset(tile_row * 16, col, tile_cols), mask=col < tile_cols, other=0)
    row = col[:, None] * 16 + tl.arange(0, 16)[None, :]
    p_turned = tl.load(weight + W_TURNED_SCALE).to(tl.pointer_type(tl.uint8)) + row * tile_rows + tile_row
    tl.store(p_turned, tl.broadcast_to(code[:, None], (N, 16)), mask=row < tl.load(weight + W_COLS))
