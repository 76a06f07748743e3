"""Weights as the forward of a trained model reads them: its bytes, found again and never quantized a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.functional.foreign import is_sharded
from halfbyte.functional.weights import takes_amax
from halfbyte.layout import Blocks
from halfbyte.nn.experts import ExpertsRecipe
from halfbyte.nn.linear import Linear
from halfbyte.nn.sibling_amax import shared_amax
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.spec import NVFP4, Recipe
from halfbyte.tensor import PrimaryWeight, QuantTensor, quantize
from halfbyte.tensor.quant_tensor import VALUE_DTYPES, describe

RULE = "keep it in high precision, hb.quantize_(…, rules={glob: None}), and train it so"


TURNED = ("GptOssExperts", "Llama4TextExperts")
"""Classes of transformers whose experts [E, K, N] ModelOpt writes as they lie (its export/unified_export_hf.py)."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One weight of a layer that computes in NVFP4, or one for each expert.

    Args:
        layer: name of the module that follows a recipe.
        key: of the weight in the model's state dict.
        recipe: the layer's.
        quants: LINEAR; one [N, K], or one for each expert.
        compute_dtype: that the weight was rounded to before it was quantized.
        changed: bytes of codes and scales that differ from the trained ones, and all of them.
        reason: why some may differ; empty where nothing was quantized again.
        per_expert: whether the state dict holds [E, N, K], or [E, K, N].
        transposed: whether it holds [E, K, N].
    """

    layer: str
    key: str
    recipe: Recipe
    quants: tuple[QuantTensor, ...]
    compute_dtype: torch.dtype
    changed: tuple[int, int]
    reason: str = ""
    per_expert: bool = False
    transposed: bool = False

    @property
    def spec(self) -> NVFP4:
        spec = self.quants[0].spec
        assert isinstance(spec, NVFP4), "find refuses other formats"
        return spec


def find_trained(model: nn.Module, compute_dtype: torch.dtype | None) -> dict[str, Trained]:
    """Return the weights that the model's forward reads in NVFP4, by the names of their layers.

    Args:
        model: converted by `hb.quantize_`.
        compute_dtype: what GEMMs computed in; None where the weights themselves say it.

    Raises:
        ValueError: no forward is in NVFP4, or a layer's weight has no form of checkpoint.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FollowsRecipe)}
    if any(layer.times_aside for layer in layers.values()):
        raise ValueError("model is in hb.high_precision, where no layer has its recipe; export outside of it")
    found = {n: _trained(model, n, m, compute_dtype) for n, m in layers.items() if _weight_spec(n, m) is not None}
    if not found:
        raise ValueError(
            f"model={type(model).__name__}: no layer's forward reads its weight in NVFP4, so there are no trained "
            "bytes; convert it with hb.quantize_, or give layers another recipe with hb.set_recipe_"
        )
    return found


def _weight_spec(name: str, layer: FollowsRecipe) -> NVFP4 | None:
    """Return how the forward quantizes a weight, None for high precision."""
    fprop = layer.recipe.fprop
    spec = None if fprop is None else fprop.b
    if spec is None:
        return None
    if not isinstance(spec, NVFP4):
        raise ValueError(f"{name}: its weight is {describe(spec)}, and these checkpoints hold NVFP4; {RULE}")
    if spec.needs_rng or spec.needs_sign_rng:
        raise ValueError(
            f"{name}: its weight is {describe(spec)}, drawn anew in every forward, so there are no bytes that it was "
            "trained with; give it a recipe whose fprop.b draws nothing"
        )
    return spec


def _trained(model: nn.Module, name: str, layer: FollowsRecipe, compute_dtype: torch.dtype | None) -> Trained:
    transposed = False
    if isinstance(layer, ExpertsRecipe):
        key, weight, transposed = _experts(model, name, layer)
    elif type(layer) is Linear:
        key, weight = (f"{name}.weight" if name else "weight"), layer.weight
    else:
        raise ValueError(
            f"{name}: {type(layer).__name__} has no form of checkpoint that engines load (torch.nn.Linear and the "
            f"experts of transformers do; after hb.nn.fuse_ call hb.nn.unfuse_); else {RULE}"
        )
    if is_sharded(weight):
        raise ValueError(f"{name}: its weight is sharded (DTensor); gather the model on one rank and export there")
    if weight.shape[-1] % NVFP4().block_length:
        raise ValueError(
            f"{name}: in_features={weight.shape[-1]} is no multiple of {NVFP4().block_length}, as engines need; {RULE}"
        )
    if isinstance(weight, QuantTensor):
        quants, dtype = _held(weight), weight.dtype
    else:
        dtype = _dtype(name, layer, weight, compute_dtype)
        quants = _quantized(layer, weight, dtype)
    _check_finite(name, quants)
    sizes = (0, sum(q.qdata.numel() + q.block_scale.numel() for q in quants))
    own = {"quants": quants, "compute_dtype": dtype, "changed": sizes, "per_expert": weight.dim() == 3}
    return Trained(layer=name, key=key, recipe=layer.recipe, transposed=transposed, **own)


