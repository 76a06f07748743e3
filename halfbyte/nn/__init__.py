"""Modules: torch.nn's layers with a recipe, and the norms and activations around them."""

from halfbyte.nn.cache import WeightCache, cache_weights
from halfbyte.nn.fuse import FuseReport, fuse_, unfuse_
from halfbyte.nn.fused import MLP, LayerNormLinear, LayerNormMLP
from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import Linear, forward_shared
from halfbyte.nn.lora import LoRALinear
from halfbyte.nn.norm import LayerNorm, RMSNorm
from halfbyte.nn.transposed import TransposedLinear

__all__ = [
    "MLP",
    "FuseReport",
    "GroupedLinear",
    "GroupedRecipe",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LoRALinear",
    "RMSNorm",
    "TransposedLinear",
    "WeightCache",
    "cache_weights",
    "forward_shared",
    "fuse_",
    "unfuse_",
]
