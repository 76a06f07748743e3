"""How tokens are quantized that travel to their experts as codes (docs/numerics.md section 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from halfbyte import ops
from halfbyte.spec import MXFP8, NVFP4, Recipe
from halfbyte.tensor import QuantTensor


def dispatch_problem(recipe: Recipe) -> str | None:
    """Return why tokens cannot travel as the codes that `recipe` multiplies, None if they can."""
    spec = None if recipe.fprop is None else recipe.fprop.a
    if spec is None:
        return "fprop.a=None: fprop quantizes no activations"
    if isinstance(spec, MXFP8):
        return "fprop.a=MXFP8: its codes have eight bits"
    if spec.is_tile:
        return "fprop.a.block=(16, 16): a tile spans tokens"
    if spec.needs_rng:
        return "fprop.a draws random bits, whose places depend on the tokens of other ranks"
    if spec.rotation is not None:
        return f"fprop.a.rotation={spec.rotation}: what it stands for is not x"
    return None


def dispatch_spec(recipe: Recipe) -> NVFP4 | None:
    """Return how tokens travel under a recipe: as fprop reads them, each with its own amax.

    Returns:
        None where fprop quantizes no activations now, as in high precision: they travel in their values.

    Raises:
        ValueError: it quantizes them otherwise than codes can travel.
    """
    if recipe.fprop is None or recipe.fprop.a is None:
        return None
    problem, spec = dispatch_problem(recipe), recipe.fprop.a
    if problem is not None or isinstance(spec, MXFP8):
        raise ValueError(f"{problem}: tokens cannot travel so; use dispatch='plain'")
    return replace(spec, outer="row")


def check_row(x_row: Any, x: Tensor, recipe: Recipe) -> ops.Operand | None:
    """Return codes that came in the place of fprop's operand of x, None for None.

    Raises:
        TypeError: they are no QuantTensor.
        ValueError: they are of other tokens, or quantized otherwise than the recipe says.
    """
    if x_row is None:
        return None
    if not isinstance(x_row, QuantTensor):
        raise TypeError(f"x_row={type(x_row).__name__}: give a QuantTensor of x, or None")
    spec = dispatch_spec(recipe)
    if spec is None or x_row.spec != spec:
        wanted = "nothing" if spec is None else spec.key
        raise ValueError(f"x_row.spec={x_row.spec.key}: the recipe reads {wanted}; quantize x so, or leave x_row out")
    if tuple(x_row.shape) != tuple(x.shape) or x_row.device != x.device or x_row.splits_columns:
        raise ValueError(
            f"x_row has shape {tuple(x_row.shape)} on {x_row.device}: x is {tuple(x.shape)} on {x.device}; give its "
            "rows, quantized"
        )
    return ops.Operand(x_row.blocks, spec, x.shape[1], x_row.scale_layout)
