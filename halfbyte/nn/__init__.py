"""Modules: torch.nn's layers with a recipe."""

from halfbyte.nn.linear import Linear, forward_shared

__all__ = ["Linear", "forward_shared"]
