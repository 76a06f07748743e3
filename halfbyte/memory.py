"""hb.memory_report: what a training forward keeps for its backward under each recipe, found without running it.

The forward is traced with fake tensors, which have shapes and no data, at the given inputs and at twice their first
dimension. What grows with it is paid per token; what does not, such as copies of weights in the dtype of the GEMMs or
their quantized transposes, is paid per parameter. Nothing is guessed from formulas: the graph that autograd would hold
is asked for the tensors in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte import recipes as presets
from halfbyte.nn.linear import describe_recipe
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.notebook import ShowsText
from halfbyte.recipes import resolve
from halfbyte.spec import Recipe
from halfbyte.state import RunState

Owned = dict[int, int]
"""Storages by identity: their bytes."""


@dataclass(frozen=True, kw_only=True)
class KeptBytes:
    """What one recipe keeps: bytes for each token, and bytes in all that do not depend on tokens.

    Args:
        recipe: its name or key.
        per_token, fixed: of the whole model.
        linear_per_token, linear_fixed: of the layers that follow recipes alone: their inputs, and their weights.
    """

    recipe: str
    per_token: float
    fixed: int
    linear_per_token: float
    linear_fixed: int

    def bytes(self, tokens: int) -> int:
        """What a forward of so many tokens keeps."""
        return round(self.per_token * tokens) + self.fixed


@dataclass(frozen=True, kw_only=True)
class MemoryReport(ShowsText):
    """What `hb.memory_report` found; prints as a table.

    Args:
        rows: bf16 first, then the recipes in the order given.
        parameters: of the model.
        weights: elements of the weights that follow recipes.
    """

    rows: tuple[KeptBytes, ...]
    parameters: int
    weights: int

    def __getitem__(self, recipe: str) -> KeptBytes:
        names = [row.recipe for row in self.rows]
        if recipe not in names:
            raise KeyError(f"recipe={recipe!r}: the report has {', '.join(names)}")
        return self.rows[names.index(recipe)]

    def __str__(self) -> str:
        head = ("recipe", "bytes/token", "of linears", "of bf16's", "bytes/weight")
        base, lines = self.rows[0], []
        for row in self.rows:
            share = row.linear_per_token / base.linear_per_token if base.linear_per_token else 1.0
            weight = row.linear_fixed / max(1, self.weights)
            numbers = (f"{row.per_token:,.0f}", f"{row.linear_per_token:,.0f}", f"{share:.3f}", f"{weight:.3f}")
            lines.append((row.recipe, *numbers))
        widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in (head, *lines))
        ]
        return "\n".join((f"kept for the backward pass, {self.parameters / 1e6:,.1f}M parameters", *text))


def memory_report(
    model: nn.Module,
    *inputs: Tensor,
    recipes: Sequence[Recipe | str] = ("nvfp4",),
    dtype: torch.dtype | None = torch.bfloat16,
    forward: Callable[..., Any] | None = None,
) -> MemoryReport:
    """Say what a forward of `model` keeps for its backward, in bf16 and under recipes; no kernel runs.

    Activation checkpointing and compilation change what is kept; the report is about an eager forward without them.

    Args:
        model: converted by `hb.quantize_`; on any device, `meta` included. Layers kept in high precision stay there.
        inputs: example inputs of one forward; their first dimension is the batch.
        recipes: Recipes or names, for all layers that follow one.
        dtype: of autocast, None for none.
        forward: called with the inputs instead of the model, for models with other arguments.

    Returns:
        MemoryReport, with a row for bf16 and one for each other recipe.

    Raises:
        ValueError: no layer follows a recipe, an input has no dimension or is empty, or the forward's result has no
            gradient.
        TypeError: an input is no tensor, or `recipes` no list.
    """
    followers = [m for m in model.modules() if isinstance(m, FollowsRecipe) and not m.kept]
    layers = [m for m in followers if m.recipe.specs or m.run_state]
    if not layers:
        raise ValueError(f"model={type(model).__name__}: no layer follows a recipe; call hb.quantize_ first")
    if not all(isinstance(t, Tensor) for t in inputs):
        raise TypeError("inputs: give tensors; other arguments go into forward=lambda x: model(x, …)")
    if not inputs or any(t.dim() == 0 or t.shape[0] == 0 for t in inputs):
        raise ValueError("inputs: give example inputs whose first dimension is the batch, not empty")
    if isinstance(recipes, str | Recipe):
        raise TypeError(f"recipes={recipes!r}: give a list, such as recipes=['nvfp4', 'mxfp8']")
    chosen = dict.fromkeys((presets.bf16(), *(resolve(recipe) for recipe in recipes)))
    run = forward or model
    rows = []
    with _set_aside(layers):
        for recipe in chosen:
            for layer in layers:
                layer.recipe = recipe
            one, two = (_kept(model, layers, run, inputs, dtype, times) for times in (1, 2))
            rows.append(_row(describe_recipe(recipe), one, two, _tokens(inputs[0])))
    weights = {id(w): w for layer in layers for w in _weights(layer)}
    return MemoryReport(
        rows=tuple(rows),
        parameters=sum(p.numel() for p in model.parameters()),
        weights=sum(w.numel() for w in weights.values()),
    )


def _tokens(example: Tensor) -> int:
    """Return how many tokens an input holds: all leading dimensions of floats, every element of integers."""
    return example.numel() if not example.is_floating_point() else example.numel() // max(1, example.shape[-1])


def _row(name: str, one: tuple[int, int], two: tuple[int, int], tokens: int) -> KeptBytes:
    """Split bytes at one and at two times the tokens into a slope and a constant."""
    slopes = [(b - a) / tokens for a, b in zip(one, two, strict=True)]
    fixed = [2 * a - b for a, b in zip(one, two, strict=True)]
    per_token, linear_per_token = slopes
    return KeptBytes(
        recipe=name, per_token=per_token, fixed=fixed[0], linear_per_token=linear_per_token, linear_fixed=fixed[1]
    )


@contextmanager
def _set_aside(layers: Sequence[FollowsRecipe]) -> Iterator[None]:
    """Let recipes be tried: no cache is refilled, and recipes, random positions and caches are as before at the end."""
    saved = [(layer, layer.recipe, layer.run_state, layer.weight_cache, layer._stale) for layer in layers]
    states = {id(layer.run_state): layer.run_state for layer in layers if layer.run_state is not None}
    stand_ins = {key: copy.copy(state) for key, state in states.items()}
    stand_ins[id(None)] = RunState()  # for layers whose own recipe draws nothing
    try:
        for layer in layers:
            layer.weight_cache = None
            layer.run_state = stand_ins[id(layer.run_state)]
        yield
    finally:
        for layer, recipe, state, cache, stale in saved:
            layer.recipe, layer.run_state, layer._stale = recipe, state, stale
            layer.weight_cache = cache


def _weights(layer: FollowsRecipe) -> list[nn.Parameter]:
    found = (getattr(layer, name, None) for name in layer.weight_names)
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


def _kept(
    model: nn.Module,
    layers: Sequence[FollowsRecipe],
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    dtype: torch.dtype | None,
    times: int,
) -> tuple[int, int]:
    """Return the bytes that a fake forward of `times` the batch keeps: of the model, and of the layers alone."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, fake_parameters(model, mode):
        device = next(model.parameters()).device.type
        fakes = [_fake(t, mode).repeat(times, *[1] * (t.dim() - 1)) for t in inputs]
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
            outputs = run(*fakes)
        roots = [t.grad_fn for t in _flatten(outputs) if t.grad_fn is not None]
        if not roots:
            raise ValueError("model: the result of the forward has no gradient; give it parameters that require one")
        parameters = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        own = {id(weight) for layer in layers for weight in _weights(layer)}
        total, linear = _storages(roots, parameters, own)
        return sum(total.values()), sum(linear.values())


