"""What quantized layers refuse: second derivatives and torch.func, which rounding gives no meaning to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Refusals(NamedTuple):
    """What a function says where it has no derivative: of the second, of torch.func, of forward-mode AD."""

    twice: str
    transformed: str
    forward_mode: str


def refusals(what: str, remedy: str) -> Refusals:
    """Return the refusals of `what`, a noun, all with one remedy."""
    return Refusals(
        f"halfbyte: {what} cannot be differentiated twice, its backward rounds; {remedy}",
        f"halfbyte: {what} does not run under torch.func (grad, vmap, jvp, …); {remedy}",
        f"halfbyte: {what} has no forward-mode derivative; {remedy}",
    )


LINEAR = refusals(
    "a quantized layer",
    "run these layers in high precision: `with hb.high_precision(model): …`, or a recipe of None for them",
)
EXPERTS = refusals(
    "a grouped layer, of any recipe,", "run its experts one by one: torch.nn.functional.linear(x_g, weight[g])"
)
ELEMENTWISE = refusals(
    "a norm or activation of halfbyte",
    "use torch's: hb.nn.unfuse_(model), or to_modules(); linear layers under `with hb.high_precision(model): …`",
)

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(refused: Refusals) -> Callable[[Backward], Backward]:
    """Wrap the backward of an autograd function: with create_graph=True, using its results again raises.

    Torch's once_differentiable says less, and lets a second derivative with respect to saved tensors vanish silently.
    """

    def wrap(backward: Backward) -> Backward:
        @wraps(backward)
        def wrapper(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            records = torch.is_grad_enabled()
            try:
                if not records:
                    return backward(ctx, *gradients)
                with torch.no_grad():
                    outputs = backward(ctx, *gradients)
            except RuntimeError as error:
                if "Batching rule" in str(error):  # is_grads_batched=True: torch batches no product that adds in place
                    raise RuntimeError(refused.transformed) from error
                raise
            # The gradients and the leaves behind the layer come along, so that what leads to an input of the model or
            # a weight leads through the error: torch.autograd.grad would else leave this layer's part out without a
            # word, beside a residual or where the gradient is constant, as that of a sum is.
            detached = (None if t is None else t.detach().requires_grad_() for t in outputs)
            inputs = (*detached, *(t for t in gradients if t is not None), *_leaves(ctx))
            refuse: Any = torch._C._functions.DelayedError(refused.twice, len(inputs))
            return refuse(*inputs)[: len(outputs)]

        return wrapper

    return wrap


def _leaves(node: Any) -> list[Tensor]:
    """Return the tensors at the ends of the graph behind `node`: weights, and inputs that want gradients."""
    seen, pending, found = set(), [node], []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        pending += [following for following, _ in node.next_functions]
    return found


def refuse_transforms(tensors: Sequence[Tensor | None], refused: Refusals) -> None:
    """Raise RuntimeError inside torch.func transforms and forward-mode AD of a tensor: torch names no remedy."""
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(refused.transformed)
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(refused.forward_mode)
