"""Which parameters of a model that FSDP2 wrapped can be gathered as NVFP4, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from halfbyte.distributed.embedding import ShardedEmbedding
from halfbyte.distributed.fsdp_experts import ExpertShards
from halfbyte.distributed.fsdp_reading import reading_of
from halfbyte.distributed.fsdp_shards import RowShards
from halfbyte.distributed.fsdp_weight import GatheredWeight
from halfbyte.distributed.head import HeadEntry, ShardedHead
from halfbyte.functional.foreign import is_sharded
from halfbyte.nn.grouped import GroupedLinear
from halfbyte.nn.linear import LinearLayer
from halfbyte.spec import NVFP4

CALL = "fsdp_gather_nvfp4_"


class Home(NamedTuple):
    """A parameter: its name, the layer or other module that has it, and the module whose FSDP2 group gathers it.

    wrapped: None if no module of the model does: one further up gathers it, or `fully_shard` was told to leave it.
    """

    name: str
    module: nn.Module
    own: str
    wrapped: nn.Module | None

    @property
    def param(self) -> Any:
        """The parameter as it is now."""
        return self.module._parameters[self.own]


def homes_of(model: nn.Module) -> list[Home]:
    """Return every parameter once, in the model's order; tied ones under their first name."""
    gathering = _gathering_groups(model)
    above: dict[str, tuple[nn.Module, ...]] = {}  # wrapped modules that hold a path, the nearest first
    homes, seen = [], set()
    for path, module in model.named_modules():
        holding = above.get(path.rpartition(".")[0], ()) if path else ()
        above[path] = (module, *holding) if is_wrapped(module) else holding
        for own, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                if is_exchanged(module):
                    continue
                group, wrapped = gathering.get(id(param), (None, None))
                nearest = (one for one in above[path] if any(found is group for found in groups_of(one)))
                homes.append(Home(f"{path}.{own}".lstrip("."), module, own, next(nearest, wrapped)))
    return homes


def _gathering_groups(model: nn.Module) -> dict[int, tuple[Any, nn.Module]]:
    """Return the FSDP2 group that gathers a parameter, and a module of it in the model, by the id of what is there now.

    Not by module: `hb.quantize_` may have put another in the place of the one that FSDP2 knows, with its parameters.
    """
    found = {}
    for wrapped in model.modules():
        for group in groups_of(wrapped) if is_wrapped(wrapped) else ():
            for param in group.fsdp_params:
                info = param._module_info
                found[id(info.module._parameters.get(info.param_name))] = group, wrapped
    return found


def is_exchanged(module: Any) -> bool:
    """Whether ranks exchange rows or activations of a module's weight, which `fully_shard` was told to leave alone."""
    return isinstance(module, ShardedEmbedding | ShardedHead) or isinstance(getattr(module, "entry", None), HeadEntry)


def is_wrapped(module: nn.Module) -> bool:
    """Whether `fully_shard` wrapped it, without importing FSDP2."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def state_of(module: Any) -> Any:
    """Return FSDP2's state of a module that it wrapped."""
    return module._get_fsdp_state()


