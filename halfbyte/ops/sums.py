"""Sums of statistics (docs/statistics.md): no torch ops, since what calls them is one."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.define import implementation


def error_sums(
    values: Tensor,
    restored: Tensor,
    bounds: Tensor | None = None,
    signs: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of `halfbyte.reference.error_sums`, fp64, and every block's largest magnitude, fp32 or None."""
    return implementation(values.device, backend or "").error_sums(values, restored, bounds, signs)


def square_sum(values: Tensor, backend: str | None = None) -> Tensor:
    """Return the sum of the squares of values [R, C], fp64 []."""
    return implementation(values.device, backend or "").square_sum(values)


def column_outliers(values: Tensor, limit: Tensor, backend: str | None = None) -> Tensor:
    """Return how many magnitudes of each column of values [R, C] exceed `limit`, fp64 []: fp64 [C]."""
    return implementation(values.device, backend or "").column_outliers(values, limit)
