"""Other libraries beside our whole operation, amax included: each by its fastest way that runs here and is right.

A way is right where its decoded values lie as far from the input as ours do: a wrong one, or one that quantizes
nothing, is not timed. What does not import, does not run, is wrong or takes too long is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.measure import Left, limit, over, reason
from bench.registry import Setting
from halfbyte.verify.timing import measure

LIKE_OURS = (0.6, 1.6)
"""A peer's relative error, as a multiple of ours: other scales, and random bits that are none, change it by less."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way in which a library quantizes.

    Args:
        name: of the way, "" where the library has one.
        run: what is timed, on one tensor.
        values: its result -> the numbers it stands for, one fp32 tensor per orientation.
    """

    name: str
    run: Callable[[Tensor], Any]
    values: Callable[[Any], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all of them do.

    Args:
        kind: "1x16", "16x16", "1x16-sr", "4over6", "mxfp8" or "row_col-sr".
        xs: the inputs, of one shape.
        targets: what each orientation quantizes: x, and x.T rotated.
        errors: our relative error in each orientation.
    """

    kind: str
    xs: Sequence[Tensor]
    targets: Sequence[Tensor]
    errors: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Found:
    """name -> median seconds of a call, and name -> why there is none."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


Library = Callable[[str, Tensor], Iterator[Way]]
"""The kind and a tensor like those to come -> the library's ways; none where it has no such operation."""


def time_all(task: Task, setting: Setting, libraries: Mapping[str, Library]) -> Found:
    """Time every library that has the operation, each within `setting.limit` seconds."""
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, library in libraries.items():
        try:
            with limit(setting.limit):
                best = _best(task, setting, library, lambda way, why, name=name: left_out.update({f"{name}{way}": why}))
        except Exception as error:  # a peer's failure of any kind is not ours
            left_out[name] = reason(error)
            continue
        if best:
            seconds[f"{name}{best[0]}"] = best[1]
    return Found(seconds=seconds, left_out=left_out)


def _best(
    task: Task, setting: Setting, library: Library, leave: Callable[[str, str], None]
) -> tuple[str, float] | None:
    """Return name and seconds of the fastest way; None if the library has none."""
    best = None
    for way in library(task.kind, task.xs[0]):
        suffix = f" ({way.name})" if way.name else ""
        try:
            require_like_ours(way, task)
            took = measure(over(task.xs, way.run), setting.device, budget=setting.budget).seconds
        except TimeoutError:
            leave(suffix, f"took longer than {setting.limit:g} s to compile and run")
            break
        except Exception as error:  # the next way may run
            leave(suffix, reason(error))
            continue
        if best is None or took < best[1]:
            best = suffix, took
    return best


def require_like_ours(way: Way, task: Task) -> None:
    """Compare what a way's result stands for with its input.

    Raises:
        Left: the error is not like ours, so that it does something else.
    """
    all_values = way.values(way.run(task.xs[0]))
    if len(all_values) != len(task.targets):
        raise Left(f"gives {len(all_values)} orientations, not {len(task.targets)}")
    for values, target, ours in zip(all_values, task.targets, task.errors, strict=True):
        if values.shape != target.shape:
            raise Left(f"decodes to {tuple(values.shape)}, not {tuple(target.shape)}")
        error = relative_error(values, target)
        low, high = LIKE_OURS
        if not low * ours <= error <= high * ours:
            raise Left(f"is another operation: relative error {error:.4f}, ours {ours:.4f}")


def relative_error(values: Tensor, target: Tensor) -> float:
    """Return |values - target| / |target|, Frobenius norms in fp32."""
    difference = torch.linalg.vector_norm(values.float() - target.float())
    return float(difference / torch.linalg.vector_norm(target.float()))
