"""Layers that hold plain tensors, each this rank's part of a whole one, and are told so.

Some libraries say in types of their own what lies where (spmd_types, torchtitan's default) and hand every layer the
parts, as if they were whole. A layer that follows a recipe has to know: its operands have the amax of all parts, and
draw at places in the whole.

| weight   | x                 | its gradient     | output            | its gradient |
|----------|-------------------|------------------|-------------------|--------------|
| Shard(0) | whole             | one of a sum     | features in parts | alike        |
| Shard(1) | features in parts | alike            | one of a sum      | whole        |

Sums are taken where that library does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from halfbyte.functional.foreign import PLAIN
from halfbyte.functional.parts import as_part, part_here


@dataclass(frozen=True)
class PlainParts:
    """How the plain tensors of one linear layer lie; `as_part` of a layer.

    Args:
        mesh: of one dimension: the ranks that share the layer.
        out_features, in_features: of the whole weight.
        dim: that of the weight which is in parts, 0 or 1.
    """

    mesh: DeviceMesh
    out_features: int
    in_features: int
    dim: int

    def __post_init__(self) -> None:
        if self.dim not in (0, 1):
            raise ValueError(f"dim={self.dim}: of a weight [out_features, in_features] 0 or 1 is in parts")
        if self.mesh.ndim != 1:
            raise ValueError(f"mesh={self.mesh}: give one of one dimension, such as mesh['tp']")

    def __call__(self, name: str, parameter: Any) -> Any:
        """Return a parameter as the DTensor of which it is a part; as itself if it is no plain tensor."""
        if type(parameter) not in PLAIN:
            return parameter
        lines = (self.out_features, self.in_features) if name == "weight" else (self.out_features,)
        place = Shard(self.dim)
        return as_part(parameter, self.mesh, place, torch.Size(lines), place)

    def output(self, forward: Callable[[Any], Any], x: Tensor) -> Tensor:
        """Return what is here of forward(x), given what is here of x [..., features]."""
        last = x.dim() - 1
        of_x, of_dx, of_y, of_dy = (_of_columns if self.dim else _of_rows)(last)
        y = forward(as_part(x, self.mesh, of_x, torch.Size((*x.shape[:-1], self.in_features)), of_dx))
        if y.placements != (of_y,):
            y = y.redistribute(placements=(of_y,))
        return part_here(y, of_dy)


def _of_rows(last: int) -> tuple[Placement, Placement, Placement, Placement]:
    return Replicate(), Partial(), Shard(last), Shard(last)


def _of_columns(last: int) -> tuple[Placement, Placement, Placement, Placement]:
    return Shard(last), Shard(last), Partial(), Replicate()
