"""Weights that come quantized (a QuantTensor) as operands of a linear layer: their codes, which nothing trains.

fprop reads the codes. What dgrad reads is made of the same codes in the backward, so that nothing but them is kept in
between: 16x16 tiles are transposed, which is exact; other blocks, and tiles that dgrad wants in another format, are
dequantized to the dtype of x and quantized along the other dimension, if the recipe says so.
"""

from __future__ import annotations

import torch

from halfbyte import layout, ops
from halfbyte.functional.operands import Place, both
from halfbyte.functional.weights import CachedWeight
from halfbyte.layout import LINEAR, Blocks
from halfbyte.spec import Recipe, Spec
from halfbyte.tensor.quant_tensor import QuantTensor, blocks_of, describe


def frozen_operands(
    w: QuantTensor, recipe: Recipe, dtype: torch.dtype, cached: CachedWeight | None = None
) -> CachedWeight:
    """Return a quantized weight as `linear` takes cached ones: the codes as fprop's operand, and nothing for dgrad.

    Args:
        w: [N, K], not grouped, unrotated unless fprop rotates x alike.
        recipe: its fprop.b is w's spec, or None: a GEMM in high precision multiplies what the codes stand for.
        dtype: that the forward computes in.
        cached: codes of w's spec that are multiplied in the place of w's, as this function returns them.

    Raises:
        ValueError: the recipe wants the weight quantized in another way, or w is no operand of a linear layer.
    """
    spec = None if recipe.fprop is None else recipe.fprop.b
    if w.group_offsets is not None:
        raise ValueError("w is grouped (group_offsets is set): linear multiplies by one matrix; take one group")
    if w.spec.rotation is not None:
        raise ValueError(
            f"w is {describe(w.spec)}: its codes are those of the rotated weight, of which dgrad cannot be made; "
            "quantize the weight with a spec that has rotation=None"
        )
    if spec is not None and spec != w.spec:
        raise ValueError(
            f"recipe.fprop.b={describe(spec)}: this weight exists only as {describe(w.spec)}; use a recipe with that "
            "spec for weights, or None for a GEMM in high precision"
        )
    if cached is not None and not cached.is_frozen:
        raise ValueError("cached_weight is given and w is quantized already: leave cached_weight out")
    if cached is not None:
        return cached
    row = ops.Operand(blocks_of(w), w.spec, w.shape[-1], w.scale_layout)
    return CachedWeight(row, None, dtype, is_frozen=True)


def frozen_right(
    operand: ops.Operand, recipe: Recipe, spec: Spec | None, place: Place, dtype: torch.dtype
) -> ops.Operand | torch.Tensor:
    """Return dgrad's right operand, made of the codes that fprop multiplied.

    Args:
        operand: of fprop.
        recipe: of the call.
        spec: how dgrad quantizes the weight, None for not at all.
        place: where that draws.
        dtype: of x, that values are rounded to before they are quantized along the other dimension.
    """
    is_turned = operand.spec.is_tile and spec in (None, operand.spec) and recipe.backward == "original"
    if is_turned:
        return _turned(operand)
    values = ops.dequantize(operand, dtype)
    return values.T if spec is None else both(values, None, spec, place, ops.Amaxes())[1]


def _turned(operand: ops.Operand) -> ops.Operand:
    """Return the other orientation of 16x16 tiles: codes and scales move, nothing is rounded."""
    (qdata, scale, amax), spec, cols, scale_layout = operand
    rows = qdata.shape[0]
    if scale_layout != LINEAR:
        scale = layout.unswizzle(scale, rows, layout.ceil_div(cols, spec.block_length))
    turned, turned_scale = ops.transpose(qdata, scale, rows, cols)
    return ops.Operand(Blocks(turned, turned_scale, amax), spec, rows)
