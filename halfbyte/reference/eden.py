"""MS-EDEN: the block scale that makes codes of nearest unbiased on average (docs/numerics.md section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import E4M3
from halfbyte.reference.blocks import ordered_sum

RANDOM_BITS = 24
_EXPONENT_MASK = 0x7F800000


def code_scale(scale: Tensor) -> Tensor:
    """Return the scale that codes are rounded with, fp32: never 0, of which no correction would lead away."""
    return scale.clamp_min(E4M3.min_subnormal)


def stored_scale(y: Tensor, magnitude: Tensor, scale: Tensor, random: Tensor) -> Tensor:
    """Return the corrected scale, stochastically rounded to one of its two neighbours in E4M3.

    Args:
        y: fp32 [rows, blocks, 16], what was rounded to codes; no NaN.
        magnitude: fp32, the magnitudes of these codes.
        scale: fp32 [rows, blocks], from `code_scale`.
        random: fp32 [rows, blocks], 0 to 2^24 - 1.

    Returns:
        float8_e4m3fn [rows, blocks].
    """
    squares = ordered_sum(y * y)
    products = ordered_sum(y.abs() * magnitude)
    t = (scale * (squares / products)).nan_to_num(nan=E4M3.max).clamp_max(E4M3.max)
    step = _step(t)
    low = (t / step).floor().mul_(step)  # exact: a power of two
    up = t - low > random * (step * 2.0**-RANDOM_BITS)
    rounded = torch.where(up, low + step, low)
    return torch.where(products == 0, 0.0, rounded).to(torch.float8_e4m3fn)


def _step(t: Tensor) -> Tensor:
    """Return the distance from t >= 0 to the next value of E4M3: a power of two."""
    binade = (t.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp_min_(E4M3.min_normal)
    return binade.mul_(2.0**-E4M3.mantissa_bits)
