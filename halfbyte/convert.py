"""Put a recipe into a model: quantize_ converts its linear layers in place, set_recipe_ changes them at any step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType

from torch import nn
from torch.nn.parameter import is_lazy

from halfbyte import recipes
from halfbyte.decide import SHARE_AMAX, FilterFn, Wishes, make_plan
from halfbyte.functional.grouped import recipe_of_experts
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import Linear, LinearLayer
from halfbyte.nn.streams import FollowsRecipe, name_layers
from halfbyte.nn.transposed import TransposedLinear, is_conv1d
from halfbyte.policy import Keep, matches, plain_name
from halfbyte.position import ConvertedAt, warn_user
from halfbyte.recipes import resolve
from halfbyte.report import Report, Row
from halfbyte.spec import Recipe
from halfbyte.state import RunState

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}


def quantize_(
    model: nn.Module,
    recipe: Recipe | str,
    filter_fn: FilterFn | None = None,
    *,
    rules: Mapping[str, Recipe | str | None] | None = None,
    keep: Keep | None = None,
    share_amax: Sequence[Sequence[str]] = SHARE_AMAX,
    state: RunState | None = None,
) -> Report:
    """Convert the linear layers of `model` to `recipe` in place; Parameters and state_dict keys stay as they are.

    A layer's recipe is decided in this order: `filter_fn` says no: unchanged; the last rule whose glob matches; `keep`;
    `recipe`. Only exact torch.nn.Linear modules and transformers' Conv1D are converted, no subclasses with a forward of
    their own. Layers of experts (hb.nn.GroupedLinear) in high precision take the recipe as they are; experts that
    transformers dispatches are prepared, their weights called `….up_recipe` and `….down_recipe`. Layers of hb.nn built
    without `state=` keep their recipe and draw from the report's RunState from now on.

    Args:
        model: any module that contains linear layers.
        recipe: for every layer that nothing else decides.
        filter_fn: (module, fully qualified name) -> whether to convert; third, as in torchao's quantize_.
        rules: {glob: recipe, preset name, or None for high precision}; an explicit rule wins over `keep`.
        keep: what stays in high precision; Keep() by default, Keep(names=(), last_fraction=0) for nothing.
        share_amax: groups of globs; sibling layers of one parent that match a group share one weight amax.
        state: the RunState to draw from; by default that of layers converted before or built with `state=`, else that
            which an hb.nn layer made for itself, else a new RunState(0).

    Returns:
        Report, which prints as a table and carries the RunState.

    Raises:
        ValueError: a rule or a name of an explicit `keep` or `share_amax` matches no linear layer, a lazy layer has not
            seen its first input, or nothing would be converted; a second call may convert nothing, and so may rules
            that say None to every layer. The model is unchanged then.
    """
    _check_kinds(model, filter_fn, rules, share_amax)
    _check_values(keep, state)
    _check_initialized(model)
    default = resolve(recipe)
    state = _run_state(model) if state is None else state
    resolved = {glob: None if rule is None else resolve(rule) for glob, rule in (rules or {}).items()}
    groups = tuple(tuple(group) for group in share_amax)
    plan = make_plan(model, Wishes(recipe=default, filter_fn=filter_fn, rules=resolved, keep=keep, share_amax=groups))
    _check_experts({row.name: (plan.layers[row.name], row.recipe) for row in plan.rows})
    followers = [layer for layer in _quantized(model) if layer.recipe.specs or layer.run_state is not None]
    if any(row.recipe is not None for row in plan.rows if row.name in plan.experts.recipes):
        plan.experts.prepare()
    _convert(model, [(plan.layers[row.name], row) for row in plan.rows], state.share())
    for layer in followers:  # after those converted here, whose streams do not depend on them
        layer.join(state)
    _share_amaxes(model, plan.rows, groups)
    _leave_fast_paths(model)
    _name_held(model, {id(plan.layers[row.name]): row.name for row in plan.rows if row.recipe is not None})
    name_layers(model)
    return Report(rows=plan.rows, state=state, others=plan.others, weights=plan.weights)


def _check_experts(wanted: Mapping[str, tuple[nn.Module, Recipe | None]]) -> None:
    """Raise ValueError where experts are to have a recipe that they cannot follow: nothing has changed then."""
    for name, (layer, recipe) in wanted.items():
        if recipe is None or not isinstance(layer, GroupedRecipe):
            continue
        try:
            recipe_of_experts(recipe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _convert(model: nn.Module, decided: Sequence[tuple[nn.Module, Row]], state: RunState) -> None:
    for layer, row in decided:
        if row.recipe is not None and isinstance(layer, GroupedRecipe):
            layer.adopt(row.recipe, state)
        elif isinstance(layer, GroupedRecipe):
            layer.kept = row.present is None
        elif row.recipe is not None and isinstance(layer, nn.Linear):
            _put(model, layer, Linear.from_linear(layer, row.recipe, state), row.name)
        elif row.recipe is not None:
            _put(model, layer, TransposedLinear.from_conv1d(layer, row.recipe, state), row.name)


def _check_initialized(model: nn.Module) -> None:
    """Raise where torch's lazy layers wait for an input that tells their shapes."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        some = ", ".join(lazy[:4]) + (", …" if len(lazy) > 4 else "")
        raise ValueError(f"model: {some} not initialized yet, of lazy layers; run one forward first, then convert")


