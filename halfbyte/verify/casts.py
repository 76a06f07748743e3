"""The self-test of the GPU's own E2M1 conversions: 65,536 values beside our arithmetic."""

from __future__ import annotations

import time

import torch

from halfbyte.kernels.target import find
from halfbyte.verify import record
from halfbyte.verify.record import Check


def casts(device: torch.device) -> list[Check]:
    """Compare every conversion that `device` has; one that quantize does not use may differ, which is reported."""
    if device.type != "cuda":
        return [_check("", record.NOT_RUN, "no GPU is visible")]
    from halfbyte.kernels.device import hardware_cast  # imports Triton, so only where it runs

    found = hardware_cast.conversions(device)
    if not found:
        reason = f"{find(device).name} has no E2M1 conversion; it came with sm_100"
        return [_check("", record.NOT_RUN, reason)]
    checks = []
    for name, used in found.items():
        start = time.perf_counter()
        ours, theirs = hardware_cast.compare(device, name)
        count = int((ours != theirs).sum())
        detail = f"{count} of {ours.numel()} words of 8 codes differ" if count else ""
        outcome = record.PASSED if not count else record.FAILED if used else record.NOT_RUN
        checks.append(_check(name, outcome, detail if used or not count else f"{detail}; not used", start))
    return checks


def _check(name: str, outcome: record.Outcome, detail: str, start: float | None = None) -> Check:
    seconds = 0.0 if start is None else time.perf_counter() - start
    return Check(group=record.HARDWARE_CAST, name=name, outcome=outcome, detail=detail, seconds=seconds)
