"""freeze_: the weights of a trained model become the codes that its forwards read, and their masters are freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.foreign import is_sharded
from halfbyte.functional.weights import takes_amax
from halfbyte.nn.linear import Linear, LinearLayer
from halfbyte.nn.lora import frozen_weight
from halfbyte.nn.sibling_amax import shared_amax
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.nn.transposed import TransposedLinear
from halfbyte.notebook import ShowsText
from halfbyte.report import some
from halfbyte.spec import Recipe, Spec
from halfbyte.tensor import PrimaryWeight, quantize
from halfbyte.tensor.quant_tensor import check_value_dtype, describe


@dataclass(frozen=True, kw_only=True)
class Frozen(ShowsText):
    """What `freeze_` left; prints as a table.

    Args:
        layers: {name: its spec in words} of the layers whose weights are codes now.
        kept: {name: reason} of linear layers whose weights stay as they are.
        weights: elements of the frozen weights, each weight once.
        nbytes: that their codes, scales and amaxes take.
        more_than_codes: the frozen layers whose recipe multiplies a part of x by the weight in high precision, which
            is gone: their outputs are others now.
    """

    layers: Mapping[str, str]
    kept: Mapping[str, str]
    weights: int
    nbytes: int
    more_than_codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = as_table(("layer", "weight"), [*self.layers.items(), *self.kept.items()])
        total = f"{len(self.layers)} layers frozen, {self.weights:,} weights in {self.nbytes:,} bytes"
        lines.append(f"{total}, {self.bits:.4g} bits each; {len(self.kept)} stay in high precision")
        if self.more_than_codes:
            lines.append(
                f"outputs of {some(self.more_than_codes)} are others now: part of x (its mean, few channels) met the "
                "weight in high precision, which is gone; activation_mean='kept' and channels=None avoid it"
            )
        return "\n".join(lines)

    @property
    def bits(self) -> float:
        """Bits a frozen weight."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def reads_more_than_codes(recipe: Recipe) -> bool:
    """Whether the forward of a recipe multiplies a part of x by the weight in high precision, beside its codes."""
    return recipe.splits_mean or recipe.channels is not None


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def freeze_(model: nn.Module, *, dtype: torch.dtype | None = None) -> Frozen:
    """Turn the weights of `model` whose forward reads codes into these codes, in place, and free the masters.

    Every hb.nn.Linear, which a Conv1D under a recipe becomes too, then holds a QuantTensor in the place of its
    Parameter `weight`: 4.5 bits a weight in NVFP4, with the bytes that its forward multiplied by before. Outputs stay
    as they are, but for recipes that multiply more than codes, which the result names; so does dx where the weight has
    16x16 tiles. Other blocks are dequantized in the backward, and quantized once more where dgrad wants it. No gradient
    reaches a frozen weight. Other parameters stay as they are.

    Args:
        model: converted by `hb.quantize_`, or built of hb.nn layers.
        dtype: that forwards compute in, to which weights are rounded first. None: autocast's if it is enabled now, else
            each weight's own.

    Returns:
        Frozen, which prints as a table; layers that were frozen before are part of it.

    Raises:
        ValueError: nothing can be frozen, or the weight of a layer has no bytes of its own: drawn at random, rotated,
            sharded, cached, parametrized, a primary weight, NaN or Inf. The model is unchanged then.
    """
    if dtype is not None:
        check_value_dtype("dtype", dtype, "name the dtype that forwards compute in, such as torch.bfloat16")
    with conv1d_as_linear(model):
        return _freeze(model, dtype)


def _freeze(model: nn.Module, dtype: torch.dtype | None) -> Frozen:
    specs, kept = plan_frozen(model)
    amaxes: dict[tuple[int, torch.dtype], Tensor] = {}
    todo = {
        name: layer for name, layer in linear_layers(model).items() if name in specs and frozen_weight(layer) is None
    }
    dtypes = {name: dtype or autocast_dtype(layer.weight.device) or layer.weight.dtype for name, layer in todo.items()}
    for name, layer in todo.items():
        _check(name, layer, specs[name])
        if layer.amax_group and takes_amax(specs[name]):
            amaxes.setdefault((id(layer.amax_group[0]), dtypes[name]), shared_amax(layer, dtypes[name]))
    made: dict[tuple, nn.Parameter] = {}
    for name, layer in todo.items():
        spec, group = specs[name], layer.amax_group
        amax = amaxes.get((id(group[0]), dtypes[name])) if group else None
        key = id(layer.weight), spec, dtypes[name], id(amax)
        if key not in made:  # tied weights stay tied
            codes = quantize(layer.weight.detach().to(dtypes[name]), spec, amax=amax)
            made[key] = nn.Parameter(codes, requires_grad=False)
        layer.weight = made[key]
    return _frozen(model, kept)


