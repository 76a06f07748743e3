"""The random Hadamard transform as fp32 butterflies (docs/numerics.md section 7)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import f32
from halfbyte.layout import round_up
from halfbyte.reference.blocks import elements_lead
from halfbyte.reference.philox import sign_bits
from halfbyte.rng import Draw
from halfbyte.spec import HADAMARD_SIGNS, Hadamard


def signs(rotation: Hadamard, sign_draw: Draw | None, device: torch.device, is_traced: bool = False) -> Tensor:
    """Return the +1 / -1 factors of one group, fp32 [size]; `is_traced` keeps them out of a cache."""
    if rotation.signs == "fresh":
        assert sign_draw is not None, "fresh signs need a draw"
        return 1.0 - 2.0 * sign_bits(rotation.size, sign_draw).float()
    known = _known_signs.__wrapped__ if is_traced else _known_signs
    return known(rotation.signs, rotation.size, device)


@lru_cache(maxsize=32)
def _known_signs(name: str, size: int, device: torch.device) -> Tensor:
    given = {"fixed": HADAMARD_SIGNS, "none": "+"}.get(name, name)
    one = [-1.0 if sign == "-" else 1.0 for sign in given]
    return torch.tensor(one, device=device, dtype=torch.float32).repeat(size // len(one))


@lru_cache(maxsize=8)
def _both(device: torch.device) -> Tensor:
    """Return the signs of b in a + b and in a - b, [2, 1]."""
    return torch.tensor([[1.0], [-1.0]], device=device, dtype=torch.float32)


def rotate(x: Tensor, rotation: Hadamard, sign_draw: Draw | None = None) -> Tensor:
    """Rotate groups of `rotation.size` along the last dimension.

    Args:
        x: any float dtype [R, C], any strides; cast to bf16 first.
        rotation: width and signs.
        sign_draw: the place of fresh signs.

    Returns:
        bf16 [R, round_up(C, size)].
    """
    is_traced = type(x) is not Tensor  # a fake tensor must not stay in the cache for eager calls
    return rotate_by(x, signs(rotation, sign_draw, x.device, is_traced))


def rotate_by(x: Tensor, factors: Tensor) -> Tensor:
    """Do what `rotate` does, with the signs of a group as factors, fp32 [size]."""
    n = len(factors)
    rows, cols = x.shape
    is_traced = type(x) is not Tensor
    x = x.to(torch.bfloat16)
    if cols % n:
        x = pad(x, (0, round_up(cols, n) - cols))
    groups = x.shape[1] // n
    y = x.view(rows, groups, n)
    if y.stride(2) == 1:
        y = elements_lead(y)
    y = y.float() * factors
    both = (_both.__wrapped__ if is_traced else _both)(x.device)
    other = torch.empty_like(y)
    stride = 1
    while stride < n:
        pairs = rows, groups, n // (2 * stride), 2, stride
        a, b = y.view(pairs).chunk(2, dim=3)
        torch.addcmul(a, b, both, out=other.view(pairs))  # a + b and a - b: a product with 1 or -1 rounds nothing
        y, other = other, y
        stride *= 2
    # 0 + x turns -0 into +0 and rounds nothing; an underflow in the bf16 rounding keeps its sign.
    y = torch.add(y.new_zeros(()), y, alpha=f32(n**-0.5), out=other)
    return y.to(torch.bfloat16).reshape(rows, groups * n)
