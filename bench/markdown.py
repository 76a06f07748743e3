"""A table of the docs, and a figure with its unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rows(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; figures are given as text."""
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def percent(share: float, digits: int = 1) -> str:
    """Return a share as percents."""
    return f"{share * 100:.{digits}f} %"
