"""The storage plan: nothing overlaps, nothing is lost, shares are even, and a parameter costs 0.504 bytes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.distributed.plan import UNIT, Item, scale_room, scale_runs, storage_plan
from halfbyte.pieces import code_bytes, cut_tile_rows, tiles_before


@st.composite
def items(draw):
    shapes = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90), st.booleans()), min_size=1, max_size=6))
    return [Item(str(i), *shape) for i, shape in enumerate(shapes)]


@given(items(), st.integers(1, 9), st.integers(1, 5000))
def test_every_element_has_one_place_and_one_rank(things, world, bucket_numel):
    plan = storage_plan(things, world, bucket_numel)
    placed = [place.item.name for bucket in plan for place in bucket.places]
    assert sorted(placed) == sorted(item.name for item in things)
    for bucket in plan:
        assert bucket.share % UNIT == 0 and len({place.item.tiled for place in bucket.places}) == 1
        owner = torch.full((bucket.numel,), -1)
        for place in bucket.places:
            assert place.first % UNIT == 0 and place.pitch >= place.item.cols
            mine = owner[place.first : place.first + place.numel]
            assert mine.numel() == place.numel and (mine == -1).all(), "places overlap or leave the bucket"
            for rank in range(world):
                part = bucket.part(place, rank)
                if part is not None:
                    assert (mine[part.start : part.stop] == -1).all()
                    mine[part.start : part.stop] = rank
            assert (mine >= 0).all()
        rank_of = torch.arange(bucket.numel) // bucket.share
        assert torch.equal(owner[owner >= 0], rank_of[owner >= 0])


@given(items(), st.integers(1, 9))
def test_a_tile_belongs_to_the_rank_of_its_first_element(things, world):
    for bucket in storage_plan(things, world, 4000):
        if not bucket.tiled:
            continue
        owners = []
        for place in bucket.places:
            assert place.first_tile == len(owners)
            for row in range(0, place.item.rows, 16):
                for col in range(0, place.item.cols, 16):
                    owners.append((place.first + row * place.pitch + col) // bucket.share)
        runs = bucket.tile_runs
        assert runs[0] == 0 and runs[-1] == len(owners) and owners == sorted(owners)
        assert [owners.count(rank) for rank in range(world)] == [b - a for a, b in pairwise(runs)]


@given(items(), st.integers(1, 9), st.integers(1, 5000))
def test_every_scale_travels_once_in_a_row_without_gaps(things, world, bucket_numel):
    plan = storage_plan(things, world, bucket_numel)
    runs, next_tile, filled = scale_runs(plan), 0, [0] * world
    for run in runs:
        assert run.first_tile == next_tile and run.first == filled[run.rank], "a gap, or scales that overlap"
        next_tile, filled[run.rank] = run.first_tile + run.count, run.first + run.count
    tiles = [place.tile_count for bucket in plan if bucket.tiled for place in bucket.places]
    assert next_tile == sum(tiles) == sum(filled) and scale_room(plan) == max(filled)


@pytest.mark.parametrize("world", (2, 4, 8))
def test_a_parameter_costs_half_a_byte_and_a_256th(world):
    things = [Item(str(i), 2048, 5632 if i % 3 else 2048, True) for i in range(24)]
    plan = storage_plan(things, world, 1 << 25)
    gathered = sum(bucket.numel / 2 for bucket in plan) + scale_room(plan) * world
    assert gathered / sum(item.rows * item.cols for item in things) < 0.5045


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 1500), st.integers(0, 1500))
def test_code_bytes_are_those_of_the_elements(cols, padding, a, b):
    pitch, (start, stop) = cols + padding, sorted((a, b))
    row_bytes = -(-cols // 16) * 8
    touched = {e // pitch * row_bytes + e % pitch // 2 for e in range(start, stop) if e % pitch < cols}
    first, last = code_bytes(cols, pitch, start, stop)
    assert all(first <= byte < last for byte in touched)
    if padding == 0 and touched:
        end = max(touched) + 1
        row_ends = stop % pitch == 0
        assert first == min(touched) and (last == end or (row_ends and last == -(-end // row_bytes) * row_bytes))


def test_cut_tile_rows():
    assert cut_tile_rows(20, 40, [0, 320, 321, 640, 799, 800]) == [1, 2]
    assert cut_tile_rows(20, 40, [0, 800]) == []
    assert tiles_before(0, 0) == 0
    assert [tiles_before(2, 16 * n) for n in (0, 1, 2, 3, 31, 32, 33, 34)] == [0, 1, 2, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("arguments", ((0, 10), (2, 0)))
def test_refusals(arguments):
    with pytest.raises(ValueError, match="give a positive number"):
        storage_plan([Item("w", 2, 2, True)], *arguments)


def test_a_bucket_is_closed_once_it_has_its_elements():
    four = [Item(name, 1, 64, False) for name in "abcd"]
    for size, wanted in (
        (63, ["a", "b", "c", "d"]),
        (64, ["a", "b", "c", "d"]),
        (65, ["ab", "cd"]),
        (129, ["abc", "d"]),
    ):
        plans = storage_plan(four, 1, size)
        assert ["".join(place.item.name for place in plan.places) for plan in plans] == wanted, size


def test_a_border_between_rows_of_tiles_cuts_none():
    """Of 64 rows of 32 elements, 512 to a row of tiles."""
    assert cut_tile_rows(32, 64, [0, 512, 1024, 2048]) == []
    assert cut_tile_rows(32, 64, [8, 512, 520, 1016, 2040, 2048, 2056]) == [0, 1, 3]
