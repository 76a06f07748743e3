"""Which parameters of a model can exist in NVFP4 only, how they are replaced, and which modules need them first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.functional.weights import weight_specs
from halfbyte.nn import GroupedLinear, Linear
from halfbyte.nn.linear import LinearLayer
from halfbyte.recipes import Recipe
from halfbyte.spec import NVFP4
from halfbyte.tensor.primary import PrimaryWeight, check_primary_spec

HIDDEN = (LinearLayer, nn.modules.linear.NonDynamicallyQuantizableLinear)


def tiled_parameters(model: nn.Module, groups: Iterable[Iterable[str]] = ()) -> dict[str, NVFP4]:
    """Return {name: spec} of the weights that their recipes want in one NVFP4 form in forward and backward.

    Experts [E, N, K] are among them if N is a multiple of 16. A parameter that any other module holds too, such as a
    tied embedding, is not, nor one that shares its amax with a weight that is not, or with one of another of the
    `groups` of names, which are cast apart.
    """
    part = {name: i for i, names in enumerate(groups) for name in names}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            holders.setdefault(id(param), []).append((module, name))
    found: dict[str, tuple[nn.Module, NVFP4]] = {}
    for name, param in model.named_parameters():
        (module, own), *others = holders[id(param)]
        is_candidate = (
            own == "weight" and not others and param.requires_grad and not getattr(module, "transposed", False)
        )
        is_apart = param.dim() < 3 or param.shape[1] % NVFP4_BLOCK == 0  # no tile has rows of two experts
        spec = _spec_of(module) if is_candidate and is_apart else None
        if spec is not None:
            found[name] = module, spec
    chosen = {module: part.get(name) for name, (module, _) in found.items()}
    return {
        name: spec
        for name, (module, spec) in found.items()
        if all(s in chosen and chosen[s] == chosen[module] for s in getattr(module, "amax_group", ()))
    }


def transposed_tiles(model: nn.Module) -> list[str]:
    """Return the names of layers whose recipes want the same, and whose weights lie the other way round."""
    return [name for name, m in model.named_modules() if getattr(m, "transposed", False) and _spec_of(m) is not None]


def _spec_of(module: nn.Module) -> NVFP4 | None:
    if not isinstance(module, LinearLayer | GroupedLinear):
        return None
    row, col = weight_specs(module.recipe)
    reads_values = col is None and module.recipe.backward == "original"  # of the weight before it was rounded
    schedule = None if module.run_state is None else module.run_state.schedule
    later = {spec for _, recipe in (() if schedule is None else schedule.changes) for spec in weight_specs(recipe)}
    if not isinstance(row, NVFP4) or reads_values or not {col, *later} <= {row, None}:
        return None
    try:
        check_primary_spec(row)
    except ValueError:
        return None
    return row


def make_primary(
    model: nn.Module, name: str, form: tuple[NVFP4, torch.dtype], qdata: Tensor, amaxes: dict[int, Tensor]
) -> PrimaryWeight:
    """Put a PrimaryWeight in the place of parameter `name` and return it.

    Args:
        form: its spec, and its nominal dtype.
        qdata: where its codes lie.
        amaxes: of groups of layers that share an amax, by the first member; filled as they are met.
    """
    old = model.get_parameter(name)
    module = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(module, Linear | GroupedLinear), "tiled_parameters chose it"
    siblings, amax = getattr(module, "amax_group", ()), None
    if siblings:
        amax = amaxes.setdefault(id(siblings[0]), torch.zeros((), dtype=torch.float32, device=old.device))
    if old.dim() == 3:
        weight = PrimaryWeight.empty(tuple(old.shape), form[0], dtype=form[1], qdata=qdata)
    else:
        weight = PrimaryWeight.empty((old.shape[0], old.shape[1]), form[0], dtype=form[1], qdata=qdata, amax=amax)
        weight.allocate_turned()
    parameter = weight.as_parameter()
    for key, value in vars(old).items():  # such as marks that a framework leaves on parameters
        vars(parameter).setdefault(key, value)
    parameter.without_masters = False
    table: dict[str, Any] = module._parameters
    table["weight"] = parameter
    return parameter


def memory_of(param: Tensor) -> list[Tensor]:
    """Return the tensors whose version autograd compares: the parameter, codes and scales in both orientations."""
    if not isinstance(param, PrimaryWeight):
        return [param]
    both = [blocks for blocks in (param.blocks, param.turned) if blocks is not None]
    return [param, *(tensor for blocks in both for tensor in blocks if tensor is not None)]


def described_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return for each parameter what ranks compare of its layer: recipe, schedule, the first that shares its amax."""
    paths = {module: path for path, module in model.named_modules()}
    out = {}
    for path, module in model.named_modules():
        recipe, state = getattr(module, "recipe", None), getattr(module, "run_state", None)
        if isinstance(recipe, Recipe):
            changes = () if state is None or state.schedule is None else state.schedule.changes
            siblings = [paths.get(sibling, "") for sibling in getattr(module, "amax_group", ())]
            own = [recipe.key, " ".join(f"{when}:{later.key}" for when, later in changes), *siblings[:1]]
            out |= {f"{path}.{name}".lstrip("."): own for name in module._parameters}
    return out


def linear_users(model: nn.Module, names: Iterable[str]) -> dict[LinearLayer, list[str]]:
    """Return for each linear layer the parameters that its forward reads: its own, and weights that share its amax."""
    wanted = {id(model.get_parameter(name)): name for name in names}
    users = {}
    for layer in model.modules():
        if isinstance(layer, LinearLayer):
            read = [*layer._parameters.values(), *(sibling.weight for sibling in layer.amax_group)]
            users[layer] = list(dict.fromkeys(wanted[id(param)] for param in read if id(param) in wanted))
    return {layer: found for layer, found in users.items() if found}


def first_users(model: nn.Module, names: Iterable[str]) -> dict[nn.Module, list[str]]:
    """Return for each module whose forward is hooked the parameters that must be complete before it.

    Linear layers are not hooked themselves, which would keep siblings from sharing one quantization of their input,
    lists have no forward, and that of the projection of torch's MultiheadAttention is never called: the nearest module
    above waits for their parameters. It may not be called itself: see `linear_users`.
    """
    above: dict[str, nn.Module] = {}
    users: dict[nn.Module, list[str]] = {}
    wanted = {id(model.get_parameter(name)): name for name in names}
    for path, module in model.named_modules(remove_duplicate=False):
        hidden = isinstance(module, HIDDEN) or type(module).forward is nn.Module.forward
        above[path] = above[path.rpartition(".")[0]] if hidden and path else module
        for param in module._parameters.values():
            if param is not None and id(param) in wanted:
                users.setdefault(above[path], []).append(wanted[id(param)])
    return users
