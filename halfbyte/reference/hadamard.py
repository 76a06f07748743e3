"""The random Hadamard transform as fp32 butterflies (docs/numerics.md section 7)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import f32
from halfbyte.layout import round_up
from halfbyte.reference.blocks import elements_lead
from halfbyte.reference.philox import sign_bits
from halfbyte.rng import HADAMARD_SIGN_BITS, Draw
from halfbyte.spec import Hadamard


def signs(rotation: Hadamard, sign_draw: Draw | None, device: torch.device) -> Tensor:
    """Return the +1 / -1 factors of one group, fp32 [size]."""
    if rotation.signs == "fixed":
        bit = torch.arange(rotation.size, device=device) % 16
        negate = (torch.full_like(bit, HADAMARD_SIGN_BITS) >> bit) & 1
    else:
        assert sign_draw is not None, "fresh signs need a draw"
        negate = sign_bits(rotation.size, sign_draw)
    return 1.0 - 2.0 * negate.float()


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
