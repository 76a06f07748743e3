"""The cast of weights in 16x16 tiles that FSDP2 gathers: each rank's rows to codes and scales, with one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.cast import Cast, CastLayout, Share
from halfbyte.distributed.fsdp_group_cast import GroupCast
from halfbyte.distributed.fsdp_weight import GatheredWeight
from halfbyte.layout import Blocks
from halfbyte.pieces import CastTarget, Piece


class ShardCast(GroupCast):
    """A GroupCast of weights in 16x16 tiles."""

    def __init__(self, weights: Sequence[GatheredWeight], group: dist.ProcessGroup) -> None:
        super().__init__(weights, group)
        self._prepared: tuple[Any, Cast] | None = None
        self._own_scales: tuple[list[Tensor], list[Tensor]] = [], []

    def _write(self) -> None:
        cast = self._cast()
        cast.agree()
        cast.scale()
        cast.write()
        tiles = cast.amaxes.numel() - self._slots
        self._amaxes.copy_(cast.amaxes[tiles:])
        if self._own_scales[0]:
            torch._foreach_copy_(*self._own_scales)

    def _cast(self) -> Cast:
        """Return the cast of the shards where they lie now; its tables hold their addresses."""
        key = [weight.memory for weight in self.weights]
        if self._prepared is None or self._prepared[0] != key:
            self._prepare_weights()
            layout, pieces = self._layout()
            cast = Cast(layout, pieces, self._ranks.group, local_scales=True, device=self._amaxes.device)
            self._prepared, self._own_scales = (key, cast), self._scales_to_send(cast)
        return self._prepared[1]

    def _scales_to_send(self, cast: Cast) -> tuple[list[Tensor], list[Tensor]]:
        """Return where the scales of this rank's tiles go, and where they come from."""
        to, from_, first = [], [], 0
        for weight in self.weights:
            tile_rows, tile_cols = weight.shards.tiles
            start, stop = weight.shards.tile_rows_of(weight.shards.rank)
            if stop > start:
                own = cast.scales[first + start * tile_cols : first + stop * tile_cols]
                to.append(weight.scales[: stop - start])
                from_.append(own.view(stop - start, tile_cols))
            first += tile_rows * tile_cols
        return to, from_

    def _layout(self) -> tuple[CastLayout, list[Piece]]:
        targets, shares, pieces, first_tile = [], [], [], 0
        for weight in self.weights:
            shards = weight.shards
            # Codes and scales of the whole weight are nowhere: only stages that this cast does not run write them.
            blocks = Blocks(weight.codes, weight.scales, weight.amax)
            rows, cols = shards.rows, shards.cols
            target = CastTarget(rows, cols, weight.spec, weight.dtype, blocks, False, first_tile, weight.slot)
            targets.append(target)
            first_tile += target.tile_count
            shares.append([_share(shards.rows_of(rank), cols) for rank in range(shards.world)])
            own = shares[-1][shards.rank]
            if own is not None:
                first_byte = own.start // cols * shards.row_bytes
                values = weight.local.detach().view(-1)
                pieces.append(Piece(target, values, own.start, cols, weight.codes.view(-1), first_byte))
        return CastLayout(targets, [target.cols for target in targets], shares, self._slots), pieces


def _share(rows: tuple[int, int], cols: int) -> Share | None:
    return Share(rows[0] * cols, rows[1] * cols) if rows[0] < rows[1] else None
