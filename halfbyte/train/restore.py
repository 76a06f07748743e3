"""What a checkpoint holds against what a run needs: everything is looked at before anything of the run changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.functional.foreign import is_sharded
from halfbyte.optimizer_state import check_optimizer_state
from halfbyte.state import RunState
from halfbyte.train import parallel
from halfbyte.train.config import TrainConfig

OF_THE_DEVICE = ("lr", "fused", "foreach", "capturable")
"""Options of a parameter group that a checkpoint from another device has otherwise; lr is set in every step."""


def check(
    saved: dict, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, run_state: RunState
) -> None:
    """Raise ValueError unless all of `saved` fits; nothing changes.

    Args:
        saved: what `checkpoint.load_checkpoint` returned, or `sharded.load_tensors`: then with DTensors where this run
            has them.
        config, model, optimizer, run_state: of the run that is to go on.

    Raises:
        ValueError: a key, shape, dtype, number or place is not what this run saves after that step, and is named.
    """
    step, position = saved["step"], saved["position"]
    if step > config.optim.steps:
        raise ValueError(f"step={step}: the run has {config.optim.steps} steps")
    if position != step * config.data.accumulate:
        raise ValueError(f"position={position}: after {step} steps it is {step * config.data.accumulate}")
    check_weights(saved["model"], model.state_dict())
    _check_optimizer(saved["optimizer"], optimizer, step)
    _check_run_state(saved["run_state"], run_state, step, position)


def optimizer_state(saved: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Return the saved state, that `check` has seen, with the options that follow from the device taken from here."""
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    return {**saved, "param_groups": [theirs | {key: ours[key] for key in OF_THE_DEVICE} for ours, theirs in groups]}


def check_weights(saved: Any, own: dict[str, Tensor]) -> None:
    """Raise ValueError unless `saved` has the tensors of a model's state, all plain or sharded as its own.

    Raises:
        ValueError: a name, kind, shape or dtype differs, and is named.
    """
    if not isinstance(saved, dict):
        raise ValueError(f"model: a {type(saved).__name__}, not a dict of tensors")
    for name in sorted({*own} ^ {*saved}, key=str):
        raise ValueError(f"model: {str(name)[:80]!r} is on one side only, {'here' if name in own else 'there'}")
    for name, ours in own.items():
        theirs = saved[name]
        is_plain = type(theirs) in (Tensor, nn.Parameter) and theirs.layout == torch.strided
        is_plain = is_plain and theirs.device.type in ("cpu", ours.device.type)
        if not is_plain and not (type(theirs) is type(ours) and is_sharded(ours)):
            raise ValueError(f"model: {name!r} is no plain tensor")
        found, expected = ((t.dtype, list(t.shape)) for t in (theirs, ours))
        if found != expected:
            raise ValueError(f"model: {name!r} is {found[0]} {found[1]}, here {expected[0]} {expected[1]}")
        _check_finite(f"model: {name!r}", theirs)


def _check_optimizer(saved: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Compare the options with those of this run, and the state with what its optimizer keeps after `step` steps."""
    try:
        here = optimizer_state(saved, optimizer) if isinstance(saved, dict) else saved
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        here = saved  # and the next line says what is wrong with it
    check_optimizer_state(optimizer, here, steps=step, is_complete=True)
    for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, here["param_groups"], strict=True)):
        for name in sorted((ours.keys() & theirs.keys()) - {"params", *OF_THE_DEVICE}):
            if ours[name] != (tuple(theirs[name]) if isinstance(ours[name], tuple) else theirs[name]):
                raise ValueError(f"optimizer: group {number} has {name}={theirs[name]!r}, this run {ours[name]!r}")
    for index, values in saved["state"].items():
        if float(values["step"]) != min(step, 1 << 24):  # where a count in float32 ends
            raise ValueError(f"optimizer: parameter {index} has made {float(values['step'])} steps, the run {step}")
        _check_finite(f"optimizer: 'exp_avg' of parameter {index}", values["exp_avg"])
        if not bool((parallel.local(values["exp_avg_sq"]) >= 0).all()):  # NaN is not
            raise ValueError(f"optimizer: 'exp_avg_sq' of parameter {index} holds numbers below 0, or NaN")


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(parallel.local(tensor)).all()):
        raise ValueError(f"{name} holds numbers that are not finite: the run had diverged, or the file is damaged")


def _check_run_state(saved: Any, own: RunState, step: int, position: int) -> None:
    trial = copy.deepcopy(own)  # which refuses what `own` would
    trial.load_state_dict(saved)
    begun = step if "step" in saved or own.schedule is not None else 0  # checkpoints were once without it
    if (trial.seed, trial.position, trial.step) != (own.seed, position, begun):
        found = f"seed={trial.seed}, position={trial.position}, step={trial.step}"
        raise ValueError(f"run_state: {found}; expected are {own.seed}, {position}, {begun}")


def as_shards(saved: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return what one process saved, and `check` has seen, as this rank holds it: tensors of DTensors' shape as theirs.

    Args:
        saved: with whole tensors or, already, with DTensors.
        model, optimizer: of the run that is to go on.
    """
    own = model.state_dict()
    tensors = {name: parallel.sharded_like(tensor, own[name]) for name, tensor in saved["model"].items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [index for group in saved["optimizer"]["param_groups"] for index in group["params"]]
    states = {
        index: {
            key: parallel.sharded_like(value, parameter) for key, value in saved["optimizer"]["state"][index].items()
        }
        for index, parameter in zip(numbers, parameters, strict=True)
        if index in saved["optimizer"]["state"]
    }
    return saved | {"model": tensors, "optimizer": saved["optimizer"] | {"state": states}}
