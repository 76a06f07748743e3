"""How long work shows itself: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

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
