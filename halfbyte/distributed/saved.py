"""Whether a saved state fits a ZeroOptimizer and is the same on all ranks: looked at before any of it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.distributed.agree import exchange_notes
from halfbyte.distributed.inner import NUMBERS, TENSORS, readable_option
from halfbyte.distributed.same import ranks_of
from halfbyte.optimizer_state import (
    AS_NUMBERS,
    count_problem,
    dtype_name,
    kept_by,
    keys_problem,
    kind_of,
    number_of,
    option_problem,
)

if TYPE_CHECKING:
    from halfbyte.distributed.zero import ZeroOptimizer

VERSION = 3
PARTS = ("masters", "state", "groups", "scalars")
SINCE = {2: ("version", *PARTS), 3: ("version", *PARTS, "keys")}
"""The keys of a state by its version."""
CALL = "ZeroOptimizer.load_state_dict"
REMEDY = "pass what ZeroOptimizer.state_dict() returned for this model"
SAMPLES = 16


def check_saved(zero: ZeroOptimizer, state: Any) -> None:
    """Raise ValueError on every rank unless `state` fits on each of them and is the same on all."""
    note: list[Any]
    try:
        problem = problem_of(zero, state)
        note = [problem, {} if problem is not None else _digests(zero, state)]
    except Exception as error:  # of whatever kind: the other ranks are told
        note = [f"state: {type(error).__name__}: {error}; {REMEDY}", {}]
    notes = exchange_notes(note, zero.group, CALL, zero.config.timeout)
    for rank, (problem, _) in enumerate(notes):
        if problem is not None:
            raise ValueError(problem if len(notes) == 1 else f"rank {rank}: {problem}")
    first: dict[str, tuple[int, str]] = {}
    for rank, (_, digests) in enumerate(notes):
        for members, digest in digests.items():
            other, expected = first.setdefault(members, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"state: that of rank {rank} is another than that of rank {other}; load the same checkpoint on all"
                )


def problem_of(zero: ZeroOptimizer, state: Any) -> str | None:
    """Say why `state` does not fit, or return None."""
    problem = _outline_problem(state) or _groups_problem(zero, state["groups"])
    if problem is not None:
        return problem
    for part in ("masters", "state", "keys"):
        if part in state and state[part].keys() != zero.names.keys():
            differing = sorted(map(str, state[part].keys() ^ zero.names.keys()))
            return f"state[{part!r}]: {differing[0]!r} is on one side only; {REMEDY}"
    for key, dtype in state["scalars"].items():
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            return f"state['scalars'][{key!r}]={dtype!r}: no dtype; {REMEDY}"
    for name, param in zero.names.items():
        if not _is_whole(state["masters"][name], param.shape, torch.float32):
            return (
                f"state['masters'][{name!r}] is {kind_of(state['masters'][name])}, expected is float32 "
                f"{list(param.shape)}; {REMEDY}"
            )
    return _state_problem(zero, state)


def _outline_problem(state: Any) -> str | None:
    keys = SINCE.get(state.get("version")) if isinstance(state, dict) and type(state.get("version")) is int else None
    dicts = [part for part in keys or () if part not in ("version", "groups")]
    is_whole = keys is not None and all(isinstance(state.get(part), dict) for part in dicts)
    if not is_whole or not isinstance(state.get("groups"), list):
        return f"state: not of a ZeroOptimizer of version {VERSION}; {REMEDY}"
    entries = [("state", state["state"]), ("keys", state.get("keys", {}))]
    for part, name, entry in [(part, name, entry) for part, whole in entries for name, entry in whole.items()]:
        if not isinstance(entry, dict):
            return f"state[{part!r}][{name!r}] is {kind_of(entry)}, expected is a dict; {REMEDY}"
    if not all(isinstance(group, dict) for group in state["groups"]):
        return f"state['groups']: not all of them are dicts; {REMEDY}"
    extra = sorted(map(repr, state.keys() - {*(keys or ())}))
    return f"state: the key {extra[0]} belongs to no ZeroOptimizer; {REMEDY}" if extra else None


def _groups_problem(zero: ZeroOptimizer, groups: list[dict]) -> str | None:
    missing, foreign = _options(zero, groups)
    if missing and foreign:
        return (
            f"state: its optimizer has the option {foreign[0]!r} and no {missing[0]!r}, unlike this "
            f"{type(zero.inner).__name__}; build the optimizer that the state is of"
        )
    ours = [group["names"] for group in zero.inner.param_groups]
    theirs = [group.get("names") for group in groups]
    if ours != theirs:
        return f"state['groups']: parameters are grouped as {theirs}, here as {ours}; use the same param_options"
    for number, (own, saved) in enumerate(zip(zero.inner.param_groups, groups, strict=True)):
        problem = "'params' are in it" if "params" in saved else option_problem(zero.inner, own, saved)
        if problem is not None:
            return f"state['groups'][{number}]: {problem}; {REMEDY}"
    return None


def _options(zero: ZeroOptimizer, groups: list[dict]) -> tuple[list[str], list[str]]:
    """Return options that this optimizer has and the groups lack, and the reverse.

    One of both may be of another release of torch, or of a schedule; both are of another optimizer.
    """
    theirs = {key for group in groups for key in group}
    ours = {key for group in zero.inner.param_groups for key in group}
    foreign = theirs - ours - {"initial_lr"}  # a schedule notes it
    return sorted(zero.inner.defaults.keys() - theirs), sorted(map(str, foreign))


def _state_problem(zero: ZeroOptimizer, state: Mapping[str, Any]) -> str | None:
    known, scalars = kept_by(zero.inner), state["scalars"]
    options = {
        name: {**ours, **theirs}
        for ours, theirs in zip(zero.inner.param_groups, state["groups"], strict=True)
        for name in ours["names"]
    }
    has_stepped = bool(scalars) or any(state["state"].values())
    for name, param in zero.names.items():
        values = state["state"][name]
        if "keys" in state:  # it says what there has to be
            problem = _listed_problem(state["keys"][name], values, scalars)
        else:
            lost = known is not None and has_stepped and not values and known.required(options[name], param.dim())
            problem = "it has none, though the run had made steps: its moments are lost" if lost else None
        if problem is None and known is not None and values:
            problem = keys_problem(known, options[name], values, param.dim())
        for key, value in values.items():
            problem = problem or _value_problem(param.shape, key, value, known is not None, scalars.get(key))
        problem = problem or count_problem(values)
        if problem is not None:
            return f"state['state'][{name!r}]: {problem}; {REMEDY}"
    unused = [key for key in scalars if not any(key in values for values in state["state"].values())]
    return f"state['scalars'] has {unused[0]!r}, the state of no parameter does; {REMEDY}" if unused else None


def _listed_problem(listed: Mapping[str, Any], values: Mapping[str, Any], scalars: Mapping[str, str]) -> str | None:
    """Return how the state of a parameter differs from the list of its keys and dtypes that was saved with it."""
    differing = sorted(map(str, listed.keys() ^ values.keys()))
    if differing:
        what = "is missing" if differing[0] in listed else "is in no list of what was saved"
        return f"{differing[0]!r} {what}"
    for key, value in values.items():
        found = dtype_name(value) if isinstance(value, Tensor) else scalars.get(key)
        if found != listed[key]:
            return f"{key!r} is {kind_of(value)} to be kept as {found}, expected is {listed[key]}"
    return None


def _value_problem(shape: torch.Size, key: Any, value: Any, is_known: bool, kept_as: str | None) -> str | None:
    """Return what is wrong with a value; kept_as: the dtype of the tensor that a number becomes."""
    if is_known and key in AS_NUMBERS:
        is_fit = not isinstance(value, Tensor) and number_of(value) is not None and kept_as in ("float32", "float64")
        expected = "a finite number, kept as float32"
    elif isinstance(value, Tensor):
        is_fit = _is_whole(value, shape, torch.float32 if is_known else value.dtype)
        expected = f"{'float32 ' if is_known else ''}{list(shape)}"
    else:
        is_fit = isinstance(value, NUMBERS) and (value is None or not is_known)
        is_fit = is_fit and (kept_as is None or (isinstance(value, int | float) and not isinstance(value, bool)))
        expected = f"a number, kept as {kept_as}" if kept_as else f"a number, or a tensor {list(shape)}"
    return None if is_fit else f"{key!r} is {kind_of(value)}, expected is {expected}"


def _is_whole(value: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    is_plain = type(value) in TENSORS and value.layout == torch.strided and not value.is_meta
    return is_plain and value.shape == shape and value.dtype == dtype


def _digests(zero: ZeroOptimizer, state: Mapping[str, Any]) -> dict[str, str]:
    """Return {members: digest} of what the ranks of each group have to have in common, by samples of the tensors."""
    options: dict[str, Any] = {}
    for group in state["groups"]:
        note = repr(sorted((key, readable_option(value)) for key, value in group.items() if key != "names"))
        options.update(dict.fromkeys(group["names"], note))
    seen: dict[str, Any] = {}
    for bucket in zero.buckets:
        digest = seen.setdefault(str(ranks_of(bucket.ranks.group)), hashlib.sha256())
        for place in bucket.plan.places:
            name = place.item.name
            values = {"": state["masters"][name], **state["state"][name]}
            notes = [f"{key}: {note}" for key, value in sorted(values.items()) for note in _samples(value)]
            digest.update("\n".join([name, options[name], *notes, ""]).encode())
    return {members: digest.hexdigest() for members, digest in seen.items()}


def _samples(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        value = flat[:: max(1, flat.numel() // SAMPLES)].tolist()
    yield repr(value)
