"""On how many threads a command trains where other programs use the cores: torch's wait for each other all the time."""

from __future__ import annotations

import time

import torch

SIZE = 1 << 17  # values of one operation: enough for torch to share among threads, little enough to wait often
SECONDS = 0.15  # several time slices of a scheduler
HELD_UP = 0.5
"""Up to what share of the operations of one thread several are held up; undisturbed they do more than one."""


def settle_threads(device: torch.device) -> tuple[str, ...]:
    """Let torch use one thread where several hold each other up, and return what a user should know of it.

    Takes 0.3 seconds on a CPU. Whoever gave OMP_NUM_THREADS has chosen, and a GPU does not depend on it.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads < 2 or not _is_unset():
        return ()
    if operations(threads) > HELD_UP * operations(1):
        return ()
    torch.set_num_threads(1)
    return (
        f"one thread in place of {threads}: other programs keep cores of this machine busy, and several threads "
        "would wait for each other in every operation (OMP_NUM_THREADS in front of the command chooses)",
    )


def _is_unset() -> bool:
    """Whether OMP_NUM_THREADS is not set, as torch reports it."""
    return "OMP_NUM_THREADS : [not set]" in torch.__config__.parallel_info()


def operations(threads: int) -> int:
    """Return how many operations on `SIZE` values so many threads do in `SECONDS`."""
    before = torch.get_num_threads()
    values = torch.zeros(SIZE, dtype=torch.float32)
    torch.set_num_threads(threads)
    try:
        values.add_(1)  # starts the threads
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            values.add_(1)
            done += 1
        return done
    finally:
        torch.set_num_threads(before)
