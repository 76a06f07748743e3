"""Mixtures of experts of Hugging Face transformers, every model whose experts it can dispatch (transformers 5.23).

    prepare_experts_(model)                  # the experts run as grouped linear layers, still in high precision
    report = hb.quantize_(model, "nvfp4")    # experts and linear layers follow the recipe

Weights stay where they are, [E, N, K] or transposed, and state_dict keys stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halfbyte.integrations.trainer import HalfbyteCallback
from halfbyte.nn import GroupedRecipe

__all__ = ["HalfbyteCallback", "experts_forward", "prepare_experts_"]

IMPLEMENTATION = "halfbyte"
UP, DOWN = "up_recipe", "down_recipe"


def prepare_experts_(model: nn.Module) -> tuple[str, ...]:
    """Let the experts of `model` run as grouped linear layers that `hb.quantize_` and `hb.set_recipe_` know.

    Registers the experts implementation "halfbyte" with transformers and selects it. Each experts module gets two
    submodules without parameters that carry the recipes, at first high precision.

    Args:
        model: a transformers PreTrainedModel.

    Returns:
        The names of the experts modules.

    Raises:
        ValueError: the model has no experts that transformers can dispatch.
    """
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if _is_dispatched(module)}
    select = getattr(model, "set_experts_implementation", None)
    if not found or select is None:
        raise ValueError(
            f"model={type(model).__name__}: it has no experts that transformers dispatches; convert its linear layers "
            "with hb.quantize_"
        )
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in found.values():
        for name, weight in ((UP, _up_weight(module)), (DOWN, module.down_proj)):
            experts, out_features, in_features = _weight(module, weight).shape
            if not hasattr(module, name):
                own = GroupedRecipe(experts, in_features, out_features)
                own.held_as = next(key for key, p in module.named_parameters() if p is weight), module.is_transposed
                before = getattr(module.config, "_experts_implementation", None)
                own.implementation_before = "eager" if before == IMPLEMENTATION else before
                module.add_module(name, own)
    select(IMPLEMENTATION)
    return tuple(found)


def _is_dispatched(module: Any) -> bool:
    """Whether transformers' `use_experts_implementation` wrapped the module's class."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj"))


def _up_weight(module: Any) -> Tensor:
    return module.gate_up_proj if module.has_gate else module.up_proj


def _weight(module: Any, weight: Tensor) -> Tensor:
    """Return a weight as [E, N, K]."""
    return weight.mT if module.is_transposed else weight


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts; what transformers calls for implementation "halfbyte".

    Args:
        self: an experts module that `prepare_experts_` has seen.
        hidden_states: [S, K].
        top_k_index: int64 [S, k]; an index >= num_experts is of another rank and adds nothing.
        top_k_weights: [S, k].

    Returns:
        [S, K] of hidden_states' dtype.

    Raises:
        ValueError: the module has no recipes.
    """
    if not hasattr(self, UP):
        raise ValueError(f"{type(self).__name__} has no recipes: call prepare_experts_(model) once the model is built")
    k = top_k_index.shape[-1]
    experts = top_k_index.flatten()
    order = experts.argsort(stable=True)
    experts = experts[order]
    # Experts of other ranks sort behind the last group, which makes their tokens padding.
    known = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, known, right=True, out_int32=True)
    local = experts < self.num_experts
    experts = experts.clamp(max=self.num_experts - 1)

    def linear(x: Tensor, name: str, weight: Tensor, bias_name: str) -> Tensor:
        y = getattr(self, name)(x.to(weight.dtype), _weight(self, weight), offsets)
        return y + getattr(self, bias_name)[experts] if self.has_bias else y

    bias = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
    y = linear(hidden_states[order // k], UP, _up_weight(self), bias)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = linear(y, DOWN, self.down_proj, "down_proj_bias")
    if self.has_post_expert_norm:
        y = self.post_expert_norm(y)
    weights = top_k_weights.flatten()[order].masked_fill(~local, 0.0)
    y = (y * weights[:, None])[order.argsort()]
    return y.unflatten(0, (-1, k)).sum(1).to(hidden_states.dtype)
