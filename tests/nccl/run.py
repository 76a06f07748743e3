"""Run the tests of ranks with a GPU each: python3 tests/nccl/run.py [pytest options].

The exit status is pytest's, and 1 if nothing ran: where there are too few GPUs every test is skipped. `--on cpu` runs
them over gloo, which shows that the tests themselves work.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NOTHING_COLLECTED = 5


class Outcomes:
    """Counts tests that were skipped and tests that ran."""

    def __init__(self) -> None:
        self.skipped, self.ran = set(), set()

    def pytest_runtest_logreport(self, report) -> None:
        """Note what became of a test; a setup that failed is no test that ran."""
        if report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.ran.add(report.nodeid)

    @property
    def nothing_ran(self) -> str:
        """Why no test ran, "" if one did."""
        if self.ran:
            return ""
        return f"all {len(self.skipped)} tests were skipped" if self.skipped else "no test was collected"


def main(options: list[str]) -> int:
    """Run them; return the exit status."""
    outcomes, begin = Outcomes(), time.monotonic()
    status = int(pytest.main([str(FOLDER), "-q", "-p", "no:cacheprovider", *options], plugins=[outcomes]))
    missing = outcomes.nothing_ran if status in (0, NOTHING_COLLECTED) else ""
    status = status or int(bool(missing))
    why = f"nothing ran: {missing}; `make test-distributed` needs no GPU; " if missing else ""
    print(f"{'FAILED' if status else 'passed'}: {why}{len(outcomes.ran)} tests, {time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