def groups_of(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters of a module that it wrapped; torch 2.11 has one at most."""
    state = state_of(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def gathered_together(
    wrapped: Iterable[nn.Module | None], weights: Sequence[GatheredWeight]
) -> list[tuple[Any, list[GatheredWeight]]]:
    """Return each of FSDP2's groups with its weights, in its order, which one all-gather brings; None for no group.

    Args:
        wrapped: modules that `fully_shard` wrapped, any number of times, or None.
        weights: of their parameters; one that is in no group comes alone.
    """
    own = {(weight.layer, "weight"): weight for weight in weights}
    found = []
    for module in dict.fromkeys(module for module in wrapped if module is not None):
        for group in groups_of(module):
            places = [(param._module_info.module, param._module_info.param_name) for param in group.fsdp_params]
            found.append((group, [own.pop(place) for place in places if place in own]))
    return [one for one in found if one[1]] + [(None, [weight]) for weight in own.values()]


def param_dtype_of(home: Home) -> torch.dtype | None:
    """Return the dtype that FSDP2's MixedPrecisionPolicy gathers a parameter in."""
    return None if home.wrapped is None else state_of(home.wrapped)._mp_policy.param_dtype


def group_of(home: Home) -> dist.ProcessGroup:
    """Return the ranks that hold the shards of a DTensor."""
    mesh = home.param.device_mesh
    return mesh.get_group(mesh.ndim - 1)


def shards_of(home: Home, spec: NVFP4) -> RowShards | ExpertShards:
    """Return how a DTensor's rows, in blocks of a spec, or its experts are split."""
    param = home.param
    mesh, last = param.device_mesh, param.device_mesh.ndim - 1
    if param.dim() == 3:
        matrix = param.shape[1], param.shape[2]
        return ExpertShards(param.shape[0], matrix, mesh.size(last), mesh.get_local_rank(last), spec.block[0])
    return RowShards(param.shape[0], param.shape[1], mesh.size(last), mesh.get_local_rank(last), spec.block[0])


def wrapping_problem(modules: Iterable[nn.Module]) -> str | None:
    """Return what keeps FSDP2's wrappers from gathering anything but values; None if nothing does."""
    for module in modules:
        if getattr(state_of(module), "_is_root", None) is not None:
            return (
                "the model has run already, and FSDP2 has the memory of its whole weights: call it after fully_shard "
                "and before the first forward"
            )
        for group in groups_of(module):
            if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
                return (
                    "offload_policy=CPUOffloadPolicy(…): FSDP2 copies shards to the device without the hooks that "
                    "send codes; use fully_shard without it"
                )
            if group.post_forward_mesh_info not in (None, group.mesh_info):
                return (
                    "reshard_after_forward is an integer: FSDP2 splits whole weights among these ranks, which it "
                    "cannot do with codes; use True or False"
                )
    return None


def holders_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules that have each parameter, by its id."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            holders.setdefault(id(param), []).append(module)
    return holders


def reason_against(home: Home, holders: list[nn.Module]) -> str | None:
    """Return why one parameter is gathered in its own values; "" for what is no weight of a layer with a recipe.

    Args:
        home: of the parameter.
        holders: all modules that have it.
    """
    param = home.param
    kinds = LinearLayer, GroupedLinear
    layers = [m for m in holders if isinstance(m, kinds) and m._parameters.get("weight") is param]
    if not any(layer.recipe.specs for layer in layers):
        return ""
    checks = (
        (not is_sharded(param), "fully_shard has not sharded it"),
        (home.wrapped is None, f"no module that fully_shard wrapped gathers it here; give {CALL} the one that does"),
        (len(holders) > 1, "other modules have it too"),
        (getattr(layers[0], "entry", None) is not None and param.dim() == 3, "ranks share its experts"),
        (
            getattr(layers[0], "transposed", False),
            "it lies as [in_features, out_features], and rows of its transpose are split",
        ),
        (param.numel() == 0, "it is empty"),
    )
    known = next((reason for applies, reason in checks if applies), None)
    return known or _reason_of_placement(param) or _reason_of_recipe(layers[0])


def _reason_of_placement(param: Any) -> str | None:
    *before, last = param.placements
    is_by_rows = type(last).__name__ == "Shard" and last.dim == 0
    is_replicated = [type(placement).__name__ for placement in before] in ([], ["Replicate"])
    return None if is_by_rows and is_replicated else f"it is sharded as {tuple(param.placements)}, not by rows alone"


def _reason_of_recipe(layer: LinearLayer | GroupedLinear) -> str | None:
    reading = reading_of(layer.recipe)
    if isinstance(reading, str):
        return reading
    changes = () if layer.run_state is None or layer.run_state.schedule is None else layer.run_state.schedule.changes
    if any(reading_of(later) != reading for _, later in changes):
        return "a later recipe of its schedule reads it in another form"
    return None