@contextmanager
def conv1d_as_linear(model: nn.Module) -> Iterator[None]:
    """Put an hb.nn.Linear of the transposed weight in the place of every Conv1D that can be frozen.

    Codes exist of [N, K] alone. If the block raises, the model is as it was.
    """
    old = _conv1d_layers(model)
    weights = {id(layer.weight): nn.Parameter(layer.weight.detach().mT, requires_grad=False) for layer in old}
    new = {id(layer): layer.to_linear(weights[id(layer.weight)]) for layer in old}  # tied weights stay tied
    exchange(model, new)
    try:
        yield
    except BaseException:
        exchange(model, {id(new[id(layer)]): layer for layer in old})
        raise


def _conv1d_layers(model: nn.Module) -> list[TransposedLinear]:
    """Return the Conv1D under a recipe that reads codes, whose weight is their own."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, TransposedLinear):
        raise ValueError("model is itself a Conv1D and cannot be replaced in place; give the module that holds it")
    found = [layer for layer in model.modules() if isinstance(layer, TransposedLinear)]
    others = {id(p) for m in model.modules() if not isinstance(m, TransposedLinear) for p in m._parameters.values()}
    return [
        layer
        for layer in found
        if layer.recipe.fprop is not None
        and layer.recipe.fprop.b is not None
        and layer._parameters.get("weight") is not None
        and id(layer.weight) not in others
    ]


def exchange(model: nn.Module, new: Mapping[int, LinearLayer]) -> None:
    """Put new layers wherever the model holds those whose ids are given, and into the groups that share an amax."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = new.get(id(child), child)
    for layer in model.modules():
        if isinstance(layer, LinearLayer):
            group: tuple[LinearLayer, ...] = tuple(new.get(id(member), member) for member in layer.amax_group)
            layer.amax_group = group


def linear_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the layers of a model that follow recipes and hold a weight [N, K], by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def plan_frozen(model: nn.Module) -> tuple[dict[str, Spec], dict[str, str]]:
    """Return the layers whose forward reads codes, each with their spec, and why other linear layers stay."""
    specs: dict[str, Spec] = {}
    kept: dict[str, str] = {}
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(module, Linear):
                holders.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            fprop = module.recipe.fprop
            codes = frozen_weight(module)
            spec = codes.spec if codes is not None else None if fprop is None else fprop.b
            tied = holders.get(id(module._parameters.get("weight")))
            if spec is None:
                kept[name] = "its forward reads the weight in high precision"
            elif tied:
                kept[name] = f"its weight is that of {tied[0]} too"
            else:
                specs[name] = spec
        elif isinstance(module, FollowsRecipe) and module.recipe.specs:
            kept[name] = f"a {type(module).__name__}, of which only hb.nn.Linear can be frozen"
        elif isinstance(module, nn.Linear):
            kept[name] = "in high precision"
    if not specs:
        raise ValueError(
            f"model={type(model).__name__}: no hb.nn.Linear of it reads its weight as codes; convert it with "
            "hb.quantize_ to a recipe that quantizes weights in fprop"
        )
    return specs, kept


def _check(name: str, layer: Linear, spec: Spec) -> None:
    """Raise ValueError where a layer's weight is not codes that forwards will go on reading."""
    weight, title = layer._parameters.get("weight"), name or "the layer"
    if weight is None:
        raise ValueError(f"{title}: its weight is parametrized; take that out, torch.nn.utils.parametrize, first")
    if isinstance(weight, PrimaryWeight) or layer.before_use is not None:
        raise ValueError(f"{title}: an optimizer of hb.distributed trains its weight; let go of that optimizer first")
    if is_sharded(weight):
        raise ValueError(f"{title}: its weight is sharded (DTensor); freeze the model before it is sharded")
    if layer.weight_cache is not None:
        raise ValueError(f"{title}: hb.cache_weights holds its operands; release() that first, codes need no cache")
    if layer.times_aside:
        raise ValueError(f"{title}: the model is in hb.high_precision; freeze it outside of the context")
    if spec.needs_rng or spec.needs_sign_rng or spec.rotation is not None:
        raise ValueError(
            f"{title}: its weight is {describe(spec)}, drawn anew in every forward or rotated, so no codes stand for "
            "it; give it another recipe with hb.set_recipe_"
        )
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{title}: its weight holds NaN or Inf; freeze a checkpoint of before the run diverged")


def _frozen(model: nn.Module, kept: Mapping[str, str]) -> Frozen:
    found = {name: frozen_weight(layer) for name, layer in linear_layers(model).items()}
    layers = {name: weight for name, weight in found.items() if weight is not None}
    weights = {id(weight): weight for weight in layers.values()}
    recipes = {name: layer.recipe for name, layer in linear_layers(model).items() if name in layers}
    return Frozen(
        layers={name: describe(weight.spec) for name, weight in layers.items()},
        kept=kept,
        weights=sum(weight.numel() for weight in weights.values()),
        nbytes=sum(weight.nbytes for weight in weights.values()),
        more_than_codes=tuple(name for name, recipe in recipes.items() if reads_more_than_codes(recipe)),
    )
