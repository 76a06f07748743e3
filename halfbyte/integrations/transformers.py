"""Mixtures of experts of Hugging Face transformers, every model whose experts it can dispatch (transformers 5.23).

`hb.quantize_` prepares the experts that a recipe reaches by itself. To run them as grouped linear layers before that:

    prepare_experts_(model)                  # still in high precision
    report = hb.quantize_(model, "nvfp4")    # experts and linear layers follow the recipe

Weights stay where they are, [E, N, K] or transposed, and state_dict keys stay as they are.
"""

from __future__ import annotations

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halfbyte.integrations.distill import Distillation
from halfbyte.integrations.exported import load_exported
from halfbyte.integrations.quantizer import HalfbyteConfig
from halfbyte.integrations.trainer import HalfbyteCallback
from halfbyte.nn.experts import IMPLEMENTATION, experts_forward, find_experts

__all__ = [
    "ALL_EXPERTS_FUNCTIONS",
    "IMPLEMENTATION",
    "Distillation",
    "HalfbyteCallback",
    "HalfbyteConfig",
    "experts_forward",
    "load_exported",
    "prepare_experts_",
]


def prepare_experts_(model: nn.Module) -> tuple[str, ...]:
    """Let the experts of `model` run as grouped linear layers that `hb.quantize_` and `hb.set_recipe_` know.

    Registers the experts implementation "halfbyte" with transformers and selects it for these modules; the model's
    config and other models built from it stay as they are. Each experts module gets two submodules without parameters
    that carry the recipes, at first high precision.

    Args:
        model: a transformers PreTrainedModel, or a module that contains some.

    Returns:
        The names of the experts modules.

    Raises:
        ValueError: the model has no experts that transformers can dispatch.
    """
    found = find_experts(model)
    if not found.names:
        raise ValueError(
            f"model={type(model).__name__}: it has no experts that transformers dispatches; convert its linear layers "
            "with hb.quantize_"
        )
    found.prepare()
    return found.names
