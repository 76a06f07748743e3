"""Put a recipe into a model: quantize_ converts its linear layers in place, set_recipe_ changes them at any step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from halfbyte import recipes
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import REPLACED_FORWARD, Linear, as_recipe, describe
from halfbyte.nn.streams import FollowsRecipe, name_layers
from halfbyte.spec import Recipe
from halfbyte.state import RunState

Layer = nn.Linear | GroupedRecipe

FilterFn = Callable[[nn.Module, str], bool]

SHARE_AMAX = (("*q_proj", "*k_proj", "*v_proj"), ("*gate_proj", "*up_proj"))
"""Siblings that serving engines fuse, and that therefore need one global amax (vLLM does not rescale block scales)."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which linear layers stay in high precision: by default as in NVIDIA's NVFP4 pretraining (arXiv 2509.25149).

    Args:
        names: globs of fully qualified names.
        first_blocks: this many blocks at the start of every stack of blocks.
        last_fraction: this share of the blocks at the end of the stack, rounded up, but never all of them.
    """

    names: tuple[str, ...] = (
        *("*lm_head", "*embed*", "*output_layer"),
        *("*router", "*router.*", "*.gate", "*.gate.*", "*shared_expert_gate"),
    )
    first_blocks: int = 0
    last_fraction: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise TypeError(f"names={self.names!r}: give a tuple of globs")
        object.__setattr__(self, "names", tuple(self.names))
        if not isinstance(self.first_blocks, int) or self.first_blocks < 0:
            raise ValueError(f"first_blocks={self.first_blocks!r}: give a number of blocks >= 0")
        if not 0 <= self.last_fraction <= 1:
            raise ValueError(f"last_fraction={self.last_fraction!r}: give a share between 0 and 1")

    def last_blocks(self, count: int) -> int:
        """Return how many of `count` blocks stay in high precision at the end."""
        return min(math.ceil(self.last_fraction * count - 1e-9), max(count - 1, 0))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One linear layer: its name, shape (out, in) or (experts, out, in), recipe or None, and why.

    present: the recipe that a layer follows which was converted before and stays as it is.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str
    present: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What quantize_ did; prints as a table.

    Args:
        rows: one per linear layer, in the model's order.
        state: the RunState that the converted layers draw from; advance it once per micro-batch.
        others: {class: names} of modules with matrices of their own that are no linear layers: they stay.
    """

    rows: tuple[Row, ...]
    state: RunState = field(repr=False)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that now follow a recipe."""
        return tuple(row.name for row in self.rows if row.recipe is not None)

    @property
    def kept(self) -> dict[str, str]:
        """Name and reason of every layer that stays as it is: in high precision, or converted before."""
        return {row.name: row.reason for row in self.rows if row.recipe is None}

    def __str__(self) -> str:
        table = [("layer", "out x in", "recipe", "why")]
        for row in self.rows:
            follows = row.recipe or row.present
            recipe = "high precision" if follows is None else describe(follows)
            table.append((row.name, " x ".join(map(str, row.shape)), recipe, row.reason))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        total = sum(math.prod(row.shape) for row in self.rows)
        done = sum(math.prod(row.shape) for row in self.rows if row.recipe is not None)
        share = f"{100 * done / total:.1f} %" if total else "none"
        lines.insert(1, "  ".join("-" * width for width in widths))
        for kind, names in self.others.items():
            some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            lines.append(f"{len(names)} x {kind} ({some}): no torch.nn.Linear, stays as it is")
        lines.append(f"{len(self.converted)} of {len(self.rows)} linear layers converted, {share} of their weights")
        return "\n".join(lines)


def quantize_(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    filter_fn: FilterFn | None = None,
    rules: Mapping[str, Recipe | str | None] | None = None,
    keep: Keep | None = None,
    share_amax: Sequence[Sequence[str]] = SHARE_AMAX,
    state: RunState | None = None,
) -> Report:
    """Convert the linear layers of `model` to `recipe` in place; Parameters and state_dict keys stay as they are.

    A layer's recipe is decided in this order: `filter_fn` says no: unchanged; the last rule whose glob matches; `keep`;
    `recipe`. Only exact torch.nn.Linear modules are converted, never subclasses with a forward of their own; layers of
    experts (hb.nn.GroupedLinear) that are in high precision take the recipe as they are. Layers of hb.nn that were
    built without `state=` keep their recipe and draw from the report's RunState from now on.

    Args:
        model: any module that contains linear layers.
        recipe: for every layer that nothing else decides.
        filter_fn: (module, fully qualified name) -> whether to convert.
        rules: {glob: recipe, preset name, or None for high precision}; an explicit rule wins over `keep`.
        keep: what stays in high precision; Keep() by default, Keep(names=(), last_fraction=0) for nothing.
        share_amax: groups of globs; sibling layers of one parent that match a group share one weight amax.
        state: the RunState to draw from; by default that of layers converted before or built with `state=`, else that
            which an hb.nn layer made for itself, else a new RunState(0).

    Returns:
        Report, which prints as a table and carries the RunState.

    Raises:
        ValueError: a rule or a name of an explicit `keep` or `share_amax` matches no linear layer, a lazy layer has not
            seen its first input, or nothing is there to convert. The model is unchanged then.
    """
    _check_kinds(model, rules, share_amax)
    _check_initialized(model)
    state = _run_state(model) if state is None else state
    resolved = {glob: None if rule is None else as_recipe(rule) for glob, rule in (rules or {}).items()}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, GroupedRecipe))}
    if not layers:
        raise ValueError(f"model={type(model).__name__}: it contains no torch.nn.Linear; nothing can be converted")
    groups = [tuple(group) for group in share_amax]
    _check_globs("rules", resolved, layers)
    if keep is not None:
        _check_globs("keep.names", keep.names if keep.names != Keep().names else (), layers)
    if tuple(groups) != SHARE_AMAX:
        _check_globs("share_amax", [glob for group in groups for glob in group], layers)
    keep = keep or Keep()
    edges, default = _kept_blocks(model, layers, keep), as_recipe(recipe)
    rows = tuple(_decide(name, layer, default, filter_fn, resolved, keep, edges) for name, layer in layers.items())
    others = _other_matrices(model)
    followers = [layer for layer in _quantized(model) if layer.recipe.specs or layer.run_state is not None]
    _convert(model, [(layers[row.name], row) for row in rows], state.share())
    for layer in followers:  # after those converted here, whose streams do not depend on them
        layer.join(state)
    _share_amaxes(model, [row.name for row in rows if row.recipe is not None], groups)
    _leave_fast_paths(model)
    name_layers(model)
    return Report(rows=rows, state=state, others=others)


def _convert(model: nn.Module, decided: Sequence[tuple[Layer, Row]], state: RunState) -> None:
    for layer, row in decided:
        if row.recipe is not None and isinstance(layer, GroupedRecipe):
            layer.adopt(row.recipe, state)
        elif isinstance(layer, GroupedRecipe):
            layer.kept = row.present is None
        elif row.recipe is not None and isinstance(layer, nn.Linear):
            _replace(model, layer, Linear.from_linear(layer, row.recipe, state))


def _check_initialized(model: nn.Module) -> None:
    """Raise where torch's lazy layers wait for an input that tells their shapes."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        some = ", ".join(lazy[:4]) + (", …" if len(lazy) > 4 else "")
        raise ValueError(f"model: {some} not initialized yet, of lazy layers; run one forward first, then convert")


