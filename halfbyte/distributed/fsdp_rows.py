"""The cast of weights in 1x16 blocks that FSDP2 gathers: each rank quantizes its rows, which hold whole blocks.

Nothing but the amax is shared: no block of a row lies on two ranks, though those of w.T may (fsdp_columns.py). So it is
`quantize` of the rows with the amax of the whole weight, which one all-reduce (a maximum) completes for all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte import ops
from halfbyte.distributed.fsdp_columns import ColumnCast
from halfbyte.distributed.fsdp_group_cast import GroupCast
from halfbyte.distributed.fsdp_weight import GatheredWeight
from halfbyte.sides import both_sides


class RowCast(GroupCast):
    """A GroupCast of weights in 1x16 blocks."""

    def __init__(self, weights: Sequence[GatheredWeight], group: dist.ProcessGroup) -> None:
        super().__init__(weights, group)
        self._members = torch.empty(0, dtype=torch.float32)
        self._prepared: Any = None
        self._apart = [i for i, weight in enumerate(weights) if weight.columns is not None]
        self._columns = ColumnCast([self.weights[i] for i in self._apart], group) if self._apart else None

    def _write(self) -> None:
        self._prepare()
        rows = [weight.local.detach().to(weight.dtype) for weight in self.weights]
        self._find_amaxes(rows)
        to, from_ = [], []
        for weight, own in zip(self.weights, rows, strict=True):
            if own.numel():
                blocks, _ = ops.quantize_row_col(own, *both_sides(weight.spec, None, row_amax=weight.amax))
                assert blocks is not None, "the row was asked for"
                to += weight.codes[: len(own)], weight.scales[: len(own)]
                from_ += blocks.qdata, blocks.block_scale.view(torch.uint8)
        if to:
            torch._foreach_copy_(to, from_)
        if self._columns is not None:
            self._columns.run([rows[i] for i in self._apart])

    def _prepare(self) -> None:
        """Make the memory of messages and amaxes, anew where a shard has moved to another device."""
        key = tuple((weight.local.device, weight.dtype) for weight in self.weights)
        if self._prepared != key:
            self._prepare_weights()
            members = [[i for i, weight in enumerate(self.weights) if weight.slot == n] for n in range(self._slots)]
            most = max(map(len, members))
            # A rectangle: the last member of a slot fills its line. Slots of weights in tiles have none here.
            lines = [own + [(own or [0])[-1]] * (most - len(own)) for own in members]
            self._members = torch.tensor(lines, device=self._amaxes.device)
            self._prepared = key

    def _find_amaxes(self, rows: Sequence[Tensor]) -> None:
        """Write the greatest finite magnitude of each weight, or of those that share theirs."""
        found = torch.stack([ops.amax(x) if x.numel() else self._amaxes.new_zeros(()) for x in rows])
        own = found[self._members].amax(1)
        if self._ranks.group is not None:
            dist.all_reduce(own, dist.ReduceOp.MAX, group=self._ranks.group)
        self._amaxes.copy_(own)
