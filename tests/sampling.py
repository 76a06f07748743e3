"""Of families of cases that take long, a fourth a day: what `make test` leaves out is marked `full`.

A family is a test function with its parameters. Those listed in `sampled.txt` are drawn from by the day, alike in every
process of a run, so that all of their cases run within some days, and at every change those of that day do.
`make test-full` and `make test-distributed-full` run all; `--day 2026-11-27` repeats a day's choice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

SHARE = 1 / 4
LIST = Path(__file__).with_name("sampled.txt")


def listed() -> frozenset[str]:
    """Return the families that are drawn from, as path::function."""
    return frozenset(line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))


def family(nodeid: str) -> str:
    """Return the family of a case."""
    return nodeid.split("[")[0].removeprefix("tests/")


def left_out(nodeids: Iterable[str], families: Iterable[str], day: str) -> set[str]:
    """Return which of these cases a day leaves out."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        if family(nodeid) in families:
            cases[family(nodeid)].append(nodeid)
    out = set()
    for name, found in cases.items():
        kept = random.Random(f"{day} {name}").sample(sorted(found), math.ceil(SHARE * len(found)))
        out |= set(found) - set(kept)
    return out


def mark(items: list[pytest.Item], day: str) -> None:
    """Mark what a day leaves out as `full`; what is `full` by itself is no part of the draw."""
    open_to = [item for item in items if item.get_closest_marker("full") is None]
    out = left_out((item.nodeid for item in open_to), listed(), day)
    for item in open_to:
        if item.nodeid in out:
            item.add_marker(pytest.mark.full)
