"""Adapters over frozen codes: freeze_ makes codes of weights, lora_ adds adapters, merge_lora_ takes them in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfbyte import layout
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.foreign import is_sharded
from halfbyte.functional.weights import takes_amax
from halfbyte.nn.fused import MLP, LayerNormLinear
from halfbyte.nn.linear import Linear, LinearLayer, shared_amax
from halfbyte.nn.lora import LoRALinear, check_adapter, frozen_weight
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.policy import matches
from halfbyte.report import some
from halfbyte.spec import Spec
from halfbyte.tensor import PrimaryWeight, QuantTensor, quantize
from halfbyte.tensor.quant_tensor import check_value_dtype, describe

MAGNITUDE = 7  # the bits of an E2M1 code beside its sign


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What `freeze_` left; prints as a table.

    Args:
        layers: {name: its spec in words} of the layers whose weights are codes now.
        kept: {name: reason} of linear layers whose weights stay as they are.
        weights: elements of the frozen weights, each weight once.
        nbytes: that their codes, scales and amaxes take.
    """

    layers: Mapping[str, str]
    kept: Mapping[str, str]
    weights: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits a frozen weight."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    def __str__(self) -> str:
        lines = _table(("layer", "weight"), [*self.layers.items(), *self.kept.items()])
        total = f"{len(self.layers)} layers frozen, {self.weights:,} weights in {self.nbytes:,} bytes"
        return "\n".join([*lines, f"{total}, {self.bits:.4g} bits each; {len(self.kept)} stay in high precision"])


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What `lora_` did; prints as a table.

    Args:
        layers: names of the layers that have an adapter now.
        frozen: what `freeze_` says of the model.
        parameters: elements of all adapters, which alone are trained.
    """

    layers: tuple[str, ...]
    frozen: Frozen
    parameters: int

    def __str__(self) -> str:
        return f"{self.frozen}\n{len(self.layers)} adapters, {self.parameters:,} trained parameters"


@dataclass(frozen=True, kw_only=True)
class MergedLayer:
    """One merged adapter.

    Args:
        name: of the layer.
        error: of the merged weight against what the layer multiplied by in training, relative, Frobenius norms; 0 for
            merge_aware=True, whose forwards multiplied by the merged bytes.
        update_error: the same error relative to the adapter's product: the share of the update that rounding lost.
        changed: share of the codes that stand for another number than those of the base, 0 to 1.
    """

    name: str
    error: float
    update_error: float
    changed: float

    @property
    def percent(self) -> tuple[str, ...]:
        """The three numbers, as they are printed."""
        return tuple(f"{100 * value:.3g} %" for value in (self.error, self.update_error, self.changed))


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What `merge_lora_` did; prints as a table."""

    rows: tuple[MergedLayer, ...]

    @property
    def error(self) -> float:
        """The greatest relative error of a layer."""
        return max(row.error for row in self.rows)

    def __str__(self) -> str:
        head = ("layer", "error", "of the update", "codes changed")
        return "\n".join(_table(head, [(row.name, *row.percent) for row in self.rows]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def freeze_(model: nn.Module, *, dtype: torch.dtype | None = None) -> Frozen:
    """Turn the weights of `model` whose forward reads codes into these codes, in place, and free the masters.

    Every hb.nn.Linear then holds a QuantTensor in the place of its Parameter `weight`: 4.5 bits a weight in NVFP4, with
    the bytes that its forward multiplied by before. Outputs stay as they are, and so does dx where the weight has 16x16
    tiles; other blocks are dequantized in the backward, and quantized once more where dgrad wants it. No gradient
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
    specs, kept = _plan(model)
    amaxes: dict[tuple[int, torch.dtype], Tensor] = {}
    todo = {name: layer for name, layer in _linears(model).items() if name in specs and frozen_weight(layer) is None}
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


def _linears(model: nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def _plan(model: nn.Module) -> tuple[dict[str, Spec], dict[str, str]]:
    """Return the layers whose forward reads codes, each with their spec, and why other linear layers stay."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
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
    found = {name: frozen_weight(layer) for name, layer in _linears(model).items()}
    layers = {name: weight for name, weight in found.items() if weight is not None}
    weights = {id(weight): weight for weight in layers.values()}
    return Frozen(
        layers={name: describe(weight.spec) for name, weight in layers.items()},
        kept=kept,
        weights=sum(weight.numel() for weight in weights.values()),
        nbytes=sum(weight.nbytes for weight in weights.values()),
    )


def lora_(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = ("*",),
    merge_aware: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Adapted:
    """Freeze `model` and give its frozen layers low-rank adapters, in place; these alone are trained (docs/lora.md).

    Weights become codes as `freeze_` says, all other parameters stop requiring gradients, and every frozen layer that
    `targets` names becomes an hb.nn.LoRALinear with parameters lora_A and lora_B.

    Args:
        model: converted by `hb.quantize_`; whether x and dy are quantized too is what its recipe says.
        rank: of the adapters.
        alpha: they are multiplied by alpha / rank.
        targets: globs of the layers' names.
        merge_aware: whether every forward multiplies by the merged weight, quantized, so that merging changes nothing.
        dtype: of the adapters; they are cast to what the forward computes in.

    Returns:
        Adapted, which prints as a table.

    Raises:
        TypeError: targets is one string, or dtype none that is computed in.
        ValueError: a target matches no frozen layer, a layer cannot be frozen or adapted, or merge_aware=True adapts a
            part of layers that share one amax.
    """
    if isinstance(targets, str):
        raise TypeError(f"targets={targets!r}: give a tuple of globs, such as ('*q_proj', '*v_proj')")
    check_value_dtype("dtype", dtype, "name the dtype of lora_A and lora_B, such as torch.float32")
    check_adapter(rank, alpha)
    specs, _ = _plan(model)
    _check_targets(targets, tuple(specs))
    linears = _linears(model)
    chosen = {n: linears[n] for n in specs if any(matches(n, glob) for glob in targets)}
    _check_places(model, chosen)
    if merge_aware:
        _check_groups(chosen, specs)
    frozen = freeze_(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    options = {"rank": rank, "alpha": alpha, "merge_aware": merge_aware, "dtype": dtype}
    new = {id(layer): LoRALinear.from_linear(layer, **options) for layer in chosen.values()}
    _exchange(model, new)
    return Adapted(
        layers=tuple(chosen),
        frozen=frozen,
        parameters=sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in new.values()),
    )


def _check_targets(targets: Sequence[str], names: tuple[str, ...]) -> None:
    for glob in targets:
        if not any(matches(name, glob) for name in names):
            raise ValueError(
                f"targets: {glob!r} matches no layer whose weight is read as codes; names look like {some(names)}"
            )


def _check_places(model: nn.Module, chosen: Mapping[str, Linear]) -> None:
    """Raise ValueError where a layer cannot be replaced by one with an adapter."""
    if "" in chosen:
        raise ValueError(
            "model is itself a layer and cannot be replaced in place; use hb.nn.LoRALinear.from_linear(model)"
        )
    for name, layer in chosen.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if layer.shared_input is not None or isinstance(parent, MLP | LayerNormLinear):
            raise ValueError(f"{name}: a fused module runs it; call hb.nn.unfuse_(model) before")
        if isinstance(layer, LoRALinear):
            raise ValueError(f"{name}: it has an adapter already; merge that first, hb.merge_lora_(model)")


def _check_groups(chosen: Mapping[str, Linear], specs: Mapping[str, Spec]) -> None:
    """Raise ValueError where some of the layers with one amax would change it for the others."""
    ours = {id(layer) for layer in chosen.values()}
    for name, layer in chosen.items():
        left = [member for member in layer.amax_group if id(member) not in ours]
        if left and takes_amax(specs[name]):
            raise ValueError(
                f"{name} shares its weight amax with {some(tuple(m.title for m in left))}, which no target names: with "
                "merge_aware=True the amax is that of the merged weights; name all of them or none, or convert with "
                "hb.quantize_(…, share_amax=())"
            )


def _exchange(model: nn.Module, new: Mapping[int, Linear]) -> None:
    """Put new layers wherever the model holds those whose ids are given, and into the groups that share an amax."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = new.get(id(child), child)
    for layer in model.modules():
        if isinstance(layer, LinearLayer):
            group: tuple[LinearLayer, ...] = tuple(new.get(id(member), member) for member in layer.amax_group)
            layer.amax_group = group


def merge_lora_(model: nn.Module) -> Merged:
    """Take the adapters of `model` into its codes, in place: every hb.nn.LoRALinear becomes an hb.nn.Linear.

    The merged weight is quantized as the base was, which rounds; the result says how much that changes. With
    merge_aware=True the bytes are those that forwards multiplied by, as long as this computes as they did: on the same
    kind of device, with the same torch.backends.cuda.matmul settings.

    Args:
        model: what `lora_` made.

    Returns:
        Merged, which prints as a table.

    Raises:
        ValueError: no layer has an adapter, or a merged weight holds NaN or Inf. The model is unchanged then.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    if not layers:
        raise ValueError(f"model={type(model).__name__}: no layer of it has an adapter; add them with hb.lora_")
    if "" in layers:
        raise ValueError("model is itself a layer and cannot be replaced in place; use model.merged_codes()")
    done = {name: _merge(name, layer) for name, layer in layers.items()}
    new: dict[int, Linear] = {}
    for name, layer in layers.items():
        linear = new[id(layer)] = layer.to_linear()
        linear.weight = nn.Parameter(done[name][0], requires_grad=False)
    _exchange(model, new)
    return Merged(rows=tuple(row for _, row in done.values()))


def _merge(name: str, layer: LoRALinear) -> tuple[QuantTensor, MergedLayer]:
    values = layer.merged_values()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name}: its merged weight holds NaN or Inf; go back to adapters of before the run diverged")
    base, merged = layer.weight, layer.quantize_merged(values)
    assert isinstance(base, QuantTensor), "merged_values asked"
    lost = 0.0 if layer.merge_aware else float(torch.linalg.norm(merged.dequantize(torch.float32) - values))
    update = float(torch.linalg.norm(values - base.dequantize(torch.float32)))
    changed = int((_codes(merged) != _codes(base)).sum()) / max(base.numel(), 1)
    ratios = (lost / total if total else 0.0 for total in (float(torch.linalg.norm(values)), update))
    error, update_error = ratios
    assert math.isfinite(error), "of finite values"
    return merged, MergedLayer(name=name, error=error, update_error=update_error, changed=changed)


def _codes(q: QuantTensor) -> Tensor:
    """Return what a weight's elements are compared by: a sum with zero makes +0 of -0, which changes no value."""
    if q.spec.format.codes_per_byte == 1:
        return q.qdata.float()
    codes = layout.unpack(q.qdata)
    return torch.where((codes & MAGNITUDE) == 0, 0, codes)
