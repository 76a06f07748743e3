"""Styles for torch's parallelize_module that share every expert of hb.nn.GroupedLinear by its features.

Tokens are the same on all ranks of the mesh, sorted by expert; a rank multiplies them by its part of every expert. What
torch's ColwiseParallel and RowwiseParallel do for a linear layer, for weights [experts, out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from halfbyte.functional import grouped_linear
from halfbyte.functional.derivatives import first_order, refusals
from halfbyte.functional.earlier import refuse_delayed
from halfbyte.functional.foreign import is_foreign, refuse_foreign
from halfbyte.functional.parts import part_here
from halfbyte.functional.split import NAMES, LayerSplit, chunks
from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import LinearLayer
from halfbyte.rng import AnyPhilox
from halfbyte.tensor import QuantTensor

SUMS = refusals("experts that ranks share by features", "run them in one process")


@dataclass(frozen=True)
class Features:
    """How the ranks of a mesh share every expert of a layer: N or K in parts, and the sections of its output.

    sections: into how many equal parts the output falls, of each of which a rank wants its own part.
    """

    mesh: DeviceMesh
    dim: str
    sections: int = 1

    @property
    def placements(self) -> dict[str, Placement]:
        """How weight and bias lie."""
        by_rows = self.dim == "N"
        return {"weight": Shard(1) if by_rows else Shard(2), "bias": Shard(1) if by_rows else Replicate()}

    def outputs(self, layer: GroupedRecipe, x: Tensor, experts: tuple[Any, Any], offsets: Tensor, call: int) -> Tensor:
        """Return this rank's part of the outputs of a layer whose features alone are shared."""
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(self._outputs, (layer, x, experts, offsets, call), {})
        return self._outputs(layer, x, experts, offsets, call)

    def _outputs(self, layer: GroupedRecipe, x: Tensor, experts: tuple[Any, Any], offsets: Tensor, call: int) -> Tensor:
        refuse_main_grad(layer, experts[0])
        if isinstance(x, DTensor):
            raise ValueError(
                f"{layer.title}: x is a DTensor, {x.placements}: hand it what this rank holds, x.to_local()"
            )
        w, bias = local_part(experts[0]), None if experts[1] is None else local_part(experts[1])
        refuse_foreign((("x", x), ("its weight", w), ("its bias", bias)), layer)
        return self.run(layer, x, (w, bias), offsets, (layer.place(call, w.device), None))

    def run(
        self,
        layer: GroupedRecipe,
        x: Tensor,
        own: tuple[Any, Any],
        offsets: Tensor,
        more: tuple[AnyPhilox | None, QuantTensor | None],
    ) -> Tensor:
        """Return this rank's part of the outputs of the experts that are here.

        Args:
            layer: that has them.
            x: tokens [M, K], or this rank's part of their K features.
            own: this rank's part of weights and biases.
            offsets: ends of the groups of these experts.
            more: where they draw, and x quantized before or None.
        """
        rng, row = more
        refuse_delayed(layer.recipe, "experts that ranks share by features")
        split = self.split(layer)
        bounds = (0, layer.in_features) if split is None or self.dim == "N" else _bounds(split.borders, split.rank)
        if x.dim() == 2 and x.shape[1] != bounds[1] - bounds[0]:
            raise ValueError(
                f"{layer.title}: x.shape={tuple(x.shape)}, and this rank multiplies features {bounds[0]} to "
                f"{bounds[1]} of {layer.in_features}; hand GroupedRowwise what GroupedColwise returns, which takes all"
            )
        if split is None:
            return grouped_linear(x, own[0], offsets, layer.recipe, bias_EN=own[1], rng=rng, x_row=row)
        if self.dim == "N":
            x = _SumOfGradients.apply(x, split.group)
        options: dict[str, Any] = {"bias_EN": own[1], "rng": rng, "x_row": row, "split": split}
        y = grouped_linear(x, own[0], offsets, layer.recipe, **options)
        if self.dim == "K":
            return _Sum.apply(y, split.group)
        return y if self.sections == 1 else _ToSections.apply(y, sections_of(split, self.sections))

    def split(self, layer: GroupedRecipe) -> LayerSplit | None:
        """Return what says which part of every expert is here, None for all of it."""
        if self.mesh.size() == 1:
            return None
        size = layer.out_features if self.dim == "N" else layer.in_features
        rank, group = self.mesh.get_local_rank(), self.mesh.get_group().group_name
        return LayerSplit.of(self.dim, chunks(size, self.mesh.size()), rank, group, layer.recipe)


def _bounds(borders: Sequence[int], rank: int) -> tuple[int, int]:
    return borders[rank], borders[rank + 1]


def local_part(t: Any) -> Tensor:
    """Return what is here of a weight or a bias, whose gradient lies alike."""
    return part_here(t) if isinstance(t, DTensor) else t


