"""How work shows itself: a live bar on a terminal, a line every few seconds elsewhere; several runs as a live table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

PLAIN_SECONDS = 10.0
"""Time between two lines when the output is not a terminal."""


class Progress(Protocol):
    """What the training loop reports to."""

    def update(self, step: int, text: str) -> None:
        """Show that `step` steps are done, with a few words about them."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen."""
        ...


class Plain:
    """A line every `PLAIN_SECONDS`, and one at the end."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self._title, self._steps, self._first = title, steps, done
        self._start = self._shown = time.monotonic()
        self._last = ""

    def update(self, step: int, text: str) -> None:
        now = time.monotonic()
        remaining = (now - self._start) / max(1, step - self._first) * (self._steps - step)
        self._last = f"{self._title}  step {step}/{self._steps}  {text}  {remaining:.0f} s to go"
        if now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        if self._last:
            print(self._last, flush=True)
            self._last = ""


class Live:
    """A bar drawn by `rich`."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description:<16}"),
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[text]}"),
            progress.TimeRemainingColumn(),
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, text="")
        self._bar.start()

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, text=text)

    def close(self) -> None:
        self._bar.stop()


def start(title: str, steps: int, done: int) -> Progress:
    """Return a progress display that fits standard output, at `done` of `steps`."""
    if sys.stdout.isatty():
        try:
            return Live(title, steps, done)
        except ImportError:
            pass  # rich is part of the extra `train`; lines do as well
    return Plain(title, steps, done)


class _Nothing:
    def update(self, step: int, text: str) -> None:
        """Another rank shows it."""

    def close(self) -> None:
        """Another rank does."""


def silent(title: str, steps: int, done: int) -> Progress:
    """Return the display of a rank that is not the first: none."""
    return _Nothing()


Show = Callable[[str, int, int], Progress]
"""Makes the display of a run of its title, its steps and how many are done, as `start` does."""


class Board(AbstractContextManager["Board"]):
    """Several runs one after the other, each as `start` shows it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def start(self, name: str, steps: int, done: int) -> Progress:
        """Return the display of the run called `name`."""
        return start(f"[{self._names.index(name) + 1}/{len(self._names)}] {name}", steps, done)

    def finish(self, name: str, loss: str, gap: str) -> None:
        """Show how a run ended: its held-out loss and its gap to the first, in words."""

    def __exit__(self, *exception: object) -> None:
        return None


@dataclass
class ProgressRow:
    """What a live table shows of one run."""

    steps: str = ""
    training: str = ""
    loss: str = ""
    gap: str = ""


class RowDisplay:
    """The display of a run that is a row of a table."""

    def __init__(self, row: ProgressRow, steps: int, refresh: Callable[[], None]) -> None:
        self._row, self._steps, self._refresh = row, steps, refresh

    def update(self, step: int, text: str) -> None:
        self._row.steps, self._row.training = f"{step}/{self._steps}", text
        self._refresh()

    def close(self) -> None:
        self._refresh()


class LiveBoard(Board):
    """A table drawn by `rich` with a row for every run, from the start to the end of all."""

    def __init__(self, names: Sequence[str], console: Any = None) -> None:
        from rich.live import Live

        super().__init__(names)
        self.rows = {name: ProgressRow() for name in names}
        self._live = Live(self.table(), console=console, refresh_per_second=4)

    def __enter__(self) -> LiveBoard:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._refresh()
        self._live.stop()

    def start(self, name: str, steps: int, done: int) -> Progress:
        display = RowDisplay(self.rows[name], steps, self._refresh)
        display.update(done, "")
        return display

    def finish(self, name: str, loss: str, gap: str) -> None:
        self.rows[name].loss, self.rows[name].gap = loss, gap
        self._refresh()

    def table(self) -> Any:
        """Return the rows as a table of rich."""
        from rich.table import Table

        table = Table("recipe", "steps", "training", "held-out loss", f"gap to {self._names[0]}")
        for name, row in self.rows.items():
            table.add_row(name, row.steps, row.training, row.loss, row.gap)
        return table

    def _refresh(self) -> None:
        self._live.update(self.table())


def board(names: Sequence[str]) -> Board:
    """Return a display of several runs that fits standard output."""
    if sys.stdout.isatty():
        try:
            return LiveBoard(names)
        except ImportError:
            pass  # as in `start`
    return Board(names)
