"""The dtype that autocast gives to GEMMs on a device."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on `device`, None where it is off; torch raises for meta tensors, which have none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
