"""Modules: torch.nn's layers with a recipe."""

from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import Linear, forward_shared

__all__ = ["GroupedLinear", "GroupedRecipe", "Linear", "forward_shared"]
