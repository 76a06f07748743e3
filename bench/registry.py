"""What a case is, what it yields, and which cases exist.

A case refuses to be timed until its bytes equal the reference: `run` raises Unequal, and the runner then prints what
differs and no speed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch

from halfbyte.verify.timing import Ceilings

Shape = tuple[int, ...]
Metric = Literal["of copy", "of bf16", "of free", "x bf16", "x kept", "us"]
MULTIPLES = ("x bf16", "x kept")  # of a time, less is better; the others are shares
"""Share of the copy bandwidth or of the bf16 GEMM's rate (more is better); time as a multiple of bf16's; only time."""


class Unequal(Exception):
    """The bytes, or a GEMM's error, are not what the reference demands."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a case must reach at least, and what it aims at, in its metric."""

    least: float
    aim: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How all cases of one run are measured.

    Args:
        device: where.
        backend: "reference", "triton" or "native".
        ceilings: of this process.
        plain: time the compiled plain-torch version too.
        peers: time other libraries too, where they import.
        budget: seconds a measurement may take.
        limit: seconds that each of the others may take to compile and run.
    """

    device: torch.device
    backend: str
    ceilings: Ceilings
    plain: bool = True
    peers: bool = False
    budget: float = 0.3
    limit: float = 40.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case at one shape.

    Args:
        seconds, spread: median time of a call and its relative interquartile range.
        work: bytes moved or floating-point operations done by a call; 0 where neither is meant.
        unit: of work per second.
        metric: what `value` is.
        value: the figure that the bar is about.
        checked: what was compared before timing.
        rivals: name -> how many times longer it takes than ours.
        left_out: name -> why it was not timed.
        facts: anything else worth recording.
    """

    seconds: float
    spread: float
    metric: Metric
    value: float
    work: float = 0.0
    unit: Literal["TB/s", "TFLOP/s", ""] = ""
    checked: tuple[str, ...] = ()
    rivals: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Work per second in `unit`."""
        return self.work / self.seconds / 1e12


Run = Callable[[Setting, Shape], Outcome]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the benchmark.

    Args:
        name: group/what, matched by --only.
        about: one line for people.
        shapes: shape -> its bar, or None where no bar is set.
        small: the shape on a machine without a GPU.
        run: checks, then measures.
    """

    name: str
    about: str
    shapes: Mapping[Shape, Bar | None]
    small: Shape
    run: Run


def all_cases() -> list[Case]:
    """Return every case, in the order of the table."""
    from bench.cases import attention, fused, gemm, grouped, host, layer, primary, quantize, steps, training, unpack

    modules = (quantize, unpack, gemm, layer, fused, grouped, primary, host, attention, steps, training)
    return [case for module in modules for case in module.CASES]


def select(cases: Iterable[Case], globs: Iterable[str]) -> list[Case]:
    """Return the cases whose names match one of `globs`; all of them if there is none.

    Raises:
        ValueError: a glob matches no case.
    """
    cases, globs = list(cases), list(globs)
    for glob in globs:
        if not any(fnmatchcase(case.name, glob) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"--only {glob!r} matches no case; they are {names}")
    return [case for case in cases if not globs or any(fnmatchcase(case.name, glob) for glob in globs)]
