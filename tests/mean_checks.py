"""What the tests of means over tokens share, on the CPU (interpreter) and on a GPU alike."""

from __future__ import annotations

import torch
from kernel_checks import same
from quantize_checks import draws, same_blocks
from torch import Tensor

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import backend
from halfbyte.kernels.quantize import residual
from halfbyte.sides import both_sides

PAIRS = (
    (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(rounding="stochastic"), hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(signs="fresh"))),
    (hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256), hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(outer="row"), hb.NVFP4(outer="row", rotation=hb.Hadamard())),
    (hb.NVFP4(), hb.NVFP4()),
    (hb.NVFP4(), None),
    (None, hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard(size=64))),
    (hb.NVFP4(block=(16, 16)), hb.NVFP4(block=(16, 16))),
    (hb.NVFP4(), hb.MXFP8()),
)


def values(shape: tuple[int, int], dtype: torch.dtype, *, bad: bool = False, calm: bool = False) -> Tensor:
    """Return tokens around a mean that is large beside them; with outliers, which hide it, unless `calm`.

    bad: with NaN and Inf, in few columns.
    """
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=g) + 10 * torch.randn(shape[1], generator=g)
    if not calm:
        x.view(-1)[:: max(1, x.numel() // 5)] *= 30
    if bad:
        x[shape[0] // 2, 1], x[shape[0] // 3, 5] = float("nan"), float("inf")
        x[:, 7] = torch.finfo(dtype).max  # whose sum overflows
    return x.to(dtype)


def check_mean(x: Tensor, device: str) -> None:
    """Sum, mean and what remains have the bits of the reference."""
    mine, mean = x.to(device), reference.token_mean(x)
    same(backend.token_sum(mine), reference.token_sum(x))
    same(backend.token_mean(mine), mean)
    same(residual.residual_of(mine, mean.to(device)), reference.residual_of(x, mean))


def check_grouped_sum(x: Tensor, sizes: tuple[int, ...], device: str, dtype: torch.dtype = torch.int32) -> None:
    """The sums of groups of x have the bits of the reference; rows behind the last group are in none."""
    offsets = torch.tensor(sizes).cumsum(0).to(dtype)
    got = backend.grouped_token_sum(x.to(device), offsets.to(device))
    same(got, reference.grouped_token_sum(x, offsets))


def check_quantized(x: Tensor, pair: tuple, device: str) -> None:
    """Both orientations have the bytes of the reference; decoded for one GEMM they are what is decoded of the rest."""
    mean, mine = reference.token_mean(x), x.to(device)
    expected = reference.quantize_residual(x, mean, *both_sides(*pair, **draws("cpu")))
    actual = backend.quantize_residual(mine, mean.to(device), *both_sides(*pair, **draws(device)))
    for got, want in zip(actual, expected, strict=True):
        same_blocks(got, want)


def check_transient(x: Tensor, pair: tuple, device: str) -> None:
    """Decoded for one GEMM, the row is what is decoded of x without its mean."""
    mean, sides = reference.token_mean(x), both_sides(*pair, **draws(device), transient=(True, False))
    expected = backend.quantize_row_col(reference.residual_of(x, mean).to(device), *sides)
    for got, want in zip(backend.quantize_residual(x.to(device), mean.to(device), *sides), expected, strict=True):
        same_blocks(got, want)


def check_with_sum(x: Tensor, pair: tuple, device: str) -> None:
    """Both orientations have the bytes of the reference, and the sum is that of fp64 up to the order of its terms."""
    expected = reference.quantize_with_sum(x, *both_sides(*pair, **draws("cpu")))
    actual = backend.quantize_with_sum(x.to(device), *both_sides(*pair, **draws(device)))
    for got, want in zip(actual[:2], expected[:2], strict=True):
        same_blocks(got, want)
    values = x.double()
    error = (actual[2].cpu().double() - values.sum(0)).abs()
    assert (error <= 1e-6 * values.abs().sum(0)).all()
