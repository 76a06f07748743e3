"""A bucket of the storage plan at work: its buffers, the reduction of its gradients, the gathering of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.distributed.holding import UNPICKLABLE
from halfbyte.distributed.plan import BucketPlace, BucketPlan
from halfbyte.distributed.scales import Ranks, ScaleGather, all_gather
from halfbyte.ops.primary import primary_stages
from halfbyte.pieces import CastTarget

# torch 2.13 renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Fragment(NamedTuple):
    """What this rank has of a parameter: fp32 values that the optimizer steps, the number of the first, gradients."""

    place: BucketPlace
    master: nn.Parameter
    start: int
    grad: Tensor


class Bucket:
    """Buffers of one bucket.

    Args:
        plan: what lies where.
        ranks: who shares it.
        device: of the buffers.
        value_dtype: of the gathered values; uint8 for packed codes.
        grad_dtype: fp32 or bf16, in which gradients are summed and reduced.
    """

    def __init__(
        self,
        plan: BucketPlan,
        ranks: Ranks,
        device: torch.device,
        value_dtype: torch.dtype,
        grad_dtype: torch.dtype,
    ) -> None:
        self.plan, self.ranks = plan, ranks
        self.quantized = value_dtype == torch.uint8
        own = slice(ranks.rank * plan.share, (ranks.rank + 1) * plan.share)
        self.grads = torch.zeros(plan.numel, dtype=grad_dtype, device=device)
        self.own_grads = self.grads[own]
        is_fp32 = grad_dtype == torch.float32
        self.master_grads = self.own_grads if is_fp32 else torch.zeros(plan.share, dtype=torch.float32, device=device)
        self.masters = torch.zeros(plan.share, dtype=torch.float32, device=device)
        per_byte = 2 if self.quantized else 1
        self.values = torch.zeros(plan.numel // per_byte, dtype=value_dtype, device=device)
        self.own_values = self.values[own.start // per_byte : own.stop // per_byte]
        self.fragments = self._make_fragments()
        self._gaps = self._make_gaps()
        self.bytes_gathered = self.bytes_reduced = 0
        self._scales: ScaleGather | None = None
        self._arrived: set[int] = set()
        self._reducing: list[dist.Work] = []
        self._gathering: list[dist.Work] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Bucket:
        """Return this bucket: hooks of a copied model wait for it, and its masters are not copied with them."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled with a model, whose hooks lead here."""
        raise TypeError(UNPICKLABLE)

    def _make_fragments(self) -> list[Fragment]:
        fragments = []
        for place in self.plan.places:
            part = self.plan.part(place, self.ranks.rank)
            if part is not None:
                begin = place.first + part.start - self.ranks.rank * self.plan.share
                end = begin + part.stop - part.start
                master = nn.Parameter(self.masters[begin:end])
                fragments.append(Fragment(place, master, part.start, self.master_grads[begin:end]))
        return fragments

    def _make_gaps(self) -> list[Tensor]:
        """Return the gradients of elements that no parameter has: padding of rows, and between parameters."""
        gaps, at = [], 0
        for place in self.plan.places:
            rows = self.grads[place.first : place.first + place.numel].view(place.item.rows, place.pitch)
            gaps += [self.grads[at : place.first], rows[:, place.item.cols :]]
            at = place.first + place.numel
        return [gap for gap in (*gaps, self.grads[at:]) if gap.numel()]

    def matrix(self, buffer: Tensor, place: BucketPlace) -> Tensor:
        """Return the values of a parameter as a view [rows, cols] of a buffer of the bucket's elements."""
        whole = buffer[place.first : place.first + place.numel].view(place.item.rows, place.pitch)
        return whole[:, : place.item.cols]

    def codes(self, place: BucketPlace) -> Tensor:
        """Return the packed codes of a parameter, uint8 [rows, pitch / 2]."""
        first = place.first // 2
        return self.values[first : first + place.numel // 2].view(place.item.rows, place.pitch // 2)

    # Gradients

    def add_gradient(self, index: int, grad: Tensor) -> None:
        """Add the gradient of parameter `index` of the bucket."""
        place = self.plan.places[index]
        to, grad = self.matrix(self.grads, place), grad.reshape(place.item.rows, place.item.cols)
        if index in self._arrived:
            to.add_(grad)
        else:
            to.copy_(grad)
            self._arrived.add(index)

    def start_reducing(self) -> None:
        """Sum the gradients of all ranks, each rank its own share; parameters without a gradient count as zeros."""
        for index, place in enumerate(self.plan.places):
            if index not in self._arrived:
                self.matrix(self.grads, place).zero_()
        if self._gaps:
            torch._foreach_zero_(self._gaps)  # a norm of NaN has multiplied them too, and they count in the next one
        self._arrived.clear()
        if self.ranks.group is not None:
            self._reducing.append(_reduce_scatter(self.own_grads, self.grads, group=self.ranks.group, async_op=True))
            self.bytes_reduced += self.grads.numel() * self.grads.element_size()

    def finish_reducing(self) -> None:
        """Let the gradients of the masters be complete, and give them to the optimizer: never those of one rank."""
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        if self.master_grads is not self.own_grads:
            self.master_grads.copy_(self.own_grads)
        for fragment in self.fragments:
            fragment.master.grad = fragment.grad

    def drop_gradients(self) -> None:
        """Forget what arrived; a sum that still runs must not meet the next gradients in its buffer."""
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        self._arrived.clear()
        for fragment in self.fragments:
            fragment.master.grad = None

    # Values

    def attach(self, scales: ScaleGather, targets: Sequence[CastTarget]) -> None:
        """Say what gathers the scales of this bucket, and its weights."""
        self._scales = scales
        _, self._finisher = primary_stages((), targets, scales.cast.scales.numel(), self.values.device)

    def start_gathering(self) -> None:
        """Send this rank's values: codes that the cast wrote, or the masters in the parameters' dtype."""
        assert self._gathering is None, "gathered twice"
        self._gathering = []
        if self._scales is None:
            self.own_values.copy_(self.masters)
        if self.ranks.group is not None:
            self._gathering.append(all_gather(self.values, self.own_values, group=self.ranks.group, async_op=True))
            self.bytes_gathered += self.values.numel() * self.values.element_size()

    def finish_gathering(self) -> None:
        """Let the parameters be complete; nothing if they are."""
        if self._gathering is None:
            return
        for work in self._gathering:
            work.wait()
        if self._scales is not None:
            self._scales.finish_gathering()
            with torch.no_grad():
                self._finisher.transpose()
        self._gathering = None  # last: where a wait fails, the next one must fail too
