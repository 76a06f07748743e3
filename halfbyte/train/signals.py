"""Ctrl-C and SIGTERM: a run that trains finishes its step, writes a checkpoint and says where it goes on.

What is not training (reading and tokenizing text, building the model, drawing the picture) stops at once: whatever it
writes is whole or absent. A second signal ends the process there and then. Nothing is installed where no handler can
be, outside the main thread, or for a signal that the process was told to ignore, as `nohup` and shell jobs are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 0.25
"""Seconds in which a second signal is the first one again: schedulers signal a process and its group, make does too."""
SOMEWHERE = "where it stopped"


class Stopped(KeyboardInterrupt):
    """A signal ended the work.

    Args:
        number: of the signal.
        where: where the same command goes on, as in "it goes on with step 3".
    """

    def __init__(self, number: int, where: str = SOMEWHERE) -> None:
        super().__init__(number, where)
        self.number, self.where = number, where

    @property
    def status(self) -> int:
        """The exit status that shells give such an end: 130 for ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Interrupts:
    """Whether a signal asked the work to stop. It asks at once, but in `deferred` blocks, which have to look."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._time, self._is_deferring = 0.0, False

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def check(self, where: str = SOMEWHERE) -> None:
        """Raise Stopped if a signal has come; it goes on at `where`."""
        if self.number is not None:
            raise Stopped(self.number, where)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block signals are noted and raise nothing; one that nobody looked for raises at its end."""
        self.check()
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.check()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first, and end the process at the second."""
        now = time.monotonic()
        if self.number is None:
            self.number, self._time = number, now
            if not self._is_deferring:
                raise Stopped(number)
            if sys.stderr.isatty():  # os.write: the signal may have come in the middle of a print
                os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")
        elif now - self._time > ONE_SIGNAL:
            os._exit(128 + number)


@contextlib.contextmanager
def watch() -> Iterator[Interrupts]:
    """Yield Interrupts that hear of ctrl-C and SIGTERM until the block ends."""
    interrupts = Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    caught = [number for number in CAUGHT if is_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupts.receive) for number in caught}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            # None: not installed from Python, and so not to be put back from there
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
