"""Experts of Hugging Face transformers as grouped linear layers, which follow recipes.

transformers dispatches the forward of its experts modules to registered implementations; "halfbyte" is ours. Nothing
here imports it: a model that holds such modules has.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.tensor.quant_tensor import VALUE_DTYPES

IMPLEMENTATION = "halfbyte"
UP, DOWN = "up_recipe", "down_recipe"


class ExpertsRecipe(GroupedRecipe):
    """The recipe of the experts of a transformers model; brings the implementation along where it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()


@dataclass(frozen=True, kw_only=True)
class FoundExperts:
    """Experts modules of a model that transformers can dispatch.

    Args:
        model: that holds them.
        modules: by name.
        recipes: {name: ExpertsRecipe} of the submodules that carry recipes, as far as a module has none yet.
    """

    model: nn.Module
    modules: Mapping[str, Any]
    recipes: Mapping[str, ExpertsRecipe]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules."""
        return tuple(self.modules)

    def prepare(self) -> None:
        """Give the modules the submodules that they lack, and select the implementation for them alone."""
        _register()
        for name, recipe in self.recipes.items():
            parent, _, own = name.rpartition(".")
            module: Any = self.model.get_submodule(parent)
            recipe.config_before = module.config
            module.add_module(own, recipe)
        for module in self.modules.values():
            config = copy.copy(module.config)  # the other one may be another model's too
            config._experts_implementation_internal = IMPLEMENTATION
            assert config._experts_implementation == IMPLEMENTATION, "transformers dispatches by this attribute"
            module.config = config


def find_experts(model: nn.Module) -> FoundExperts:
    """Return the experts of `model` whose forward transformers can hand to another implementation."""
    modules: dict[str, Any] = {n: m for n, m in model.named_modules() if _is_dispatched(m)}
    recipes: dict[str, ExpertsRecipe] = {}
    for path, module in modules.items():
        for name, weight in ((UP, _up_weight(module)), (DOWN, module.down_proj)):
            if not hasattr(module, name):
                experts, out_features, in_features = _weight(module, weight).shape
                own = ExpertsRecipe(experts, in_features, out_features)
                own.held_as = next(key for key, p in module.named_parameters() if p is weight), module.is_transposed
                recipes[f"{path}.{name}" if path else name] = own
    return FoundExperts(model=model, modules=modules, recipes=recipes)


def expert_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return {name of the submodule that carries a recipe: weight [E, N, K]} of what transformers dispatches."""
    modules = find_experts(model).modules
    pairs = [(path, m, ((UP, _up_weight(m)), (DOWN, m.down_proj))) for path, m in modules.items()]
    return {
        f"{path}.{name}" if path else name: _weight(module, weight)
        for path, module, own in pairs
        for name, weight in own
    }


def _register() -> None:
    moe: Any = sys.modules.get("transformers.integrations.moe")
    if moe is not None:
        moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def _is_dispatched(module: Any) -> bool:
    """Whether transformers' `use_experts_implementation` wrapped the module's class, and its weights are plain."""
    names = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj", "config")
    if "transformers.integrations.moe" not in sys.modules or not all(hasattr(module, name) for name in names):
        return False
    weights = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), module.down_proj
    return all(isinstance(w, nn.Parameter) and w.dim() == 3 and w.dtype in VALUE_DTYPES for w in weights)


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

    def linear(x: Tensor, name: str, weight: Tensor, bias_name: str) -> Tensor:
        bias = getattr(self, bias_name) if self.has_bias else None
        return getattr(self, name)(x.to(weight.dtype), _weight(self, weight), offsets, bias_EN=bias)

    bias = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
    y = linear(hidden_states[order // k], UP, _up_weight(self), bias)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = linear(y, DOWN, self.down_proj, "down_proj_bias")
    if getattr(self, "has_post_expert_norm", False):  # before transformers 5.23 no experts have one
        y = self.post_expert_norm(y)
    weights = top_k_weights.flatten()[order].masked_fill(~local, 0.0)
    y = (y * weights[:, None])[order.argsort()]
    return y.unflatten(0, (-1, k)).sum(1).to(hidden_states.dtype)
