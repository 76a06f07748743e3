"""The table of machines in docs/hardware.md: a row of each file that `halfbyte verify --report FILE` wrote.

The files lie in bench/results/machines, named by the machine. `python -m bench.tables --write` prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.records import Record
from halfbyte.verify.record import ROW_HEAD

FOLDER = Path(__file__).with_name("results") / "machines"


def render(records: Sequence[Record]) -> str:
    """Return the table, the GPUs before the CPUs."""
    found = [json.loads(path.read_text(encoding="utf-8"))["row"] for path in sorted(FOLDER.glob("*.json"))]
    return "\n".join([ROW_HEAD, *sorted(found, key=lambda row: " CPU |" in row)])
