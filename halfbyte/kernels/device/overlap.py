"""Programmatic dependent launch: programs of a kernel take their places while the last ones of the kernel before run.

Such a kernel is launched with `launch_pdl` and begins with `begin`. It touches no memory before all that the kernels
before it wrote is visible, so nothing but the gap between two launches changes. From sm_90 on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.target import target_of

OVERLAP_CAPABILITY = tl.constexpr(90)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let programs of the next kernel start where there is room, and wait for the kernels before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def overlaps(device: torch.device) -> bool:
    """Say whether kernels on `device` are launched so."""
    return target_of(device).pdl


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the options with which a kernel that has a parameter OVERLAP is launched on `device`."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


def placed_early(hardware: int) -> dict[str, bool]:
    """Return the options of a launch whose kernel has a Rule of this `hardware`; AMD's compiler has none."""
    return {"launch_pdl": True} if hardware >= OVERLAP_CAPABILITY.value else {}
