"""Weights of experts [E, N, K] that FSDP2 gathers as NVFP4: it splits them by experts, which are quantized whole.

Every expert has an amax, tiles and blocks of its own, so that no rank asks another for anything, and what a backward
reads of w.T can be made where the expert lies. The amaxes travel with the codes, four bytes an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte import ops
from halfbyte.distributed.fsdp_weight import GatheredWeight, event_of
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import Blocks, Operand, ceil_div
from halfbyte.sides import both_sides
from halfbyte.spec import Spec
from halfbyte.tensor.primary import PrimaryWeight

AMAX_BYTES = 4


class ExpertShards(NamedTuple):
    """How FSDP2 splits the experts of a weight [experts, N, K] over `world` ranks, of which this is `rank`.

    matrix: N and K.
    height: rows of a block, 16 or 1.
    """

    rows: int
    matrix: tuple[int, int]
    world: int
    rank: int
    height: int

    @property
    def chunk(self) -> int:
        """Experts of rank 0, the most that any rank has."""
        return ceil_div(self.rows, self.world)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first expert of a rank and the one past its last."""
        return min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """What is sent of one rank's experts: codes, a scale byte for each tile or block, amaxes as bytes."""
        rows, blocks = self.matrix[0], ceil_div(self.matrix[1], NVFP4_BLOCK)
        codes, scales = (rows, blocks * NVFP4_BLOCK // 2), (ceil_div(rows, self.height), blocks)
        return {"codes": (self.chunk, *codes), "scales": (self.chunk, *scales), "amaxes": (self.chunk, 1, AMAX_BYTES)}

    def column_shapes(self, spec: Spec) -> dict[str, tuple[int, int, int]]:
        """What is sent of one rank's experts transposed."""
        rows, cols = self.matrix
        blocks = ceil_div(rows, spec.block_length)
        codes = cols, blocks * spec.format.block_bytes
        return {
            "column codes": (self.chunk, *codes),
            "column scales": (self.chunk, cols, blocks),
            "column amaxes": (self.chunk, 1, AMAX_BYTES),
        }

    @property
    def message_bytes(self) -> int:
        """What every rank sends for a forward."""
        return sum(a * b * c for a, b, c in self.shapes.values())


class GatheredExperts(GatheredWeight):
    """The experts of one hb.nn.GroupedLinear, whose codes travel; arguments as of GatheredWeight."""

    shards: ExpertShards

    is_tiled = False
    why_eager = "its experts run eagerly"
    forward_parts = ("codes", "scales", "amaxes")

    @property
    def tail(self) -> tuple[int, ...]:
        return self.shards.matrix

    @property
    def backward_parts(self) -> tuple[str, ...]:
        if self.reading.is_one:
            return ()
        spec = self.reading.columns
        return ("values",) if spec is None else tuple(self.shards.column_shapes(spec))

    def prepare(self, amax: Tensor) -> None:
        """Make the memory of what is sent; amax: not read."""
        shapes = self.shards.shapes
        if self.reading.columns is not None:
            shapes |= self.shards.column_shapes(self.reading.columns)
        device = self.local.device
        self.sent = {what: torch.zeros(shape, dtype=torch.uint8, device=device) for what, shape in shapes.items()}
        self.codes = self.sent["codes"]

    def part(self, what: str) -> Tensor:
        return self._sent_values(self.values_dtype) if what == "values" else self.sent[what]

    def backward_bytes(self) -> int:
        if self.reading.columns is None:
            return super().backward_bytes()
        return sum(a * b * c for a, b, c in self.shards.column_shapes(self.reading.columns).values())

    @property
    def joined(self) -> dict[str, tuple[int, int]]:
        """Scales of tiles, of which every row reads its own."""
        rows, cols = self.shards.matrix
        return {"scales": (self.shards.rows * rows, ceil_div(cols, NVFP4_BLOCK))} if self.spec.is_tile else {}

    def join(self, what: str, received: Tensor, out: Tensor) -> None:
        """Write the scales of tiles into each of their rows; received: [world * experts, tile rows, blocks]."""
        experts, rows = self.shards.rows, self.shards.matrix[0]
        tile_rows = received.shape[1]
        row = torch.arange(experts * rows, device=received.device)
        tile = row // rows * tile_rows + row % rows // NVFP4_BLOCK
        torch.index_select(received.view(-1, received.shape[2]), 0, tile, out=out)

    def arrive_as(
        self, forward: Sequence[Tensor], backward: Sequence[Tensor], turn: Callable[[], None] | None
    ) -> PrimaryWeight:
        """Return the experts whose parts arrive there; turn: lets those of the backward be there."""
        experts, (rows, cols) = self.shards.rows, self.shards.matrix
        codes, scales, amaxes = forward
        dgrad: Operand | Tensor | None = None
        if backward and self.reading.columns is None:
            dgrad = backward[0][:experts].mT
        elif backward:
            spec = self.reading.columns
            assert spec is not None, "or there are values"
            own = _as_amaxes(backward[2])[:experts]
            blocks = Blocks(backward[0][:experts], backward[1][:experts], own if spec.format.has_amax else own[:0])
            dgrad = Operand(blocks, spec, rows)
        scales = scales if self.spec.is_tile else scales[:experts].flatten(0, 1)
        row = Blocks(codes[:experts].flatten(0, 1), scales, _as_amaxes(amaxes)[:experts])
        offsets = torch.arange(1, experts + 1, device=codes.device, dtype=torch.int32) * rows
        shape, dtype = (experts, rows, cols), self._nominal(self.local)
        weight = PrimaryWeight(row, self.spec, shape=shape, dtype=dtype, group_offsets=offsets)
        weight.turn, weight.rounded, weight.dgrad = turn, self.dtype, dgrad
        self.arrived = weight
        return weight


def _as_amaxes(message: Tensor) -> Tensor:
    """Return the bytes of amaxes [experts, 1, 4] as fp32 [experts]."""
    return message.view(torch.float32).view(-1)


class ExpertCast:
    """Casts experts, each on the rank that has it.

    Args:
        weights: of experts.
        group: of their shards.
    """

    def __init__(self, weights: Sequence[GatheredWeight], group: dist.ProcessGroup) -> None:
        self.weights = [weight for weight in weights if isinstance(weight, GatheredExperts)]
        self._prepared: object = None
        self.runs = 0

    @torch.no_grad()
    def run(self) -> None:
        """Write codes, scales and amaxes of this rank's experts."""
        for weight in self.weights:
            weight.note()
        key = tuple((weight.local.device, weight.dtype) for weight in self.weights)
        if self._prepared != key:
            for weight in self.weights:
                weight.prepare(torch.empty(0, dtype=torch.float32))
            self._prepared = key
        for weight in self.weights:
            if weight.local.numel():
                self._cast(weight)
        ready = event_of(self.weights[0].codes)
        self.runs += 1
        for weight in self.weights:
            weight.has_cast(ready)

    @staticmethod
    def _cast(weight: GatheredExperts) -> None:
        own = weight.local.detach().to(weight.dtype)
        row, col = ops.grouped_quantize_row_col(own, None, *both_sides(weight.spec, weight.reading.columns))
        assert row is not None, "the row was asked for"
        for blocks, prefix in ((row, ""), (col, "column ")):
            if blocks is None:
                continue
            scales = blocks.block_scale.view(torch.uint8)
            scales = scales[:, :: weight.spec.block[0]] if blocks is row else scales
            weight.sent[f"{prefix}codes"][: len(own)].copy_(blocks.qdata.view(torch.uint8))
            weight.sent[f"{prefix}scales"][: len(own)].copy_(scales)
            if blocks.amax.numel():
                amaxes = blocks.amax.view(torch.uint8).view(-1, 1, AMAX_BYTES)
                weight.sent[f"{prefix}amaxes"][: len(own)].copy_(amaxes)
