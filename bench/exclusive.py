"""Which kernels a training step waits for: `python -m bench.exclusive 125m 60m` on a GPU, those of bench.cases.steps.

Kernels overlap, so the sum of their times says little. Here each has the time from the end of everything before it to
its own end: these times add up to that of the step without its gaps.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile

from bench.cases import steps

STEPS, ROWS = 20, 34


def exclusive(events: Iterable[tuple[float, float, str]]) -> tuple[dict[str, tuple[int, float]], float]:
    """Return of each name how often it ran and the time that it added, and the time in which nothing ran.

    Args:
        events: (begin, end, name).
    """
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    idle, last = 0.0, None
    for begin, end, name in sorted(events):
        last = begin if last is None else last
        idle += max(0.0, begin - last)
        last = max(last, begin)
        count, total = found[name]
        found[name] = count + 1, total + max(0.0, end - last)
        last = max(last, end)
    return dict(found), idle


def profiled(step: Callable[[], object]) -> tuple[dict[str, tuple[int, float]], float]:
    """Return `exclusive` of one step on the GPU, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    ran = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return exclusive((event.time_range.start, event.time_range.end, event.name) for event in ran)


def milliseconds(step: Callable[[], object]) -> float:
    """Return the time of a step in a row of them; nobody reads a loss between."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS * 1e3


def main(names: list[str]) -> None:
    """Print of each model the steps in bf16 and nvfp4, and what each kernel adds to them."""
    shapes = {name: shape for name, shape, *_ in steps.MODELS}
    for name in names:
        times = []
        for recipe in ("bf16", "nvfp4"):
            setting = SimpleNamespace(on_gpu=True, device=torch.device("cuda"))
            step = steps._stepper(setting, shapes[name], name, recipe)  # type: ignore[arg-type]
            times.append(milliseconds(step))
            kernels, idle = profiled(step)
            print(f"{name} {recipe}: {times[-1]:.2f} ms a step; profiled, nothing ran for {idle / 1e3:.2f} ms")
            for kernel, (count, total) in sorted(kernels.items(), key=lambda item: -item[1][1])[:ROWS]:
                print(f"{total / 1e3:8.2f} ms {count:5d} x {total / count:7.1f} us  {kernel[:90]}")
            del step
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        print(f"{name}: {times[1] / times[0]:.3f} x bf16", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name, *_ in steps.MODELS])
