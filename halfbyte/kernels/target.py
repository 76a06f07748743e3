"""What kernels are launched for: a GPU's compute capability and size, found from a tensor's device.

Recordings (`record`) say another one: they launch for GPUs that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Target:
    """A GPU.

    Args:
        capability: as in sm_90.
        multiprocessors: how many it has.
    """

    capability: int
    multiprocessors: int


_assumed: ContextVar[Target | None] = ContextVar("assumed target", default=None)


@lru_cache(maxsize=64)
def _found(device: torch.device) -> Target | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Target(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)


def target_of(device: torch.device) -> Target | None:
    """Return the GPU that kernels on `device` are launched for; None for Triton's interpreter."""
    return _assumed.get() or _found(device)


@contextmanager
def assumed(target: Target) -> Iterator[None]:
    """Let every launcher choose for `target`, whatever the device: for recordings."""
    token = _assumed.set(target)
    try:
        yield
    finally:
        _assumed.reset(token)
