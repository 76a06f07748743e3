"""Expert parallel: ranks hold other experts of a layer, and tokens travel to them and back.

Operands are those of one process with the tokens of all ranks: an expert sees the same tokens in the same order, so its
amaxes, blocks and rotations are the same, and it draws as the group that it is among all experts. What tokens travel as
is a choice: their values, or the codes that fprop reads (docs/numerics.md section 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from halfbyte.distributed.feature_styles import Features, local_part, refuse_main_grad, share_parameters_
from halfbyte.distributed.journey import (
    DTYPES,
    CodesToExperts,
    Holders,
    Journey,
    Leaving,
    Travel,
    journey,
    tell_of_failure,
)
from halfbyte.distributed.same import agree_on_parameters
from halfbyte.distributed.tied import refuse_tied
from halfbyte.functional import grouped_linear
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.dispatch import dispatch_problem, dispatch_spec
from halfbyte.functional.foreign import is_foreign, refuse_foreign
from halfbyte.layout import Blocks
from halfbyte.nn.earlier import ExpertsHere, amaxes_of_experts
from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import describe_recipe
from halfbyte.ops import check_offsets, constant
from halfbyte.rng import GROUP_SEED_STEP, RANK_SEED_STEP, SEED_LIMIT, StreamPhilox, as_signed64
from halfbyte.spec import NVFP4
from halfbyte.tensor import QuantTensor

Dispatch = Literal["plain", "nvfp4"]
Reduce = Literal["sum", "mean"]


class Arrived(NamedTuple):
    """Tokens of all ranks for the experts that are here.

    x: [M', K], sorted by expert.
    offsets: int32, cumulative ends of the experts that are here; behind them lies padding.
    journey: how they came, for the way back.
    """

    x: Tensor
    offsets: Tensor
    journey: Journey


class _Held(NamedTuple):
    """What arrived, until it is on its way back: its memory is not given to another tensor before."""

    values: Tensor
    row: QuantTensor
    version: int

    def is_read_as(self, x: Tensor) -> bool:
        """Whether x is the values: FSDP2 hands a module another tensor of the same memory."""
        same = x.shape == self.values.shape and x.dtype == self.values.dtype and x.stride() == self.values.stride()
        return same and x.data_ptr() == self.values.data_ptr() and _version(x) == self.version


def _version(x: Tensor) -> int:
    """Return how often x was changed in place; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version


class ExpertExchange:
    """The way of tokens to the ranks that hold their experts and back; made by `shard_experts_`.

    Args:
        ranks: that share the experts.
        readers: the layers that read what arrives.
        dispatch: "plain", or "nvfp4" for tokens that travel as codes.
        capacity: tokens that one rank sends another, None for as many as there are.
        first: one of the layers that share the experts.

    Attributes:
        dropped: int64 [], this rank's tokens beyond the capacity in the last forward; None without one.
    """

    def __init__(
        self,
        ranks: Holders,
        readers: Sequence[GroupedLinear],
        dispatch: Dispatch,
        capacity: int | None,
        first: GroupedLinear,
    ) -> None:
        self.ranks, self.dispatch, self.capacity = ranks, dispatch, capacity
        self.dropped: Tensor | None = None
        self._readers, self._first = tuple(readers), first
        self._held: _Held | None = None

    def send(self, x: Tensor, offsets: Tensor) -> Arrived:
        """Return the tokens of all ranks for the experts that are here; all ranks must call it together.

        Args:
            x: bf16, fp16 or fp32 [M, K], sorted by expert; cast first under autocast.
            offsets: int32 [experts] of all ranks, cumulative ends of the groups; tokens behind the last are padding.

        Raises:
            ValueError: shapes do not fit, offsets descend or end behind the tokens, or the recipe of a reader cannot be
                dispatched as codes.
            TypeError: offsets is no integer tensor.

        Where offsets of one rank alone are wrong, the others raise a ValueError that names it. With a capacity values
        on a GPU are checked there: no host waits, and the device of every rank reports a failed assertion.
        """
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(self._send, (x, offsets), {})
        return self._send(x, offsets)

    def back(self, y: Tensor, arrived: Arrived) -> Tensor:
        """Return the outputs of this rank's tokens [M, N]; zeros for padding and beyond the capacity.

        Args:
            y: [M', N], rows as those of `arrived.x`.
            arrived: what `send` returned.

        Raises:
            ValueError: y has other rows.
        """
        if y.shape[0] != arrived.x.shape[0]:
            raise ValueError(f"y.shape={tuple(y.shape)}: {arrived.x.shape[0]} tokens arrived; give a row for each")
        self._held = None
        way = y, arrived.journey.to_tokens, arrived.journey.to_experts
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(Travel.apply, way, {})
        return Travel.apply(*way)

    def row_of(self, x: Tensor, spec: NVFP4 | None, layer: GroupedRecipe) -> QuantTensor | None:
        """Return the codes as which x arrived, None for tokens that came in their values.

        Raises:
            ValueError: codes arrived, and x is not what they stand for.
        """
        if spec is None or self.dispatch == "plain" or layer not in self._readers:
            return None
        if self._held is None or not self._held.is_read_as(x):
            raise ValueError(
                f"{layer.title}: x is not what arrived as codes; hand it send(...).x unchanged, or use dispatch='plain'"
            )
        return self._held.row

    def _send(self, x: Tensor, offsets: Tensor) -> Arrived:
        try:
            self._check(x, offsets)
        except (TypeError, ValueError):
            self.tell_of_failure()
            raise
        x = x.to(autocast_dtype(x.device) or x.dtype)
        tokens = Leaving(count=x.shape[0], features=x.shape[1], dtype=x.dtype)
        how = journey(self.ranks, offsets.detach(), tokens, self.capacity)
        self.dropped = how.dropped
        spec = self._spec()
        if spec is None:
            return Arrived(Travel.apply(x, how.to_experts, how.to_tokens), how.offsets, how)
        values, *blocks = CodesToExperts.apply(x, how, spec)
        shape, groups = tuple(values.shape), how.offsets
        row = QuantTensor(Blocks(*blocks), spec, shape=shape, dtype=x.dtype, group_offsets=groups)
        self._held = _Held(values.detach(), row, _version(values))
        return Arrived(values, groups, how)

    def tell_of_failure(self) -> None:
        """Let the other ranks raise that would wait for this one, which has nothing to send."""
        weight: Any = self._first.weight
        tell_of_failure(self.ranks, weight.device)

    def _check(self, x: Tensor, offsets: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x={type(x).__name__}: give tokens, a tensor [M, K]")
        refuse_foreign((("x", x), ("offsets", offsets)), "tokens")
        check_offsets(offsets, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"x.dtype={x.dtype}: tokens travel in bf16, fp16 or fp32; cast them")
        if x.dim() != 2 or offsets.shape[0] != self.ranks.experts:
            raise ValueError(
                f"x.shape={tuple(x.shape)}, offsets.shape={tuple(offsets.shape)}: give tokens [M, K] and the ends of "
                f"the groups of all {self.ranks.experts} experts"
            )

    def _spec(self) -> NVFP4 | None:
        if self.dispatch == "plain":
            return None
        specs = [dispatch_spec(layer.recipe) for layer in self._readers]
        if any(spec != specs[0] for spec in specs):
            titles = ", ".join(layer.title for layer in self._readers)
            found = " and ".join(sorted({"nothing" if spec is None else spec.key for spec in specs}))
            raise ValueError(f"{titles} read {found}: layers that read one x as codes need one recipe for it")
        return specs[0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}


@dataclass(frozen=True)
class _Part:
    """How a layer runs the experts that are here, and whether their gradients are those of the ranks' mean loss.

    features: how other ranks share each of these experts; None where they are whole.
    """

    exchange: ExpertExchange
    reduce: Reduce
    features: Features | None = None

    def outputs(
        self, layer: GroupedRecipe, x: Tensor, experts: tuple[Tensor, Tensor | None], offsets: Tensor, call: int
    ) -> Tensor:
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(self._outputs, (layer, x, experts, offsets, call), {})
        return self._outputs(layer, x, experts, offsets, call)

    def _outputs(self, layer: GroupedRecipe, x: Tensor, experts: tuple[Any, Any], offsets: Tensor, call: int) -> Tensor:
        ranks, w_ENK = self.exchange.ranks, experts[0]
        refuse_main_grad(layer, w_ENK)
        if offsets.dim() == 1 and offsets.shape[0] != ranks.here:
            raise ValueError(
                f"{layer.title}: offsets has {offsets.shape[0]} groups and {ranks.here} experts are here; hand it "
                "what ExpertExchange.send returned"
            )
        w, bias = self._own(w_ENK), None if experts[1] is None else self._own(experts[1])
        refuse_foreign((("x", x), ("its weight", w), ("its bias", bias)), layer)
        row = self.exchange.row_of(x, self._spec_of(layer), layer)
        place = self._place(layer, call, w.device)
        if self.features is not None:
            return self.features.run(layer, x, (w, bias), offsets, (place, row))
        here = ExpertsHere(slice(ranks.first, ranks.first + ranks.here), row is not None)
        earlier = amaxes_of_experts(layer, (x, w, offsets), place, here)
        return grouped_linear(x, w, offsets, layer.recipe, bias_EN=bias, rng=place, x_row=row, earlier=earlier)

    def _own(self, t: Any) -> Any:
        """Return what is here of a weight or a bias, whose gradient is that of the ranks' loss."""
        t = local_part(t)
        is_share = self.reduce == "mean" and t.requires_grad and torch.is_grad_enabled()
        return _ShareOfGradient.apply(t, self.exchange.ranks.world) if is_share else t

    def _spec_of(self, layer: GroupedRecipe) -> NVFP4 | None:
        return None if self.exchange.dispatch == "plain" else dispatch_spec(layer.recipe)

    def _place(self, layer: GroupedRecipe, call: int, device: torch.device) -> StreamPhilox | None:
        """Return where the experts that are here draw: as the groups that they are among all, for the first rank."""
        place, ranks = layer.place(call, device), self.exchange.ranks
        if place is None or layer.run_state is None:
            return None
        groups, behind = ranks.first * GROUP_SEED_STEP, layer.run_state.rank % ranks.world * RANK_SEED_STEP
        signs = place.base if place.sign_base is None else place.sign_base
        bases = [_moved(base.to(device), by) for base, by in ((place.base, groups - behind), (signs, groups))]
        return StreamPhilox(bases[0], place.stream, place.shift, bases[1])


class _ShareOfGradient(torch.autograd.Function):
    """w as it is, and its gradient divided."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, by: int) -> Tensor:
        ctx.by = by
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        return dw / ctx.by, None


def _moved(base: Tensor, by: int) -> Tensor:
    return base + _seeds_further(as_signed64(by % SEED_LIMIT), base.shape[0], base.device)  # int64 wraps, as seeds do


@lru_cache(maxsize=256)
def _seeds_further(by: int, size: int, device: torch.device) -> Tensor:
    """Return what moves a place in the random stream by a number of seeds."""
    return constant(lambda: torch.tensor([by] + [0] * (size - 1), device=device))


def shard_experts_(
    module: nn.Module,
    mesh: DeviceMesh,
    *readers: str,
    dispatch: Dispatch = "plain",
    capacity: int | None = None,
    reduce: Reduce = "sum",
    src_data_rank: int | None = 0,
) -> ExpertExchange:
    """Let the ranks of a mesh share the experts of every hb.nn.GroupedLinear of a module, in place.

    Weights and biases become DTensors, `Shard(0)`; shapes and state_dict keys stay. The layers then take what `send` of
    the exchange returns; a module whose forward takes (x, offsets) needs no change: `hb.distributed.ExpertParallel`.

    Args:
        module: converted or about to be; of one or more GroupedLinear with equally many experts. A weight that it holds
            under two names is refused; one that something outside it has too cannot be seen, and is one no more.
        mesh: of one dimension, of ranks that are neighbours, such as mesh["ep"]. Of two, mesh["ep", "tp"], where
            GroupedColwise and GroupedRowwise have shared every expert by features over mesh["tp"].
        readers: names of the layers that read the tokens which arrive, such as "gate_up_proj"; needed for "nvfp4".
        dispatch: "plain": tokens travel in their values. "nvfp4": as the codes that fprop reads, 0.29 of the bytes of
            bf16; every token has its own amax, and wgrad reads what the codes stand for.
        capacity: tokens that one rank sends another in a forward. The host then never waits for counts, and tokens
            beyond it get zeros. None: as many as choose its experts, of which the host asks once.
        reduce: the gradients of experts are those of the "sum" of the ranks' losses, or of their "mean", as DDP and
            FSDP2 make them for all other weights: use it where `fully_shard` follows.
        src_data_rank: whose weights count, None for each rank's own.

    Returns:
        What sends tokens to their experts and back.

    Raises:
        ValueError, TypeError: something of the module does not go with it, or ranks ask for different things or have
            other experts or recipes, by name.
    """
    layers = _layers(module)
    experts = next(iter(layers.values())).experts
    ranks = _ranks(mesh, experts)
    features = _features(mesh, layers)
    _check_options(dispatch, capacity, readers, layers)
    if reduce not in get_args(Reduce):
        raise ValueError(f"reduce={reduce!r}: give 'sum' or 'mean'")
    for name, layer in layers.items():
        _check_layer(name, layer, experts)
    refuse_tied(module, layers.values())
    reading = [layers[name] for name in readers]
    if dispatch == "nvfp4":
        _check_recipes(dict(zip(readers, reading, strict=True)), features)
    asked = {"dispatch": dispatch, "capacity": capacity, "readers": readers, "reduce": reduce}
    facts = [(name, str(value)) for name, value in asked.items()]
    facts += [(name, f"{tuple(layer.weight.shape)}, {describe_recipe(layer.recipe)}") for name, layer in layers.items()]
    agree_on_parameters("shard_experts_", mesh.mesh.flatten().tolist(), None, facts)
    exchange = ExpertExchange(ranks, reading, dispatch, capacity, next(iter(layers.values())))
    for name, layer in layers.items():
        share_parameters_(layer, lambda _, data: _shared(data, mesh, src_data_rank))
        layer.entry = _Part(exchange, reduce, features[name])
    return exchange


def _shared(data: Any, mesh: DeviceMesh, source: int | None) -> Tensor:
    """Return a weight or a bias whose experts ranks share, and its features where it is a DTensor already."""
    if not isinstance(data, DTensor):
        return distribute_tensor(data, mesh, [Shard(0)], src_data_rank=source)
    assert mesh.mesh_dim_names is not None, "it was checked"
    here = distribute_tensor(data.to_local(), mesh[mesh.mesh_dim_names[0]], [Shard(0)], src_data_rank=source).to_local()
    sizes = {"shape": data.shape, "stride": data.stride()}
    return DTensor.from_local(here, mesh, (Shard(0), *data.placements), run_check=False, **sizes)


def _features(mesh: DeviceMesh, layers: dict[str, GroupedLinear]) -> dict[str, Features | None]:
    """Return how ranks share each expert of every layer; raise ValueError where that is not over the mesh."""
    found = {name: layer.entry if isinstance(layer.entry, Features) else None for name, layer in layers.items()}
    within = mesh.mesh[mesh.get_local_rank(0)] if mesh.ndim == 2 else None
    for name, one in found.items():
        if one is None and within is not None:
            raise ValueError(
                f"{name or 'module'}: the mesh has two dimensions, and its experts are whole; give mesh['ep'], or "
                "apply GroupedColwise or GroupedRowwise over mesh['tp'] first"
            )
        if one is not None and (within is None or not torch.equal(one.mesh.mesh, within)):
            raise ValueError(
                f"{name or 'module'}: ranks {one.mesh.mesh.tolist()} share every expert by features; give a mesh of "
                "two dimensions whose last is theirs, mesh['ep', 'tp']"
            )
    return found


def _layers(module: nn.Module) -> dict[str, GroupedLinear]:
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, GroupedRecipe)}
    for name, layer in found.items():
        if not isinstance(layer, GroupedLinear):
            raise TypeError(
                f"{name or 'module'}={type(layer).__name__}: its weights belong to another module; ranks share those "
                "of hb.nn.GroupedLinear"
            )
    if not found:
        raise ValueError(
            f"module={type(module).__name__}: it has no hb.nn.GroupedLinear, whose experts ranks could share"
        )
    return found  # type: ignore[return-value]


def _ranks(mesh: DeviceMesh, experts: int) -> Holders:
    if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise ValueError(
            f"mesh={mesh}: give a mesh of one dimension, such as mesh['ep'], or mesh['ep', 'tp'] where experts lie "
            "in parts"
        )
    members, world = mesh.mesh.flatten().tolist(), mesh.size(0)
    first, count = members[0], len(members)
    if members != list(range(first, first + count)) or first % count:
        raise ValueError(
            f"mesh={mesh}: ranks that share experts are neighbours and draw as the first of them; let 'ep' be the last "
            "dimension of the mesh that it is taken from, before 'tp' if there is one"
        )
    ranks = Holders(experts=experts, world=world, rank=mesh.get_local_rank(0), group=mesh.get_group(0).group_name)
    if min(ranks.counts) < 1:
        raise ValueError(f"mesh: {world} ranks cannot share {experts} experts, some would have none; use fewer")
    return ranks


def _check_options(
    dispatch: str, capacity: int | None, readers: Sequence[str], layers: dict[str, GroupedLinear]
) -> None:
    if dispatch not in get_args(Dispatch):
        raise ValueError(f"dispatch={dispatch!r}: give 'plain' or 'nvfp4'")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
        raise TypeError(f"capacity={capacity!r}: give an int, or None")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity}: give at least one token, or None for as many as there are")
    for name in readers:
        if name not in layers:
            raise ValueError(f"readers: {name!r} is no hb.nn.GroupedLinear of the module; use some of {list(layers)}")
    if dispatch == "nvfp4" and not readers:
        raise ValueError(f"dispatch='nvfp4': name the layers that read the tokens, some of {list(layers)}")


def _check_layer(name: str, layer: Any, experts: int) -> None:
    weight, bias, what = layer.weight, layer.bias, name or "module"
    if layer.experts != experts:
        raise ValueError(f"{what} has {layer.experts} experts, another layer {experts}: share them in two calls")
    if (is_foreign(weight) or layer.entry is not None) and not isinstance(layer.entry, Features):
        raise ValueError(
            f"{what}: its weight is shared already, as fully_shard or another library leave it; share experts of whole "
            "plain weights, or of what GroupedColwise and GroupedRowwise made of them, then apply fully_shard"
        )
    if isinstance(weight, QuantTensor) or (type(weight) is not nn.Parameter and not is_foreign(weight)):
        raise ValueError(f"{what}: its weight is a {type(weight).__name__}; ranks share experts of plain weights")
    if bias is not None and type(bias) is not nn.Parameter and not isinstance(layer.entry, Features):
        raise ValueError(f"{what}: its bias is a {type(bias).__name__}; ranks share plain biases")
    if layer.weight_cache is not None:
        raise ValueError(f"{what} has a cached weight: call release() on the cache first")
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError(f"{what}: its weight has a main_grad, which experts of several ranks do not add to")


def _check_recipes(readers: dict[str, GroupedLinear], features: dict[str, Features | None]) -> None:
    for name, layer in readers.items():
        own = features[name]
        if own is not None and own.dim == "K":
            raise ValueError(
                f"{name}: it reads tokens as codes, and its in_features lie in parts; use GroupedColwise for it, or "
                "dispatch='plain'"
            )
        problem = dispatch_problem(layer.recipe) if layer.recipe.specs else None
        if problem is not None:
            raise ValueError(f"{name}: {problem}, so that tokens cannot travel as codes; use dispatch='plain'")
