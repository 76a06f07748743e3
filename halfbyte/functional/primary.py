"""Weights that exist only in NVFP4 (PrimaryWeight) as operands of a linear layer: their codes, not quantized again."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.weights import CachedWeight, covers, weight_specs
from halfbyte.layout import Blocks
from halfbyte.ops.repeat import is_watched
from halfbyte.spec import Recipe, Spec
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import describe


def runs_eagerly(x: Tensor, weights: Sequence[Tensor], recipe: Recipe) -> bool:
    """Whether compiled code must step out (`eager`): it would trace what a primary weight waits for into its graph."""
    if not torch.compiler.is_compiling():
        return False
    return any(isinstance(w, PrimaryWeight) and not (in_graph(w, recipe) and _computes_in(w, x)) for w in weights)


def in_graph(w: PrimaryWeight, recipe: Recipe) -> bool:
    """Whether compiled code multiplies by a primary weight: both passes under this recipe read its codes alone."""
    if not w.codes_suffice or recipe.splits_mean or recipe.channels is not None:
        return False
    spec = w.header.spec  # past properties, whose reads guards would repeat in Python
    if recipe.fprop is None or recipe.fprop.b != spec:
        return False
    return recipe.backward == "dequantized" or (spec.is_tile and recipe.dgrad is not None and recipe.dgrad.b == spec)


def _computes_in(w: PrimaryWeight, x: Tensor) -> bool:
    """Whether a forward of x computes in what the weight was rounded to: else an error has to be raised."""
    return (w.rounded or w.dtype) == (autocast_dtype(x.device) or x.dtype)


class _Values(torch.autograd.Function):
    """The values of a primary weight; their gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, w: PrimaryWeight) -> Tensor:
        return w.dequantize()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensor:
        return dw


class Known(NamedTuple):
    """Operands of a primary weight that was read before, kept with it: in most steps nothing of it but bytes is new.

    made_of: all that they were made of, one and the same object each.
    """

    made_of: tuple[Any, ...]
    cached: CachedWeight

    def __reduce__(self) -> tuple:
        """Leave copies of the weight without it."""
        return type(None), ()


def _made_of(w: PrimaryWeight, recipe: Recipe) -> tuple[Any, ...]:
    return recipe, w.header, w.qdata, w.block_scale, w.amax, w.turned, w.turn, w.dgrad, w.rounded


def primary_operands(w: PrimaryWeight, recipe: Recipe) -> tuple[Tensor, CachedWeight | None]:
    """Return a primary weight as `linear` takes weights: what is differentiated, and the operands that exist already.

    A GEMM in high precision reads the dequantized values.

    Args:
        w: [N, K].
        recipe: its fprop.b and dgrad.b are w's own spec or None.

    Raises:
        ValueError: the recipe wants the weight quantized in another way.
    """
    if torch.compiler.is_compiling() and in_graph(w, recipe):  # what does not survive a trace is not read
        assert w.amax is not None, "NVFP4 has one"
        blocks = Blocks(w.qdata, w.block_scale.view(torch.uint8), w.amax)
        row = ops.Operand(blocks, w.header.spec, w.shape[1], w.header.scale_layout)
        return w, CachedWeight(row, None, w.rounded or w.dtype, is_frozen=True)
    if w.before_use is not None:
        w.before_use()
    if w.is_stale or is_watched() or torch.is_inference_mode_enabled():  # whose views are of another kind
        return _operands(w, recipe)
    made_of, known = _made_of(w, recipe), w.operands
    if known is not None and all(map(operator.is_, made_of, known.made_of)):
        return w, known.cached
    read, cached = _operands(w, recipe)
    if read is w and cached is not None and not (w.turned is None and w.dgrad is None and cached.col is not None):
        w.operands = Known(made_of, cached)
    return read, cached


