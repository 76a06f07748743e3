"""Tokens on their way to the ranks that hold their experts, and back.

A rank has tokens sorted by expert, of all experts; it ends up with the tokens of all ranks for the experts that it
holds, sorted by expert and within one by rank: the order that they have in one process whose tokens are those of rank
0, then those of rank 1 and so on. Everything here moves rows and rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.derivatives import first_order, refusals
from halfbyte.layout import Blocks, Operand
from halfbyte.sides import Side
from halfbyte.spec import NVFP4

TRAVEL = refusals("the way of tokens to their experts", "run the experts in one process")
Way = Callable[[Tensor], Tensor]
WRONG = -1
"""What a rank sends in the place of every count if its offsets are wrong: no cumulative end is so small."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""As what tokens travel."""


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Who holds which experts: rank r those from r * each to (r + 1) * each, as torch shards a dimension.

    experts: of all ranks.
    world, rank, group: of this process, and the name of the process group.
    """

    experts: int
    world: int
    rank: int
    group: str

    @property
    def each(self) -> int:
        """Experts of every rank but, where they do not divide, the last ones."""
        return -(-self.experts // self.world)

    @property
    def first(self) -> int:
        """The first expert that is here."""
        return min(self.rank * self.each, self.experts)

    @property
    def counts(self) -> list[int]:
        """How many experts each rank holds."""
        borders = [min(rank * self.each, self.experts) for rank in range(self.world + 1)]
        return [stop - start for start, stop in pairwise(borders)]

    @property
    def here(self) -> int:
        """How many experts are here."""
        return self.counts[self.rank]

    def exchange(self, t: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the rows that come: `received[r]` from rank r, to which go `sent[r]` of t, in turn."""
        if self.world == 1:
            return t
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_to_all_single(t.contiguous(), received, sent, self.group))


@dataclass(frozen=True, eq=False)
class Journey:
    """How the tokens of one forward travel.

    ranks: that share the experts.
    tokens: rows of x, of which padding stays where it is.
    sent, received: rows to and from every rank.
    picked: int64, which rows of x are sent, `tokens` for a row of zeros; None: the first ones, in their order.
    placed: int64 [tokens], of every row of x its place among those that are sent, or one behind them if it is not;
        None: as picked.
    order: int64, of every row that is here its place among those that were received.
    back: int64, of every row that was received its place among those that are here.
    offsets: int32, cumulative ends of the groups of experts that are here.
    dropped: int64 [], tokens of this rank beyond the capacity; None without one.
    """

    ranks: Holders
    tokens: int
    sent: list[int]
    received: list[int]
    picked: Tensor | None
    placed: Tensor | None
    order: Tensor
    back: Tensor
    offsets: Tensor
    dropped: Tensor | None

    def to_experts(self, t: Tensor) -> Tensor:
        """Return rows of this rank's tokens [tokens, ...] as rows of the experts that are here."""
        leaving = t[: sum(self.sent)] if self.picked is None else _with_zeros(t)[self.picked]
        return self.ranks.exchange(leaving, self.received, self.sent)[self.order]

    def to_tokens(self, t: Tensor) -> Tensor:
        """Return rows of the experts that are here as rows of this rank's tokens; zeros for those that stayed."""
        arrived = self.ranks.exchange(t[self.back], self.sent, self.received)
        if self.placed is not None:
            return _with_zeros(arrived)[self.placed]
        behind = self.tokens - arrived.shape[0]
        return torch.cat((arrived, arrived.new_zeros(behind, *arrived.shape[1:]))) if behind else arrived


def _with_zeros(t: Tensor) -> Tensor:
    return torch.cat((t, t.new_zeros(1, *t.shape[1:])))


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """What a rank has to send.

    count: rows, padding included.
    features: of each.
    dtype: one of DTYPES.
    """

    count: int
    features: int
    dtype: torch.dtype

    @property
    def kind(self) -> int:
        """What has to be equal on all ranks, as one number."""
        return self.features * len(DTYPES) + DTYPES.index(self.dtype)


def _named(kind: int) -> str:
    """Return what a number of `Leaving.kind` stands for."""
    return f"{DTYPES[kind % len(DTYPES)]} with {kind // len(DTYPES)} features"


def journey(ranks: Holders, offsets: Tensor, tokens: Leaving, capacity: int | None) -> Journey:
    """Return how the tokens of all ranks travel; all of them must call this together.

    Args:
        ranks: that share the experts.
        offsets: integer [experts], cumulative ends of the groups of this rank's tokens.
        tokens: of this rank.
        capacity: rows that one rank sends another, whatever the tokens choose; None: as many as there are, which the
            host has to know.

    Raises:
        ValueError: offsets of some rank descend or end behind its tokens, or ranks bring other dtypes or numbers of
            features; on every rank. Beside a capacity no host waits for a GPU, whose device reports it, on every rank
            too.
    """
    ends = offsets.long()
    missing = ranks.world * ranks.each - ranks.experts
    if missing:
        ends = torch.cat((ends, ends[-1:].expand(missing)))
    ends = ends.view(ranks.world, ranks.each)
    return _as_counted(ranks, ends, tokens) if capacity is None else _within_capacity(ranks, ends, tokens, capacity)


