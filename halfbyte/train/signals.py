"""Ctrl-C and SIGTERM: a run that trains finishes its step, writes a checkpoint and says where it goes on.

What is not training (reading and tokenizing text, building the model, drawing the picture) stops at once: whatever it
writes is whole or absent. A second signal ends the process there and then. Nothing is installed where no handler can
be, outside the main thread, or for a signal that the process was told to ignore, as `nohup` and shell jobs are.

Python runs handlers between two of its own instructions, which a tokenizer's training in Rust keeps waiting, maybe for
minutes. So a thread hears of every signal too, and ends a process that does not answer while it has nothing to save.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 0.25
"""Seconds in which a second signal is the first one again: schedulers signal a process and its group, make does too."""
PATIENCE = 2.0
"""Seconds in which the main thread has to answer where it saves nothing."""
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
        self._is_deferring = False

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
        """Within the block signals are noted and raise nothing; one that nobody looked for raises at its end.

        A block that fails goes on deferring: a launcher signals the ranks that are left as one dies, and what ends them
        is the loss of it, which they still have to say.
        """
        self.check()
        self._is_deferring = True
        yield
        self._is_deferring = False
        self.check()

    def defer(self) -> None:
        """Only note signals from now on: what is left to do is to say why the work failed."""
        self._is_deferring = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first; `listen` ends the process at the second."""
        if self.number is not None:
            return
        self.number = number
        if not self._is_deferring:
            raise Stopped(number)
        if sys.stderr.isatty():  # os.write: the signal may have come in the middle of a print
            os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")

    def listen(self, pipe: int, say: Callable[[Stopped], None]) -> None:
        """Read the numbers of signals from `pipe` until it closes; end the process where the main thread does not."""
        first, since = None, 0.0
        while True:
            waiting = first is not None and self.number is None and not self._is_deferring
            ready, _, _ = select.select([pipe], [], [], PATIENCE if waiting else None)
            if not ready and self.number is None and not self._is_deferring:
                assert first is not None, "it waits for an answer to it"
                say(Stopped(first))
                os._exit(128 + first)
            numbers = os.read(pipe, 64) if ready else b""
            if ready and not numbers:
                return
            for number in filter(CAUGHT.__contains__, numbers):
                if first is None:
                    first, since = number, time.monotonic()
                elif time.monotonic() - since > ONE_SIGNAL:
                    os._exit(128 + number)


def ignore_launcher() -> None:
    """Ignore SIGTERM from now on: a rank that failed ends by itself, when it has said why.

    Ranks with nothing to say of the failure may end before it, and then the launcher ends those that are left.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def watch(say: Callable[[Stopped], None]) -> Iterator[Interrupts]:
    """Yield Interrupts that hear of ctrl-C and SIGTERM until the block ends, or has a handler of its own.

    Args:
        say: what prints where the work goes on, called before a process ends whose main thread does not answer.
    """
    interrupts = Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    caught = [number for number in CAUGHT if is_main and signal.getsignal(number) != signal.SIG_IGN]
    if not caught:
        yield interrupts
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=interrupts.listen, args=(reading, say), daemon=True)
    before = {number: signal.signal(number, interrupts.receive) for number in caught}
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield interrupts
    finally:
        signal.set_wakeup_fd(outer)
        for number, handler in before.items():
            if signal.getsignal(number) == interrupts.receive:  # what the block itself chose stays
                # None: not installed from Python, and so not to be put back from there
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writing)
        thread.join()
        os.close(reading)
