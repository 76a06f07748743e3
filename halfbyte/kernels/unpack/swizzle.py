"""Rearrange block scales between LINEAR and SWIZZLED_32_4_4 (docs/numerics.md section 8).

Every group of a grouped operand has a region of its own; a matrix is one expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.device import overlap
from halfbyte.kernels.groups import find_group, plan_groups
from halfbyte.kernels.launch import jit
from halfbyte.layout import SWIZZLED_32_4_4, ceil_div, group_alignment, grouped_shapes, round_up, swizzled_numel
from halfbyte.spec import Spec

TILES, TILES_OF_BYTES = 16, 4  # tiles of 128 x 4 scales that a program moves, in words or byte by byte
NUM_WARPS = 4


@jit(do_not_specialize=("groups", "rows"))
def swizzle_kernel(
    linear_ptr,
    words_ptr,
    offsets_ptr,
    table_ptr,
    tile_group_ptr,
    storage_ptr,
    groups,
    rows,
    blocks,
    tile_columns,
    linear_stride,
    UNIT: tl.constexpr,
    STORED: tl.constexpr,
    CONTRACTION: tl.constexpr,
    INVERSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Move TILES tiles of 128 x 4 scales side by side; one int32 word holds the 4 scales of a row of a tile.

    Groups of rows: tiles of 128 rows, counted from `offsets` [E] or, where that is None, of experts of equal size.
    CONTRACTION: regions are UNIT tiles of columns, in the plan's table; the storage table counts STORED columns of
    linear. ALIGNED: every group of linear starts on a word, and so do its rows. WHOLE: programs have TILES tiles each.
    """
    overlap.begin(OVERLAP)
    programs = tl.cdiv(tile_columns, TILES)
    i_row = tl.program_id(0) // programs
    i_tile = (tl.program_id(0) - i_row * programs) * TILES
    tile = i_tile + tl.arange(0, TILES)
    in_tile = tl.full((TILES,), True, tl.int1) if WHOLE else tile < tile_columns
    row = tl.arange(0, 128)
    word = tile
    if CONTRACTION:
        group = tl.load(tile_group_ptr + tile // UNIT, mask=in_tile, other=0)
        first = tl.load(table_ptr + group * 3 + 2) * UNIT
        # A region's width: from its first tile to the next group's.
        width = tl.load(table_ptr + group * 3 + 5, mask=group < groups, other=0) * UNIT - first
        width = tl.where(group < groups, width, tile_columns - first)
        stored_tile = (
            first.to(tl.int64) * (tl.cdiv(rows, 128) * 128) + (i_row * width + tile - first).to(tl.int64) * 128
        )
        if UNIT == 1 and STORED == 4:  # columns lie where their tiles do
            limit = tile * 4 + 4
        else:
            stored = tl.load(storage_ptr + group * 3 + 2)
            word = stored * (STORED // 4) + tile - first
            column = stored * STORED + (tile - first) * 4
            limit = tl.load(storage_ptr + group * 3 + 5, mask=group < groups, other=0) * STORED
        in_group = group < groups
        row = i_row * 128 + row
        in_row = row < rows
    else:
        if offsets_ptr is None:
            own = rows // groups
            tiles = (own + 127) // 128
            group = i_row // tiles
            first, start = group * tiles, group * own
            end = start + own
        else:
            group, start, end, first = find_group(i_row, offsets_ptr, groups, rows, 128, GROUPS)
        row = start + (i_row - first) * 128 + row
        stored_tile = (i_row.to(tl.int64) * tile_columns + tile) * 128
        limit = blocks
        in_group = in_tile
        in_row = (row < end) & (group < groups)
    if not (CONTRACTION and (UNIT != 1 or STORED != 4)):
        column = tile * 4
    # In storage, rows r, r + 32, r + 64 and r + 96 of a tile lie together.
    p_words = words_ptr + stored_tile[:, None] + tl.arange(0, 128)[None, :]
    p_linear = linear_ptr + row.to(tl.int64)[:, None] * linear_stride
    inside = in_row[:, None] & (in_group & in_tile & (column < limit))[None, :]
    if INVERSE:
        words = tl.load(p_words, mask=in_tile[:, None], other=0)
        words = tl.reshape(tl.permute(tl.reshape(words, (TILES, 32, 4)), (2, 1, 0)), (128, TILES))
        if ALIGNED:
            tl.store(p_linear + word[None, :], words, mask=inside)
        else:
            for byte in tl.static_range(4):
                mask = inside & (column + byte < limit)[None, :]
                tl.store(p_linear + (column + byte)[None, :], (words >> (8 * byte)).to(tl.uint8), mask=mask)
    else:
        if ALIGNED and WHOLE and not CONTRACTION:
            words = tl.load(p_linear + word[None, :], mask=in_row[:, None], other=0)
        elif ALIGNED:
            words = tl.load(p_linear + word[None, :], mask=inside, other=0)
        else:
            words = tl.zeros((128, TILES), tl.int32)
            for byte in tl.static_range(4):
                mask = inside & (column + byte < limit)[None, :]
                scale = tl.load(p_linear + (column + byte)[None, :], mask=mask, other=0)
                words |= scale.to(tl.int32) << (8 * byte)
        words = tl.reshape(tl.permute(tl.reshape(words, (4, 32, TILES)), (2, 1, 0)), (TILES, 128))
        tl.store(p_words, words, mask=in_tile[:, None])


def swizzle(block_scale: Tensor) -> Tensor:
    """Rearrange LINEAR block scales into the SWIZZLED_32_4_4 buffer; equal to `layout.swizzle`.

    Args:
        block_scale: one-byte dtype [rows, cols].

    Returns:
        Same dtype [round_up(rows, 128) * round_up(cols, 4)], zeros in the padding.
    """
    rows, cols = block_scale.shape
    linear = block_scale if block_scale.stride(1) == 1 or cols == 0 else block_scale.contiguous()
    out = torch.empty(swizzled_numel(rows, cols), dtype=block_scale.dtype, device=block_scale.device)
    _launch(linear.view(torch.uint8)[None], out.view(torch.uint8), None, None, (False, None, False))
    return out


def unswizzle(block_scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the LINEAR [rows, cols] scales of a SWIZZLED_32_4_4 buffer; equal to `layout.unswizzle`.

    Args:
        block_scale: one-byte dtype [round_up(rows, 128) * round_up(cols, 4)].
        rows, cols: the logical shape.
    """
    assert block_scale.numel() == swizzled_numel(rows, cols), "not the buffer of this shape"
    out = torch.empty(rows, cols, dtype=block_scale.dtype, device=block_scale.device)
    _launch(out.view(torch.uint8)[None], block_scale.view(torch.uint8), None, None, (False, None, True))
    return out


def grouped_swizzle(
    block_scale: Tensor, spec: Spec, offsets: Tensor | None, *, contraction: bool, total: int | None = None
) -> Tensor:
    """Rearrange LINEAR block scales of a grouped operand.

    Args:
        block_scale: uint8 [rows, blocks], of experts [E, rows, blocks].
        spec: of the operand.
        offsets: integer [E] of tokens; None: of experts, whose every matrix is a group.
        contraction: whether the groups split the columns.
        total: the tokens of an operand whose groups split the columns.

    Returns:
        uint8 [bytes of all regions] as `layout.grouped_shapes` says; of experts [E, bytes of one].
    """
    shape = _swizzled_shape(block_scale, spec, offsets, contraction, total)
    out = torch.empty(shape, dtype=torch.uint8, device=block_scale.device)
    _launch(block_scale, out, spec, offsets, (contraction, total, False))
    return out


def grouped_unswizzle(
    swizzled: Tensor,
    shape: tuple[int, ...],
    spec: Spec,
    offsets: Tensor | None,
    *,
    contraction: bool,
    total: int | None = None,
) -> Tensor:
    """Return the LINEAR block scales, of `shape`; the inverse of `grouped_swizzle`."""
    out = torch.zeros(shape, dtype=torch.uint8, device=swizzled.device)
    _launch(out, swizzled, spec, offsets, (contraction, total, True))
    return out


def _swizzled_shape(
    linear: Tensor, spec: Spec, offsets: Tensor | None, contraction: bool, total: int | None
) -> tuple[int, ...]:
    if offsets is None:
        groups, rows, blocks = linear.shape
        return groups, round_up(rows, SWIZZLE_ROWS) * round_up(blocks, SWIZZLE_COLS)
    rows, blocks = linear.shape
    cols = total if contraction else blocks * spec.block_length
    assert cols is not None, "groups along the contraction need the number of tokens"
    return grouped_shapes((rows, cols), offsets.shape[0], spec, SWIZZLED_32_4_4, contraction=contraction).block_scale


def _launch(
    linear: Tensor, swizzled: Tensor, spec: Spec | None, offsets: Tensor | None, mode: tuple[bool, int | None, bool]
) -> None:
    """Move scales between linear [rows, blocks], of experts [E, rows, blocks], and the buffer of their regions.

    Args:
        spec: of an operand whose groups split the columns.
        mode: whether they do, the tokens, and whether linear is written.
    """
    contraction, total, inverse = mode
    contraction = contraction and offsets is not None  # experts have all their columns
    if linear.numel() == 0 and swizzled.numel() == 0:
        return
    groups = linear.shape[0] if offsets is None else offsets.shape[0]
    linear = linear.flatten(0, -2)
    rows, blocks = linear.shape
    unit = stored = 1
    plan = stored_plan = None
    if contraction:
        assert spec is not None and total is not None, "groups along the contraction need the number of tokens"
        region, storage = max(SWIZZLE_COLS * spec.block_length, spec.alignment), group_alignment(spec)
        unit, stored = region // (SWIZZLE_COLS * spec.block_length), storage // spec.block_length
        plan = plan_groups(offsets, groups, total, region, linear.device)
        stored_plan = plan if region == storage else plan_groups(offsets, groups, total, storage, linear.device)
        row_tiles = ceil_div(rows, SWIZZLE_ROWS)
        tile_columns = swizzled.numel() // (round_up(rows, SWIZZLE_ROWS) * SWIZZLE_COLS) if rows else 0
    else:
        tile_columns = ceil_div(blocks, SWIZZLE_COLS)
        row_tiles = swizzled.numel() // (tile_columns * SWIZZLE_ROWS * SWIZZLE_COLS) if tile_columns else 0
    if not row_tiles or not tile_columns:
        return
    stride = linear.stride(0)
    aligned = stored % 4 == 0 if contraction else blocks % 4 == 0
    aligned = aligned and stride % 4 == linear.data_ptr() % 4 == 0
    swizzled = swizzled if swizzled.data_ptr() % 4 == 0 else swizzled.clone()
    tiles = TILES if aligned else TILES_OF_BYTES
    swizzle_kernel[(row_tiles * ceil_div(tile_columns, tiles),)](
        linear.view(torch.int32) if aligned else linear,
        swizzled.view(torch.int32),
        None if contraction else offsets,
        plan and plan.table,
        plan and plan.tile_group,
        stored_plan and stored_plan.table,
        groups,
        rows,
        blocks,
        tile_columns,
        stride // 4 if aligned else stride,
        UNIT=unit,
        STORED=stored,
        CONTRACTION=contraction,
        INVERSE=inverse,
        ALIGNED=aligned,
        WHOLE=tile_columns % tiles == 0,
        GROUPS=triton.next_power_of_2(groups + 1),
        TILES=tiles,
        num_warps=NUM_WARPS,
        **overlap.launch_options(linear.device),
    )
