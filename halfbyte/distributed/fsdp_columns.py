"""What dgrad multiplies by where that cannot be made of forward's codes: blocks of w.T, which the ranks quantize.

A block of w.T is 16 rows of a weight (32 of MXFP8) in one column, and a rank's rows begin and end anywhere. It belongs
to the rank that has its first row, to which others send what they have of it: all weights in one exchange, in the
values that are quantized. So the operand is that of the whole weight, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte import ops
from halfbyte.distributed.agree import WeakGroup
from halfbyte.distributed.fsdp_shards import RowShards
from halfbyte.layout import Blocks, Operand, round_up
from halfbyte.sides import both_sides
from halfbyte.spec import Spec

if TYPE_CHECKING:
    from halfbyte.distributed.fsdp_weight import GatheredWeight

# torch 2.13 made it a name that others share.
all_to_all = dist.all_to_all_single


class Columns(NamedTuple):
    """What ranks send of w.T, of a weight whose rows they hold.

    spec: how it is quantized.
    shards: of the rows, in blocks of the spec.
    """

    spec: Spec
    shards: RowShards

    @classmethod
    def of(cls, spec: Spec, shards: RowShards) -> Columns:
        """Return that of rows that are split so."""
        return cls(spec, shards._replace(height=spec.block_length))

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the codes and scale bytes in everybody's message."""
        sent = self.shards.sent_tile_rows
        return (self.shards.cols, sent * self.spec.format.block_bytes), (self.shards.cols, sent)

    @property
    def message_bytes(self) -> int:
        """What every rank sends."""
        return sum(rows * cols for rows, cols in self.shapes)

    def leading(self, rank: int) -> int:
        """Return how many of a rank's first rows lie in a block that began before."""
        start, stop = self.shards.rows_of(rank)
        return min(stop, round_up(start, self.shards.height)) - start

    def owner(self, rank: int) -> int:
        """Return the rank that has the block of a rank's leading rows."""
        start, height = self.shards.rows_of(rank)[0], self.shards.height
        return start // height * height // self.shards.chunk

    def whole(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the codes and scale bytes that arrive."""
        blocks = self.shards.tiles[0]
        return (self.shards.cols, blocks * self.spec.format.block_bytes), (self.shards.cols, blocks)

    def join(self, received: Tensor, out: Tensor) -> None:
        """Write the columns that each rank sent beside those of the rank before.

        Args:
            received: uint8 [world * cols, bytes].
            out: uint8 [cols, bytes of all blocks].
        """
        world, cols = self.shards.world, self.shards.cols
        each = received.shape[1] // self.shards.sent_tile_rows
        spans = map(self.shards.tile_rows_of, range(world))
        widths = [(stop - start) * each for start, stop in spans]
        parts = received.view(world, cols, -1)
        torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1, out=out)

    def operand(self, codes: Tensor, scales: Tensor, amax: Tensor) -> Operand:
        """Return the operand whose codes and scale bytes lie there."""
        own = amax if self.spec.format.has_amax else amax.new_empty(0)
        return Operand(Blocks(codes, scales, own), self.spec, self.shards.rows)


class ColumnCast:
    """Casts w.T of weights whose rows the ranks of one group hold, after their amaxes were found.

    Args:
        weights: that have `columns`; the same on every rank, in one order.
        group: of the shards.
    """

    def __init__(self, weights: Sequence[GatheredWeight], group: dist.ProcessGroup) -> None:
        self.weights = list(weights)
        self._ranks = WeakGroup.of(group if dist.get_world_size(group) > 1 else None)

    @torch.no_grad()
    def run(self, rows: Sequence[Tensor]) -> None:
        """Write codes and scales of the blocks that begin in this rank's rows.

        Args:
            rows: of each weight, in the dtype that is quantized.
        """
        to, from_ = [], []
        for weight, own in zip(self.weights, self._completed(rows), strict=True):
            assert weight.columns is not None, "it is one of those"
            if own.numel():
                sides = both_sides(None, weight.columns.spec, col_amax=weight.amax if _has_amax(weight) else None)
                _, blocks = ops.quantize_row_col(own, *sides)
                assert blocks is not None, "the column was asked for"
                codes, scales = blocks.qdata, blocks.block_scale.view(torch.uint8)
                to += weight.column_codes[:, : codes.shape[1]], weight.column_scales[:, : scales.shape[1]]
                from_ += codes, scales
        if to:
            torch._foreach_copy_(to, from_)

    def _completed(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of the blocks that begin here, with what other ranks have of them."""
        own = []
        for weight, mine in zip(self.weights, rows, strict=True):
            own.append([mine[_columns(weight).leading(weight.shards.rank) :]])
        for dtype in dict.fromkeys(mine.dtype for mine in rows):
            self._exchange([i for i, mine in enumerate(rows) if mine.dtype == dtype], rows, own)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in own]

    def _exchange(self, chosen: list[int], rows: Sequence[Tensor], own: list[list[Tensor]]) -> None:
        """Send leading rows of some weights to the ranks whose blocks they are in; append those that come to `own`."""
        shards = self.weights[0].shards
        journeys, sizes = [], []
        for rank, i in product(range(shards.world), chosen):
            columns = _columns(self.weights[i])
            if columns.leading(rank):
                journeys.append((rank, columns.owner(rank), i))
                sizes.append(columns.leading(rank) * columns.shards.cols)
        if not journeys:  # on no rank: all have the same list
            return
        sent, received = [0] * shards.world, [0] * shards.world
        leaving: list[tuple[int, Tensor]] = []
        for (rank, to, i), size in zip(journeys, sizes, strict=True):
            if rank == shards.rank:
                sent[to] += size
                leaving.append((to, rows[i].reshape(-1)[:size]))
            if to == shards.rank:
                received[rank] += size
        leaving.sort(key=lambda one: one[0])
        like = rows[chosen[0]]
        message = torch.cat([part for _, part in leaving]) if leaving else like.new_empty(0)
        arrived = like.new_empty(sum(received))
        all_to_all(arrived, message, received, sent, group=self._ranks.group)
        first = 0
        for (_, to, i), size in zip(journeys, sizes, strict=True):
            if to == shards.rank:
                own[i].append(arrived[first : first + size].view(-1, self.weights[i].shards.cols))
                first += size


def _columns(weight: Any) -> Columns:
    assert weight.columns is not None, "it is one of those"
    return weight.columns


def _has_amax(weight: GatheredWeight) -> bool:
    return _columns(weight).spec.format.has_amax