def share_parameters_(module: nn.Module, share: Callable[[str, Tensor], Tensor]) -> None:
    """Put what ranks share in the place of a module's own parameters; submodules keep theirs.

    Args:
        module: changed in place.
        share: from a parameter's name and values to what becomes the parameter, which needs a gradient if that one did.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(share(name, param.detach()), requires_grad=param.requires_grad))


def refuse_main_grad(layer: GroupedRecipe | LinearLayer, weight: Any) -> None:
    """Raise ValueError if a weight has a main_grad."""
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError(f"{layer.title}: its weight has a main_grad, which parts on several ranks do not add to")


@dataclass(frozen=True)
class Exchange:
    """How columns go from ranks that hold neighbours of all of them to ranks that want neighbours of each section.

    leaving: of this rank's columns, begin and end of each run that goes, in the order of the ranks to which they go.
    sent, received: columns to and from every rank. They arrive in the order in which they are wanted.
    """

    leaving: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: str


def sections_of(split: LayerSplit, sections: int) -> Exchange:
    """Return how the columns of an output travel to the ranks that want a part of each section."""
    world, size = len(split.borders) - 1, split.borders[-1] // sections
    within = chunks(size, world)
    wanted = [[(s * size + a, s * size + b) for s in range(sections)] for a, b in pairwise(within)]
    start, stop = _bounds(split.borders, split.rank)
    to_ranks = [_common([(start, stop)], theirs) for theirs in wanted]
    leaving = tuple([(a - start, b - start) for runs in to_ranks for a, b in runs])
    received = [_width(_common([one], wanted[split.rank])) for one in pairwise(split.borders)]
    return Exchange(leaving, tuple(map(_width, to_ranks)), tuple(received), split.group)


def _common(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(a, b) for a, b in pairs if a < b]


def _width(runs: list[tuple[int, int]]) -> int:
    return sum(b - a for a, b in runs)


def _all_to_all(t: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_to_all_single(t.contiguous(), list(received), list(sent), group))


def _all_sum(t: Tensor, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(t.contiguous(), "sum", group))


class _SumOfGradients(torch.autograd.Function):
    """x as it is, which all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_order(SUMS)
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _all_sum(dx, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' y, whose gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: str) -> Tensor:
        return _all_sum(y, group)

    @staticmethod
    @first_order(SUMS)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _ToSections(torch.autograd.Function):
    """This rank's neighbours of all columns as its part of each section; gradients go back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, how: Exchange) -> Tensor:
        ctx.how = how
        rows = y.mT
        rows = torch.cat([rows[a:b] for a, b in how.leaving]) if how.leaving else rows[:0]
        return _all_to_all(rows, how.received, how.sent, how.group).mT.contiguous()

    @staticmethod
    @first_order(SUMS)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        how = ctx.how
        back = _all_to_all(dy.mT, how.sent, how.received, how.group)
        parts = back.split([b - a for a, b in how.leaving])
        in_order = [part for _, part in sorted(zip(how.leaving, parts, strict=True), key=lambda pair: pair[0])]
        return (torch.cat(in_order) if in_order else back).mT.contiguous(), None


class _GroupedStyle(ParallelStyle):
    """What both styles do to a layer."""

    dim = ""
    sections = 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        _check_layer(layer, type(self).__name__, device_mesh)
        features = Features(device_mesh, self.dim, self.sections)
        _check_sizes(layer, features)
        places, source = features.placements, self.src_data_rank
        share_parameters_(
            layer, lambda name, data: distribute_tensor(data, device_mesh, [places[name]], src_data_rank=source)
        )
        layer.entry = features
        return module


class GroupedColwise(_GroupedStyle):
    """out_features of every expert of an hb.nn.GroupedLinear in parts, `Shard(1)`, for tokens that all ranks have.

    The layer takes all of x and returns this rank's part of the output; gradients of x are summed over the ranks. Of
    tied weights holds what NVFP4Colwise says.

    Args:
        sections: of the output, such as 2 where gate and up are one weight: the output then is this rank's part of each
            section, side by side, which ranks exchange. 1: neighbours, and nothing is exchanged.
    """

    dim = "N"

    def __init__(self, *, sections: int = 1) -> None:
        super().__init__()
        if isinstance(sections, bool) or not isinstance(sections, int):
            raise TypeError(f"sections={sections!r}: give an int")
        if sections < 1:
            raise ValueError(f"sections={sections}: give 1, or 2 where gate and up are one weight")
        self.sections = sections


class GroupedRowwise(_GroupedStyle):
    """in_features of every expert of an hb.nn.GroupedLinear in parts, `Shard(2)`, for features that lie in parts.

    The layer takes what GroupedColwise returns and returns the sum over all ranks, the same on each.
    """

    dim = "K"


def _check_layer(layer: Any, style: str, mesh: DeviceMesh) -> None:
    if type(layer) is not GroupedLinear:
        raise TypeError(
            f"module={type(layer).__name__}: {style} is for hb.nn.GroupedLinear; linear layers take torch's own style, "
            "experts of transformers none"
        )
    if mesh.ndim != 1:
        raise ValueError(f"mesh={mesh}: give a mesh of one dimension, such as mesh['tp']")
    weight, bias = layer.weight, layer.bias
    if is_foreign(weight) or layer.entry is not None:
        raise ValueError(
            f"{layer.title}: its weight is shared already; apply {style} first, then ExpertParallel and fully_shard"
        )
    if type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
        raise ValueError(
            f"{layer.title}: its weight is a {type(weight).__name__}; ranks share experts of plain weights"
        )
    if layer.weight_cache is not None:
        raise ValueError(f"{layer.title} has a cached weight: call release() on the cache first")
    refuse_main_grad(layer, weight)
    refuse_delayed(layer.recipe, "experts that ranks share by features")


def _check_sizes(layer: GroupedLinear, features: Features) -> None:
    """Raise ValueError where a rank would have nothing, or sections are no equal parts."""
    size = layer.out_features if features.dim == "N" else layer.in_features
    world, what = features.mesh.size(), NAMES[features.dim]
    if size % features.sections:
        raise ValueError(
            f"{layer.title}: out_features={size} fall in no sections={features.sections} of one size; leave it out"
        )
    each = chunks(size // features.sections, world)
    if each[-2] >= each[-1]:
        raise ValueError(
            f"{layer.title}: {what}={size} on {world} ranks would leave some without any; give a mesh of fewer"
        )
