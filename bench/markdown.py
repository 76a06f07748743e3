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


def recorded(columns: Sequence[str], lines: Iterable[tuple[Sequence[str], Iterable[str]]]) -> str:
    """Return a table whose last column names records by letters, and the records under it: a stamp is long.

    Args:
        columns: without that of the records.
        lines: of each line its cells and the stamps of its records.
    """
    letters: dict[str, str] = {}
    table = []
    for cells, stamps in lines:
        own = [letters.setdefault(stamp, _letter(len(letters))) for stamp in dict.fromkeys(stamps)]
        table.append([*cells, ", ".join(own)])
    listed = "; ".join(f"{letter} {stamp}" for stamp, letter in letters.items())
    return f"{rows([*columns, 'record'], table)}\n\nRecords: {listed or 'none'}."


def _letter(number: int) -> str:
    assert number < 26, "more records than letters"
    return chr(ord("a") + number)
