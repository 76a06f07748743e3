"""Which backend runs an operation, and why (docs/recipes.md): chosen from the device, overridable by argument."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.types import Device

from halfbyte.formats import MXFP8_E4M3, MXFP8_E5M2, NVFP4_E2M1
from halfbyte.kernels.target import HIP, find
from halfbyte.spec import Spec, parse

REFERENCE, TRITON, NATIVE = "reference", "triton", "native"
BACKENDS = (REFERENCE, TRITON, NATIVE)
KERNEL_FORMATS = (NVFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2)
"""Blocks that kernels write and read; of any other they would take the bytes for one of these."""
PORTABLE = "portable"
"""Asks for Triton's kernels on a GPU where they are not chosen because nobody has compared their bytes there."""


@dataclass(frozen=True, kw_only=True)
class BackendStatus:
    """Whether a backend runs on a device, and the reason.

    casts: how its quantization converts to E2M1, and why not by the GPU's own conversions where it does not.
    """

    name: str
    available: bool
    reason: str
    casts: str = ""


def backends(device: Device = None) -> tuple[BackendStatus, ...]:
    """Say what runs on `device` and why not.

    Args:
        device: the device asked about; the first CUDA device if there is one, else the CPU.

    Returns:
        One status per backend, the preferred last.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    reference, *others = _statuses(device)
    return reference, *(replace(status, casts=_casts(device)) if status.available else status for status in others)


def _statuses(device: torch.device) -> tuple[BackendStatus, ...]:
    return (
        BackendStatus(name=REFERENCE, available=True, reason="plain torch runs on every device"),
        _triton_status(device),
        _native_status(device),
    )


def _no_gpu(device: torch.device) -> str | None:
    """Say why Triton finds no GPU at `device`, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda":
        return f"Triton kernels need a CUDA GPU, not {device.type}"
    return None if torch.cuda.is_available() else "no CUDA GPU is visible"


def _triton_status(device: torch.device) -> BackendStatus:
    reason = _no_gpu(device)
    if reason is None:
        target = find(device)
        reason = target.problem
        if reason is None:
            return BackendStatus(name=TRITON, available=True, reason=f"{target.name}, GEMMs emulated in bf16")
    return BackendStatus(name=TRITON, available=False, reason=reason)


def _native_status(device: torch.device) -> BackendStatus:
    triton = _triton_status(device)
    if not triton.available:
        return BackendStatus(name=NATIVE, available=False, reason=triton.reason)
    target = find(device)
    if not target.fp4_products:
        reason = f"{target.name} has no FP4 tensor cores; they came with sm_100"
        return BackendStatus(name=NATIVE, available=False, reason=reason)
    return BackendStatus(name=NATIVE, available=True, reason=f"{target.name}, GEMMs on FP4 and FP8 tensor cores")


def _portable_status(device: torch.device) -> BackendStatus:
    reason = _no_gpu(device)
    if reason is None:
        target = find(device)
        if target.problem is not None and target.backend == HIP:
            return BackendStatus(name=PORTABLE, available=True, reason=f"{target.name}, bytes not compared")
        reason = target.problem or f"the kernels of {target.name} run without it"
    return BackendStatus(name=PORTABLE, available=False, reason=reason)


def _casts(device: torch.device) -> str:
    from halfbyte.kernels.device import hardware_cast  # imports Triton, so only where it runs

    return hardware_cast.explain_conversions(device)


def _status(name: str, device_type: str, index: int | None) -> BackendStatus:
    device = torch.device(device_type, index) if index is not None else torch.device(device_type)
    if name == PORTABLE:
        return _portable_status(device)
    for status in _statuses(device):
        if status.name == name:
            return status
    raise AssertionError(f"backend {name} has no status")


_cached_status = lru_cache(maxsize=64)(_status)


def _available(name: str, device_type: str, index: int | None) -> BackendStatus:
    # torch.compile looks behind the cache, and warns that it does.
    return (_status if torch.compiler.is_compiling() else _cached_status)(name, device_type, index)


def choose(device: torch.device, backend: str | None) -> str:
    """Return the name of the backend that runs on `device`.

    Args:
        device: where the operands are.
        backend: a name that overrides the choice, or None. PORTABLE runs Triton's kernels on an AMD GPU.

    Raises:
        ValueError: the backend asked for does not exist or does not run there.
    """
    if backend is None:
        for name in (NATIVE, TRITON):
            if _available(name, device.type, device.index).available:
                return name
        return REFERENCE
    if backend not in (*BACKENDS, PORTABLE):
        names = ", ".join(map(repr, (*BACKENDS, PORTABLE)))
        raise ValueError(f"backend={backend!r}: use one of {names}, or None to choose")
    status = _available(backend, device.type, device.index)
    if not status.available:
        raise ValueError(f"backend={backend!r}: {status.reason}; use backend=None to choose what runs here")
    return TRITON if backend == PORTABLE else backend


def unread_by_kernels(spec: Spec | None) -> str | None:
    """Return a spec whose bytes only the reference reads, or None."""
    return None if spec is None or spec.format in KERNEL_FORMATS else repr(spec)


def without_kernel(spec: Spec | None) -> str | None:
    """Return what of a spec only the reference quantizes, or None; a rule without kernels is named here."""
    return unread_by_kernels(spec)


def check_kernels(specs: tuple[Spec | None, ...], device: torch.device, backend: str | None) -> None:
    """Raise ValueError if the backend that would run on `device` has no kernel that quantizes by a spec."""
    _check_missing(map(without_kernel, specs), device, backend)


def check_readers(spec: Spec | None, device: torch.device, backend: str | None) -> None:
    """Raise ValueError if the backend that would run on `device` cannot read bytes of a spec."""
    _check_missing((unread_by_kernels(spec),), device, backend)


def stored_spec(key: str, device: torch.device, backend: str) -> Spec:
    """Return the spec of codes that an op reads on `device`; raise ValueError if what runs there cannot read them."""
    spec = parse(key)
    check_readers(spec, device, backend or None)
    return spec


def _check_missing(missing: Iterable[str | None], device: torch.device, backend: str | None) -> None:
    for what in missing:
        if what is not None:
            check_reference(what, device, backend)


def check_reference(missing: str, device: torch.device, backend: str | None) -> None:
    """Raise ValueError unless the reference would run on `device`, which alone computes what is `missing`."""
    chosen = choose(device, backend)
    if chosen != REFERENCE:
        raise ValueError(
            f"{missing} has no kernel on backend {chosen!r}, which runs on {device}: give "
            "backend='reference', move the tensors to the CPU, or choose a spec with a kernel"
        )


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Report a slower or different path, once per process and reason."""
    warnings.warn(message, stacklevel=3)
