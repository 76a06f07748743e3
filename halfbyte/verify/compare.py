"""Compare two tensors bit for bit, and say what differs."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """Say how `actual` differs from `expected`, or return None if every bit is the same (NaN equals NaN).

    Args:
        actual: any device.
        expected: any device; shape and dtype must agree too.
    """
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    actual, expected = actual.detach().contiguous(), expected.detach().contiguous().to(actual.device)
    bits = _BITS[actual.element_size()]
    differs = actual.view(bits) != expected.view(bits)
    if actual.is_floating_point() and actual.element_size() > 1:
        differs &= ~(actual.isnan() & expected.isnan())
    count = int(differs.sum())
    if count == 0:
        return None
    where = tuple(int(i) for i in differs.nonzero()[0])
    got, want = actual[where].item(), expected[where].item()
    return f"{count} of {actual.numel()} differ, the first at {list(where)}: {got}, expected {want}"


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error against fp64 `exact`; infinite if NaN is not exactly where it should be."""
    actual = actual.to(exact.device).double()
    nan = exact.isnan()
    if not torch.equal(actual.isnan(), nan):
        return float("inf")
    actual, exact = actual.masked_fill(nan, 0.0), exact.masked_fill(nan, 0.0)
    norm = exact.norm()
    error = (actual - exact).norm()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / norm)
