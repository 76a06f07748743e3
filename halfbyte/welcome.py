"""What `halfbyte` says without arguments: what can be done here, given this machine."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import NamedTuple

from halfbyte.version import __version__

EXTRA = ("matplotlib", "numpy", "rich", "tensorboard", "tokenizers", "tyro")
COMPARED = Path("runs/compare")


class Here(NamedTuple):
    """What matters of a machine: its GPU, "" for none; the backends that run; missing packages; what lies about."""

    gpu: str
    backends: tuple[str, ...]
    missing: tuple[str, ...]
    is_checkout: bool
    comparison: str


def look() -> Here:
    """Look at this machine and this folder."""
    import torch

    import halfbyte as hb

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return Here(
        gpu=gpu,
        backends=tuple(backend.name for backend in hb.backends() if backend.available),
        missing=tuple(name for name in EXTRA if importlib.util.find_spec(name) is None),
        is_checkout=(Path(__file__).resolve().parent.parent / "bench" / "run.py").exists(),
        comparison="" if not COMPARED.exists() else "done" if (COMPARED / "losses.png").exists() else "begun",
    )


def welcome_text(here: Here) -> str:
    """Return what can be done on a machine: a sentence about it, then commands with what they give."""
    commands = [
        *_training(here),
        *_checking(here),
        ("halfbyte env", "versions, devices, and why a backend does not run here"),
    ]
    width = max(len(command) for command, _ in commands)
    listed = [f"  {command:<{width}}  {about}" for command, about in commands]
    last = "All commands: halfbyte --help; all options of one: halfbyte COMMAND --help."
    return "\n".join((f"halfbyte {__version__}: {_machine(here)}", "", "What you can do here:", "", *listed, "", last))


def _machine(here: Here) -> str:
    if not here.gpu:
        return f"no GPU is visible, so the reference runs, in plain torch on this {platform.machine()} CPU."
    if "native" in here.backends:
        return f"{here.gpu}: GEMMs on FP4 tensor cores, quantization by Triton kernels."
    if "triton" in here.backends:
        return f"{here.gpu}: Triton kernels; GEMMs are emulated exactly, at the speed of bf16."
    return f"{here.gpu}: the reference runs, in plain torch; halfbyte env says why the kernels do not."


def _training(here: Here) -> list[tuple[str, str]]:
    if here.missing:
        return [
            ("pip install 'halfbyte[train]'", f"first, for train and compare: {', '.join(here.missing)} is missing")
        ]
    again = {"begun": f"goes on with {COMPARED}", "done": f"shows the table of {COMPARED} again"}.get(here.comparison)
    where = "on this GPU" if "triton" in here.backends else "on two cores"
    found = [("halfbyte compare", again or f"five recipes on a small model: a table, a picture; minutes {where}")]
    if "triton" in here.backends:
        found.append(
            (
                "halfbyte compare --preset one_gpu --out runs/one_gpu",
                "the same at 60M parameters: an evening on one GPU",
            )
        )
    return [
        *found,
        ("halfbyte train --recipe nvfp4 --corpus FILE", "one recipe on your text: text, JSON Lines or Parquet"),
    ]


def _checking(here: Here) -> list[tuple[str, str]]:
    what = (
        "every kernel against the reference, byte for byte"
        if "triton" in here.backends
        else "the reference, in seconds"
    )
    found = [("halfbyte verify", what)]
    if "triton" in here.backends and here.is_checkout:
        found.append(("halfbyte bench --quick", "speeds of every kernel beside this machine's ceilings: two minutes"))
    if "triton" in here.backends:
        found.append(
            ("halfbyte explain 8192x4096 nvfp4 nvfp4", "which kernels a call launches, with which tiles, and why")
        )
    if not here.missing:
        found.append(("halfbyte plan --model llama3-8b --gpus 8", "memory and time of a run elsewhere; needs no GPU"))
    return found