def _as_counted(ranks: Holders, ends: Tensor, tokens: Leaving) -> Journey:
    """Return how all tokens travel; `ends` of groups are [world, each]."""
    starts = _starts(ends)
    kinds, received = _exchanged(ranks, _marked(ends - starts[:, None], ends, tokens.count), tokens.kind)
    offsets, places = _sorted(received)
    sizes = received.diff(dim=1, prepend=received.new_zeros(ranks.world, 1))
    come = sizes.sum(1)
    places = (places - (come.cumsum(0) - come)[:, None]).flatten()  # of a row among those of all ranks
    counts = torch.cat((ends[:, -1] - starts, come, _wrong(received), kinds))
    sent, came, wrong, found = counts.view(4, ranks.world).tolist()  # the one time that the host waits
    if any(wrong) or any(kind != tokens.kind for kind in found):
        raise ValueError(_said(ranks, wrong, found, ends, tokens))
    rows = torch.arange(sum(came), device=ends.device)
    back = places.repeat_interleave(sizes.flatten(), output_size=sum(came)).add_(rows)
    return Journey(ranks, tokens.count, sent, came, None, None, _inverse(back, rows), back, offsets, None)


def _within_capacity(ranks: Holders, ends: Tensor, tokens: Leaving, capacity: int) -> Journey:
    """Return how at most `capacity` tokens travel from each rank to each; `ends` of groups are [world, each]."""
    starts, rows = _starts(ends), torch.arange(ranks.world * capacity, device=ends.device)
    kept, count = (ends - starts[:, None]).clamp(max=capacity), tokens.count
    kinds, received = _exchanged(ranks, _marked(kept, ends, count), tokens.kind)
    check_received(ranks, (kinds, received), ends, tokens)
    place, leaving = rows[:capacity], kept[:, -1]
    picked = torch.where(place < leaving[:, None], starts[:, None] + place, count).flatten()
    placed = ends.new_full((count + 1,), ranks.world * capacity).scatter_(0, picked, rows)[:count]
    # Of every row that comes its expert; behind the last one zeros, as if they were one expert's more.
    groups = torch.cat((received, received.new_full((ranks.world, 1), capacity)), 1)
    of_rows = torch.searchsorted(groups, place.expand(ranks.world, -1).contiguous(), right=True)
    offsets, places = _sorted(groups)
    back = (places.gather(1, of_rows) + place).flatten()
    sizes = [capacity] * ranks.world
    dropped = ends[-1, -1] - leaving.sum()
    order = _inverse(back, rows)
    return Journey(ranks, count, sizes, sizes, picked, placed, order, back, offsets[: ranks.here], dropped)


def _starts(ends: Tensor) -> Tensor:
    """Return where the rows for each rank begin, int64 [world]."""
    return torch.cat((ends.new_zeros(1), ends[:-1, -1]))


def _marked(leaving: Tensor, ends: Tensor, tokens: int) -> Tensor:
    """Return what ranks are told of groups, WRONG throughout if these do not ascend or end behind the tokens."""
    borders = torch.cat((ends.new_zeros(1), ends.flatten(), ends.new_full((1,), tokens)))
    return leaving.masked_fill(borders.diff().amin() < 0, WRONG)


def _wrong(received: Tensor) -> Tensor:
    """Return of which ranks the offsets are wrong, bool [world]."""
    return (received < 0).any(1)


def check_received(ranks: Holders, received: tuple[Tensor, Tensor], ends: Tensor, tokens: Leaving) -> None:
    """Raise ValueError if offsets of a rank are wrong or its tokens others; a GPU reports it, and its host goes on.

    Args:
        ranks: that share the experts.
        received: what they tell of their tokens, and of their groups.
        ends: of this rank's groups, [world, each].
        tokens: of this rank.
    """
    kinds, wrong = received[0], _wrong(received[1])
    if wrong.is_meta:
        return
    if wrong.is_cuda or type(wrong) is not Tensor:  # a fake one has no values either
        fits = ~(wrong | (kinds != tokens.kind)).any()
        torch._assert_async(fits, "ranks that share experts bring other tokens, or no cumulative ends of their groups")
        return
    found = kinds.tolist()
    if bool(wrong.any()) or any(kind != tokens.kind for kind in found):
        raise ValueError(_said(ranks, wrong.tolist(), found, ends, tokens))


