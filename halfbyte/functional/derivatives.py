"""What quantized layers refuse: second derivatives and torch.func, which rounding gives no meaning to."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_REMEDY = "run these layers in high precision: `with hb.high_precision(model): …`, or a recipe of None for them"

TWICE = f"halfbyte: a quantized layer cannot be differentiated twice, its backward rounds; {_REMEDY}"
TRANSFORMED = f"halfbyte: a quantized layer does not run under torch.func (grad, vmap, jvp, …); {_REMEDY}"
FORWARD_MODE = f"halfbyte: a quantized layer has no forward-mode derivative; {_REMEDY}"

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Wrap the backward of an autograd function: with create_graph=True, using its results again raises.

    Torch's once_differentiable says less, and lets a second derivative with respect to saved tensors vanish silently.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            outputs = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return outputs
        refuse: Any = torch._C._functions.DelayedError(TWICE, len(outputs))
        return refuse(*(None if t is None else t.detach().requires_grad_() for t in outputs))

    return wrapper


def refuse_transforms(x: Tensor) -> None:
    """Raise RuntimeError inside torch.func transforms and forward-mode AD of `x`; torch's messages name no remedy."""
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(TRANSFORMED)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise RuntimeError(FORWARD_MODE)