def _other_matrices(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return {class: names} of modules with matrices that no recipe reaches; a lookup in a table is no product."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        matrices = any(p is not None and p.dim() > 1 and p.is_floating_point() for p in module._parameters.values())
        reached = any(isinstance(child, GroupedRecipe) for child in module.children())  # the experts it owns
        if (
            matrices
            and not reached
            and not isinstance(module, (nn.Linear, FollowsRecipe, nn.Embedding, nn.EmbeddingBag))
        ):
            kind = type(module).__name__
            found[kind] = (*found.get(kind, ()), name or "the model")
    return found


def _run_state(model: nn.Module) -> RunState:
    """Return the RunState of the layers converted before: a second one of seed 0 would draw their bits again."""
    states = [m.run_state for m in _quantized(model) if m.run_state is not None]
    return next((state for state in states if not state.is_private), states[0] if states else RunState(0))


def _check_kinds(model: object, rules: object, share_amax: Sequence[Sequence[str]]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model is itself a Linear and cannot be replaced in place; use hb.nn.Linear.from_linear(model, …)"
        )
    if isinstance(share_amax, str) or any(isinstance(group, str) for group in share_amax):
        raise TypeError(f"share_amax={share_amax!r}: give groups of globs, such as (('*q_proj', '*k_proj'),)")
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules={rules!r}: give a dict of glob to recipe, preset name or None")


def _decide(
    name: str,
    module: Layer,
    default: Recipe,
    filter_fn: FilterFn | None,
    rules: Mapping[str, Recipe | None],
    keep: Keep,
    edges: Mapping[str, str],
) -> Row:
    """Return the recipe of one layer and the reason."""

    def row(recipe: Recipe | None, reason: str, present: Recipe | None = None) -> Row:
        experts = (module.experts,) if isinstance(module, GroupedRecipe) else ()
        shape = (*experts, module.out_features, module.in_features)
        return Row(name=name, shape=shape, recipe=recipe, reason=reason, present=present)

    if isinstance(module, Linear) or (isinstance(module, GroupedRecipe) and module.recipe.specs):
        return row(None, f"already an hb.nn.{type(module).__name__}; use hb.set_recipe_", module.recipe)
    if type(module) is not nn.Linear and not isinstance(module, GroupedRecipe):
        return row(None, f"{type(module).__name__} is a subclass of Linear with a forward of its own")
    if isinstance(module, nn.Linear) and "forward" in vars(module):
        return row(None, f"its forward was {REPLACED_FORWARD}")
    if filter_fn is not None and not filter_fn(module, name):
        return row(None, "filter_fn")
    matching = [glob for glob in rules if fnmatchcase(name, glob)]
    if matching:
        return row(rules[matching[-1]], f"rule {matching[-1]!r}")
    for glob in keep.names:
        if fnmatchcase(name, glob):
            return row(None, f"kept: name matches {glob!r}")
    if name in edges:
        return row(None, f"kept: {edges[name]}")
    return row(default, "recipe")


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model holds `old`: a layer may be registered under several names."""
    holders = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in holders:
        setattr(parent, name, new)


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


def _check_globs(argument: str, globs: Sequence[str] | Mapping[str, object], layers: Mapping[str, Layer]) -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in layers):
            some = ", ".join(list(layers)[:4])
            raise ValueError(f"{argument}: {glob!r} matches no linear layer; names look like {some}")


def _kept_blocks(model: nn.Module, layers: Mapping[str, Layer], keep: Keep) -> dict[str, str]:
    """Return {layer name: reason} of the layers in the first and last blocks of every outermost ModuleList."""
    kept: dict[str, str] = {}
    outer: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{p}.") for p in outer):
            continue
        inside = [name for name in layers if name.startswith(f"{path}." if path else "")]
        if not inside:
            continue
        outer.append(path)
        count, last = len(module), keep.last_blocks(len(module))
        for index in range(count):
            edge = "first" if index < keep.first_blocks else "last" if index >= count - last else None
            prefix = f"{path}.{index}." if path else f"{index}."
            if edge is not None:
                amount = keep.first_blocks if edge == "first" else last
                reason = f"{edge} {amount} of {count} blocks of {path or 'the model'}"
                kept.update({name: reason for name in inside if name.startswith(prefix) or name == prefix[:-1]})
    return kept


def _share_amaxes(model: nn.Module, converted: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    """Give sibling layers that match a group of globs the same amax_group."""
    for globs in groups:
        families: dict[str, list[Linear]] = {}
        for name in converted:
            if any(fnmatchcase(name, glob) for glob in globs):
                layer = model.get_submodule(name)
                if isinstance(layer, Linear):
                    families.setdefault(name.rpartition(".")[0], []).append(layer)
        for family in families.values():
            if len(family) > 1:
                for module in family:
                    module.amax_group = tuple(family)


def _quantized(model: nn.Module) -> Iterator[FollowsRecipe]:
    return (m for m in model.modules() if isinstance(m, FollowsRecipe))


def set_recipe_(model: nn.Module, recipe: Recipe | str, *, state: RunState | None = None) -> None:
    """Give every converted layer of `model` another recipe, effective from the next forward.

    Layers that `quantize_` kept in high precision stay there, experts too.

    Args:
        model: a model that `quantize_` converted, or one built of hb.nn layers.
        recipe: a Recipe or a preset's name.
        state: the RunState to draw from, for layers that were built without one; others keep theirs.

    Raises:
        ValueError: the model has no hb.nn layer, or the recipe draws and a layer has no RunState.
    """
    recipe = as_recipe(recipe)
    modules = [module for module in _quantized(model) if not module.kept]
    if not modules:
        raise ValueError(f"model={type(model).__name__}: no layer follows a recipe; call hb.quantize_ first")
    for module in modules:
        if module.run_state is None and state is None and recipe.needs_rng:
            raise ValueError(
                "state=None: the recipe draws random bits and a layer has no RunState; pass state=hb.RunState(seed)"
            )
    for module in modules:
        if state is not None:
            module.join(state.share())
        module.recipe = recipe


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
