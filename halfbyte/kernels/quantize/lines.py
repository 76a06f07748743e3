"""Quantize to NVFP4 or MXFP8 in one read of the input: scales, codes and layout in one kernel (docs/numerics.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.decode import INTERPRETED
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import wide
from halfbyte.layout import LINEAR, Blocks, ceil_div, check_scale_layout, matrix_shape, round_up, swizzled_numel
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, Spec

# Numbers that differ from call to call and decide no addressing: one compilation serves all.
VARYING = ("stream", "first_block", "sign_stream", "tiles", "magic", "shift")


@jit(do_not_specialize=VARYING)
def quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    draw_ptr,
    sign_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    stride_c,
    stream,
    first_block,
    blocks_per_row,
    sign_stream,
    span,
    floor,
    inverse,
    unit,
    tiles,
    magic,
    shift,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    LOOP: tl.constexpr,
    DOWN: tl.constexpr,
):
    """One program quantizes LOOP tiles of R rows and N groups, beside each other or, DOWN, below each other."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    constants = (span, floor, inverse, unit)
    NEXT_ROW: tl.constexpr = R if DOWN else 0
    NEXT_GROUP: tl.constexpr = 0 if DOWN else N
    outer = pm.divide(tl.program_id(0), magic, shift)
    i_row = outer * (R + (LOOP - 1) * NEXT_ROW)
    i_group = (tl.program_id(0) - outer * tiles) * (N + (LOOP - 1) * NEXT_GROUP)
    loaded = read_row_tile(i_row, i_group, x_ptr, rows, cols, stride_r, stride_c, RULE, R, N)
    factors = sc.operand_factors(amax_ptr, constants, RULE)
    for step in range(LOOP):
        here = loaded
        if LOOP > 1:
            # The next tile is read before this one is quantized; the last reads itself again, from the cache.
            i_next = tl.minimum(step + 1, LOOP - 1)
            i_next_row, i_next_group = i_row + i_next * NEXT_ROW, i_group + i_next * NEXT_GROUP
            loaded = read_row_tile(i_next_row, i_next_group, x_ptr, rows, cols, stride_r, stride_c, RULE, R, N)
        quantize_row_tile(
            i_row + step * NEXT_ROW,
            i_group + step * NEXT_GROUP,
            x_ptr,
            q_ptr,
            scale_ptr,
            amax_ptr,
            draw_ptr,
            sign_ptr,
            rows,
            cols,
            blocks,
            stride_r,
            stride_c,
            stream,
            first_block,
            blocks_per_row,
            sign_stream,
            constants,
            RULE,
            SWIZZLED,
            R,
            N,
            factors,
            here,
        )


@jit(do_not_specialize=VARYING)
def quantize_cols_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    draw_ptr,
    sign_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    stride_c,
    stream,
    first_block,
    blocks_per_row,
    sign_stream,
    span,
    floor,
    inverse,
    unit,
    tiles,
    magic,
    shift,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    constants = (span, floor, inverse, unit)
    tile = tl.program_id(0)
    outer = pm.divide(tile, magic, shift)
    quantize_col_tile(
        outer * N,
        (tile - outer * tiles) * C,
        x_ptr,
        q_ptr,
        scale_ptr,
        amax_ptr,
        draw_ptr,
        sign_ptr,
        rows,
        cols,
        blocks,
        stride_r,
        stride_c,
        stream,
        first_block,
        blocks_per_row,
        sign_stream,
        constants,
        RULE,
        SWIZZLED,
        N,
        C,
    )


class Tile(NamedTuple):
    """A tile of `outer` rows (columns) of `groups` groups each, warps, `Rule.words`, and how many tiles a program."""

    outer: int
    groups: int
    num_warps: int
    words: int = 1
    loop: int = 1


