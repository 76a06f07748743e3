"""What a run was computed with: kept with its checkpoints and its result, and said where it is not what runs now."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from halfbyte.train import measure
from halfbyte.train.mesh_config import MeshConfig

COMPARED = ("halfbyte", "torch", "machine", "device", "threads", "dtype", "mesh")
"""What losses may depend on in their last bits; threads on a CPU alone, mesh only where several processes train."""
ALONE = MeshConfig().in_words()


def own(device: torch.device, dtype: torch.dtype, mesh: MeshConfig) -> dict:
    """Return what this process computes with, and with how many others."""
    facts = measure.environment(device) | {"dtype": str(dtype).removeprefix("torch.")}
    if mesh.size > 1:
        facts["mesh"] = mesh.in_words()
    if device.type != "cpu":
        del facts["threads"]
    return {key: facts[key] for key in COMPARED if key in facts}


def problem(history: object) -> str:
    """Say why `history` is no list of environments, each with the step from which it held; "" if it is one."""
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        return "environments: not a list of objects"
    for entry in history:
        for key in ("step", *COMPARED):
            kind = int if key in ("step", "threads") else str
            if key in entry and (type(entry[key]) is not kind or (kind is int and entry[key] < 0)):
                return f"environments: {key}={str(entry[key])[:40]!r} is not what a run notes"
    return ""


def changes(history: list[dict], now: dict) -> str:
    """Return what differs between the environments of a run, none if that is not known, and `now`; "" for nothing."""
    found: list[str] = []
    for entry in history or [{}]:
        if "mesh" in entry.keys() | now.keys():
            entry, now = ({"mesh": ALONE, **facts} for facts in (entry, now))
        for key, value in now.items():
            text = f"{key} {entry.get(key, 'of an unknown version' if key == 'halfbyte' else 'unknown')} there"
            if entry.get(key) != value and f"{text}, {value} here" not in found:
                found.append(f"{text}, {value} here")
    return "; ".join(found)


def say_kept(folder: Path, history: list[dict], now: dict) -> None:
    """Print a line if the result in `folder` was not computed with what runs now."""
    differing = changes(history, now)
    if differing:
        print(f"{folder}: the result found there is kept ({differing}); --overwrite trains again", file=sys.stderr)


def resumed(folder: Path, step: int, history: list[dict], now: dict) -> list[dict]:
    """Return `history` and, if the run goes on with something else than before, `now`; then print a line too.

    Args:
        folder, step: the run, and where it goes on.
        history: its environments so far, none if they are not known.
        now: the present one, with the key "step".
    """
    differing = changes(history[-1:], {key: value for key, value in now.items() if key != "step"})
    if not differing:
        return history
    print(
        f"{folder}: goes on from step {step}, but not with the bits of an undisturbed run ({differing}); "
        "--overwrite starts anew",
        file=sys.stderr,
    )
    return [*(history or [{"step": 0}]), {**now, "step": step}]
