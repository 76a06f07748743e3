"""Tests whose ranks share GPUs: all begin together, as many as the machine has cores for, since kernels compile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import ranks

SECONDS = 480
"""Of one job, after which it fails."""


class Job(NamedTuple):
    """What a test asks of its ranks.

    world: how many, each with a GPU.
    call: takes `device=`, which is where the first rank is.
    name: of the test's parameter.
    """

    world: int
    call: Callable
    name: str


def job(world: int, function: Callable, *arguments, name: str = "") -> Job:
    """Return the job of `ranks.run`."""
    call = partial(ranks.run, world, function, *arguments, seconds=SECONDS)
    return Job(world, call, "-".join(filter(None, (str(world), name))))


def asks(*jobs: Job):
    """Make a test of each job, whose answer it takes as `found`."""
    return pytest.mark.parametrize("found", jobs, indirect=True, ids=[one.name for one in jobs])


class Begun:
    """Jobs that run.

    Args:
        jobs: by the test that waits for it; small ones begin first, and larger ones find their kernels compiled.
        device: "cpu" or "cuda".
        gpus: how many there are.
        cores: processes that may run at once, or one job if it has more.
    """

    def __init__(self, jobs: dict[str, Job], device: str, gpus: int, cores: int) -> None:
        self._free, self._changed, self._cores = cores, threading.Condition(), cores
        self._pool = ThreadPoolExecutor(max(1, len(jobs)))
        self._answers: dict[str, Future] = {}
        for i, (test, one) in enumerate(sorted(jobs.items(), key=lambda item: item[1].world)):
            first = i * one.world % (gpus - one.world + 1) if device == "cuda" else 0
            place = f"cuda:{first}" if device == "cuda" else device
            self._answers[test] = self._pool.submit(self._run, one, place)

    def _run(self, one: Job, place: str):
        with self._taken(min(one.world, self._cores)):
            return one.call(device=place)

    @contextmanager
    def _taken(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()

    def answer(self, test: str):
        """Return what a test's job returned; raise what it raised."""
        return self._answers[test].result()

    def stop(self) -> None:
        """Let no other job begin."""
        self._pool.shutdown(cancel_futures=True)
