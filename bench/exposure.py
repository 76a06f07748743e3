"""What a trace of kernels says of a step's all-gathers: how long they ran, beside what, and what was only waiting.

A gather's kernel begins when its own rank has launched it and ends with the last rank's: what it runs before that one
begins is no communication but the distance between the ranks' hosts, and the rank that comes last does not wait.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

Span = tuple[float, float]
Kernels = Sequence[tuple[str, float, float]]
"""Name, start and end of kernels, in µs."""


class Gather(NamedTuple):
    """One all-gather on one rank.

    Args:
        took: µs from its kernel's start to its end.
        alone: µs of these in which no kernel but NCCL's ran.
    """

    took: float
    alone: float


def traced_kernels(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Return the kernels of what `run` launches and awaits, in the order in which they began."""
    # Kernels alone: with the host's events a step is slower than its kernels, and there is little beside a gather.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text())["traceEvents"])


def kernels_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return the kernels of a trace's events, in the order in which they began."""
    found = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    return sorted(found, key=lambda kernel: kernel[1])


def gathers_of(kernels: Kernels) -> list[Gather]:
    """Return the all-gathers among kernels, in their order, which is that of every rank."""
    spans = [(s, e) for name, s, e in kernels if "nccl" in name.lower() and "allgather" in name.lower()]
    others = _others(kernels)
    return [Gather(took=e - s, alone=e - s - _overlap((s, e), others)) for s, e in spans]


def exposed(kernels: Kernels, steps: int) -> dict[str, float]:
    """Return the time of a step's all-gathers, and of that what no kernel but NCCL's ran beside."""
    gathers = gathers_of(kernels)
    alone = [one.alone for one in gathers]
    total = sum(one.took for one in gathers)
    return {
        "gather_kernels_ms": total / steps / 1e3,
        "exposed_ms": sum(alone) / steps / 1e3,
        "most_exposed_ms": max(alone, default=0.0) / 1e3,
        "hidden_share": 1 - sum(alone) / total if total else 1.0,
        "kernels_ms": sum(e - s for s, e in _others(kernels)) / steps / 1e3,
    }


def of_the_last(ranks: Sequence[Sequence[Gather]], steps: int, first: int) -> dict[str, float]:
    """Return what a step's all-gathers take the rank that comes last to each, which waits for no other.

    Args:
        ranks: the gathers of each, of whole steps.
        steps: how many.
        first: how many of a step's gathers its first block needs.

    Returns:
        wires_ms: all; wires_alone_ms: of that what no kernel but NCCL's ran beside; wires_hidden_share: the rest's
        share; first_wires_ms: those of the first block, the median of the steps; others_hidden_share: of the rest.

    Raises:
        ValueError: ranks differ in how many they have, or steps do.
    """
    counts = {len(gathers) for gathers in ranks}
    if len(counts) != 1 or max(counts) % steps:
        raise ValueError(f"ranks: gathers of {steps} steps, but they have {[len(gathers) for gathers in ranks]}")
    last = [min(of_all, key=lambda one: one.took) for of_all in zip(*ranks, strict=True)]
    each = len(last) // steps
    begins = [sum(one.took for one in last[i * each : i * each + first]) for i in range(steps)]
    others = [one for index, one in enumerate(last) if index % each >= first]
    return {
        "wires_ms": sum(one.took for one in last) / steps / 1e3,
        "wires_alone_ms": sum(one.alone for one in last) / steps / 1e3,
        "wires_hidden_share": _hidden(last),
        "first_wires_ms": statistics.median(begins) / 1e3,
        "others_hidden_share": _hidden(others),
    }


def _hidden(gathers: Sequence[Gather]) -> float:
    took = sum(one.took for one in gathers)
    return 1 - sum(one.alone for one in gathers) / took if took else 1.0


def _others(kernels: Kernels) -> list[Span]:
    return _union([(s, e) for name, s, e in kernels if "nccl" not in name.lower()])


def _union(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _overlap(span: Span, others: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
