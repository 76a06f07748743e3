"""Take recipes out of a model: unquantize_ is the inverse of quantize_."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from halfbyte import recipes
from halfbyte.functional.foreign import is_sharded
from halfbyte.nn.fuse import unfuse_
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import REPLACED_FORWARD
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.position import ModelHooks
from halfbyte.tensor import PrimaryWeight, QuantTensor

_SHARDERS = ("FSDPModule", "FullyShardedDataParallel")


def unquantize_(model: nn.Module) -> tuple[str, ...]:
    """Turn the layers of `model` that follow recipes back into torch's, in place, with the same Parameters and hooks.

    hb.nn.Linear becomes torch.nn.Linear, other layers what they were converted from; a parametrization goes along.
    Weight caches are released, what `hb.nn.fuse_` replaced comes back, experts of transformers run in the
    implementation of before, and nothing follows a RunState any longer. hb.nn.GroupedLinear, which has no counterpart
    in torch, stays and computes in high precision; hb.nn.MLP, LayerNormLinear and LayerNormMLP that nobody fused stay
    around torch's layers.

    Args:
        model: what `hb.quantize_` converted, or a model built of hb.nn layers.

    Returns:
        The names of the layers that followed a recipe or were kept from it.

    Raises:
        ValueError: no layer of the model is halfbyte's, the model itself is one, or a layer cannot be put back: its
            weight exists in NVFP4 only or is sharded, an optimizer of hb.distributed holds it, its forward was
            replaced, or it is of a subclass that says no way back (`to_module`). The model is unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FollowsRecipe)}
    if not layers:
        raise ValueError(f"model={type(model).__name__}: no layer of it is halfbyte's; nothing can be put back")
    if "" in layers and not isinstance(model, GroupedRecipe):
        raise ValueError("model is itself a layer and cannot be replaced in place; use model.to_module()")
    for name, layer in layers.items():
        _check(name, layer)
    _check_whole(model)
    _release_caches(layers.values())
    unfuse_(model)
    for layer in layers.values():
        layer.stop_delaying()
        if not isinstance(layer, GroupedRecipe):
            _replace(model, layer, layer.to_module())
        elif layer.held_as is None:
            layer.adopt(recipes.bf16(), None)
    for module in list(model.modules()):
        _release_experts(module)
        _restore_fast_path(module)
        _stop_following(module)
    return tuple(layers)


def _check(name: str, layer: FollowsRecipe) -> None:
    """Raise ValueError if a layer cannot be put back."""
    weights = [getattr(layer, weight, None) for weight in layer.weight_names]
    if any(isinstance(weight, QuantTensor) for weight in weights):
        kind = "a primary weight" if any(isinstance(weight, PrimaryWeight) for weight in weights) else "frozen"
        raise ValueError(
            f"{name}: its weight is {kind}, which exists in codes only; put a Parameter of the masters, or of "
            "weight.dequantize(), in its place first"
        )
    if any(is_sharded(weight) for weight in weights):
        raise ValueError(f"{name}: its weight is sharded (DTensor); call hb.unquantize_ before the model is sharded")
    if getattr(layer, "before_use", None) is not None:
        raise ValueError(
            f"{name}: an optimizer of hb.distributed gathers its weight; let go of the optimizer before hb.unquantize_"
        )
    if "forward" in vars(layer):
        raise ValueError(
            f"{name}: its forward was {REPLACED_FORWARD.partition(';')[0]}; take that out first, as "
            "accelerate.hooks.remove_hook_from_module does"
        )
    if not isinstance(layer, GroupedRecipe) and not {"converted_from", "to_module"} & vars(_class_of(layer)).keys():
        raise ValueError(
            f"{name}: {_class_of(layer).__name__} is a subclass of an hb.nn layer; give it a method to_module() that "
            "returns the module to put in its place"
        )


def _class_of(layer: nn.Module) -> type:
    return parametrize.type_before_parametrizations(layer)


def _check_whole(model: nn.Module) -> None:
    """Raise ValueError if FSDP has taken hold of the model's modules: it would go on filling those of before."""
    for name, module in model.named_modules():
        if any(cls.__name__ in _SHARDERS for cls in type(module).__mro__):
            raise ValueError(
                f"{name or 'model'}: FSDP wrapped it and holds the modules inside; call hb.unquantize_ first"
            )


def _release_caches(layers: Any) -> None:
    for layer in layers:
        if layer.weight_cache is not None:
            layer.weight_cache.release()


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model holds `old`: a layer may be registered under several names."""
    for parent, name in list(_holders(model, old)):
        setattr(parent, name, new)


def _holders(model: nn.Module, child: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((parent, name) for parent in model.modules() for name, other in parent._modules.items() if other is child)


def _release_experts(module: Any) -> None:
    """Let experts of transformers run without the recipes that were put into them."""
    recipes_held = [
        (n, m) for n, m in module.named_children() if isinstance(m, GroupedRecipe) and m.held_as is not None
    ]
    for name, recipe in recipes_held:
        delattr(module, name)
        if recipe.config_before is not None:
            module.config = recipe.config_before


def _restore_fast_path(module: nn.Module) -> None:
    """Let torch's encoders take the fast path again that `hb.quantize_` closed."""
    for name, value in vars(module).pop("fast_path_before", {}).items():
        setattr(module, name, value)


def _stop_following(module: nn.Module) -> None:
    for hook in list(module._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ModelHooks):
            owner.remove()