def _run_state(model: nn.Module) -> RunState:
    """Return the RunState of the layers converted before: a second one of seed 0 would draw their bits again."""
    states = [m.run_state for m in _quantized(model) if m.run_state is not None]
    return next((state for state in states if not state.is_private), states[0] if states else RunState(0))


def check_share_amax(share_amax: Sequence[Sequence[str]]) -> None:
    """Raise TypeError unless these are groups of globs."""
    is_sequence = isinstance(share_amax, Sequence) and not isinstance(share_amax, str)
    if not is_sequence or any(isinstance(group, str) or not isinstance(group, Sequence) for group in share_amax):
        raise TypeError(f"share_amax={share_amax!r}: give groups of globs, such as (('*q_proj', '*k_proj'),)")


def _check_kinds(model: object, filter_fn: object, rules: object, share_amax: Sequence[Sequence[str]]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model is itself a Linear and cannot be replaced in place; use hb.nn.Linear.from_linear(model, …)"
        )
    if is_conv1d(model):
        raise ValueError(
            "model is itself a Conv1D and cannot be replaced in place; use hb.nn.TransposedLinear.from_conv1d(model, …)"
        )
    check_share_amax(share_amax)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn={filter_fn!r}: give a function of (module, name); a dict of recipes is rules=")
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules={rules!r}: give a dict of glob to recipe, preset name or None")
    strange = [glob for glob in rules or {} if not isinstance(glob, str)]
    if strange:
        raise TypeError(f"rules: {strange[0]!r} is no glob; give names of layers, such as 'blocks.0.*'")


def _check_values(keep: object, state: object) -> None:
    if keep is not None and not isinstance(keep, Keep):
        raise TypeError(f"keep={keep!r}: give a Keep, such as hb.Keep(last_fraction=0.3)")
    if state is not None and not isinstance(state, RunState):
        raise TypeError(f"state={state!r}: give a RunState, such as hb.RunState(seed=0)")


def _put(model: nn.Module, old: nn.Module, new: LinearLayer, called: str) -> None:
    """Put `new` wherever the model holds `old`, a layer may be registered under several names, and note where."""
    holders = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in holders:
        setattr(parent, name, new)
        new.places.append(ConvertedAt(weakref.ref(parent), name, called))


def _name_held(model: nn.Module, converted: Mapping[int, str]) -> None:
    """Warn of layers that the model also holds outside its modules, where they are called as they were."""
    held = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _REGISTRIES:
                continue
            of_dict = value.values() if isinstance(value, dict) else None
            for one in of_dict or (value if isinstance(value, (list, tuple)) else (value,)):
                found = converted.get(id(one.__self__ if isinstance(one, MethodType) else one))
                if found is not None and not isinstance(one, LinearLayer):
                    held.append(f"{found} in {name + '.' if name else ''}{attribute}")
    if held:
        some = ", ".join(held[:4]) + (", …" if len(held) > 4 else "")
        warn_user(
            f"{some}: held there as it was before, so that what calls it there is in high precision; hold it in a "
            "torch.nn.ModuleList, or convert before it is put there"
        )


