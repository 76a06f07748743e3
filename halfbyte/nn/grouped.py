"""hb.nn.GroupedLinear: one linear layer per expert, all with one recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.types import Device

from halfbyte.functional import grouped_linear
from halfbyte.functional.earlier import ExpertAmaxes
from halfbyte.functional.foreign import PLAIN, refuse_foreign
from halfbyte.functional.grouped import recipe_of_experts
from halfbyte.nn.earlier import amaxes_of_experts
from halfbyte.nn.linear import describe_recipe, weight_of
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.spec import Recipe
from halfbyte.state import RunState

_NO_AMAXES = ExpertAmaxes()


class ExpertEntry(Protocol):
    """What runs experts that lie on several ranks."""

    def outputs(
        self, layer: GroupedRecipe, x: Tensor, experts: tuple[Tensor, Tensor | None], offsets: Tensor, call: int
    ) -> Tensor: ...


class GroupedRecipe(FollowsRecipe, nn.Module):
    """The recipe of expert weights that another module owns; it has no parameters, so no state_dict key changes.

    Args:
        experts, in_features, out_features: E, K and N of the weights.
        recipe, state: as for hb.nn.Linear.

    Attributes:
        held_as: under which name the parent module holds the weights, and whether as [E, K, N]; None if nobody says.
            `hb.cache_weights` caches what it knows.
    """

    held_as: tuple[str, bool] | None = None

    weight_to_read: Callable[[Any, Any], Any] | None = None
    """Returns what a forward multiplies by, given the parameter, as for hb.nn.Linear."""

    entry: ExpertEntry | None = None
    """How the experts that are here run where ranks share them, as `hb.distributed.shard_experts_` has it."""

    config_before: Any = None
    """The config of the experts of transformers before they had this recipe; it names their implementation."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | str = "bf16",
        state: RunState | None = None,
    ) -> None:
        super().__init__()
        if isinstance(experts, bool) or not isinstance(experts, int):
            raise TypeError(f"experts={experts!r}: give an int")
        if experts < 1:
            raise ValueError(f"experts={experts}: give at least one")
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        recipe_of_experts(recipe)
        self.adopt(recipe, state)

    @property
    def amaxes_of(self) -> int:
        return self.experts

    def forward(
        self, x: Tensor, w_ENK: Tensor, offsets: Tensor, call: int = 0, bias_EN: Tensor | None = None
    ) -> Tensor:
        """Return x_g @ w_g.T + bias_g of every group, [M, out_features].

        Args:
            x: [M, in_features], sorted by expert.
            w_ENK: [experts, out_features, in_features], any strides.
            offsets: int32 [experts], cumulative ends of the groups.
            call: as for `hb.nn.Linear.forward`.
            bias_EN: [experts, out_features] or None.
        """
        if self.entry is not None:
            return self.entry.outputs(self, x, (w_ENK, bias_EN), offsets, call)
        if not (type(x) in PLAIN and type(w_ENK) in PLAIN and bias_EN is None):
            refuse_foreign((("x", x), ("its weight", w_ENK), ("its bias", bias_EN)), self)
        place = self.place(call, w_ENK.device)
        earlier = _NO_AMAXES if self.amaxes is None else amaxes_of_experts(self, (x, w_ENK, offsets), place)
        options = {
            "recipe": self._recipe,
            "bias_EN": bias_EN,
            "rng": place,
            "main_grad": getattr(w_ENK, "main_grad", None),
            "cached_weight": None if self.weight_cache is None else self.cached_weight(w_ENK),
            "earlier": earlier,
        }
        if self.instead is not None:
            return self.instead(partial(grouped_linear, **options), (x, w_ENK, offsets, bias_EN), self, place)
        return grouped_linear(x, w_ENK, offsets, **options)

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, recipe={describe_recipe(self.recipe)}"


class GroupedLinear(GroupedRecipe):
    """The linear layers of several experts as one weight [experts, out_features, in_features]; a bias by `add_bias_`.

    Args:
        experts, in_features, out_features: E, K and N.
        device, dtype: of the weight.
        recipe: a Recipe or a preset's name; changed by `hb.set_recipe_` or assignment.
        state: the RunState that random operands draw from, shared by all layers of a model. None makes a private one,
            seeded from torch's default generator, if the recipe draws.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "nvfp4",
        state: RunState | None = None,
    ) -> None:
        super().__init__(experts, in_features, out_features, recipe=recipe, state=state)
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def add_bias_(self) -> GroupedLinear:
        """Give every expert a bias, [experts, out_features] of the weight's dtype and device; return self.

        Raises:
            ValueError: they have one, which would be lost.
        """
        if self.bias is not None:
            raise ValueError(f"{self.title} has a bias already; reset_parameters() fills weight and bias anew")
        self.bias = nn.Parameter(self.weight.new_empty(self.experts, self.out_features))
        self._fill(self.bias)
        return self

    def reset_parameters(self) -> None:
        """Fill weight and bias as torch.nn.Linear does: uniform within 1 / sqrt(in_features)."""
        for parameter in self.parameters():
            self._fill(parameter)

    def _fill(self, parameter: Tensor) -> None:
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor, call: int = 0) -> Tensor:
        """Return x_g @ w_g.T + bias_g of every group of tokens, [M, out_features].

        Args:
            x: [M, in_features], sorted by expert.
            offsets: int32 [experts] on x's device, cumulative ends of the groups; tokens behind the last one are
                padding, with zero outputs and gradients.
            call: 0, 1, … for the first, second, … run of this module within one micro-batch.
        """
        return super().forward(x, weight_of(self), offsets, call, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.bias is None else ", bias=True")