def _operands(w: PrimaryWeight, recipe: Recipe) -> tuple[Tensor, CachedWeight | None]:
    row_spec, col_spec = weight_specs(recipe)
    if w.dgrad is not None:
        return w, CachedWeight(_row(w, row_spec), w.dgrad, w.rounded or w.dtype, False, w.turn)
    for name, spec in (("fprop.b", row_spec), ("dgrad.b", col_spec)):
        if spec is not None and spec is not w.spec and spec != w.spec:
            raise ValueError(
                f"recipe.{name}={describe(spec)}: this weight exists only as {describe(w.spec)}; use a recipe with "
                "that spec for weights, or None for a GEMM in high precision"
            )
    row = _row(w, row_spec)
    col = None if col_spec is None else _col(w)
    late = w.turn if col is not None else None
    cached = None if row is None and col is None else CachedWeight(row, col, w.rounded or w.dtype, False, late)
    return (w if covers(cached, recipe) else _Values.apply(w)), cached


def primary_experts(w: PrimaryWeight, recipe: Recipe) -> tuple[Tensor, CachedWeight | None]:
    """Return primary weights of experts as `grouped_linear` takes weights; of tiles the backward turns the row's own.

    Args:
        w: [E, N, K].
        recipe: its fprop.b and dgrad.b are w's own specs or None.

    Raises:
        ValueError: the recipe wants the weights quantized in another way.
    """
    if w.before_use is not None:
        w.before_use()
    if not recipe.specs:
        return _Values.apply(w), None
    row_spec, col_spec = weight_specs(recipe)
    other = w.dgrad.spec if isinstance(w.dgrad, ops.Operand) else None if w.dgrad is not None else w.spec
    fits_apart = w.dgrad is None or (row_spec == w.spec and col_spec == other and recipe.backward == "original")
    if row_spec not in (None, w.spec) or col_spec not in (None, other) or not fits_apart:
        raise ValueError(
            f"recipe={recipe.key}: these experts exist only as {describe(w.spec)}; use a recipe with that spec for "
            "weights, in forward and backward, or None for a GEMM in high precision"
        )
    experts, rows, cols = w.shape
    codes, scales = (t.view(experts, rows, -1) for t in (w.blocks.qdata, w.linear_scale().view(torch.uint8)))
    row, dtype = ops.Operand(Blocks(codes, scales, w.blocks.amax), w.spec, cols), w.rounded or w.dtype
    if w.dgrad is not None:
        return w, CachedWeight(row, w.dgrad, dtype, False, w.turn)
    if row_spec is not None and (col_spec is not None or recipe.backward == "dequantized"):
        return w, CachedWeight(row, None, dtype)
    col = None if col_spec is None else turned_experts(row)
    row = None if row_spec is None else row
    return _Values.apply(w), None if row is None and col is None else CachedWeight(row, col, dtype)


def turned_experts(row: ops.Operand) -> ops.Operand:
    """Return experts in tiles [E, N, K] as the operand [E, K, N] of dgrad, without rounding."""
    rows = row.blocks.qdata.shape[1]
    pairs = zip(row.blocks.qdata, row.blocks.block_scale, strict=True)
    turned = [ops.transpose(codes, scales, rows, row.cols) for codes, scales in pairs]
    codes, scales = (torch.stack(parts) for parts in zip(*turned, strict=True))
    return ops.Operand(Blocks(codes, scales, row.blocks.amax), row.spec, rows)


def _row(w: PrimaryWeight, spec: Spec | None) -> ops.Operand | None:
    return None if spec is None else ops.Operand(w.blocks, w.spec, w.shape[1], w.scale_layout)


def _col(w: PrimaryWeight) -> ops.Operand:
    rows, cols = w.shape
    blocks = w.turned
    if blocks is not None and w.is_stale:
        raise ValueError(
            "w was cast again and its other orientation is of before: call post_all_gather_processing([w, …]) "
            "after the all-gather"
        )
    if blocks is None:
        qdata, scale = ops.transpose(w.blocks.qdata, w.linear_scale().view(torch.uint8), rows, cols)
        blocks = Blocks(qdata, scale, w.blocks.amax)
    return ops.Operand(blocks, w.spec, rows)
