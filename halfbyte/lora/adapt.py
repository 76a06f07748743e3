"""lora_: a frozen model whose layers have low-rank adapters, which alone are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.functional.weights import takes_amax
from halfbyte.lora.freeze import Frozen, conv1d_as_linear, exchange, freeze_, linear_layers, plan_frozen
from halfbyte.nn.fused import MLP, LayerNormLinear
from halfbyte.nn.linear import Linear
from halfbyte.nn.lora import LoRALinear, check_adapter
from halfbyte.notebook import ShowsText
from halfbyte.policy import matches
from halfbyte.report import some
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import check_value_dtype


@dataclass(frozen=True, kw_only=True)
class Adapted(ShowsText):
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


def lora_(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
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
        dropout: share of x that they do not see in training; not with merge_aware.
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
    check_adapter(rank, alpha, dropout, merge_aware)
    options = {"rank": rank, "alpha": alpha, "dropout": dropout, "merge_aware": merge_aware, "dtype": dtype}
    with conv1d_as_linear(model):
        return _adapt(model, targets, options)


def _adapt(model: nn.Module, targets: Sequence[str], options: dict[str, Any]) -> Adapted:
    specs, _ = plan_frozen(model)
    _check_targets(targets, tuple(specs))
    linears = linear_layers(model)
    chosen = {n: linears[n] for n in specs if any(matches(n, glob) for glob in targets)}
    _check_places(model, chosen)
    if options["merge_aware"]:
        _check_groups(chosen, specs)
    frozen = freeze_(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    new = {id(layer): LoRALinear.from_linear(layer, **options) for layer in chosen.values()}
    exchange(model, new)
    return Adapted(
        layers=tuple(chosen),
        frozen=frozen,
        parameters=sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in new.values()),
    )


def _check_targets(targets: Sequence[str], names: tuple[str, ...]) -> None:
    if not targets:
        raise ValueError(f"targets={targets!r}: name at least one layer; hb.freeze_ makes codes without adapters")
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
