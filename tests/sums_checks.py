"""What the tests of statistics' sums share, on the CPU (interpreter) and on a GPU alike: figures by numpy, in fp64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.arithmetic import ERROR_SUMS
from halfbyte.kernels.amax import error_sums as kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    # rows, columns, size of the rotation, values of a block, dtype, whether x is a transpose
    (40, 512, 0, 16, BF16, False),
    (37, 600, 16, 16, BF16, False),
    (37, 83, 128, 16, FP32, True),
    (70, 300, 64, 16, FP16, True),
    (16, 128, 32, 32, BF16, True),
    (37, 83, 0, 0, FP32, False),
    (3, 40, 0, 32, BF16, True),
    (1, 1, 16, 16, BF16, False),
)


def hadamard(size: int) -> np.ndarray:
    """Return Sylvester's matrix."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def values(rows: int, cols: int, dtype: torch.dtype, turned: bool) -> Tensor:
    """Return small multiples of 1/4, a fifth of them 0: their rotations by 4, 16, 64 round nothing in fp32."""
    g = torch.Generator().manual_seed(rows + cols)
    x = torch.randint(-12, 13, (cols, rows) if turned else (rows, cols), generator=g).float() / 4
    return torch.where(torch.rand(x.shape, generator=g) < 0.2, 0.0, x).to(dtype).T if turned else x.to(dtype)


def rotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return groups of x times signs times H over the square root of the size, rounded to bf16."""
    size = len(signs)
    y = (x.reshape(len(x), -1, size) * signs @ hadamard(size)) * np.float64(np.float32(size**-0.5))
    return torch.from_numpy(y).to(FP32).to(BF16).double().numpy().reshape(len(x), -1)


def check_error_sums(case: tuple, device: str) -> None:
    """Every sum and every maximum is numpy's; the counts exactly, the others up to the order of fp64."""
    rows, cols, size, block, dtype, turned = case
    g = torch.Generator().manual_seed(7)
    x, align = values(rows, cols, dtype, turned), max(16, size, block)
    signs = torch.where(torch.rand(size, generator=g) < 0.5, -1.0, 1.0) if size else None
    wide = -(-cols // align) * align
    v = np.pad(x.double().numpy(), ((0, 0), (0, wide - cols)))
    if signs is not None:
        v = rotated(v, signs.double().numpy())
        x = x * (1 + 2**-12) if dtype == FP32 else x  # what is rotated is rounded to bf16 first
    q = torch.from_numpy(np.where(np.abs(v) < 0.6, 0, v * 1.25)).float()
    bounds = torch.rand(rows, wide // block, generator=g) * 3 if block else None
    if bounds is not None:
        bounds[0, 0], bounds[-1, -1] = torch.inf, float(np.abs(v[-1, -block:]).max())  # at its bound, not beyond it
    q_, d = q.double().numpy(), (q - torch.from_numpy(v).float()).double().numpy()
    magnitude = np.abs(v).reshape(rows, -1, block or wide)
    beyond = 0 if bounds is None else (magnitude > bounds.double().numpy()[..., None]).sum()
    wanted = {
        "signal": (v * v).sum(),
        "restored": (q_ * q_).sum(),
        "noise": (d * d).sum(),
        "magnitude": np.abs(v).sum(),
        "deviation": np.abs(d).sum(),
        "nonzero": (v != 0).sum(),
        "underflow": ((v != 0) & (q_ == 0)).sum(),
        "saturated": beyond,
    }
    moved = [None if t is None else t.to(device) for t in (x, q, bounds, signs)]
    found, maxima = kernels.error_sums(*moved)
    found = dict(zip(ERROR_SUMS, found.tolist(), strict=True))
    for name, value in wanted.items():
        assert np.isclose(found[name], value, rtol=1e-12, atol=0), (name, found[name], value)
    if bounds is None:
        assert maxima is None
    else:
        np.testing.assert_array_equal(maxima.cpu().double().numpy(), magnitude.max(2))


def check_not_finite(device: str) -> None:
    """NaN is a block's largest magnitude, beyond Inf, and no sum hides it; counts go on."""
    x = torch.ones(2, 64, dtype=BF16)
    x[0, 3], x[0, 20], x[0, 21], x[1, 5] = torch.nan, torch.inf, torch.nan, -torch.inf
    bounds = torch.full((2, 4), 1.5)
    found, maxima = kernels.error_sums(x.to(device), torch.ones(2, 64).to(device), bounds.to(device))
    found = dict(zip(ERROR_SUMS, found.tolist(), strict=True))
    assert np.isnan([found[name] for name in ("signal", "noise", "magnitude", "deviation")]).all()
    assert np.isclose(found["restored"], 128, rtol=1e-14)
    assert (found["nonzero"], found["underflow"], found["saturated"]) == (128, 0, 2)
    wanted = torch.tensor([[torch.nan, torch.nan, 1, 1], [torch.inf, 1, 1, 1]])
    torch.testing.assert_close(maxima.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def check_columns(shape: tuple[int, int], device: str) -> None:
    """Outliers of every column and the sum of squares are numpy's, whatever the strides."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=g).to(BF16)
    for t in (x, x.T, x[:, ::2], x[1::3]):
        for limit in (1.7, float(x[0, 0].abs())):  # an outlier is beyond the limit, not at it
            got = kernels.column_outliers(t.to(device), torch.tensor(limit, dtype=torch.float64, device=device))
            wanted = (np.abs(t.double().numpy()) > limit).sum(0)
            np.testing.assert_array_equal(got.cpu().numpy(), wanted)
        total = kernels.square_sum(t.to(device)).item()
        assert np.isclose(total, (t.double().numpy() ** 2).sum(), rtol=1e-13, atol=0)
