"""The dtype that autocast gives to GEMMs on a device, and the cast of what they read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on `device`, None where it is off; torch raises for meta tensors, which have none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast_inputs(
    dtype: torch.dtype,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    covered: Sequence[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Cast what the GEMMs will read; of a covered weight they read nothing."""
    weights = [w if is_covered else w.to(dtype) for w, is_covered in zip(weights, covered, strict=True)]
    return x.to(dtype), weights, [None if b is None else b.to(dtype) for b in biases]
