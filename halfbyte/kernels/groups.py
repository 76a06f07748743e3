"""Which group a tile of rows belongs to, found on the device: nothing here reads a group's size on the host.

Tokens in groups are cut into tiles of `tile_rows` rows that start anew in every group. The number of tiles depends on
the sizes of the groups, their upper bound does not: kernels launch over the bound, a tile looks up its group. Tiles
behind the last group belong to group E, the tail: the tokens behind the last offset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import overlap
from halfbyte.kernels.launch import jit
from halfbyte.layout import EndsOfGroups, GroupEnds, as_offsets, ceil_div, padded_groups
from halfbyte.rng import GROUP_SEED_STEP, as_signed64

SEED_STEP = tl.constexpr(as_signed64(GROUP_SEED_STEP))
TILES_PER_PROGRAM = 64


class GroupPlan(NamedTuple):
    """Where groups and tiles lie.

    table: int32 [E + 1, 3]: the first row, the row behind the last and the first tile of each group and of the tail.
    tile_group: int32 [tiles]: the group of each tile, E for the tail.
    draws, signs: int64 [E + 1, 2], the base of each group's Draw; None without one.
    amax: two fp32 [E + 1], of both orientations: given maxima, or zeros to be raised, and in the last place that of the
        tail, zero. Apart, since an op's outputs must not share memory.
    """

    table: Tensor
    tile_group: Tensor
    draws: Tensor | None
    signs: Tensor | None
    amax: tuple[Tensor, Tensor]
    groups: int
    tile_rows: int
    others: tuple[GroupPlan, ...] = ()
    """Of tiles of other sizes, from the same launch: without draws and maxima."""

    @property
    def tiles(self) -> int:
        """The most tiles that groups of any sizes need, the tail's included."""
        return self.tile_group.shape[0]


@triton.jit
def group_of_tile(tile, tile_group_ptr, table_ptr):
    """Return (group, its first row, the row behind its last, its first tile)."""
    group = tl.load(tile_group_ptr + tile)
    p = table_ptr + group * 3
    return group, tl.load(p), tl.load(p + 1), tl.load(p + 2)


@triton.jit
def store_draws(out_ptr, base_ptr, o_group, mask):
    """Store (seed + g * step, offset) of every group."""
    seed = tl.load(base_ptr) + o_group.to(tl.int64) * SEED_STEP
    tl.store(out_ptr + o_group * 2, seed, mask=mask)
    tl.store(out_ptr + o_group * 2 + 1, tl.zeros_like(seed) + tl.load(base_ptr + 1), mask=mask)


@triton.jit
def store_amax(out_ptr, given_ptr, o_group, inside, mask):
    """Store the amax that was given for every group, or zero."""
    amax = tl.zeros_like(o_group).to(tl.float32)
    if given_ptr is not None:
        amax = tl.load(given_ptr + o_group, mask=inside, other=0.0)
    tl.store(out_ptr + o_group, amax, mask=mask)


