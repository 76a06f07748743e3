"""Of what takes long, a fourth a day: what `make test` leaves out is marked `full`.

A family is a test function with its parameters. Those listed in `sampled.txt` are drawn from by the day, alike in every
process of a run, so that all of their cases run within some days, and at every change those of that day do; of one with
a number behind it so many cases a day. Functions
and files that take long by themselves are listed in `long.txt`, of which a fourth is drawn in the same way.
`make test-full` and `make test-distributed-full` run all; `--day 2026-11-27` repeats a day's choice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

SHARE = 1 / 4
LIST = Path(__file__).with_name("sampled.txt")
LONG = Path(__file__).with_name("long.txt")


def listed(path: Path = LIST) -> frozenset[str]:
    """Return what a list names: families as path::function, of the long ones files too."""
    return frozenset(numbered(path))


def numbered(path: Path = LIST) -> dict[str, int | None]:
    """Return how many cases a day a list says of what it names, None where it says nothing."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: int(*count) if count else None for name, *count in lines}


def family(nodeid: str) -> str:
    """Return the family of a case."""
    return nodeid.split("[")[0].removeprefix("tests/")


def left_out(nodeids: Iterable[str], families: Mapping[str, int | None], day: str) -> set[str]:
    """Return which of these cases a day leaves out, all but the number of each family, or a fourth."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        if family(nodeid) in families:
            cases[family(nodeid)].append(nodeid)
    out = set()
    for name, found in cases.items():
        kept = random.Random(f"{day} {name}").sample(sorted(found), families[name] or math.ceil(SHARE * len(found)))
        out |= set(found) - set(kept)
    return out


def left_out_of_long(nodeids: Iterable[str], names: Iterable[str], day: str) -> set[str]:
    """Return which of these tests a day leaves out, of those that names name one by one or by their file."""
    nodeids, names = list(nodeids), sorted(names)
    kept = set(random.Random(f"{day} long").sample(names, math.ceil(SHARE * len(names))))
    of_name = {nodeid: {family(nodeid), family(nodeid).split("::")[0]} & set(names) for nodeid in nodeids}
    return {nodeid for nodeid, found in of_name.items() if found and not found & kept}


def mark(items: list[pytest.Item], day: str) -> None:
    """Mark what a day leaves out as `full`; what is `full` by itself is no part of the draw."""
    open_to = [item for item in items if item.get_closest_marker("full") is None]
    nodeids = [item.nodeid for item in open_to]
    out = left_out(nodeids, numbered(), day) | left_out_of_long(nodeids, listed(LONG), day)
    for item in open_to:
        if item.nodeid in out:
            item.add_marker(pytest.mark.full)
