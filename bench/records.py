"""Which record of bench/results counts for a case: the newest of a clean checkout that has a figure.

Where no clean checkout measured a case, the newest record of a checkout with local changes stands in, marked with a +.
A record without a figure never counts; where it is the newest of its case it is listed beside what counts instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results

Key = tuple[str, tuple[Any, ...]]
STAMP = re.compile(r"(\d{8}T\d{6}-[0-9a-z]+)\.jsonl$")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case of one run.

    Args:
        key: the case, and its shape or what else tells it from others of that case.
        run: the facts of the run.
        values: what was measured.
        file: the name of its file.
    """

    key: Key
    run: dict[str, Any]
    values: dict[str, Any]
    file: str

    @property
    def is_clean(self) -> bool:
        """Whether the sources were those of a commit."""
        return not str(self.run["commit"]).endswith("+")

    @property
    def problem(self) -> str:
        """Why there is no figure; "" where there is one."""
        return str(self.values.get("problem", ""))

    @property
    def mark(self) -> str:
        """What stands behind its figures: a + if the checkout had local changes."""
        return "" if self.is_clean else "+"

    @property
    def stamp(self) -> str:
        """Time and commit of the file's name, with its mark."""
        found = STAMP.search(self.file)
        assert found is not None, self.file
        return found.group(1) + self.mark


def load(folder: Path = results.FOLDER) -> list[Record]:
    """Return the records of all files, oldest first.

    Raises:
        ValueError: a file is no result.
    """
    found = []
    for path in folder.glob("*.jsonl"):
        run, lines = results.read(path)
        found += [Record(key=_key(line), run=run, values=line, file=path.name) for line in lines]
    return sorted(found, key=lambda record: (str(record.run["time"]), record.file))


def _key(line: dict[str, Any]) -> Key:
    """Return what tells a case from others: the shape, or for several GPUs the model, ranks, ways and vocabulary."""
    if "shape" in line:
        return line["case"], tuple(line["shape"])
    default = 32_000 if line["case"] == "zero/step" else None  # of all files before it was recorded
    own = ("model", "world", "weights", "tied", "tokens", "layers", "way", "blocks", "recipe", "has_capacity")
    return line["case"], (line.get("vocabulary", default), *(_frozen(line.get(name)) for name in own))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def counting(records: Iterable[Record]) -> dict[Key, Record]:
    """Return the record that counts for each case; none where no run had a figure."""
    chosen: dict[Key, Record] = {}
    for record in records:  # oldest first
        if record.problem:
            continue
        before = chosen.get(record.key)
        if before is None or record.is_clean or not before.is_clean:
            chosen[record.key] = record
    return chosen


def failed(records: Sequence[Record]) -> list[tuple[Record, Record | None]]:
    """Return the records without a figure that are the newest of their case, each with what counts instead."""
    newest = {record.key: record for record in records}
    chosen = counting(records)
    return [(record, chosen.get(key)) for key, record in newest.items() if record.problem]


def select(records: Iterable[Record], wanted: Callable[[Record], bool]) -> list[Record]:
    """Return those records, in order."""
    return [record for record in records if wanted(record)]