def _leave_fast_paths(model: nn.Module) -> None:
    """Let torch's encoder layers call their linear layers in eval too: their fast path reads only the weights."""
    changed = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Linear) for m in module.children())
    ]
    for layer in changed:
        _change(layer, "activation_relu_or_gelu", 0)  # what torch asks before it takes the fast path
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(layer in changed for layer in module.layers):
            _change(module, "use_nested_tensor", False)  # only the fast path takes nested tensors


def _change(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute; `hb.unquantize_` sets what it was before."""
    vars(module).setdefault("fast_path_before", {}).setdefault(name, getattr(module, name))
    setattr(module, name, value)


def _share_amaxes(model: nn.Module, rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> None:
    """Give sibling layers that match a group of globs the same amax_group, those converted before included."""
    new = {row.name for row in rows if row.recipe is not None}
    for globs in groups:
        families: dict[str, dict[str, LinearLayer]] = {}
        for name in (row.name for row in rows if any(matches(row.name, glob) for glob in globs)):
            layer = model.get_submodule(name)
            if isinstance(layer, LinearLayer):
                families.setdefault(plain_name(name).rpartition(".")[0], {})[name] = layer
        for names, family in ((layers.keys(), tuple(layers.values())) for layers in families.values()):
            if len(family) > 1 and not new.isdisjoint(names):
                for module in family:
                    module.amax_group = family


def _quantized(model: nn.Module) -> Iterator[FollowsRecipe]:
    return (m for m in model.modules() if isinstance(m, FollowsRecipe))


def set_recipe_(model: nn.Module, recipe: Recipe | str, *, state: RunState | None = None) -> None:
    """Give every converted layer of `model` another recipe, effective from the next forward.

    Layers that `quantize_` kept in high precision stay there, experts too.

    Args:
        model: a model that `quantize_` converted, or one built of hb.nn layers.
        recipe: a Recipe or a preset's name.
        state: the RunState to draw from, for layers that were built without one or copied from one that draws from
            it; others keep theirs.

    Raises:
        ValueError: the model has no hb.nn layer, the recipe draws and a layer has no RunState, or it is called within
            `hb.high_precision`, which would undo the change.
    """
    recipe = resolve(recipe)
    modules = [module for module in _quantized(model) if not module.kept]
    if not modules:
        raise ValueError(f"model={type(model).__name__}: no layer follows a recipe; call hb.quantize_ first")
    if any(module.times_aside for module in modules):
        raise ValueError(
            "model is in hb.high_precision, which puts the recipes back that it found and would undo the change; call "
            "set_recipe_ before or after the context"
        )
    _check_experts({module.title: (module, recipe) for module in modules})
    _check_values(None, state)
    for module in modules:
        if module.run_state is None and state is None and (recipe.needs_rng or recipe.amax is not None):
            what = "draws random bits" if recipe.needs_rng else "delays amaxes"
            raise ValueError(f"state=None: the recipe {what} and a layer has no RunState; pass state=hb.RunState(seed)")
    for module in modules:
        if state is not None:
            module.join(state.share())
        module.recipe = recipe
    _leave_fast_paths(model)


@contextmanager
def high_precision(model: nn.Module) -> Iterator[nn.Module]:
    """Run every converted layer in high precision within the context; recipes come back afterwards, also on errors.

    `RunState.begin_step` of a schedule is refused within it.

    Args:
        model: any module.
    """
    saved = [(module, module.recipe) for module in _quantized(model)]
    for module, _ in saved:
        module.times_aside += 1
    try:
        for module, _ in saved:
            module.recipe = recipes.bf16()
        yield model
    finally:
        for module, recipe in saved:
            module.recipe = recipe
            module.times_aside -= 1
