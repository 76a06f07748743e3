"""From a checked operation to an Outcome: what kernel cases have in common."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.registry import Metric, Outcome, Setting, Shape, Unequal
from halfbyte.verify.compare import difference
from halfbyte.verify.timing import Call, input_sets, measure, measure_alternately

CPU = torch.device("cpu")
PLAIN = "plain torch, compiled"


class Left(Exception):
    """A library is left out; the message says why."""


@contextmanager
def repeatable() -> Iterator[None]:
    """Let attention and indexing add in one order: without this a run does not even repeat itself."""
    options: Any = torch.utils.deterministic
    fills, options.fill_uninitialized_memory = options.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        options.fill_uninitialized_memory = fills


def random_matrix(shape: Shape, device: torch.device, seed: int) -> Tensor:
    """Return bf16 values with heavier tails than a normal distribution, as activations have."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    return x.mul_(torch.randn(shape, generator=generator, device=device).mul_(0.5).exp_()).bfloat16()


def matrices(setting: Setting, shape: Shape) -> list[Tensor]:
    """Return enough matrices to rotate through, so that none is read from the L2 cache."""
    count = input_sets(setting.device, 2 * shape[0] * shape[1])
    return [random_matrix(shape, setting.device, seed) for seed in range(count)]


def require_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: str) -> None:
    """Compare tensors bit for bit.

    Raises:
        Unequal: naming the output and the first value that differs.
    """
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if mine is None or theirs is None:
            assert mine is theirs, "an output is missing"
            continue
        problem = difference(mine, theirs)
        if problem:
            raise Unequal(f"{where}, output {index}: {problem}")


def bandwidth(
    setting: Setting,
    calls: Sequence[Call],
    moved: int,
    checked: Sequence[str],
    plain: Callable[[], Sequence[Call]] | None = None,
    graph: bool = False,
) -> Outcome:
    """Time an operation that moves `moved` bytes a call against the copy ceiling.

    Args:
        plain: makes the calls of its plain-torch version, which is timed too if the run asks for it.
        graph: replay a CUDA graph: for calls shorter than their launch.
    """
    ours = measure(calls, setting.device, budget=setting.budget, graph=graph)
    rivals, left_out = {}, {}
    if plain is not None and setting.plain:
        try:
            with limit(setting.limit):
                theirs = measure(plain(), setting.device, budget=setting.budget)
            rivals[PLAIN] = theirs.seconds / ours.seconds
        except Exception as error:  # a compiler that fails or does not end costs this figure and no other
            left_out[PLAIN] = reason(error)
    return Outcome(
        seconds=ours.seconds,
        spread=ours.spread,
        metric="us" if graph else "of copy",
        value=ours.seconds * 1e6 if graph else moved / ours.seconds / setting.ceilings.copy,
        work=moved,
        unit="TB/s",
        checked=tuple(checked),
        rivals=rivals,
        left_out=left_out,
    )


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return the seconds that some work takes once, launches waited for, and the peak GiB of a GPU meanwhile."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return time.perf_counter() - begun, peak


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds: compilers have no limit of their own."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s to compile and run")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # again: a compiler may wrap the first in an error of its own
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason(error: Exception) -> str:
    """Return in one line why something was not timed."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, Left | TimeoutError):
        return lines[0]
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {lines[0]}"
    return f"{type(error).__name__}: {lines[0][:160]}"


def against_bf16(
    setting: Setting,
    calls: Sequence[Call],
    bf16: Sequence[Call],
    work: float,
    checked: Sequence[str],
    metric: Metric,
    graph: bool = False,
) -> Outcome:
    """Time an operation and its counterpart, bf16's or another, in turn; the value is the ratio that `metric` names."""
    variants = {"ours": calls, "bf16": bf16}
    times = measure_alternately(variants, setting.device, budget=setting.budget, graph=graph)
    ours, theirs = times["ours"], times["bf16"]
    return Outcome(
        seconds=ours.seconds,
        spread=ours.spread,
        metric=metric,
        value=theirs.seconds / ours.seconds if metric.startswith("of ") else ours.seconds / theirs.seconds,
        work=work,
        unit="TFLOP/s",
        checked=tuple(checked),
        facts={"bf16_us": theirs.seconds * 1e6},
    )


def over(inputs: Sequence[Any], function: Callable[[Any], Any]) -> list[Call]:
    """Return one call per input."""
    return [lambda x=x: function(x) for x in inputs]


def places(setting: Setting) -> Iterator[tuple[torch.device, str]]:
    """Yield where the reference runs for comparison: the CPU, and the device itself if it is another."""
    yield CPU, "CPU"
    if setting.on_gpu:
        yield setting.device, "same device"
