"""What the tests of norm and activation kernels share, on the CPU (interpreter) and on a GPU alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from kernel_checks import same
from torch import Tensor

import halfbyte as hb
from halfbyte import reference
from halfbyte.arithmetic import Normed
from halfbyte.kernels import fused
from halfbyte.kernels.fused import activation, norm

PLACE = hb.Philox(3, 5)
RHT = hb.NVFP4(rotation=hb.Hadamard())
FRESH = hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh"))


class Wish(NamedTuple):
    """Which amaxes are wanted, as the ops say it."""

    row: str
    col: hb.NVFP4 | None


NOTHING, PLAIN, ROTATED, BY_ROW = Wish("", None), Wish("tensor", hb.NVFP4()), Wish("tensor", RHT), Wish("row", FRESH)
GIVEN = Wish("tensor", hb.NVFP4(rotation=hb.Hadamard(signs="-++-+---")))
WIDE = Wish("tensor", hb.NVFP4(rotation=hb.Hadamard(size=128, signs="fresh")))
WISHES = {"nothing": NOTHING, "plain": PLAIN, "rotated": ROTATED, "by_row": BY_ROW, "wide": WIDE}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Return normal values with an outlier or two."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    x.view(-1)[:: max(1, x.numel() // 3)] *= 20
    return x.to(dtype)


def check_norm(
    shape: tuple[int, int], device: str, wish: Wish, centered: bool, dtypes: tuple[torch.dtype, torch.dtype],
    bad: bool = False,
) -> None:  # fmt: skip
    """Kernel and reference agree bit for bit: output, statistics, amaxes, gradients. bad: NaN and Inf in the input."""
    dtype, out_dtype = dtypes
    x, dy = random(shape, dtype, 0, 3), random(shape, out_dtype, 1)
    weight, bias = random(shape[1:], dtype, 2), random(shape[1:], dtype, 3) if centered else None
    if bad:
        x[1, 1], weight[2] = float("nan"), float("inf")
    mine = [None if t is None else t.to(device) for t in (x, weight, bias, dy)]
    draw, draw_mine = (PLACE.on(torch.device(d)) for d in ("cpu", device))
    kind = (1e-5, centered, out_dtype)
    y, total, statistics, amaxes = norm.norm_with_amaxes(mine[0], (mine[1], mine[2]), kind, *wish, draw_mine)
    expected = reference.norm_with_amaxes(x, (weight, bias), kind, *wish, draw)
    assert total is expected[1] is None
    for actual, value in zip((y, *statistics, *amaxes), (expected[0], *expected[2], *expected[3]), strict=True):
        same(actual, value)
    gradients = fused.norm_backward(mine[3], Normed(mine[0], mine[1], statistics, centered, centered))
    wanted = reference.norm_backward(dy, Normed(x, weight, expected[2], centered, centered))
    for actual, value in zip(gradients, wanted, strict=True):
        same(actual, value.to(actual.dtype))


def check_residual(
    shape: tuple[int, int], device: str, wish: Wish, centered: bool,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], bad: bool = False,
) -> None:  # fmt: skip
    """With a residual kernel and reference give the bits of torch's sums around the norm without one.

    Args:
        dtypes: of x, of the residual, of the norm.
        bad: NaN and Inf in what is added, and a sum that overflows.
    """
    dtype, added_dtype, out_dtype = dtypes
    x, residual = random(shape, dtype, 0, 3), random(shape, added_dtype, 4)
    if bad:
        x[1, 1], residual[1, 2], x[0, 3], residual[0, 3] = float("nan"), float("-inf"), 65000.0, 65000.0
    expected = x + residual
    dy, dtotal = random(shape, out_dtype, 1), random(shape, expected.dtype, 5)
    weight, bias = random(shape[1:], dtype, 2), random(shape[1:], dtype, 3) if centered else None
    kind = (1e-5, centered, out_dtype)
    y, _, statistics, amaxes = reference.norm_with_amaxes(
        expected, (weight, bias), kind, *wish, PLACE.on(torch.device("cpu"))
    )
    dx, *sums = reference.norm_backward(dy, Normed(expected, weight, statistics, centered, centered))
    values = [y, expected, *statistics, *amaxes, dx + dtotal, *sums]
    for place, module in (("cpu", reference), (device, fused)):
        mine = [None if t is None else t.to(place) for t in (x, residual, weight, bias, dy, dtotal)]
        draw = PLACE.on(torch.device(place))
        y, total, numbers, maxima = module.norm_with_amaxes(mine[0], (mine[2], mine[3]), kind, *wish, draw, mine[1])
        back = module.norm_backward(mine[4], Normed(total, mine[2], numbers, centered, centered), mine[5])
        for actual, value in zip((y, total, *numbers, *maxima, *back), values, strict=True):
            same(actual, value)


def check_activation(
    shape: tuple[int, int], device: str, wish: Wish, function: str, gated: bool, dtype: torch.dtype,
    bad: bool = False,
) -> None:  # fmt: skip
    """Kernels and reference agree bit for bit: output, gradients, the amaxes of each."""
    x, dh = random(shape, dtype, 0, 6), random(shape, dtype, 1)
    up = random(shape, dtype, 2) if gated else None
    if bad:
        x[1, 1], dh[0, 2] = float("inf"), float("nan")
    mine = [None if t is None else t.to(device) for t in (dh, x, up)]
    draw, draw_mine = (PLACE.on(torch.device(d)) for d in ("cpu", device))
    h, amaxes = activation.activation_with_amaxes(mine[1], mine[2], function, *wish, draw_mine)
    expected_h, expected_amaxes = reference.activation_with_amaxes(x, up, function, *wish, draw)
    same(h, expected_h)
    ours = activation.activation_backward_with_amaxes((mine[0], mine[1], mine[2]), function, *wish, draw_mine)
    theirs = reference.activation_backward_with_amaxes((dh, x, up), function, *wish, draw)
    for actual, value in zip(ours[0], theirs[0], strict=True):
        if value is not None:
            same(actual, value)
    for actual, value in zip((amaxes, *ours[1]), (expected_amaxes, *theirs[1]), strict=True):
        same(actual[0], value[0])
        same(actual[1], value[1])
