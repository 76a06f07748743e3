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
    """Compare values v, rotated if `signs` are given, with what was made of them, q.

    Args:
        values: [R, C], any strides.
        restored: q, [R, C], with columns of padding behind them, where v is 0.
        bounds: fp32 [R, blocks]: the magnitude that a value of each block exceeds if it is saturated.
        signs: fp32 [size]: of the rotation, whose size it gives.

    Returns:
        The sums of `halfbyte.arithmetic.ERROR_SUMS`, fp64; and the largest |v| of every block, fp32 [R, blocks], None
        without `bounds`.
    """
    return implementation(values.device, backend or "").error_sums(values, restored, bounds, signs)


def square_sum(values: Tensor, backend: str | None = None) -> Tensor:
    """Return the sum of the squares of values [R, C], fp64 []."""
    return implementation(values.device, backend or "").square_sum(values)


def column_outliers(values: Tensor, limit: Tensor, backend: str | None = None) -> Tensor:
    """Return how many magnitudes of each column of values [R, C] exceed `limit`, fp64 []: fp64 [C]."""
    return implementation(values.device, backend or "").column_outliers(values, limit)
