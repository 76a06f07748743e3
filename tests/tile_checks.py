"""What holds both orientations of a weight to the reference, on any device."""

from __future__ import annotations

import kernel_checks as checks
import torch

from halfbyte import reference
from halfbyte.kernels.quantize import both
from halfbyte.kernels.quantize.both_route import Pair, choose_pair
from halfbyte.layout import Operand
from halfbyte.sides import Side

KERNEL = "quantize_tiles_both_kernel"


def weight(shape, device="cpu"):
    """Return values over many binades, with NaN, Inf, -0 and a tile of zeros."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(4).exp2()
    w[0, 0], w[17, 3], w[-1, -1], w[2, 40] = float("nan"), float("inf"), float("-inf"), -0.0
    w[32:48, 16:32] = 0
    return w.bfloat16().to(device)


def check_both(shape, device, amax):
    """Hold codes, scales, values and amax to the reference's of x and of x.T, each quantized by itself."""
    x = weight(shape, device)
    given = None if amax is None else torch.tensor(amax, device=device)
    col = Side(checks.TILE, None, amax=given)
    for transient in (False, True):
        row = Side(checks.TILE, None, amax=given, transient=transient)
        assert choose_pair(Pair(x, row, col)).kernel == KERNEL
        made = both.quantize_row_col(x, row, col)
        for side, t in enumerate((x, x.T.contiguous())):
            expected, blocks = reference.quantize(t, checks.TILE, amax=given), made[side]
            checks.same(blocks.amax, expected.amax)
            if transient and side == 0:
                stored = Operand(expected, checks.TILE, t.shape[1])
                checks.same(blocks.qdata, reference.decode(stored).values.bfloat16())
                continue
            checks.same(blocks.qdata, expected.qdata)
            checks.same(blocks.block_scale, expected.block_scale)
