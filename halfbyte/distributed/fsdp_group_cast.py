"""What casts of weights that FSDP2 gathers have in common, whatever their blocks: a group's ranks, amaxes, an order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from halfbyte.distributed.agree import WeakGroup
from halfbyte.distributed.fsdp_weight import GatheredWeight, event_of


class GroupCast(ABC):
    """Casts weights whose shards the ranks of one group hold.

    Args:
        weights: whose blocks are alike; the same on every rank, in one order.
        group: of the shards.
    """

    def __init__(self, weights: Sequence[GatheredWeight], group: dist.ProcessGroup) -> None:
        self.weights = list(weights)
        self.runs = 0
        self._ranks = WeakGroup.of(group if dist.get_world_size(group) > 1 else None)
        self._slots = 1 + max(weight.slot for weight in weights)
        self._amaxes = torch.empty(0, dtype=torch.float32)

    @torch.no_grad()
    def run(self) -> None:
        """Write codes and scales of this rank's rows: those of the whole weights' quantization."""
        for weight in self.weights:
            weight.note()
        self._write()
        ready = event_of(self._amaxes)
        self.runs += 1
        for weight in self.weights:
            weight.has_cast(ready)

    @abstractmethod
    def _write(self) -> None:
        """Write codes, scales and `_amaxes` of what the shards hold now."""

    def _prepare_weights(self) -> None:
        """Make the memory of messages and amaxes, which stays where it is while the shards are on one device."""
        device = self.weights[0].local.device
        if self._amaxes.numel() != self._slots or self._amaxes.device != device:
            self._amaxes = torch.zeros(self._slots, dtype=torch.float32, device=device)
        for weight in self.weights:
            weight.prepare(self._amaxes[weight.slot])
