"""The torch optimizer within a ZeroOptimizer: built alike on every rank, and one that treats every element alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.agree import exchange_notes

CALL = "ZeroOptimizer"
WHOLE = frozenset(("adafactor", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap"))
"""Optimizers whose step of an element depends on others, so that it would depend on the number of ranks: names of their
classes in small letters, since several libraries have them."""
TENSORS = (Tensor, torch.nn.Parameter)
NUMBERS = (bool, int, float, str, type(None))
_FLAT = "ZeroOptimizer steps flat parts of parameters, cut anywhere"


def build_inner(
    build: Callable[[list[dict]], torch.optim.Optimizer],
    param_groups: list[dict],
    group: dist.ProcessGroup | None,
    timeout: timedelta,
) -> torch.optim.Optimizer:
    """Raise on every rank unless all build the same optimizer: gathering its state would wait for ever later."""
    inner: torch.optim.Optimizer | None = None
    failure: Exception | None = None
    try:
        if isinstance(build, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer={type(build).__name__}(…) has parameters already: give what makes an optimizer of "
                "parameter groups, such as partial(torch.optim.AdamW, lr=1e-3)"
            )
        inner = build(param_groups)
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"optimizer returned {inner!r}: return a torch.optim.Optimizer of the parameter groups")
        if any(cls.__name__.lower() in WHOLE for cls in type(inner).__mro__):
            raise ValueError(
                f"optimizer: {type(inner).__name__} looks at more than one element at a time, but {_FLAT}; use one "
                "that treats every element alike, such as AdamW or SGD"
            )
        note = [None, _optimizer_note(inner)]
    except Exception as error:  # of whatever kind: the other ranks are told
        if inner is None and not isinstance(build, torch.optim.Optimizer):
            error.add_note(f"({_FLAT}: the optimizer was given tensors of one dimension.)")
        failure, note = error, [f"{type(error).__name__}: {error}", []]
    notes = exchange_notes(note, group, CALL, timeout)
    if failure is not None:
        raise failure
    for rank, (problem, theirs) in enumerate(notes):
        if problem is not None:
            raise ValueError(f"optimizer: rank {rank} cannot build it: {problem}")
        if theirs != notes[0][1]:
            one, other = next((a, b) for a, b in zip_longest(notes[0][1], theirs) if a != b)
            raise ValueError(
                f"optimizer: {one} on rank 0, {other} on rank {rank}; build the same optimizer with the same "
                "options everywhere"
            )
    assert inner is not None, "no failure"
    return inner


def _optimizer_note(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what ranks compare of an optimizer: its class, and the options of every parameter group."""
    note = [f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    for group in optimizer.param_groups:
        options = {key: readable_option(value) for key, value in group.items() if key not in ("params", "names")}
        note.append(repr(sorted(options.items())))
    return note


def readable_option(value: Any) -> Any:
    """Return an option as something that reads alike in every process: not an object's address."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [readable_option(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def is_elementwise(value: Any, master: Tensor) -> bool:
    """Return whether a value of an optimizer's state has a number for each element of a master."""
    return type(value) in TENSORS and value.dim() > 0 and value.shape == master.shape


def state_problem(state: Mapping[Tensor, Mapping[str, Any]], masters: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return which part of an optimizer's state belongs neither to an element nor to a whole parameter, or None.

    Args:
        state: the optimizer's.
        masters: parameters by name, as far as this rank has them.
    """
    for name, master in masters:
        for key, value in state.get(master, {}).items():
            is_tensor = type(value) in TENSORS
            if is_elementwise(value, master) or (value.numel() == 1 if is_tensor else isinstance(value, NUMBERS)):
                continue
            what = f"has shape {list(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
            return (
                f"optimizer: its state {key!r} of {name} {what}, for {master.numel()} elements: only state that has a "
                "number for each element, or one for the parameter, can move between ranks; use an optimizer with such"
            )
    return None


def warn_of_state(state: Mapping[Tensor, Mapping[str, Any]], masters: Iterable[tuple[str, Tensor]]) -> None:
    """Warn if a checkpoint could not hold this state, rather than when the checkpoint is due."""
    problem = state_problem(state, masters)
    if problem is not None:
        words = "state_dict() will refuse it, and steps may depend on the number of ranks"
        warnings.warn(f"{problem} ({words})", stacklevel=4)