# Measured on an H200 at 8192 columns: the best of the tiles tried for each kind of kernel.
ROW_TILES = {
    16: Tile(1, 512, 4),
    32: Tile(1, 64, 2, loop=4),
    64: Tile(1, 64, 2),
    128: Tile(1, 64, 2),
}
ROTATED_TILE = Tile(1, 128, 2, loop=4)
MXFP8_TILE = Tile(1, 128, 4)
STOCHASTIC_TILE = Tile(1, 128, 2)
CANDIDATE_TILE = Tile(1, 128, 4, loop=4)
SQUARE_TILE = Tile(16, 16, 4)
SWIZZLED_TILE = Tile(16, 16, 2)
COL_TILES = {16: Tile(64, 4, 2, words=2), 32: Tile(64, 4, 4), 64: Tile(64, 1, 2), 128: Tile(64, 2, 4)}
LONGEST_ROW = 8192
INTERPRETED_BLOCKS = 1024  # the interpreter pays by the operation: large tiles


def row_tile(rows: int, groups: int, rule: sc.Rule, swizzled: bool) -> Tile:
    """Return the tile of the row kernel for a [rows, groups] operand."""
    best = ROW_TILES[rule.group]
    if rule.tile:
        best = SQUARE_TILE
    elif swizzled and rule.group == 16:
        best = SWIZZLED_TILE
    elif rule.element:
        best = MXFP8_TILE
    elif rule.rounding == "stochastic" and rule.group == 16:
        best = STOCHASTIC_TILE
    elif rule.candidates:
        best = CANDIDATE_TILE
    elif rule.group == 16 and rule.norm:
        best = ROTATED_TILE
    total = INTERPRETED_BLOCKS if INTERPRETED else best.outer * best.groups
    least = 16 if rule.tile else 1
    n = min(triton.next_power_of_2(groups), total // least if INTERPRETED else best.groups)
    whole = groups & -groups  # tiles without a ragged edge, unless they were very narrow
    if 8 <= whole < n and not INTERPRETED:
        n = whole
    # A narrow operand fills the tile with rows: fewer blocks than threads would split blocks between threads.
    return Tile(total // n, n, best.num_warps, loop=best.loop)


def col_tile(cols: int, groups: int, rule: sc.Rule, swizzled: bool) -> Tile:
    """Return the tile of the column kernel for `groups` groups in each of `cols` columns."""
    best = COL_TILES[rule.group]
    total = INTERPRETED_BLOCKS if INTERPRETED else best.outer * best.groups
    n = min(triton.next_power_of_2(groups), best.groups)
    return Tile(total // n, n, best.num_warps, best.words)


def divisor(n: int) -> tuple[int, int, int]:
    """Return n with (magic, shift) for `primitives.divide`: Granlund and Montgomery's multiplication, 30 bits wide."""
    bits = (n - 1).bit_length()
    return n, ceil_div(1 << (30 + bits), n), 30 + bits


def is_packed(x: Tensor) -> bool:
    """Say whether kernels may read x [R, C] in words of two bf16: `Rule.packed`."""
    aligned = x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(0) < 1 << 23
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


class Output(NamedTuple):
    """The tensors that a kernel fills, [rows, blocks] blocks; decoded: qdata is bf16 values, without scales."""

    qdata: Tensor
    block_scale: Tensor
    rows: int
    blocks: int
    swizzled: bool
    decoded: bool


def is_full(x: Tensor, out: Output, rule: sc.Rule, tile: tuple[int, int]) -> bool:
    """Say whether tiles of `tile` (rows, groups) cover x [R, C] and all that is stored of it exactly: `Rule.full`."""
    rows, cols = x.shape
    ragged = rows % tile[0] or cols % (tile[1] * rule.group)
    return not ragged and not (out.swizzled and (rows % SWIZZLE_ROWS or out.blocks % SWIZZLE_COLS))


def allocate(
    shape: tuple[int, int], spec: Spec, scale_layout: str, device: torch.device, decoded: bool = False
) -> Output:
    """Return unwritten qdata and block_scale of an operand of `shape`."""
    rows, cols = shape
    blocks = round_up(cols, spec.alignment) // spec.block_length
    if decoded:
        values = torch.empty(rows, blocks * spec.block_length, dtype=torch.bfloat16, device=device)
        return Output(values, torch.empty(0, dtype=torch.uint8, device=device), rows, blocks, False, True)
    bytes_per_block = 8 if isinstance(spec, NVFP4) else spec.block_length
    qdata = torch.empty(rows, blocks * bytes_per_block, dtype=torch.uint8, device=device)
    swizzled = scale_layout != LINEAR
    size = (swizzled_numel(rows, blocks),) if swizzled else (rows, blocks)
    return Output(qdata, torch.empty(size, dtype=torch.uint8, device=device), rows, blocks, swizzled, False)


def operand_arguments(spec: Spec, out: Output, amax: Tensor, draw: Draw | None, sign_draw: Draw | None) -> tuple:
    """Return the kernels' arguments of one operand in three runs: pointers, numbers, constants."""
    base = sign_base = None
    stream = first_block = blocks_per_row = sign_stream = 0
    if spec.needs_rng:
        assert draw is not None, "stochastic rounding needs a draw"
        base, stream, first_block, blocks_per_row = draw
        blocks_per_row = out.blocks if blocks_per_row is None else blocks_per_row
    if spec.needs_sign_rng:
        assert sign_draw is not None, "fresh signs need a draw"
        sign_base, sign_stream = sign_draw.base, sign_draw.stream
    qdata = out.qdata if out.decoded else out.qdata.view(torch.int64)
    pointers = (qdata, out.block_scale, amax, base, sign_base)
    return pointers, (stream, first_block, blocks_per_row, sign_stream), sc.constants_of(spec)


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    decoded: bool = False,
) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        spec: NVFP4 or MXFP8.
        draw: random bytes of stochastic rounding.
        sign_draw: fresh signs of the rotation.
        amax: fp32 [] or [rows], used instead of the computed one.
        scale_layout: "linear" or "swizzled_32_4_4".
        decoded: return element * block_scale in bf16 [rows, padded K] as qdata, and no scales.

    Returns:
        Blocks of the [rows, K] matrix; MXFP8 has an empty amax.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if isinstance(spec, MXFP8):
        amax = torch.empty(0, dtype=torch.float32, device=x.device)
    elif amax is None:
        amax = operand_amax(x, spec, sign_draw)
    out = allocate(x.shape, spec, scale_layout, x.device, decoded)
    if out.qdata.numel():
        _fill(x, spec, out, amax, draw, sign_draw)
    return Blocks(out.qdata, out.block_scale, amax)


def _fill(x: Tensor, spec: Spec, out: Output, amax: Tensor, draw: Draw | None, sign_draw: Draw | None) -> None:
    """Launch what fills `out` with quantize(x)."""
    x, out, draw = _in_long_rows(x, spec, out, draw)
    arguments = operand_arguments(spec, out, amax, draw, sign_draw)
    if spec.alignment >= wide.WIDE and not _in_whole_tiles(x, spec, out):
        rule = sc.rule_of(spec, sc.hardware_of(x.device))._replace(decoded=out.decoded)
        wide.launch(x, rule, out, arguments)
        return
    # Blocks along the dimension that is not contiguous in memory: the column kernel reads whole lines.
    launch = launch_cols if x.stride(0) == 1 and x.stride(1) != 1 else launch_rows
    launch(x.T if launch is launch_cols else x, spec, out, arguments)


def _in_long_rows(x: Tensor, spec: Spec, out: Output, draw: Draw | None) -> tuple[Tensor, Output, Draw | None]:
    """Return the same blocks, one after another in memory, as rows of a power of two where x has narrower whole tiles.

    What belongs to rows must not depend on where they end: no amax of a row, no tile of rows, no padding.
    """
    rows, cols = x.shape
    by_row = isinstance(spec, NVFP4) and (spec.outer == "row" or spec.is_tile)
    if by_row or out.swizzled or cols % spec.alignment or not x.is_contiguous():
        return x, out, draw
    if draw is not None and draw.blocks_per_row not in (None, out.blocks):
        return x, out, draw
    width = min(x.numel() & -x.numel(), LONGEST_ROW)
    if width <= cols & -cols:
        return x, out, draw
    rows, blocks = x.numel() // width, width // spec.block_length
    qdata, scale = (t.view(rows, -1) if t.numel() else t for t in (out.qdata, out.block_scale))
    longer = Output(qdata, scale, rows, blocks, False, out.decoded)
    return x.view(rows, width), longer, draw and draw._replace(blocks_per_row=None)


def _in_whole_tiles(x: Tensor, spec: Spec, out: Output) -> bool:
    """Say whether the row kernel needs no masks and has no candidates: else wide rotations take minutes to compile."""
    rule = sc.rule_of(spec, 0)
    if rule.candidates:
        return False
    tile = row_tile(out.rows, ceil_div(x.shape[1], rule.group), rule, out.swizzled)
    return is_packed(x) and is_full(x, out, rule, (tile.outer, tile.groups))


def launch_rows(x: Tensor, spec: Spec, out: Output, arguments: tuple) -> None:
    """Fill `out` with quantize(x)."""
    rule = sc.rule_of(spec, sc.hardware_of(x.device))._replace(decoded=out.decoded, packed=is_packed(x))
    blocks = round_up(out.blocks, SWIZZLE_COLS) if out.swizzled else out.blocks
    groups = ceil_div(blocks * spec.block_length, rule.group)
    tile = row_tile(out.rows, groups, rule, out.swizzled)
    rule = rule._replace(full=is_full(x, out, rule, (tile.outer, tile.groups)))
    row_tiles = ceil_div(round_up(out.rows, SWIZZLE_ROWS) if out.swizzled else out.rows, tile.outer)
    group_tiles = ceil_div(groups, tile.groups)
    pointers, numbers, constants = arguments
    down = group_tiles % tile.loop != 0
    loop = tile.loop if not down or row_tiles % tile.loop == 0 else 1
    quantize_rows_kernel[(row_tiles * group_tiles // loop,)](
        x,
        *pointers,
        *x.shape,
        out.blocks,
        *x.stride(),
        *numbers,
        *constants,
        *divisor(group_tiles if down else group_tiles // loop),
        RULE=rule,
        SWIZZLED=out.swizzled,
        R=tile.outer,
        N=tile.groups,
        LOOP=loop,
        DOWN=down and loop > 1,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
        **placed_early(rule.hardware),
    )


def launch_cols(x: Tensor, spec: Spec, out: Output, arguments: tuple) -> None:
    """Fill `out` with quantize(x.T)."""
    rule = sc.rule_of(spec, sc.hardware_of(x.device))._replace(decoded=out.decoded)
    rule = rule._replace(packed=is_packed(x) and not rule.tile)  # a thread's columns would share a tile
    blocks = round_up(out.blocks, SWIZZLE_COLS) if out.swizzled else out.blocks
    groups = ceil_div(blocks * spec.block_length, rule.group)
    tile = col_tile(out.rows, groups, rule, out.swizzled)
    rule = rule._replace(full=is_full(x.T, out, rule, (tile.outer, tile.groups)), words=tile.words)
    col_tiles = ceil_div(round_up(out.rows, SWIZZLE_ROWS) if out.swizzled else out.rows, tile.outer)
    group_tiles = ceil_div(groups, tile.groups)
    pointers, numbers, constants = arguments
    quantize_cols_kernel[(col_tiles * group_tiles,)](
        x,
        *pointers,
        *x.shape,
        out.blocks,
        *x.stride(),
        *numbers,
        *constants,
        *divisor(col_tiles),
        RULE=rule,
        SWIZZLED=out.swizzled,
        N=tile.groups,
        C=tile.outer,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
        **placed_early(rule.hardware),
    )