@contextmanager
def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Put fake tensors in the place of parameters and buffers; tied ones stay tied."""
    fakes: dict[int, Any] = {}
    places: list[tuple[Any, str, Tensor]] = [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    try:
        for table, name, tensor in places:
            if id(tensor) not in fakes:
                fake = _fake(tensor, mode)
                is_parameter = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            table[name] = fakes[id(tensor)]
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor where `tensor` is, or on the CPU for one on `meta`, where autocast does not work."""
    if tensor.device.type == "meta":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor.detach())


def _flatten(outputs: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _storages(roots: Sequence[Any], parameters: set[int], own: set[int]) -> tuple[Owned, Owned]:
    """Return what the graph behind `roots` keeps: all of it, and what the nodes of the layers keep."""
    total: Owned = {}
    linear: Owned = {}
    seen, pending = set(), list(roots)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_linear = any(_leads_to(following, own) for following, _ in node.next_functions)
        beside = {tensor.untyped_storage()._cdata for tensor in _of_the_activation(node)}
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                total[storage._cdata] = storage.nbytes()
                if is_linear and storage._cdata not in beside:
                    linear[storage._cdata] = storage.nbytes()
        pending += [following for following, _ in node.next_functions]
    return total, linear


_CASTS = (
    *("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    "_ValuesBackward",  # of a primary weight
)


def _leads_to(node: Any, own: set[int]) -> bool:
    """Whether a chain of casts and views of a layer's weight starts at `node`."""
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node is not None and id(getattr(node, "variable", None)) in own


def _of_the_activation(node: Any) -> Sequence[Tensor]:
    """Return what a node of linear layers with an activation behind them keeps for the activation: its inputs."""
    count = getattr(node, "activation_inputs", 0)
    return node.saved_tensors[-2 * count - 1 : -count - 1] if count else ()  # the bases of random places come last


def _saved(node: Any) -> list[Tensor]:
    """Return the tensors that one node of the graph keeps."""
    if hasattr(node, "saved_tensors"):
        return [t for t in node.saved_tensors if t is not None]
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    values += [v for value in values if isinstance(value, (tuple, list)) for v in value]
    return [value for value in values if isinstance(value, Tensor)]
