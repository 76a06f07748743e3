"""What quantize_ will do, before it does it: a model's layers, the recipe of each and why, what no recipe reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from halfbyte.nn.experts import ExpertsRecipe, FoundExperts, find_experts
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import REPLACED_FORWARD, LinearLayer
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.nn.transposed import TransposedLinear, conv1d_class, is_conv1d
from halfbyte.policy import Keep, has_stack, kept_layers, matches, unmatched_names
from halfbyte.report import Row, describe_others, some
from halfbyte.spec import Recipe

FilterFn = Callable[[nn.Module, str], bool]
Others = dict[str, tuple[str, ...]]

SHARE_AMAX = (("*q_proj", "*k_proj", "*v_proj"), ("*gate_proj", "*up_proj"))
"""Siblings that serving engines fuse, and that therefore need one global amax (vLLM does not rescale block scales)."""

TABLES = ("embed", "token", "position")
"""Words in the names of parameters that are added or looked up; any other matrix is taken for a factor."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asks of quantize_, as it is named there."""

    recipe: Recipe
    filter_fn: FilterFn | None
    rules: Mapping[str, Recipe | None]
    keep: Keep | None
    share_amax: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What will be done.

    Args:
        layers: by name in the model's order, those that experts will get included.
        rows: one for each of them.
        experts: of transformers.
        others: {class: names} of modules with matrices that no recipe reaches.
        weights: elements that will be converted, and all that are multiplied.
    """

    layers: Mapping[str, nn.Module]
    rows: tuple[Row, ...]
    experts: FoundExperts
    others: Others
    weights: tuple[int, int]


def make_plan(model: nn.Module, wishes: Wishes) -> LayerPlan:
    """Return what quantize_ will do, and change nothing.

    Raises:
        ValueError: as quantize_ does where names match nothing or nothing would be converted.
    """
    experts = find_experts(model)
    layers = _layers(model, experts)
    others, unreached = _other_matrices(model, layers, experts)
    if layers:
        _check_globs(model, layers, wishes)
    kept = kept_layers(model, layers, wishes.keep or Keep())
    rows = tuple(_decide(name, layer, wishes, kept.get(name)) for name, layer in layers.items())
    _check_converted(model, rows, layers, others)
    weights = _count_weights(model, rows, layers, unreached)
    return LayerPlan(layers=layers, rows=rows, experts=experts, others=others, weights=weights)


def _layers(model: nn.Module, experts: FoundExperts) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | GroupedRecipe | TransposedLinear) or is_conv1d(module):
            layers[name] = module
        if name in experts.modules:
            layers |= {key: own for key, own in experts.recipes.items() if key.rpartition(".")[0] == name}
    return layers


def _other_matrices(
    model: nn.Module, layers: Mapping[str, nn.Module], experts: FoundExperts
) -> tuple[Others, list[nn.Parameter]]:
    """Return {class: names} of modules with matrices that no recipe reaches, and these; a lookup is no product."""
    found: Others = {}
    unreached: list[nn.Parameter] = []
    ours = {id(layer) for layer in layers.values()} | {id(module) for module in experts.modules.values()}
    for name, module in model.named_modules():
        reached = id(module) in ours or any(isinstance(child, GroupedRecipe) for child in module.children())
        if reached or isinstance(module, FollowsRecipe | nn.Embedding | nn.EmbeddingBag):
            continue
        own = {key: p for key, p in module._parameters.items() if p is not None}
        matrices = {key: p for key, p in own.items() if p.dim() > 1 and p.is_floating_point()}
        if matrices:
            kind = type(module).__name__
            found[kind] = (*found.get(kind, ()), name or "the model")
            unreached += [p for key, p in matrices.items() if not any(word in key for word in TABLES)]
    return found, unreached


def _count_weights(
    model: nn.Module, rows: Sequence[Row], layers: Mapping[str, nn.Module], unreached: Sequence[nn.Parameter]
) -> tuple[int, int]:
    """Return the elements of weights that are converted, and of all that are multiplied, each weight once."""
    done: set[int] = set()
    sizes = {id(p): p.numel() for p in unreached}
    for row in rows:
        layer: Any = layers[row.name]
        owner, name = layer, "weight"
        if isinstance(layer, GroupedRecipe) and layer.held_as is not None:
            owner, name = model.get_submodule(row.name.rpartition(".")[0]), layer.held_as[0]
        weight = owner._parameters.get(name)
        key = id(layer if weight is None else weight)
        sizes[key] = math.prod(row.shape)
        if row.recipe is not None:
            done.add(key)
    return sum(sizes[key] for key in done), sum(sizes.values())


def _decide(name: str, module: nn.Module, wishes: Wishes, kept: str | None) -> Row:
    """Return the recipe of one layer and the reason."""

    def row(recipe: Recipe | None, reason: str, present: Recipe | None = None) -> Row:
        return Row(name=name, shape=_shape(module), recipe=recipe, reason=reason, present=present)

    if isinstance(module, LinearLayer) or (isinstance(module, GroupedRecipe) and module.recipe.specs):
        kind = "GroupedRecipe" if isinstance(module, ExpertsRecipe) else type(module).__name__
        return row(None, f"already an hb.nn.{kind}; use hb.set_recipe_", module.recipe)
    obstacle = _obstacle(module)
    if obstacle is not None:
        return row(None, obstacle)
    if wishes.filter_fn is not None and not wishes.filter_fn(module, name):
        return row(None, "filter_fn")
    matching = [glob for glob in wishes.rules if matches(name, glob)]
    if matching:
        return row(wishes.rules[matching[-1]], f"rule {matching[-1]!r}")
    return row(wishes.recipe, "recipe") if kept is None else row(None, f"kept: {kept}")


def _obstacle(module: Any) -> str | None:
    """Return why a layer that is none of ours cannot be converted, or None."""
    if isinstance(module, GroupedRecipe):
        return None
    if is_parametrized(module):
        return "its parameters are computed by torch.nn.utils.parametrize; convert first, then register these"
    if type(module) not in (nn.Linear, conv1d_class()):
        return _of_a_subclass(module)
    if module.weight.is_complex():
        return "its weight is complex, which no format quantizes"
    return f"its forward was {REPLACED_FORWARD}" if "forward" in vars(module) else None


def _of_a_subclass(module: Any) -> str:
    base = conv1d_class() if is_conv1d(module) else nn.Linear
    what = f"{type(module).__name__} is a subclass of {'Linear' if base is nn.Linear else 'Conv1D'}"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"{what} whose weight torch's attention reads itself"
    return what if type(module).forward is getattr(base, "forward", None) else f"{what} with a forward of its own"


def _shape(module: Any) -> tuple[int, ...]:
    """Return (out, in) of a layer, (experts, out, in) of experts."""
    if is_conv1d(module):
        return tuple(reversed(module.weight.shape))
    experts = (module.experts,) if isinstance(module, GroupedRecipe) else ()
    return (*experts, module.out_features, module.in_features)


def _check_globs(model: nn.Module, layers: Mapping[str, nn.Module], wishes: Wishes) -> None:
    """Raise if something that the user named matches no layer."""
    keep, groups = wishes.keep, wishes.share_amax
    sharing = [glob for group in groups for glob in group] if groups != SHARE_AMAX else []
    unmatched = {
        "rules": [glob for glob in wishes.rules if not any(matches(name, glob) for name in layers)],
        "keep.names": () if keep is None or keep.names == Keep().names else unmatched_names(model, layers, keep),
        "share_amax": [glob for glob in sharing if not any(matches(name, glob) for name in layers)],
    }
    asked = {} if keep is None else {"first_blocks": keep.first_blocks, "last_fraction": keep.last_fraction}
    for field, value in asked.items():
        if value not in (0, getattr(Keep(), field)) and not has_stack(model, layers):
            raise ValueError(
                f"keep.{field}={value}: the model has no stack of blocks, such as an nn.ModuleList of modules with "
                "linear layers, so none is the first or the last; name the layers, keep=hb.Keep(names=('layer_0.*',))"
            )
    for argument, globs in unmatched.items():
        if globs:
            names = ", ".join(list(layers)[:4])
            raise ValueError(f"{argument}: {globs[0]!r} matches no linear layer; names look like {names}")


def _check_converted(model: nn.Module, rows: Sequence[Row], layers: Mapping[str, nn.Module], others: Others) -> None:
    """Raise if nothing is converted and nobody said so: neither an earlier call nor rules of None for all."""
    if any(row.recipe is not None or row.present is not None for row in rows):
        return
    convertible = [row for row in rows if _obstacle(layers[row.name]) is None]
    if convertible and all(row.reason.startswith("rule ") for row in convertible):
        return
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.reason, []).append(row.name)
    beside = "".join(f"; {text}: no torch.nn.Linear" for text in describe_others(others))
    if not rows:
        raise ValueError(f"model={type(model).__name__}: it contains no torch.nn.Linear; nothing to convert{beside}")
    counted = "; ".join(f"{len(names)} x {reason} ({some(tuple(names), 2)})" for reason, names in reasons.items())
    raise ValueError(
        f"model={type(model).__name__}: nothing would be converted, of {len(rows)} linear layers: {counted}{beside}. "
        "Change filter_fn, rules or keep, or convert before other tools replace forwards; rules={'*': None} leaves all "
        "layers in high precision on purpose"
    )
