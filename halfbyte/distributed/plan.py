"""The storage plan: where every weight lies in the buffers that ranks reduce and gather, computed by one function.

Weights are laid end to end in buckets, all in one numbering of elements, whatever their format. A matrix has rows of
`pitch` elements, its columns rounded up to 16, so that element e of a bucket is byte e / 2 of packed codes, byte 2 e
of bf16 values and entry e of the gradients alike. Every rank has the same number of elements of every bucket, a
multiple of 64: no border cuts a byte, a block of 16 or a vector of 16 bytes, and shares are even in bytes in every
format.

A border may cut a tile, whose scale travels once: it belongs to the rank of the tile's first element. Tiles follow
each other as their first elements do, so those of a rank are a run of them in each bucket, of uneven length. A rank
sends its runs of all buckets at once, in a row with room for those of whoever has most. With 16x16 tiles that is half
a byte of codes and 1/256 of a byte of scale for each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from halfbyte.distributed.cast import Share
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import ceil_div, round_up
from halfbyte.pieces import tiles_before

UNIT = 64
"""Weights and shares start at multiples of this many elements: 32 bytes of codes."""


class Item(NamedTuple):
    """A parameter to be stored: its name, its shape as a matrix, whether it is stored in tiles, its dtype by name."""

    name: str
    rows: int
    cols: int
    tiled: bool
    dtype: str = "bfloat16"


class BucketPlace(NamedTuple):
    """Where a parameter lies in its bucket.

    item: what lies there.
    first: its first element; the element (row, col) is first + row * pitch + col.
    pitch: elements to a row.
    first_tile: the tiles of the bucket before its own.
    """

    item: Item
    first: int
    pitch: int
    first_tile: int

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.item.rows * self.pitch

    @property
    def tile_cols(self) -> int:
        return ceil_div(self.item.cols, NVFP4_BLOCK)

    @property
    def tile_count(self) -> int:
        return ceil_div(self.item.rows, NVFP4_BLOCK) * self.tile_cols if self.item.tiled else 0


class BucketPlan(NamedTuple):
    """What is reduced and gathered at once.

    places: in order.
    share: elements of every rank.
    world: ranks.
    """

    places: tuple[BucketPlace, ...]
    share: int
    world: int

    @property
    def numel(self) -> int:
        return self.share * self.world

    @property
    def tiled(self) -> bool:
        return self.places[0].item.tiled

    def part(self, place: BucketPlace, rank: int) -> Share | None:
        """Return the elements of a parameter that `rank` has, numbered from the parameter's first; None for none."""
        start = min(max(rank * self.share - place.first, 0), place.numel)
        stop = min(max((rank + 1) * self.share - place.first, 0), place.numel)
        return Share(start, stop) if start < stop else None

    def tiles_before(self, rank: int) -> int:
        """Return how many tiles of the bucket belong to lower ranks."""
        count = 0
        for place in self.places:
            element = min(max(rank * self.share - place.first, 0), place.numel)
            count += tiles_before(place.tile_cols, element)
        return count

    @property
    def tile_runs(self) -> tuple[int, ...]:
        """Where each rank's run of tiles starts, and where the last one ends."""
        return tuple(self.tiles_before(rank) for rank in range(self.world + 1))


class ScaleRun(NamedTuple):
    """Scales that one rank sends of one bucket.

    rank: whose.
    first: the first one's place among all that the rank sends.
    first_tile: its tile's number, counted over all tiled buckets.
    count: how many follow each other in both.
    """

    rank: int
    first: int
    first_tile: int
    count: int


def scale_runs(plans: Sequence[BucketPlan]) -> list[ScaleRun]:
    """Return the runs of all scales of the tiled buckets of one group of ranks, in the order of tiles."""
    runs: list[ScaleRun] = []
    tiled = [plan for plan in plans if plan.tiled]
    sent, first_tile = [0] * (tiled[0].world if tiled else 0), 0
    for plan in tiled:
        for rank, (start, stop) in enumerate(pairwise(plan.tile_runs)):
            runs.append(ScaleRun(rank, sent[rank], first_tile + start, stop - start))
            sent[rank] += stop - start
        first_tile += plan.tile_runs[-1]
    return runs


def scale_room(plans: Sequence[BucketPlan]) -> int:
    """Return the bytes of scales that each rank sends: those of whoever has most."""
    return max((run.first + run.count for run in scale_runs(plans)), default=0)


def storage_plan(items: Sequence[Item], world: int, bucket_numel: int) -> tuple[BucketPlan, ...]:
    """Return the buckets of some parameters, in their order.

    Args:
        items: parameters of one group of ranks, in the order in which the forward needs them.
        world: ranks of the group.
        bucket_numel: a bucket is closed once it has this many elements. Tiled and other parameters have buckets of
            their own, and so has every dtype.

    Returns:
        buckets ordered by their first parameter.

    Raises:
        ValueError: world or bucket_numel is not positive.
    """
    for name, value in (("world", world), ("bucket_numel", bucket_numel)):
        if value < 1:
            raise ValueError(f"{name}={value}: give a positive number")
    closed: list[tuple[int, list[BucketPlace]]] = []
    open_: dict[tuple[bool, str], tuple[int, list[BucketPlace]]] = {}
    for index, item in enumerate(items):
        kind = item.tiled, item.dtype
        _, places = open_.setdefault(kind, (index, []))
        pitch = round_up(item.cols, NVFP4_BLOCK) if item.tiled else item.cols
        first = round_up(places[-1].first + places[-1].numel, UNIT) if places else 0
        before = places[-1].first_tile + places[-1].tile_count if places else 0
        places.append(BucketPlace(item, first, pitch, before))
        if first + places[-1].numel >= bucket_numel:
            closed.append(open_.pop(kind))
    closed.extend(open_.values())
    closed.sort(key=lambda bucket: bucket[0])
    return tuple(
        BucketPlan(tuple(places), round_up(max(places[-1].first + places[-1].numel, 1), UNIT * world) // world, world)
        for _, places in closed
    )
