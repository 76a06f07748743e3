"""Modules: torch.nn's layers with a recipe."""

from halfbyte.nn.cache import WeightCache, cache_weights
from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import Linear, forward_shared

__all__ = ["GroupedLinear", "GroupedRecipe", "Linear", "WeightCache", "cache_weights", "forward_shared"]
