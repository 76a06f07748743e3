"""Activations, alone or behind the linear layers that feed them, with the amaxes that the next quantization needs.

`linear_activation` is gate, up and activation as one autograd function: the backward of the activation hands the
amaxes of dgate and dup to the quantization of the two gradients, which no gradient between two functions could carry.
Its bits are those of `linear_shared` followed by `activation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfbyte import ops
from halfbyte.arithmetic import ACTIVATIONS, Activation
from halfbyte.functional.derivatives import ELEMENTWISE, first_order, refuse_transforms
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.linear import (
    Layers,
    _draws,
    _load,
    _save,
    bases_of,
    gradient_specs,
    prepare,
    run_backward,
    run_forward,
)
from halfbyte.functional.places import sign_place
from halfbyte.functional.primary import runs_eagerly
from halfbyte.layout import from_rows, matrix_shape
from halfbyte.recipes import resolve
from halfbyte.rng import Draw
from halfbyte.spec import Recipe, Spec
from halfbyte.tensor.quant_tensor import check_value_dtype


def find_activation(name: str) -> Activation:
    """Return the activation called `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r}: use one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def activation(name: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    """Return f(x), or f(x) * up for a gated activation, rounded once.

    Args:
        name: swiglu, geglu, geglu_tanh (gated); silu, gelu, gelu_tanh, relu2.
        x: bf16, fp16 or fp32 [..., K], the gate of a gated activation.
        up: as x, for a gated activation; else None.

    Returns:
        [..., K] of x's dtype.

    Raises:
        ValueError: the name is unknown, or `up` is missing, superfluous or of another shape.
        TypeError: x and up are not of one float dtype.
    """
    found = find_activation(name)
    check_value_dtype("x.dtype", x.dtype, "cast x first")
    if (up is not None) != found.gated:
        raise ValueError(f"up={'given' if found.gated is False else None}: {name!r} takes {1 + found.gated} tensors")
    if up is not None and (up.shape != x.shape or up.dtype != x.dtype):
        raise ValueError(f"up is {up.dtype} {tuple(up.shape)}: give {x.dtype} {tuple(x.shape)}, as x")
    return _activate(x, up, found.function, ops.Following())[0]


def activate(name: str, inputs: Sequence[Tensor], following: ops.Following) -> tuple[Tensor, ops.Amaxes]:
    """Return `activation` of its one or two inputs, and the amaxes with which it will be quantized."""
    found = find_activation(name)
    assert len(inputs) == 1 + found.gated, "one input, or gate and up"
    return _activate(inputs[0], inputs[1] if found.gated else None, found.function, following)


def linear_activation(
    x: Tensor,
    layers: Layers,
    name: str,
    recipe: Recipe | str,
    following: ops.Following = ops.Following(),  # noqa: B008  a frozen value
    x_amaxes: ops.Amaxes | None = None,
) -> tuple[Tensor, ops.Amaxes]:
    """Return activation(x @ w.T + bias, …) and the amaxes with which it will be quantized.

    Args:
        x: [..., K].
        layers: the gate and up projection of a gated activation, in this order; one projection otherwise.
        name: of the activation.
        recipe: of the linear layers, as for `linear_shared`.
        following: how the result will be quantized.
        x_amaxes: those of x, as the norm that made x returned them.

    Returns:
        [..., N] and its amaxes.
    """
    recipe = resolve(recipe)
    if runs_eagerly(layers.weights):
        from halfbyte.functional.eager import eagerly

        return eagerly(linear_activation, (x, layers, name, recipe, following, x_amaxes), {})
    found = find_activation(name)
    if len(layers.weights) != 1 + found.gated:
        raise ValueError(f"layers has {len(layers.weights)} weights: {name!r} takes {1 + found.gated}")
    refuse_transforms((x, *layers.weights, *layers.biases), ELEMENTWISE)
    call, tensors = prepare(x, layers, recipe, None, x_amaxes)
    n = len(layers.weights)
    if call is None:
        outputs = [F.linear(tensors[0], w, b) for w, b in zip(tensors[1 : n + 1], tensors[n + 1 :], strict=True)]
        return _activate(outputs[0], outputs[1] if n > 1 else None, found.function, following)
    then = _Then(found.function, following.row, following.col, _static(following.sign_draw))
    # A copy: torch.compile refuses a tensor that enters twice, and it may be the layers' own base.
    base = None if following.sign_draw is None else following.sign_draw.base.clone()
    h, *amaxes = _ActivatedLinear.apply((call, then), *tensors, base)
    return from_rows(h, x.shape), following.known(*amaxes)


@dataclass(frozen=True)
class _Then:
    """The activation and how its output will be quantized, without tensors."""

    function: str
    row: Spec | None
    col: Spec | None
    sign_place: tuple | None

    def following(self, base: Tensor | None) -> ops.Following:
        sign = None if base is None or self.sign_place is None else Draw(base, *self.sign_place)
        return ops.Following(self.row, self.col, sign)


def _static(draw: Draw | None) -> tuple | None:
    return None if draw is None else draw[1:]


def _activate(x: Tensor, up: Tensor | None, function: str, following: ops.Following) -> tuple[Tensor, ops.Amaxes]:
    refuse_transforms((x, up), ELEMENTWISE)
    refuse_foreign((("x", x), ("up", up)), "an activation of halfbyte")
    sign = following.sign_draw
    then = _Then(function, following.row, following.col, _static(sign))
    h, *amaxes = _Activation.apply(then, x, up, None if sign is None else sign.base)
    return from_rows(h, x.shape), following.known(*amaxes)


def _present(amaxes: ops.Amaxes, like: Tensor) -> list[Tensor]:
    """Return tensors only: autograd functions return no None."""
    return [like.new_empty(0, dtype=torch.float32) if amax is None else amax for amax in amaxes]


class _Activation(torch.autograd.Function):
    """x [..., K], up and the base of the signs in; h [M, K] and two amaxes out."""

    @staticmethod
    def forward(ctx: Any, then: _Then, x: Tensor, up: Tensor | None, base: Tensor | None):
        shape = matrix_shape(x.shape)
        up_MK = None if up is None else up.reshape(shape)
        h, amaxes = ops.activation(x.reshape(shape), up_MK, then.function, then.following(base))
        ctx.save_for_backward(x, up)
        ctx.function = then.function
        outputs = _present(amaxes, x)
        ctx.mark_non_differentiable(*outputs)
        return h, *outputs

    @staticmethod
    @first_order(ELEMENTWISE)
    def backward(ctx: Any, dh: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        shape = matrix_shape(x.shape)
        up_MK = None if up is None else up.reshape(shape)
        (dx, dup), _ = ops.activation_backward(dh.reshape(shape), x.reshape(shape), up_MK, ctx.function)
        return None, dx.view(x.shape), None if dup is None else dup.view(x.shape), None


class _ActivatedLinear(torch.autograd.Function):
    """As _SharedLinear with an activation behind it; the last tensor is the base of its signs. h and two amaxes out."""

    @staticmethod
    def forward(ctx: Any, calls: tuple[Any, _Then], x: Tensor, *tensors: Any):
        (call, then), base = calls, tensors[-1]
        outputs, kept = run_forward(ctx, call, x, tensors[:-1])
        up = outputs[1] if len(outputs) > 1 else None
        h, amaxes = ops.activation(outputs[0], up, then.function, then.following(base))
        ctx.layout = _save(ctx, [*kept, *outputs], bases_of(call, tensors))
        ctx.function, ctx.activation_inputs = then.function, call.count
        known = _present(amaxes, x)
        ctx.mark_non_differentiable(*known)
        return h, *known

    @staticmethod
    @first_order(ELEMENTWISE)
    def backward(ctx: Any, dh: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.call.count
        kept, bases = _load(ctx.layout, ctx.saved_tensors, n + 1)
        pre, kept = kept[-n:], kept[:-n]
        need_dw = any(ctx.needs_input_grad[2 : 2 + n])
        following = ops.Following(
            *gradient_specs(ctx.call.recipe, ctx.needs_input_grad[1], need_dw),
            sign_place(_draws(ctx.call, bases)[-1]),
        )
        up = pre[1] if n > 1 else None
        gradients, amaxes = ops.activation_backward(dh, pre[0], up, ctx.function, following)
        return run_backward(ctx, kept, bases, [t for t in gradients if t is not None], amaxes[:n])