@triton.jit
def group_table(offsets_ptr, groups, total, uniform, UNIFORM: tl.constexpr, TR: tl.constexpr, GROUPS: tl.constexpr):
    """Return, for GROUPS groups: their number, whether they exist, first row, end, tiles, tiles up to their last."""
    o_group = tl.arange(0, GROUPS)
    inside = o_group < groups
    if UNIFORM:
        start, end = o_group * uniform, (o_group + 1) * uniform
    else:
        start = tl.load(offsets_ptr + o_group - 1, mask=(o_group > 0) & (o_group <= groups), other=0).to(tl.int32)
        end = tl.load(offsets_ptr + o_group, mask=inside, other=0).to(tl.int32)
    # Offsets that are no cumulative ends give wrong groups, but no access outside.
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.where(inside, tl.minimum(tl.maximum(end, start), total), total)
    count = tl.where(inside, (end - start + TR - 1) // TR, 0)
    return o_group, inside, start, end, count, tl.cumsum(count, axis=0)


@triton.jit
def find_group(tile, offsets_ptr, groups, total, TR: tl.constexpr, GROUPS: tl.constexpr):
    """Return what `group_of_tile` does without a plan: for kernels of few programs."""
    o_group, inside, start, end, count, last = group_table(offsets_ptr, groups, total, 0, False, TR, GROUPS)
    group = tl.sum((inside & (last <= tile)).to(tl.int32), axis=0)
    own = o_group == group
    first = tl.sum(tl.where(own, last - count, 0), axis=0)
    return group, tl.sum(tl.where(own, start, 0), axis=0), tl.sum(tl.where(own, end, 0), axis=0), first


@triton.jit
def store_plan(table_ptr, o_group, inside, start, end, count, last, groups, tiles, TILES: tl.constexpr):
    """Write a program's part of a plan: the first one's is the table, everyone's are the groups of TILES tiles."""
    if tl.program_id(0) == 0:
        mask = o_group <= groups
        tl.store(table_ptr + o_group * 3, start, mask=mask)
        tl.store(table_ptr + o_group * 3 + 1, end, mask=mask)
        tl.store(table_ptr + o_group * 3 + 2, last - count, mask=mask)
    o_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = (last[None, :] <= o_tile[:, None]) & inside[None, :]
    tl.store(table_ptr + (groups + 1) * 3 + o_tile, tl.sum(before.to(tl.int32), axis=1), mask=o_tile < tiles)


class OfBoth(NamedTuple):
    """A number of a plan, and of the one with tiles of another size; 0 without."""

    own: int
    other: int = 0


@jit(do_not_specialize=("groups", "total", "uniform", "tiles"))
def plan_kernel(
    offsets_ptr, table_ptr, other_ptr, row_amax_ptr, col_amax_ptr, row_given_ptr, col_given_ptr,
    draws_ptr, signs_ptr, draw_ptr, sign_ptr, groups, total, uniform, tiles,
    UNIFORM: tl.constexpr, TR: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program 0 writes the table, the draws and the maxima; every program the groups of TILES tiles.

    tiles, TR: how many, and their rows. other_ptr: of the other plan, or None. The groups of tiles lie behind a table.
    """
    overlap.begin(OVERLAP)
    o_group, inside, start, end, count, last = group_table(offsets_ptr, groups, total, uniform, UNIFORM, TR.own, GROUPS)
    store_plan(table_ptr, o_group, inside, start, end, count, last, groups, tiles.own, TILES)
    if other_ptr is not None:
        _, _, _, _, count, last = group_table(offsets_ptr, groups, total, uniform, UNIFORM, TR.other, GROUPS)
        store_plan(other_ptr, o_group, inside, start, end, count, last, groups, tiles.other, TILES)
    if tl.program_id(0) == 0:
        mask = o_group <= groups
        store_amax(row_amax_ptr, row_given_ptr, o_group, inside, mask)
        store_amax(col_amax_ptr, col_given_ptr, o_group, inside, mask)
        if draw_ptr is not None:
            store_draws(draws_ptr, draw_ptr, o_group, mask)
        if sign_ptr is not None:
            store_draws(signs_ptr, sign_ptr, o_group, mask)


def most_tiles(groups: int, total: int, tile_rows: int) -> int:
    """Return how many tiles groups of any sizes may need: one more than padding takes, which the tail may start."""
    return padded_groups(total, groups, tile_rows) // tile_rows + 1


PRODUCT_ROWS = 128
"""Rows of the tiles of most grouped products: a quantization before one plans them as well."""


def plan_groups(
    offsets: Tensor | None,
    groups: int,
    total: int,
    tile_rows: int | tuple[int, int],
    device: torch.device,
    bases: tuple[Tensor | None, Tensor | None] = (None, None),
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> GroupPlan:
    """Return the plan of groups of rows.

    Args:
        offsets: integer [E], cumulative ends; None: all groups have total / E rows.
        groups: E.
        total: rows, the tail's included.
        tile_rows: rows of a tile, a power of two; or two, of which the second is that of `others`.
        bases: int64 [2], of the operands' Draw and of their signs', or None.
        amaxes: fp32 [E], of both orientations where they were given.
    """
    rows = (tile_rows,) if isinstance(tile_rows, int) else tile_rows
    tiles = [most_tiles(groups, total, n) for n in rows]
    own = [None if base is None else torch.empty(groups + 1, 2, dtype=torch.int64, device=device) for base in bases]
    tables = [torch.empty((groups + 1) * 3 + n, dtype=torch.int32, device=device) for n in tiles]
    amax = [torch.empty(groups + 1, dtype=torch.float32, device=device) for _ in amaxes]
    plan_kernel[(ceil_div(max(tiles), TILES_PER_PROGRAM),)](
        offsets,
        tables[0],
        tables[1] if tables[1:] else None,
        *amax,
        *amaxes,
        *own,
        *bases,
        groups,
        total,
        total // groups,
        OfBoth(*tiles),
        UNIFORM=offsets is None,
        TR=OfBoth(*rows),
        GROUPS=triton.next_power_of_2(groups + 1),
        TILES=TILES_PER_PROGRAM,
        **overlap.launch_options(device),
    )
    parts = [table.split(((groups + 1) * 3, n)) for table, n in zip(tables, tiles, strict=True)]
    others = [
        GroupPlan(table.view(-1, 3), of_tile, None, None, (amax[0], amax[1]), groups, n)
        for (table, of_tile), n in zip(parts[1:], rows[1:], strict=True)
    ]
    table, of_tile = parts[0]
    return GroupPlan(table.view(-1, 3), of_tile, *own, (amax[0], amax[1]), groups, rows[0], tuple(others))


def tiles_of_pass(groups: EndsOfGroups | None, tile_rows: int) -> int | tuple[int, int]:
    """Return the rows of tiles that the first plan of a pass has: its own, and those that products will ask for."""
    return tile_rows if not isinstance(groups, GroupEnds) or tile_rows == PRODUCT_ROWS else (tile_rows, PRODUCT_ROWS)


def keep_plan(groups: EndsOfGroups | None, plan: GroupPlan) -> GroupPlan:
    """Return a plan, after noting it for what follows in its pass."""
    if isinstance(groups, GroupEnds):
        groups.plans += [plan, *plan.others]
    return plan


def plan_of_products(groups: EndsOfGroups, count: int, total: int, tile_rows: int, device: torch.device) -> GroupPlan:
    """Return where groups and tiles lie: from a plan that their pass has made, or by a launch.

    Args:
        groups: of tokens; all products of a pass are of as many.
        count: E.
        total, tile_rows, device: as for `plan_groups`.
    """
    for plan in groups.plans if isinstance(groups, GroupEnds) else ():
        if plan.tile_rows == tile_rows:
            assert plan.tiles == most_tiles(count, total, tile_rows), "one pass has as many tokens throughout"
            return plan
    return keep_plan(groups, plan_groups(as_offsets(groups), count, total, tile_rows, device))
