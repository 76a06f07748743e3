"""Activations, alone or behind the linear layers that feed them, with the amaxes that the next quantization needs.

`linear_activation` is gate, up and activation as one autograd function: the backward of the activation hands the
amaxes of dgate and dup to the quantization of the two gradients, which no gradient between two functions could carry.
Its bits are those of `linear_shared` followed by `activation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.arithmetic import ACTIVATIONS, Activation
from halfbyte.functional import whole
from halfbyte.functional.derivatives import ELEMENTWISE, first_order, refuse_transforms
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.linear import (
    Layers,
    as_gradients,
    backward_op,
    bases_of,
    by_codes_alone,
    in_high_precision,
    note,
    prepare,
)
from halfbyte.functional.operands import Saved, flatten_operands, gradient_specs, unflatten_operands, with_late
from halfbyte.functional.places import sign_place
from halfbyte.functional.primary import runs_eagerly
from halfbyte.functional.products import gradients_of, multiply
from halfbyte.functional.request import Call, draws_of
from halfbyte.layout import from_rows, matrix_shape
from halfbyte.recipes import resolve
from halfbyte.rng import Draw
from halfbyte.spec import Recipe, Spec, parse
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
    if runs_eagerly(x, layers.weights, recipe):
        from halfbyte.functional.eager import eagerly

        return eagerly(linear_activation, (x, layers, name, recipe, following, x_amaxes), {})
    found = find_activation(name)
    if len(layers.weights) != 1 + found.gated:
        raise ValueError(f"layers has {len(layers.weights)} weights: {name!r} takes {1 + found.gated}")
    refuse_transforms((x, *layers.weights, *layers.biases), ELEMENTWISE)
    call, tensors = prepare(x, layers, recipe, None, x_amaxes)
    n = len(layers.weights)
    if call is None:
        outputs = in_high_precision(tensors[0], tensors[1 : n + 1], tensors[n + 1 :])
        return _activate(outputs[0], outputs[1] if n > 1 else None, found.function, following)
    then, stream = _static(found.function, following)
    # A copy: torch.compile refuses a tensor that enters twice, and it may be the layers' own base.
    base = None if following.sign_draw is None else following.sign_draw.base.clone()
    call = call._replace(streams=(*call.streams, stream))
    h, *amaxes = _ActivatedLinear.apply((call, then), *tensors, base)
    return from_rows(h, x.shape), following.known(*amaxes)


class _Then(NamedTuple):
    """The activation and how its output will be quantized, without tensors and without the stream of its signs."""

    function: str
    row: Spec | None
    col: Spec | None
    shard: tuple | None

    def following(self, base: Tensor | None, stream: int) -> ops.Following:
        sign = None if base is None or self.shard is None else Draw(base, stream, *self.shard)
        return ops.Following(self.row, self.col, sign)


def _static(function: str, following: ops.Following) -> tuple[_Then, int]:
    sign = following.sign_draw
    shard, stream = (None, 0) if sign is None else (sign[2:], sign.stream)
    return _Then(function, following.row, following.col, shard), stream


def _activate(x: Tensor, up: Tensor | None, function: str, following: ops.Following) -> tuple[Tensor, ops.Amaxes]:
    refuse_transforms((x, up), ELEMENTWISE)
    refuse_foreign((("x", x), ("up", up)), "an activation of halfbyte")
    sign = following.sign_draw
    h, *amaxes = _Activation.apply(_static(function, following), x, up, None if sign is None else sign.base)
    return from_rows(h, x.shape), following.known(*amaxes)


def _present(amaxes: ops.Amaxes, like: Tensor) -> list[Tensor]:
    """Return tensors only: autograd functions return no None."""
    return [like.new_empty(0, dtype=torch.float32) if amax is None else amax for amax in amaxes]


class _Activation(torch.autograd.Function):
    """x [..., K], up and the base of the signs in; h [M, K] and two amaxes out."""

    @staticmethod
    def forward(ctx: Any, how: tuple[_Then, int], x: Tensor, up: Tensor | None, base: Tensor | None):
        (then, stream), shape = how, matrix_shape(x.shape)
        up_MK = None if up is None else up.reshape(shape)
        h, amaxes = ops.activation(x.reshape(shape), up_MK, then.function, then.following(base, stream))
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
    def forward(ctx: Any, calls: tuple[Call, _Then], x: Tensor, *tensors: Any):
        (call, then), n = calls, calls[0].request.count
        note(ctx, call, x, tensors)
        needs = ctx.needs_input_grad[1 : 2 + n]
        if whole.fits(call.request, needs, ctx.main_grads) and (then.shard is None or then.shard == (0, None)):
            (h, *made), ctx.layout = _forward_op(call, then, needs, (x, *tensors)), None
        else:
            static = call.request, needs, then
            given = by_codes_alone(call.request, (x, *tensors))
            (h, *made), ctx.layout = ops.run(_activated_forward, static, given, call.streams)
        ctx.save_for_backward(*made[2:], *bases_of(call, tensors))
        ctx.function, ctx.activation_inputs = then.function, n
        ctx.mark_non_differentiable(*made[:2])
        return h, *made[:2]

    @staticmethod
    @first_order(ELEMENTWISE)
    def backward(ctx: Any, dh: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.layout is None:
            return as_gradients(ctx, backward_op(_BACKWARD, ctx, ctx.saved_tensors, [dh], ctx.function))
        layout, saved = ctx.layout, ctx.saved_tensors
        if ctx.call.late:
            layout, saved = with_late(ctx.call.late, layout, saved, ctx.needs_input_grad[1])
        static = ctx.call.request, layout, ctx.needs_input_grad[1:], ctx.dtypes, ctx.function
        given = *saved, dh, *ctx.main_grads
        gradients, _ = ops.run(_activated_backward, static, given, ctx.call.streams[:-1])
        return as_gradients(ctx, gradients)


def _forward_op(call: Call, then: _Then, needs: Sequence[bool], tensors: Sequence[Any]) -> tuple:
    """Return the tensors that `_activated_forward` returns, made by one op."""
    n, (row, col) = call.request.count, (spec.key if spec else "" for spec in (then.row, then.col))
    text = whole.request_text(call.request, needs, then.function, row, col, "" if then.shard is None else "draws")
    made = _FORWARD(text, list(by_codes_alone(call.request, tensors)), [], list(call.streams))
    given = tensors[1 + 2 * n : 1 + 3 * n], tensors[5 * n + 2 : 5 * n + 4], tensors[5 * n + 4 : -1]
    kept = whole.saved(call.request, needs, made[3 : len(made) - n], given)
    return *made[:3], *kept, *made[len(made) - n :]


def _forward_whole(text: str, tensors: Sequence[Any], sizes: Sequence[int], streams: Sequence[int]) -> tuple:
    request, needs, (function, row, col, draws) = whole.parse_request(text)
    row_spec, col_spec = (parse(key) if key else None for key in (row, col))
    then = _Then(function, row_spec, col_spec, (0, None) if draws else None)
    made, _ = _activated_forward((request, needs, then), tensors, streams)
    return tuple(whole.made_of(request, made, tensors[:-1]))


def _backward_whole(text: str, tensors: Sequence[Any], sizes: Sequence[int], streams: Sequence[int]) -> tuple:
    request, needs, (dtypes, function) = whole.parse_request(text)
    n = request.count
    kept = whole.layout_of(request, needs[: 1 + n], [tensors[-1]] * n, sizes[0])
    static = request, (*kept, *[True] * n), needs, whole.parse_dtypes(dtypes, n), function
    return _activated_backward(static, (*tensors, *[None] * n), streams)[0]


_FORWARD = ops.define_pass("linear_activation_forward", _forward_whole)
_BACKWARD = ops.define_pass("linear_activation_backward", _backward_whole)


def _activated_forward(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, Saved]:
    """Return h, its two amaxes, then the tensors of what the backward needs; and their layout (`forward_pass`)."""
    request, needs, then = static
    *tensors, base = tensors
    outputs, kept = multiply(request, needs, tensors, streams[:-1])
    up = outputs[1] if len(outputs) > 1 else None
    h, amaxes = ops.activation(outputs[0], up, then.function, then.following(base, streams[-1]))
    flat, layout = flatten_operands([*kept, *outputs])
    return (h, *_present(amaxes, h), *flat), layout


def _activated_backward(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, None]:
    """Return what `backward_pass` does, of dh."""
    request, layout, needs, dtypes, function = static
    n = request.count
    kept, rest = unflatten_operands(layout, tensors)
    bases, dh, grads = rest[: n + 1], rest[n + 1], rest[n + 2 :]
    draws = draws_of(request, bases, streams)
    pre, kept = kept[-n:], kept[:-n]
    specs = gradient_specs(request.recipe, needs[0], any(needs[1 : 1 + n]))
    following = ops.Following(*specs, sign_place(draws[-1]))
    up = pre[1] if n > 1 else None
    dys, amaxes = ops.activation_backward(dh, pre[0], up, function, following)
    dys = [t for t in dys if t is not None]
    return gradients_of(request, (kept, draws, grads), dys, amaxes[:n], (needs, dtypes)), None
