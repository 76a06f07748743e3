"""Activation functions with every rounding fixed (halfbyte/arithmetic.py): fp32 inside, one rounding at the end.

NaN gives NaN, and an infinite input an output that is not finite; only ReLU² of -Inf is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfbyte.arithmetic import (
    DENSITY,
    EXP2_TERMS,
    EXPONENT_RANGE,
    FURTHEST,
    LOG2_E,
    TAIL_SLOPE,
    TAIL_TERMS,
    TANH_TERMS,
)
from halfbyte.formats import f32

CHUNK_ELEMENTS = 1 << 15
MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves an integer in the low bits


def activation(x: Tensor, up: Tensor | None, function: str) -> Tensor:
    """Return f(x), or f(x) * up, of x's dtype.

    Args:
        x: [rows, cols], the gate if there is an `up`.
        up: [rows, cols] or None.
        function: one of halfbyte.arithmetic.FUNCTIONS.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, gate, other in _parts(out, x, up):
        value = FORWARD[function](gate.float())
        part.copy_(value if other is None else value * other.float())
    return out


def activation_backward(dh: Tensor, x: Tensor, up: Tensor | None, function: str) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of `up` (None without it), of their dtypes."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    for dx_part, dup_part, dh_part, gate, other in _parts(dx, dup, dh, x, up):
        value, slope = BOTH[function](gate.float())
        dh32 = dh_part.float()
        if other is None or dup_part is None:
            dx_part.copy_(dh32 * slope)
        else:
            dx_part.copy_((dh32 * other.float()) * slope)
            dup_part.copy_(dh32 * value)
    return dx, dup


def _parts(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the tensors in runs of rows whose temporaries stay in a cache."""
    shape = next(t.shape for t in tensors if t is not None)
    step = max(1, CHUNK_ELEMENTS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield tuple(None if t is None else t[start : start + step] for t in tensors)


def exponential(x: Tensor) -> Tensor:
    """Return e^x in fp32."""
    t = (x * f32(LOG2_E)).clamp(*EXPONENT_RANGE)
    u = t + MAGIC
    value = _horner(EXP2_TERMS, t - (u - MAGIC))
    return (value.view(torch.int32) + (u.view(torch.int32) << 23)).view(torch.float32)


def _horner(terms: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, f32(terms[0]))
    for term in terms[1:]:
        total = total * x + f32(term)
    return total


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) in fp32."""
    return torch.ones_like(x) / (exponential(-x) + 1.0)


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _silu_both(x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    return x * s, s * (x * (1.0 - s) + 1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    linear, cubic = map(f32, TANH_TERMS)
    return x * sigmoid(x * ((x * x) * cubic + linear))


def _gelu_tanh_both(x: Tensor) -> tuple[Tensor, Tensor]:
    linear, cubic = map(f32, TANH_TERMS)
    square = x * x
    s = sigmoid(x * (square * cubic + linear))
    value = x * s
    return value, (value * (1.0 - s)) * (square * f32(3 * TANH_TERMS[1]) + linear) + s


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(Z <= x) of a standard normal Z and e^(-x*x/2)."""
    bell = exponential((x * x) * -0.5)
    t = torch.ones_like(x) / (x.abs().clamp_max(FURTHEST) * f32(TAIL_SLOPE) + 1.0)
    tail = bell * _horner(TAIL_TERMS, t)
    return torch.where(x > 0, 1.0 - tail, tail), bell


def _gelu(x: Tensor) -> Tensor:
    return x * _normal(x)[0]


def _gelu_both(x: Tensor) -> tuple[Tensor, Tensor]:
    below, bell = _normal(x)
    return x * below, (x * bell) * f32(DENSITY) + below


def _relu2(x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, x * x)


def _relu2_both(x: Tensor) -> tuple[Tensor, Tensor]:
    return _relu2(x), torch.where(x <= 0, 0.0, x + x)


FORWARD = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}
BOTH = {"silu": _silu_both, "gelu": _gelu_both, "gelu_tanh": _gelu_tanh_both, "relu2": _relu2_both}
