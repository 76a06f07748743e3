"""Saving behind the steps that follow: what a checkpoint holds is copied first, and a thread ends the save.

The ranks' threads talk over a group of their own, so that nothing of theirs meets what the steps exchange. One save is
under way at a time: the next waits for it, as do the end of a run and a signal that stops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from halfbyte.train.config import TrainConfig
from halfbyte.train.ranks import World

PATIENCE = 10.0
"""Seconds that a run which fails leaves to a save that is under way; where a rank died, gloo ends it sooner."""


class Background:
    """A thread that ends saves, of all ranks together.

    Args:
        ranks: who train; all must make it together.
    """

    def __init__(self, ranks: World) -> None:
        group: Any = dist.new_group(backend="gloo")
        self.ranks = World(ranks.place, group)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, finish: Callable[[], object]) -> None:
        """Let the thread call `finish`; nothing may be under way."""
        assert self._thread is None, "wait first"

        def run() -> None:
            try:
                finish()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="halfbyte-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            OSError: this rank could not write; as for a save without a thread.
            Elsewhere: another one could not.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def give_up(self) -> None:
        """Leave a save that is under way a little time, for the run has failed."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
        self.ranks.control = None


def background_of(config: TrainConfig, ranks: World) -> Background | None:
    """Return what ends saves behind the steps that follow, if that is asked for."""
    if not config.run.async_save:
        return None
    if ranks.size == 1:
        raise ValueError("async_save=True: one process writes its checkpoints at once; start several, or leave it out")
    return Background(ranks)
