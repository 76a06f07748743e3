"""The random Hadamard transform as fp32 butterflies (docs/numerics.md section 7)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import f32
from halfbyte.layout import round_up
from halfbyte.reference.blocks import elements_lead
from halfbyte.reference.philox import sign_bits
from halfbyte.rng import Draw
from halfbyte.spec import HADAMARD_SIGNS, Hadamard


def signs(rotation: Hadamard, sign_draw: Draw | None, device: torch.device) -> Tensor:
    """Return the +1 / -1 factors of one group, fp32 [size]."""
    if rotation.signs == "fresh":
        assert sign_draw is not None, "fresh signs need a draw"
        return 1.0 - 2.0 * sign_bits(rotation.size, sign_draw).float()
    given = {"fixed": HADAMARD_SIGNS, "none": "+"}.get(rotation.signs, rotation.signs)
    one = [-1.0 if sign == "-" else 1.0 for sign in given]
    return torch.tensor(one, device=device).repeat(rotation.size // len(one))


def rotate(x: Tensor, rotation: Hadamard, sign_draw: Draw | None = None) -> Tensor:
    """Rotate groups of `rotation.size` along the last dimension.

    Args:
        x: any float dtype [R, C], any strides; cast to bf16 first.
        rotation: width and signs.
        sign_draw: the place of fresh signs.

    Returns:
        bf16 [R, round_up(C, size)].
    """
    n = rotation.size
    rows, cols = x.shape
    x = x.to(torch.bfloat16)
    if cols % n:
        x = pad(x, (0, round_up(cols, n) - cols))
    groups = x.shape[1] // n
    y = x.view(rows, groups, n)
    if y.stride(2) == 1:
        y = elements_lead(y)
    y = y.float() * signs(rotation, sign_draw, x.device)
    other = torch.empty_like(y)
    stride = 1
    while stride < n:
        pairs = rows, groups, n // (2 * stride), 2
        (a, b), (total, difference) = (t.view(*pairs, stride).unbind(3) for t in (y, other))
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        y, other = other, y
        stride *= 2
    # x + 0 turns -0 into +0; an underflow in the bf16 rounding keeps its sign.
    y = y.mul_(f32(n**-0.5)).add_(0.0)
    return y.to(torch.bfloat16).reshape(rows, groups * n)
