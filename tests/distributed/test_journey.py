"""How tokens travel to their experts: places that are worked out, beside those that sorting finds."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from halfbyte.distributed.journey import Holders, Journey, Leaving, journey


def journeys(world: int, offsets: list[torch.Tensor], tokens: int, capacity: int | None) -> list[Journey]:
    """Return the journeys of ranks, each a thread that hands the others its rows."""
    made, said = run_ranks(world, offsets, tokens, capacity)
    assert said == [""] * world
    return made


def run_ranks(
    world: int, offsets: list[torch.Tensor], tokens: int, capacity: int | None, kinds: Sequence[dict[str, Any]] = ()
) -> tuple[list, list[str]]:
    """Return the journeys of ranks, and what those say that raise ValueError; `kinds`: of each rank's tokens."""
    box: dict[int, Any] = {}
    barrier, made, said = threading.Barrier(world, timeout=30), [None] * world, [""] * world

    class Ranks(Holders):
        def exchange(self, t, received, sent):
            box[self.rank] = t.split(sent)
            barrier.wait()
            found = torch.cat([box[rank][self.rank] for rank in range(self.world)])
            barrier.wait()
            return found

    def run(rank: int) -> None:
        ranks = Ranks(experts=len(offsets[0]), world=world, rank=rank, group="")
        try:
            given = kinds[rank] if kinds else {"features": 16, "dtype": torch.bfloat16}
            made[rank] = journey(ranks, offsets[rank], Leaving(count=tokens, **given), capacity)
        except ValueError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made, said


def sorted_rows(world: int, offsets: list[torch.Tensor], each: int, capacity: int | None) -> list[list[tuple]]:
    """Return for each rank (expert, from rank, row there) of what arrives, sorted by these; None for rows of zeros."""
    found = []
    for here in range(world):
        rows: list[tuple] = []
        for rank, ends in enumerate(offsets):
            starts = [0, *ends.tolist()[:-1]]
            mine = range(min(here * each, len(starts)), min((here + 1) * each, len(starts)))
            own = [(e, rank, row) for e in mine for row in range(starts[e], int(ends[e]))]
            rows += own if capacity is None else own[:capacity]
        found.append(sorted(rows))
    return found


@pytest.mark.parametrize("capacity", [None, 1, 5, 64])
@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 8), (3, 7), (4, 2)])
def test_rows_lie_as_sorting_lays_them(world, experts, capacity):
    draw, tokens, each = random.Random(world * 10 + experts), 40, -(-experts // world)
    offsets = [torch.tensor(sorted(draw.randrange(tokens) for _ in range(experts))).int() for _ in range(world)]
    made = journeys(world, offsets, tokens, capacity)
    leaving = []
    for rank, how in enumerate(made):
        rows = torch.arange(tokens) if how.picked is None else torch.cat((torch.arange(tokens), torch.tensor([-1])))
        chosen = rows[: sum(how.sent)] if how.picked is None else rows[how.picked]
        leaving.append([[(rank, row) for row in part.tolist()] for part in chosen.split(how.sent)])
    wanted = sorted_rows(world, offsets, each, capacity)
    for here, how in enumerate(made):
        came = [row for rank in range(world) for row in leaving[rank][here]]
        assert how.order.dtype == how.back.dtype == torch.int64 and how.offsets.dtype == torch.int32
        assert [came[i] for i in how.order.tolist()][: len(wanted[here])] == [row[1:] for row in wanted[here]]
        assert all(came[i][1] == -1 for i in how.order.tolist()[len(wanted[here]) :])
        assert how.order[how.back].tolist() == list(range(len(came)))
        first = min(here * each, experts)
        ends = [sum(row[0] <= e for row in wanted[here]) for e in range(first, min(first + each, experts))]
        assert how.offsets.tolist() == ends
        if how.placed is not None and how.picked is not None:
            sent = [place for place in how.placed.tolist() if place < world * (capacity or 0)]
            assert [int(how.picked[place]) for place in sent] == sorted(set(how.picked.tolist()) - {tokens})
            assert how.dropped == int(offsets[here][-1]) - len(sent)


@pytest.mark.parametrize("capacity", [None, 4, 64])
@pytest.mark.parametrize(
    ("ends", "what"),
    [
        ((5, 3, 8, 10), "group 1 ends at 3, before it begins, at 5"),
        ((5, 8, 4, 10), "group 2 ends at 4, before it begins, at 8"),
        ((-1, 3, 8, 10), "group 0 ends at -1, before it begins, at 0"),
        ((5, 6, 8, 13), "they end at 13 of 12 tokens"),
        ((1 << 40, 6, 8, 10), f"group 1 ends at 6, before it begins, at {1 << 40}"),
    ],
)
@pytest.mark.parametrize("wrong", [0, 1])
def test_ends_that_one_rank_has_wrong_raise_on_every_rank(wrong, ends, what, capacity):
    offsets = [torch.tensor([2, 2, 7, 12])] * 2
    offsets[wrong] = torch.tensor(ends)
    _, said = run_ranks(2, offsets, 12, capacity)
    assert said[wrong] == f"offsets: {what}; give the cumulative ends of the groups"
    assert said[1 - wrong] == (
        f"rank {wrong} of those that share the experts has no tokens with cumulative ends of their groups; it says "
        "what is wrong with them"
    )


@pytest.mark.parametrize("capacity", [None, 4, 64])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"features": 16, "dtype": torch.float32}, "torch.float32 with 16 features"),
        ({"features": 16, "dtype": torch.float16}, "torch.float16 with 16 features"),
        ({"features": 17, "dtype": torch.bfloat16}, "torch.bfloat16 with 17 features"),
        ({"features": 1 << 20, "dtype": torch.float32}, "torch.float32 with 1048576 features"),
    ],
)
def test_tokens_of_another_dtype_or_width_raise_on_every_rank(other, named, capacity):
    usual = {"features": 16, "dtype": torch.bfloat16}
    _, said = run_ranks(3, [torch.tensor([2, 2, 7, 12, 12])] * 3, 12, capacity, [usual, other, usual])
    starts = [text.partition(";")[0] for text in said]
    this, mine = "x: this rank of those that share the experts brings", "torch.bfloat16 with 16 features"
    assert starts[0] == starts[2] == f"{this} {mine}, rank 1 {named}"
    assert starts[1] == f"{this} {named}, rank 0 {mine}, rank 2 {mine}"


@pytest.mark.parametrize("capacity", [None, 4])
def test_all_ranks_are_named_whose_ends_are_wrong(capacity):
    offsets = [torch.tensor([5, 3, 8]), torch.tensor([2, 7, 12]), torch.tensor([5, 6, 13])]
    _, said = run_ranks(3, offsets, 12, capacity)
    assert [text.partition(";")[0] for text in said] == [
        "offsets: group 1 ends at 3, before it begins, at 5",
        "rank 0, 2 of those that share the experts has no tokens with cumulative ends of their groups",
        "offsets: they end at 13 of 12 tokens",
    ]
