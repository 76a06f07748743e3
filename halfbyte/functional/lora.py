"""Low-rank adapters of a weight that exists in codes only: beside its GEMM, or quantized together with it.

With w = deq(codes) [N, K], A [R, K], B [N, R] and a factor f (arXiv 2106.09685 calls it alpha / r), M tokens:

    beside      y = nt(x, w) + f (x A.T) B.T                  w's operands are the codes
    merged      y = nt(x, Q(w + f B A))                       Q rounds and quantizes as w was, with the amax of the sum
    gradients   dA = f (dy B).T x      dB = f dy.T (x A.T)    of both: straight through Q in the second

Straight through Q, the gradient of the sum is dy.T x. What A and B receive of it is what they receive beside the GEMM,
so that no product of N x K is made for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import LINEAR, first_order, refuse_transforms
from halfbyte.functional.weights import CachedWeight
from halfbyte.layout import LINEAR as LINEAR_LAYOUT
from halfbyte.layout import matrix_shape
from halfbyte.sides import both_sides
from halfbyte.tensor.quant_tensor import QuantTensor, blocks_of, exact_amax


class Adapter(NamedTuple):
    """What is added to a weight [N, K]: factor * b @ a, with a [R, K] and b [N, R]."""

    a: Tensor
    b: Tensor
    factor: float


def add_adapter(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """Return y + factor * (x @ a.T) @ b.T, multiplied in the dtype of y and rounded to it once more.

    Args:
        y: [..., N].
        x: [..., K].
    """
    a, b, factor = adapter
    rows = x.reshape(matrix_shape(x.shape)).to(y.dtype)
    with torch.autocast(y.device.type, enabled=False):
        low = rows @ a.to(y.dtype).T
        return torch.addmm(y.reshape(-1, y.shape[-1]), low, b.to(y.dtype).T, alpha=factor).view(y.shape)


def merged_values(w: QuantTensor, adapter: Adapter) -> Tensor:
    """Return what the codes stand for plus the adapter, fp32 [N, K], whatever is computed around it."""
    a, b, factor = adapter
    with torch.no_grad(), torch.autocast(w.device.type, enabled=False):
        values = ops.dequantize(ops.Operand(blocks_of(w), w.spec, w.shape[-1], w.scale_layout))
        if w.dtype == torch.float32 and w.amax is not None:  # rounding to another dtype gives the amax back
            values = exact_amax(values, w.amax)
        return values.addmm_(b.detach().float(), a.detach().float(), alpha=factor)


def merged_weight(w: QuantTensor, values: Tensor, amax: Tensor | None, dtype: torch.dtype) -> CachedWeight:
    """Return merged values, quantized as the codes were, as a forward in `dtype` takes a weight.

    Args:
        w: the codes.
        values: what `merged_values` returned; rounded to w's dtype first, as a master is.
        amax: fp32 [] that other weights share; None for the values' own.
        dtype: of the forward.
    """
    with torch.no_grad():
        row, _ = ops.quantize_row_col(values.to(w.dtype), *both_sides(w.spec, None, row_amax=amax))
    assert row is not None, "a row was asked for"
    return CachedWeight(ops.Operand(row, w.spec, w.shape[-1], LINEAR_LAYOUT), None, dtype, is_frozen=True)


def merged_codes(w: QuantTensor, values: Tensor, amax: Tensor | None) -> QuantTensor:
    """Return merged values as codes; arguments as for `merged_weight`."""
    row = merged_weight(w, values, amax, w.dtype).row
    assert row is not None, "quantized here"
    return QuantTensor(row.blocks, w.spec, shape=tuple(w.shape), dtype=w.dtype)


def common_amax(amaxes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the amax that merged weights share, fp32 [].

    Args:
        amaxes: of the values of each, fp32 [].
        dtype: that these are rounded to before they are quantized.
    """
    # Rounding is monotone: the rounded maximum is the maximum of the rounded weights.
    return torch.stack(list(amaxes)).amax().to(dtype).float()


def straight_through(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """Return y = nt(x, merged weight) with the gradients of an adapter that is part of the weight; x has them from y.

    Args:
        y: [..., N].
        x: [..., K], the layer's input.
    """
    refuse_transforms((y, x, adapter.a, adapter.b), LINEAR)
    rows = x.detach().reshape(matrix_shape(x.shape)).to(autocast_dtype(x.device) or x.dtype)
    return _StraightThrough.apply(y, rows, *adapter)


class _StraightThrough(torch.autograd.Function):
    """y as it is, and the gradients of a and b that a weight w + factor * b @ a has, unquantized."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.factor = factor
        return y.view_as(y)

    @staticmethod
    @first_order(LINEAR)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        _, _, need_a, need_b, _ = ctx.needs_input_grad
        da = db = None
        dy_MN = dy.reshape(matrix_shape(dy.shape)).to(x.dtype)
        with torch.autocast(dy.device.type, enabled=False):
            if need_a:
                da = ((dy_MN @ b.to(x.dtype)).T @ x).to(a.dtype) * ctx.factor
            if need_b:
                db = (dy_MN.T @ (x @ a.to(x.dtype).T)).to(b.dtype) * ctx.factor
        return dy, None, da, db, None
