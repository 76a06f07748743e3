"""Sums of statistics (docs/statistics.md): no torch ops, since what calls them is one."""

from __future__ import annotations

from torch import Tensor

from halfbyte.layout import Operand
from halfbyte.ops.backends import check_readers
from halfbyte.ops.define import implementation


def error_sums(values: Tensor, restored: Tensor, backend: str | None = None) -> Tensor:
    """Return the sums of `halfbyte.reference.error_sums`, fp64."""
    return implementation(values.device, backend or "").error_sums(values, restored)


def operand_sums(
    values: Tensor,
    operand: Operand,
    signs: Tensor | None = None,
    with_maxima: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sums of `halfbyte.reference.operand_sums`, the largest magnitude, and those of blocks or None."""
    check_readers(operand.spec, values.device, backend)
    return implementation(values.device, backend or "").operand_sums(values, operand, signs, with_maxima)


def operand_noise(values: Tensor, operand: Operand, signs: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Return the noise of `operand_sums` alone, fp64 []."""
    check_readers(operand.spec, values.device, backend)
    return implementation(values.device, backend or "").operand_noise(values, operand, signs)


def square_sum(values: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the sum of the squares of values [R, C] and their largest magnitude, both fp64 []."""
    return implementation(values.device, backend or "").square_sum(values)


def column_outliers(values: Tensor, limit: Tensor, backend: str | None = None) -> Tensor:
    """Return how many magnitudes of each column of values [R, C] exceed `limit`, fp64 []: fp64 [C]."""
    return implementation(values.device, backend or "").column_outliers(values, limit)
