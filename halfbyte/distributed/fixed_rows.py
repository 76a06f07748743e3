"""Rows of an embedding in messages whose size depends on no id: the host waits for nothing.

All ranks are sent the ids of all tokens, and every rank sends its rows for them, in the tokens' order; what stands
there for a token whose row another rank keeps is never read. Backward, all ranks are sent the gradients of all tokens,
and each adds up those of its rows: a rank's as `torch.nn.Embedding` does, then the ranks' in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.scales import all_gather
from halfbyte.layout import ceil_div

if TYPE_CHECKING:
    from halfbyte.distributed.embedding_rows import ShardedEmbedding

ID_BYTES = 8
NOBODY = -1
"""What stands in a message for a token that is not there."""
WRONG = -2
"""What a rank sends in the place of ids or counts if its ids are wrong."""


def row_bytes_exchanged(tokens: int, world: int, dim: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes that reach a rank in a micro-batch: with counts, at most; and in messages of one size.

    Args:
        tokens: of each rank.
        world: ranks that share the rows.
        dim: of a row.
        sizes: bytes of an element of rows, and of gradients as they are added up. Those of tokens travel as rows do.
    """
    return tokens * (dim * sum(sizes) + ID_BYTES), (world - 1) * tokens * (2 * dim * sizes[0] + ID_BYTES)


class FixedRows(torch.autograd.Function):
    """The rows [ids, dim] of a batch, int64 [ids]; their gradients reach those that keep them."""

    @staticmethod
    def forward(ctx: Any, embedding: ShardedEmbedding, ids: Tensor, local: Tensor) -> Tensor:
        known = (ids.clamp(0, embedding.num_embeddings - 1) == ids).all()
        group, world = embedding.group, dist.get_world_size(embedding.group)
        chunk = ceil_div(embedding.num_embeddings, world)
        own = torch.where(known, _filled(ids, embedding.room(len(ids)), NOBODY), WRONG)
        every = own.new_empty(world * len(own))
        all_gather(every, own, group=group)
        check_ids(ids, known, every, embedding)
        place = every.sub_(chunk * dist.get_rank(group))
        sent = _rows_at(local, place).to(embedding.precision.rows)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent, group=group)
        embedding.traffic["rows"] += (world - 1) * (own.nbytes + come.nbytes // world)
        embedding.traffic["exchanges"] += 1
        ctx.embedding = embedding
        ctx.save_for_backward(place, local)
        owner = torch.div(ids, chunk, rounding_mode="floor")
        return come.index_select(0, torch.arange(len(ids), device=ids.device).add_(owner, alpha=len(own)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        place, local = ctx.saved_tensors
        embedding = ctx.embedding
        embedding.kept.append((place, dy))
        if not embedding.sends_gradients:
            return None, None, torch.zeros_like(local)
        batches = list(embedding.kept)
        embedding.kept.clear()
        return None, None, embedding.averaged(_added_up(embedding, batches, local), local)


def check_ids(ids: Tensor, known: Tensor, every: Tensor, embedding: ShardedEmbedding) -> None:
    """Raise IndexError if an id names no row; on a GPU the device reports it, and the host goes on.

    Args:
        ids: of this rank.
        known: bool [], whether all of them name rows.
        every: the messages of all ranks.
        embedding: whose rows they name.
    """
    if ids.is_cuda:
        torch._assert_async((every != WRONG).all(), "an id of a rank that shares the embedding names no row")
        return
    if not bool(known):
        raise_out_of_range(ids, embedding.num_embeddings)
    messages = every.view(dist.get_world_size(embedding.group), -1)
    refuse_wrong((messages == WRONG).any(1).nonzero().flatten().tolist())


def raise_out_of_range(ids: Tensor, rows: int) -> NoReturn:
    """Raise IndexError for ids of which one names no row."""
    if int(ids.min()) < 0:
        raise IndexError(f"ids: {int(ids.min())} names no row")
    raise IndexError(f"ids: the embedding has {rows} rows, and one of {int(ids.max())} is asked")


def refuse_wrong(ranks: list[int]) -> None:
    """Raise IndexError if ranks have told that their ids are wrong."""
    if ranks:
        named = ", ".join(map(str, ranks))
        raise IndexError(f"ids of rank {named} of those that share the embedding name no row; it says which")


def _filled(given: Tensor, room: int, value: float) -> Tensor:
    """Return a tensor of `room` rows, whose last ones, if it has fewer, are of one value."""
    if len(given) == room:
        return given.contiguous()
    return torch.cat((given, given.new_full((room - len(given), *given.shape[1:]), value)))


def _rows_at(local: Tensor, place: Tensor) -> Tensor:
    """Return the rows at places that are here, and any for the others."""
    if not len(local):
        return local.new_zeros(len(place), local.shape[1])
    return local.index_select(0, place.clamp(0, len(local) - 1))


def _added_up(embedding: ShardedEmbedding, batches: list[tuple[Tensor, Tensor]], local: Tensor) -> Tensor:
    """Return the sum of gradients of this rank's rows: of every rank over its micro-batches, then over the ranks."""
    group, world = embedding.group, dist.get_world_size(embedding.group)
    wide = embedding.precision.gradients
    sums: list[Tensor | None] = [None] * world
    for place, dy in batches:
        own = _filled(dy, len(place) // world, 0.0)
        every = own.new_empty(len(place), own.shape[1])
        all_gather(every, own, group=group)
        embedding.traffic["gradients"] += (world - 1) * own.nbytes
        for rank, (at, gradients) in enumerate(zip(place.chunk(world), every.chunk(world), strict=True)):
            sums[rank] = _plus(sums[rank], _of_rows(local, at, gradients), wide)
    total: Tensor | None = None
    for one in sums:
        total = _plus(total, one, wide)
    assert total is not None, "there is a rank, and a micro-batch"
    return total.to(wide)


def _of_rows(local: Tensor, place: Tensor, gradients: Tensor) -> Tensor:
    """Return the gradient of the rows here that one rank's tokens make, as `torch.nn.Embedding` makes it."""
    count = len(local)
    if not count:
        return gradients.new_zeros(local.shape)
    # Of a token whose row is elsewhere nothing is added: its row is one behind the last, which is left out.
    row = torch.where(place.clamp(0, count - 1) == place, place, count)
    return torch.ops.aten.embedding_dense_backward(gradients, row, count + 1, count, False)[:count]


def _plus(total: Tensor | None, one: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """Return the sum in `wide` of what may not be there; what is narrower is widened as it is added."""
    if total is None or one is None:
        return one if total is None else total
    return total.to(wide).add_(one if torch.promote_types(one.dtype, wide) == wide else one.to(wide))
