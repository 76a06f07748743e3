"""The gathering of block scales: one message for all weights of a cast, which travels while their codes are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from halfbyte.distributed.agree import WeakGroup
from halfbyte.distributed.cast import Cast
from halfbyte.distributed.plan import BucketPlan, scale_room, scale_runs

# torch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(NamedTuple):
    """The ranks that share buckets: the group, None for one process alone, and this process's place in it."""

    held: WeakGroup
    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None for one process alone."""
        return self.held.group


class ScaleGather:
    """Completes the block scales of a cast, of which every rank has those of its own tiles, and those of its weights.

    A message of their own for each bucket, as codes have, would take the host longer than the wires.

    Args:
        cast: whose scales.
        plans: of the buckets of its weights.
        ranks: who shares them.
    """

    def __init__(self, cast: Cast, plans: Sequence[BucketPlan], ranks: Ranks) -> None:
        self.cast, self._ranks = cast, ranks
        self.bytes_gathered = 0
        self._gathering: list[dist.Work] | None = None
        runs = scale_runs(plans)
        self._message = torch.zeros(ranks.size, scale_room(plans), dtype=torch.uint8, device=cast.scales.device)
        self._received = [self._message[run.rank, run.first : run.first + run.count] for run in runs]
        own = [run for run in runs if run.rank == ranks.rank]
        self._own = [cast.scales[run.first_tile : run.first_tile + run.count] for run in own]
        self._sent = self._message[ranks.rank, : sum(run.count for run in own)]

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Send this rank's scales, which the cast has computed."""
        assert self._gathering is None, "gathered twice"
        self._gathering = []
        if self._ranks.group is not None:
            torch.cat(self._own, out=self._sent)
            own = self._message[self._ranks.rank]
            self._gathering.append(all_gather(self._message.view(-1), own, group=self._ranks.group, async_op=True))
            self.bytes_gathered += self._message.numel()

    @torch.no_grad()
    def finish_gathering(self) -> None:
        """Let the scales of all weights be complete; nothing if they are."""
        if self._gathering is None:
            return
        for work in self._gathering:
            work.wait()
            torch.cat(self._received, out=self.cast.scales)
        self.cast.finisher.expand(self.cast.amaxes, self.cast.scales)
        self._gathering = None