def _experts(model: nn.Module, name: str, layer: ExpertsRecipe) -> tuple[str, Tensor, bool]:
    """Return the key of the experts' weight, the weight as [E, N, K], and whether it lies as [E, K, N]."""
    assert layer.held_as is not None, "found by hb.quantize_ in a module that holds the weights"
    own, transposed = layer.held_as
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    if transposed and type(module).__name__ not in TURNED:
        raise ValueError(
            f"{path}.{own}: experts of {type(module).__name__} lie as [E, K, N], and have no published NVFP4 layout "
            f"({', '.join(TURNED)} have ModelOpt's); {RULE}"
        )
    weight = getattr(module, own)
    return f"{path}.{own}", weight.mT if transposed else weight, transposed


def _dtype(name: str, layer: FollowsRecipe, weight: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return what the weight was rounded to in training; a wide weight does not say it."""
    cached = None if layer.weight_cache is None else layer.weight_cache.dtype
    dtype = asked or cached or (None if weight.dtype == torch.float32 else weight.dtype)
    if dtype is None:
        raise ValueError(
            f"compute_dtype=None: {name}.weight is float32, and its trained bytes depend on what was computed in: say "
            "compute_dtype=torch.bfloat16 if the model was trained under torch.autocast, torch.float32 if not"
        )
    if dtype not in VALUE_DTYPES:
        raise ValueError(f"compute_dtype={dtype}: layers compute in bfloat16, float16 or float32; name one of these")
    return dtype


def _quantized(layer: Any, weight: Tensor, dtype: torch.dtype) -> tuple[QuantTensor, ...]:
    """Repeat what the forward does: one cast, the amax of the siblings, one rounding to nearest."""
    spec = layer.recipe.fprop.b
    values = weight.detach().to(dtype)
    if values.dim() == 3:
        return tuple(quantize(expert, spec) for expert in values)
    amax = shared_amax(layer, dtype) if layer.amax_group and takes_amax(spec) else None
    return (quantize(values, spec, amax=amax),)


def _held(weight: QuantTensor) -> tuple[QuantTensor, ...]:
    """Return a weight that exists in codes only, a primary one or a frozen one; of experts each."""
    if isinstance(weight, PrimaryWeight) and weight.before_use is not None:
        weight.before_use()
    blocks = Blocks(weight.blocks.qdata.clone(), weight.linear_scale().view(torch.uint8).clone(), weight.blocks.amax)
    parts, shape = [blocks], tuple(weight.shape[-2:])
    if weight.dim() == 3:
        codes, scales = (t.unflatten(0, (weight.shape[0], -1)) for t in blocks[:2])
        parts = [Blocks(*one) for one in zip(codes, scales, blocks.amax.clone(), strict=True)]
    return tuple(QuantTensor(part, weight.spec, shape=shape, dtype=weight.dtype) for part in parts)


def _check_finite(name: str, quants: tuple[QuantTensor, ...]) -> None:
    if any(bool(torch.isnan(q.block_scale.float()).any()) for q in quants):
        raise ValueError(f"{name}: its weight holds NaN or Inf; export a checkpoint of before the run diverged")


def requantized(one: Trained, spec: NVFP4, amaxes: Mapping[int, Tensor], model: nn.Module, reason: str) -> Trained:
    """Return the weight quantized once more, and what that changed.

    Args:
        one: as it was trained.
        spec: of the result.
        amaxes: {index of the expert, 0 for a layer: fp32 []}; those missing are the weight's own.
        model: that holds the values; a weight that is codes has only theirs.
        reason: to report.
    """
    values = model.state_dict(keep_vars=True)[one.key].detach()
    wide = values.dequantize(torch.float32) if isinstance(values, QuantTensor) else values.to(one.compute_dtype)
    wide = wide.mT if one.transposed else wide
    parts = wide if wide.dim() == 3 else wide[None]
    quants = tuple(quantize(part, spec, amax=amaxes.get(i)) for i, part in enumerate(parts))
    changed = sum(_differences(a, b) for a, b in zip(one.quants, quants, strict=True))
    return replace(one, quants=quants, changed=(changed, one.changed[1]), reason=reason)


def _differences(a: QuantTensor, b: QuantTensor) -> int:
    """Return how many bytes of b's codes and scales are not a's."""
    pairs = ((a.qdata, b.qdata), (a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8)))
    return sum(int((x != y).sum()) if x.shape == y.shape else y.numel() for x, y in pairs)
