"""Where and with what a benchmark ran."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import halfbyte

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("triton", "torchao", "fouroversix", "nvidia-modelopt", "quartet2")


def facts(device: torch.device) -> dict[str, str | float]:
    """Return device, driver, versions, commit and time: what a reader of the figures needs."""
    values: dict[str, str | float] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "halfbyte": halfbyte.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            values[package] = metadata.version(package)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "capability": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "L2_MiB": round(properties.L2_cache_size / 2**20, 1),
            "cuda": str(torch.version.cuda),
            "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        }
    return values


class Place(NamedTuple):
    """A GPU, as CUDA_VISIBLE_DEVICES names it, or None where there is none, and the cores of what runs there."""

    gpu: str | None
    cores: tuple[int, ...]


def visible_gpus() -> list[str]:
    """Name the GPUs as CUDA_VISIBLE_DEVICES does; none where torch sees none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(index) for index in range(count)])[:count]


def places(gpus: Sequence[str | None], cores: Sequence[int]) -> list[Place]:
    """Return a place for every GPU, with its share of the cores: all of them where there are fewer cores than GPUs."""
    share = len(cores) // max(1, len(gpus))
    return [Place(gpu, tuple(cores[i * share : (i + 1) * share] or cores)) for i, gpu in enumerate(gpus)]


def commit(root: Path = ROOT) -> str:
    """Return a checkout's commit, with a + if files differ from it; "unknown" outside a checkout."""
    head = _run("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") else "")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
