"""Sums and functions whose every rounding is fixed: what norms and activations compute, alike on every device.

All of it is fp32, rounded to nearest after every single operation, as in docs/numerics.md: no fused multiply-add, no
approximate division or exponential. The reference and the kernels take their constants from here (docs/fused.md).

- Sum of a row: `LANES` partial sums, lane l adding columns l, l + LANES, ... in order from +0; then neighbours meet:
  lanes (0, 1), (2, 3), ..., until one is left.
- Sum of a column, for gradients of norm weights and means over tokens: rows in groups of `ROW_GROUP`, each added in
  order from +0; the group sums in `GROUP_LANES` lanes as above.
- e^x: t = x * LOG2_E, clamped; k = t rounded to an integer, to even; f = t - k; then Horner's rule over EXP2_TERMS and
  a multiplication by 2^k. Relative error below 2e-6 for |x| < 20.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ERROR_SUMS = ("signal", "restored", "noise")
"""Of values v and what was made of them, q (`reference.error_sums`): sums in fp64, in any order, of v * v, q * q and
d * d, where d = q - v is fp32."""

OPERAND_SUMS = (
    *("signal", "noise", "magnitude", "deviation", "nonzero", "underflow", "saturated"),
    *("blocks", "scale_underflow"),
)
"""Of values v and what codes stand for, q (`reference.operand_sums`): sums in fp64, in any order, of v * v, d * d, |v|
and |d|, where d = q - v is fp32; then how many v are not 0, how many of them have q = 0, and how many magnitudes exceed
the bound of their block; and how many blocks hold a magnitude beyond 0 and no NaN, and how many of those have a scale
byte of 0.

The bound is fp32: the value of the block's scale times (g * f(CLIPPED * largest element)), g the operand's factor, 1
without an amax. Blocks whose scale byte is 0 have none."""

CLIPPED = 1.001
"""Times the largest value of its block: what a saturated value exceeds; roundings of the scale stay below."""

LANES = 512
ROW_GROUP = 16
GROUP_LANES = 32

LOG2_E = 1.4426950408889634
EXPONENT_RANGE = (-125.0, 124.0)  # so that 1 / (1 + e^x) is no subnormal
EXP2_TERMS = (0.0013264727, 0.0096715139, 0.0555073359, 0.2402224243, 0.6931470037, 1.0)
"""2^f on [-1/2, 1/2], highest power first: relative minimax fit with value 1 at 0, error 9.2e-8."""

TANH_TERMS = (1.5957691216057308, 0.07135481627159676)
"""2 sqrt(2 / pi) and 0.044715 times it: 1 + tanh(u) = 2 sigmoid(2u) in the tanh form of GeLU (arXiv 1606.08415)."""

TAIL_SLOPE = 0.3
FURTHEST = 64.0
TAIL_TERMS = (
    0.0356738828,
    -0.1571990699,
    0.2063461095,
    -0.0536764152,
    0.1285576326,
    0.0999147743,
    0.1207537428,
    0.1196293160,
    0.0,
)
"""The normal distribution's tail: P(Z > a) = e^(-a*a/2) * sum of these in t = 1 / (1 + TAIL_SLOPE * a), highest power
first: relative minimax fit, error 1.5e-7 for 0 <= a <= 14."""
DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)


class Normed(NamedTuple):
    """What the backward of a norm reads.

    Args:
        x: [rows, cols], that the norm was of: the sum where a residual was added.
        weight: [cols].
        statistics: mean (of LayerNorm, else empty) and 1 / sqrt(variance + eps), fp32 [rows].
        centered: LayerNorm rather than RMSNorm.
        has_bias: whether the gradient of a bias is wanted.
    """

    x: Tensor
    weight: Tensor
    statistics: tuple[Tensor, Tensor]
    centered: bool
    has_bias: bool


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of x without its mean over tokens, and of that mean, for x of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Activation(NamedTuple):
    """An activation by name: `function` of one input, or of the gate, times the other input, if `gated`."""

    function: str
    gated: bool


ACTIVATIONS = {
    "swiglu": Activation("silu", True),
    "geglu": Activation("gelu", True),
    "geglu_tanh": Activation("gelu_tanh", True),
    "silu": Activation("silu", False),
    "gelu": Activation("gelu", False),
    "gelu_tanh": Activation("gelu_tanh", False),
    "relu2": Activation("relu2", False),
}
"""gelu is the erf form (torch's default), gelu_tanh its tanh form, relu2 the square of ReLU."""

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")
