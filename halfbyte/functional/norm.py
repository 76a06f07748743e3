"""RMSNorm and LayerNorm whose roundings are fixed, and which know the amaxes that quantizing their output needs.

x, not the output, is kept for the backward: linear layers keep the output in their own, smaller form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.arithmetic import Normed
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.checks import check_devices
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
    y, *amaxes = _apply(x, None, (weight, bias), kind, following)
    return from_rows(y, x.shape), following.known(*amaxes)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: ops.NormKind,
    following: ops.Following = ops.Following(),  # noqa: B008
) -> tuple[Tensor, Tensor, ops.Amaxes]:
    """Return the norm of x + residual, that sum, and the amaxes with which the norm will be quantized.

    Bits and gradients are those of `total = x + residual` and `norm(total, ...)`; both sums, that of the two gradients
    of `total` too, are taken where the norm reads and writes anyway.

    Args:
        x, residual: bf16, fp16 or fp32 [..., K]; of different dtypes, the sum has the larger one.
        weight, bias, kind, following: as for `norm`.
    """
    y, total, *amaxes = _apply(x, residual, (weight, bias), kind, following)
    return from_rows(y, x.shape), total, following.known(*amaxes)


def _apply(
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor, Tensor | None],
    kind: ops.NormKind,
    following: ops.Following,
) -> tuple[Tensor, ...]:
    """Check the arguments of a norm and return what `_Norm` does."""
    weight, bias = parameters
    check_value_dtype("x.dtype", x.dtype, "cast x first")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (x.dim() == 0 or tuple(tensor.shape) != (x.shape[-1],)):
            raise ValueError(f"{name}.shape={tuple(tensor.shape)}: x.shape={tuple(x.shape)} needs one per column")
    check_devices(x.device, (("weight", weight), ("bias", bias), ("residual", residual)))
    dtype = x.dtype
    if residual is not None:
        check_value_dtype("residual.dtype", residual.dtype, "cast residual first")
        if residual.shape != x.shape:
            raise ValueError(
                f"residual.shape={tuple(residual.shape)}: x.shape={tuple(x.shape)}; give both one shape, as with "
                "residual.expand(x.shape)"
            )
        dtype = torch.promote_types(x.dtype, residual.dtype)
    refuse_transforms((x, residual, weight, bias), ELEMENTWISE)
    refuse_foreign((("x", x), ("residual", residual), ("weight", weight), ("bias", bias)), "a norm of halfbyte")
    dtype = autocast_dtype(x.device) or dtype
    sign = following.sign_draw
    call = _Call(kind, dtype, following.row, following.col, None if sign is None else sign[1:])
    return _Norm.apply(call, x, residual, weight, bias, None if sign is None else sign.base)


@dataclass(frozen=True)
class _Call:
    """What is static about one call: everything that is no tensor."""

    kind: ops.NormKind
    dtype: torch.dtype
    row: Spec | None
    col: Spec | None
    sign_place: tuple | None


class _Norm(torch.autograd.Function):
    """x [..., K], what is added to it, weight, bias and the base of the signs in; y [M, K], the sum, two amaxes out."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, residual: Tensor | None, *others: Tensor | None):
        weight, bias, base = others
        assert weight is not None, "every norm has one"
        sign = None if base is None or call.sign_place is None else Draw(base, *call.sign_place)
        following = ops.Following(call.row, call.col, sign)
        shape = matrix_shape(x.shape)
        if residual is None:
            y, statistics, amaxes = ops.norm(x.reshape(shape), weight, bias, call.kind, call.dtype, following)
            read, outputs = x, (y,)
        else:
            pair = x.reshape(shape), residual.reshape(shape)
            y, total, statistics, amaxes = ops.add_norm(*pair, (weight, bias), call.kind, call.dtype, following)
            read = total.view(x.shape)
            outputs = y, read
            if not torch.compiler.is_compiling():  # compiled backward passes see zeros
                ctx.set_materialize_grads(False)  # one of the two may be left unused
        ctx.save_for_backward(read, weight, *statistics)
        ctx.centered, ctx.bias_dtype = call.kind.centered, None if bias is None else bias.dtype
        ctx.added = None if residual is None else (x.dtype, residual.dtype)
        known = [x.new_empty(0, dtype=torch.float32) if amax is None else amax for amax in amaxes]
        ctx.mark_non_differentiable(*known)
        return *outputs, *known

    @staticmethod
    @first_order(ELEMENTWISE)
    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        dtotal = None if ctx.added is None else others[0]
        if dy is None:  # the norm is unused, its sum is not
            dx, dw, db = dtotal, None, None
        else:
            dx, dw, db = _gradients(ctx, dy, dtotal)
        dresidual = None
        if ctx.added is not None and dx is not None:
            dx, dresidual = (dx.to(dtype) for dtype in ctx.added)
        return None, dx, dresidual, dw, db, None


def _gradients(ctx: Any, dy: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of what a norm read, of its weight and of its bias, None without one."""
    read, weight, mean, rstd = ctx.saved_tensors
    shape, has_bias = matrix_shape(read.shape), ctx.bias_dtype is not None
    normed = Normed(read.reshape(shape), weight, (mean, rstd), ctx.centered, has_bias)
    dx, dw, db = ops.norm_backward(dy.reshape(shape), normed, None if dtotal is None else dtotal.reshape(shape))
    return dx.view(read.shape), dw.to(weight.dtype), db.to(ctx.bias_dtype) if has_bias else None