def tell_of_failure(ranks: Holders, device: torch.device) -> None:
    """Let the others raise that would wait for a rank which has no tokens or no offsets for them."""
    _exchanged(ranks, torch.full((ranks.world, ranks.each), WRONG, device=device, dtype=torch.int64), WRONG)


def _said(ranks: Holders, wrong: list[int], kinds: list[int], ends: Tensor, tokens: Leaving) -> str:
    """Return what is wrong with this rank's offsets, or whose are, or whose tokens are others."""
    if not any(wrong):
        others = ", ".join(f"rank {rank} {_named(kind)}" for rank, kind in enumerate(kinds) if kind != tokens.kind)
        return (
            f"x: this rank of those that share the experts brings {_named(tokens.kind)}, {others}; bring tokens of one "
            "dtype, cast or under one autocast, and of one width"
        )
    if not wrong[ranks.rank]:
        named = ", ".join(str(rank) for rank, is_wrong in enumerate(wrong) if is_wrong)
        return (
            f"rank {named} of those that share the experts has no tokens with cumulative ends of their groups; it says "
            "what is wrong with them"
        )
    borders = [0, *ends.flatten().tolist()[: ranks.experts]]
    found = (f"group {g} ends at {b}, before it begins, at {a}" for g, (a, b) in enumerate(pairwise(borders)) if b < a)
    what = next(found, f"they end at {borders[-1]} of {tokens.count} tokens")
    return f"offsets: {what}; give the cumulative ends of the groups"


def _exchanged(ranks: Holders, ends: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Return of each rank its tokens' kind, int64 [world], and the cumulative ends of its groups that come here.

    Args:
        ranks: that share the experts.
        ends: int64 [world, each], of the groups that go to each rank.
        kind: of this rank's tokens.

    Returns:
        The second is int64 [world, here].
    """
    counts = [1 + count for count in ranks.counts]
    told = torch.cat((_repeated(kind, ranks.world, ends.device), ends), 1)
    if min(counts) <= ranks.each:
        told = torch.cat([row[:n] for row, n in zip(told, counts, strict=True)])
    received = ranks.exchange(told.flatten(), [1 + ranks.here] * ranks.world, counts).view(ranks.world, 1 + ranks.here)
    return received[:, 0], received[:, 1:]


@lru_cache(maxsize=256)
def _repeated(kind: int, world: int, device: torch.device) -> Tensor:
    """Return a number for each rank, int64 [world, 1]."""
    return ops.constant(lambda: torch.full((world, 1), kind, dtype=torch.int64, device=device))


def _sorted(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return how rows lie that come sorted by rank, then by group, once they are sorted by group, then by rank.

    Args:
        ends: int64 [world, groups], of each rank the cumulative ends of its rows.

    Returns:
        int32 [groups], the cumulative ends of the groups; and int64 [world, groups], what to add to the place of a row
        among those of its rank.
    """
    until = ends.cumsum(0)
    places, behind = until - ends, until[-1] - until
    places[:, 1:] += behind[:, :-1]  # of the group before, what later ranks have
    return until[-1].to(torch.int32), places


def _inverse(back: Tensor, rows: Tensor) -> Tensor:
    """Return where each of `rows`, which are 0, 1, …, lies in a permutation of them."""
    return torch.empty_like(back).scatter_(0, back, rows)


class Travel(torch.autograd.Function):
    """Rows of tokens as rows of experts, or the other way; their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    @first_order(TRAVEL)
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients), None, None


class CodesToExperts(torch.autograd.Function):
    """Tokens quantized here, dequantized where their experts are; gradients travel back in their values.

    Returns:
        The values, and codes, scales and amaxes, which have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Journey, spec: NVFP4) -> tuple[Tensor, ...]:
        ctx.how = how
        blocks, _ = ops.quantize_row_col(x, Side(spec), None)
        assert blocks is not None, "a row is asked for"
        here = _unpacked(how.to_experts(_packed(blocks)), blocks)
        values = ops.dequantize(Operand(here, spec, x.shape[1]), x.dtype)
        ctx.mark_non_differentiable(*here)
        return values, *here

    @staticmethod
    @first_order(TRAVEL)
    def backward(ctx: Any, dx: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.how.to_tokens(dx), None, None


def _packed(blocks: Blocks) -> Tensor:
    """Return codes, scales and amax of every row as one row of bytes."""
    return torch.cat((blocks.qdata, blocks.block_scale, blocks.amax[:, None].view(torch.uint8)), 1)


def _unpacked(rows: Tensor, like: Blocks) -> Blocks:
    """Return what `_packed` put together, of other rows than those of `like`."""
    widths = like.qdata.shape[1], like.block_scale.shape[1], like.amax.element_size()
    qdata, scale, amax = (part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1))
    return Blocks(qdata, scale, amax.view(torch.float32).flatten())
