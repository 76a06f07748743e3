"""Where the host's time of a step goes, by name of op, autograd node and call of the CUDA runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 4


class Share(NamedTuple):
    """What has one name.

    ms: host's own time in it in a step, without what it calls; the profiler's cost is in it.
    calls: in a step.
    """

    name: str
    ms: float
    calls: float


def shares(step: Callable[[], object], device: torch.device, steps: int = STEPS) -> tuple[list[Share], float]:
    """Return what the host does in a step, most time first, and the ms of a step's launching while it is watched.

    Python's own time is that of the autograd node or op that runs it; outside of both it is in no name, so the names'
    sum is less than the step.

    Args:
        step: of training, warmed up.
        device: is waited for before each step, outside the time.
        steps: number of them, averaged.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    launching = 0.0
    with profile(activities=activities, acc_events=True) as trace:
        for _ in range(steps):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            step()
            launching += time.perf_counter() - begun
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    waits = ("cudaDeviceSynchronize",)
    found = [
        Share(event.key, event.self_cpu_time_total / 1e3 / steps, event.count / steps)
        for event in trace.key_averages()
        if event.self_cpu_time_total > 0 and event.key not in waits
    ]
    return sorted(found, key=lambda share: -share.ms), 1e3 * launching / steps


def text(found: list[Share], launching: float, most: int = 30) -> str:
    """Return a line for each of the names that take most, and one for the rest."""
    named, rest = found[:most], found[most:]
    lines = [f"{share.ms:8.3f} ms {share.calls:8.1f} x  {share.name}" for share in named]
    lines += [f"{sum(share.ms for share in rest):8.3f} ms {sum(share.calls for share in rest):8.1f} x  others"]
    return "\n".join([f"{launching:8.3f} ms of launching, watched", *lines])
