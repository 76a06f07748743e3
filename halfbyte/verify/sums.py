"""Checks of the sums that statistics are made of, against the reference on the CPU: equal up to the order of fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.arithmetic import ERROR_SUMS
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED
from halfbyte.verify.record import Finding

GROUP = "sums of statistics"
SHAPES = ((256, 512), (37, 83))
SIZES = (0, 16, 32, 64, 128)
"""Of rotations; 0 is none."""
COUNTS = slice(ERROR_SUMS.index("nonzero"), None)
ORDER = 1e-12
"""Relative: what the order of a sum in fp64 may change."""


def error_figures(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """error_sums of rows and columns under every rotation, and column_outliers."""
    for shape in SHAPES:
        for size in SIZES:
            for turned in (False, True):
                where = device, backend, shape, size, turned
                what = f"{'x'.join(map(str, shape))} {'columns' if turned else 'rows'}, rotation {size}"
                yield GROUP, f"error_sums, {what}", lambda w=where: _errors(*w)
        where = device, backend, shape
        yield GROUP, f"column_outliers, {'x'.join(map(str, shape))}", lambda w=where: _outliers(*w)


def _errors(device, backend, shape, size, turned) -> str | None:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(shape, generator=generator).bfloat16()
    x = x.T if turned else x
    align = max(16, size)
    wide = -(-x.shape[1] // align) * align
    q = torch.randn(x.shape[0], wide, generator=generator).round()
    bounds = torch.rand(x.shape[0], wide // 16, generator=generator) * 3
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1 if size else None
    results = []
    for place, which in ((device, backend), (CPU, "reference")):
        moved = [None if t is None else t.to(place) for t in (x, q, bounds, signs)]
        results.append(ops.error_sums(*moved, backend=which))  # type: ignore[arg-type]  # x and q are there
    (mine, maxima), (theirs, others) = results
    assert maxima is not None and others is not None, "there are bounds"
    return difference(maxima, others) or difference(mine[COUNTS], theirs[COUNTS]) or _far(mine, theirs)


def _far(mine: Tensor, theirs: Tensor) -> str | None:
    """Say which sum differs by more than another order of fp64 makes."""
    for name, got, want in zip(ERROR_SUMS, mine.tolist(), theirs.tolist(), strict=True):
        if not abs(got - want) <= ORDER * abs(want):
            return f"{name}: {got}, expected {want}"
    return None


def _outliers(device, backend, shape) -> str | None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    limit = torch.tensor(1.5, dtype=torch.float64)
    mine, theirs = (
        ops.column_outliers(x.to(place), limit.to(place), which)
        for place, which in ((device, backend), (CPU, "reference"))
    )
    return difference(mine, theirs)
