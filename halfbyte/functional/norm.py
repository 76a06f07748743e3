"""RMSNorm and LayerNorm whose roundings are fixed, and which know the amaxes that quantizing their output needs.

x, not the output, is kept for the backward: linear layers keep the output in their own, smaller form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import ELEMENTWISE, first_order, refuse_transforms
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.layout import from_rows, matrix_shape
from halfbyte.rng import Draw
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import check_value_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean of squares + eps) * weight, rounded once.

    Args:
        x: bf16, fp16 or fp32 [..., K].
        weight: [K].
        eps: added to the mean of squares.

    Returns:
        [..., K] of x's dtype; under autocast of autocast's.

    Raises:
        TypeError, ValueError: x is no float tensor, or shapes do not fit.
    """
    return norm(x, weight, None, ops.NormKind(eps, centered=False))[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, rounded once.

    Args:
        x: bf16, fp16 or fp32 [..., K].
        weight, bias: [K]; bias may be None.
        eps: added to the variance.

    Returns:
        [..., K] of x's dtype; under autocast of autocast's.

    Raises:
        TypeError, ValueError: x is no float tensor, or shapes do not fit.
    """
    return norm(x, weight, bias, ops.NormKind(eps, centered=True))[0]


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: ops.NormKind,
    following: ops.Following = ops.Following(),  # noqa: B008  a frozen value
) -> tuple[Tensor, ops.Amaxes]:
    """Return the norm of x and the amaxes with which it will be quantized.

    Args:
        x, weight, bias: as for `layer_norm`.
        kind: RMSNorm or LayerNorm, and eps.
        following: how the result will be quantized.
    """
    check_value_dtype("x.dtype", x.dtype, "cast x first")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (x.dim() == 0 or tuple(tensor.shape) != (x.shape[-1],)):
            raise ValueError(f"{name}.shape={tuple(tensor.shape)}: x.shape={tuple(x.shape)} needs one per column")
    refuse_transforms((x, weight, bias), ELEMENTWISE)
    refuse_foreign((("x", x), ("weight", weight), ("bias", bias)), "a norm of halfbyte")
    dtype = autocast_dtype(x.device) or x.dtype
    sign = following.sign_draw
    call = _Call(kind, dtype, following.row, following.col, None if sign is None else sign[1:])
    y, *amaxes = _Norm.apply(call, x, weight, bias, None if sign is None else sign.base)
    return from_rows(y, x.shape), following.known(*amaxes)


@dataclass(frozen=True)
class _Call:
    """What is static about one call: everything that is no tensor."""

    kind: ops.NormKind
    dtype: torch.dtype
    row: Spec | None
    col: Spec | None
    sign_place: tuple | None


class _Norm(torch.autograd.Function):
    """x [..., K], weight, bias and the base of the signs in; y [M, K] and two amaxes out."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None):
        sign = None if base is None or call.sign_place is None else Draw(base, *call.sign_place)
        following = ops.Following(call.row, call.col, sign)
        x_MK = x.reshape(matrix_shape(x.shape))
        y, statistics, amaxes = ops.norm(x_MK, weight, bias, call.kind, call.dtype, following)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.centered, ctx.bias_dtype = call.kind.centered, None if bias is None else bias.dtype
        outputs = [x.new_empty(0, dtype=torch.float32) if amax is None else amax for amax in amaxes]
        ctx.mark_non_differentiable(*outputs)
        return y, *outputs

    @staticmethod
    @first_order(ELEMENTWISE)
    def backward(ctx: Any, dy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        shape = matrix_shape(x.shape)
        has_bias = ctx.bias_dtype is not None
        statistics = (statistics[0], statistics[1])
        dx, dw, db = ops.norm_backward(dy.reshape(shape), x.reshape(shape), weight, statistics, ctx.centered, has_bias)
        return None, dx.view(x.shape), dw.to(weight.dtype), db.to(ctx.bias_dtype) if has_bias else None, None
