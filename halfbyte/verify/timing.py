"""How long something takes on a device, and the ceilings that it is measured against.

A measurement is the median over batches of calls. Calls rotate through input sets that together exceed the L2 cache, so
that none reads what the one before left there. On a GPU a batch is queued behind a short wait, so that the device never
idles between its calls, and is timed with events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from halfbyte.layout import ceil_div

Call = Callable[[], Any]

BATCHES = 15
"""Batches in a measurement, if the budget allows."""

BATCH_SECONDS = 1e-3
"""A batch lasts at least this long: the clock's resolution and the cost of two events disappear in it."""

MAX_BATCH_CALLS = 256  # stays below the depth of the launch queue, where the host would wait
CLOCK_HERTZ = 2e9  # of the wait that fills the queue; its length is not critical


class Timing(NamedTuple):
    """Median seconds of one call, and the interquartile range as a share of it."""

    seconds: float
    spread: float


def measure(calls: Sequence[Call], device: torch.device, *, budget: float = 0.3, graph: bool = False) -> Timing:
    """Time one operation.

    Args:
        calls: the operation on each input set, run in turn.
        device: where it runs.
        budget: seconds to spend.
        graph: replay a CUDA graph of the calls, which takes launch costs out of the figure.
    """
    return measure_alternately({"it": calls}, device, budget=budget, graph=graph)["it"]


def measure_alternately(
    variants: Mapping[str, Sequence[Call]], device: torch.device, *, budget: float = 0.3, graph: bool = False
) -> dict[str, Timing]:
    """Time operations batch by batch in turn, so that a change of clocks or power meets all of them.

    Args:
        variants: name -> calls, see `measure`.
        device: where they run.
        budget: seconds per variant.
        graph: see `measure`.

    Returns:
        name -> Timing.
    """
    clock = _gpu_batch if device.type == "cuda" else _cpu_batch
    batches = {name: _Batch(calls, device, graph) for name, calls in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    deadline = time.perf_counter() + budget * len(variants)
    for index in range(BATCHES):
        for name, batch in batches.items():
            seconds[name].append(clock(batch) / batch.count)
        if time.perf_counter() > deadline and index >= 2:
            break
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(values: list[float]) -> Timing:
    middle = median(values)
    low, _, high = quantiles(values, n=4)
    return Timing(middle, (high - low) / middle)


class _Batch:
    """Enough calls to be timed, warmed up."""

    def __init__(self, calls: Sequence[Call], device: torch.device, graph: bool) -> None:
        for call in calls:
            call()  # compiles, allocates, picks algorithms
        runs = calls
        if graph and device.type == "cuda":
            runs = [_graph(calls)]
        per_run = len(calls) // len(runs)
        _synchronize(device)
        start = time.perf_counter()
        for run in runs:
            run()
        self.host_seconds = (time.perf_counter() - start) / len(runs)
        _synchronize(device)
        each = (time.perf_counter() - start) / len(runs)
        rounds = min(ceil_div(MAX_BATCH_CALLS, len(calls)), max(1, round(BATCH_SECONDS / (each * len(runs)))))
        self.runs = list(runs) * rounds
        self.count = len(self.runs) * per_run


def _graph(calls: Sequence[Call]) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _gpu_batch(batch: _Batch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait = min(0.02, 1.2 * batch.host_seconds * len(batch.runs))
    torch.cuda._sleep(int(wait * CLOCK_HERTZ))
    start.record()
    for run in batch.runs:
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _cpu_batch(batch: _Batch) -> float:
    start = time.perf_counter()
    for run in batch.runs:
        run()
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ceilings(NamedTuple):
    """What the machine reached in this process: bytes/s read plus written by a copy, and flop/s of a bf16 GEMM."""

    copy: float
    gemm: float

    def text(self) -> str:
        return f"device copy {self.copy / 1e12:.3g} TB/s, bf16 GEMM {self.gemm / 1e12:.4g} TFLOP/s"


def ceilings(device: torch.device) -> Ceilings:
    """Measure both ceilings: a copy of 1 GiB and an 8192³ GEMM on random data (CPU: 16 MiB and 128³)."""
    gpu = device.type == "cuda"
    size, n = (1 << 30, 8192) if gpu else (1 << 24, 128)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / measure([lambda: target.copy_(source)], device).seconds
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).bfloat16() for _ in range(2))
    return Ceilings(copy, 2 * n**3 / measure([lambda: a @ b.T], device).seconds)


def input_sets(device: torch.device, size: int) -> int:
    """Return how many input sets of `size` bytes a measurement rotates: three times the L2 cache, at least 2."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(64, max(2, ceil_div(3 * cache, max(1, size))))
