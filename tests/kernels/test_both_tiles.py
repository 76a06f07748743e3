"""Both orientations of a weight from one launch: the bytes of the reference, whole or moved programs, odd values."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch
from tile_checks import KERNEL, check_both

from halfbyte import reference
from halfbyte.kernels.quantize import both
from halfbyte.kernels.quantize.both_route import Pair, choose_pair
from halfbyte.sides import Side


@pytest.mark.parametrize("shape", ((64, 256), (80, 272), (128, 320)), ids=str)  # the second: both edges move
@pytest.mark.parametrize("amax", (None, 100.0, float("nan")))
def test_bytes_of_both_orientations(shape, amax):
    check_both(shape, "cpu", amax)


@pytest.mark.parametrize("shape", ((48, 256), (64, 248), (72, 256)))
def test_what_does_not_fit_goes_another_way(shape):
    """Fewer lines than a warp takes, fewer columns than a strip kernel, cut tiles."""
    side = Side(checks.TILE, None)
    x = torch.randn(shape).bfloat16()
    assert choose_pair(Pair(x, side, side)).kernel != KERNEL
    made = both.quantize_row_col(x, side, side)
    for t, blocks in zip((x, x.T), made, strict=True):
        checks.same(blocks.qdata, reference.quantize(t, checks.TILE).qdata)
