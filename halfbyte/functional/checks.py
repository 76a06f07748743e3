"""Checks that several functions make of the tensors that they are given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def check_devices(device: torch.device, others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ValueError unless tensors are where x is."""
    for name, other in others:
        if other is not None and other.device != device:
            raise ValueError(f"{name}.device={other.device}, x.device={device}: move one of them")


def check_main_grad(main_grad: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raise ValueError unless the gradient of a weight of this shape can be added to main_grad."""
    if main_grad.dtype != torch.float32 or main_grad.shape != shape:
        raise ValueError(f"main_grad is {main_grad.dtype} {tuple(main_grad.shape)}: give float32 {tuple(shape)}")
    check_devices(device, (("main_grad", main_grad),))
    refuse_overlap("main_grad", main_grad)


def refuse_overlap(name: str, written: Tensor) -> None:
    """Raise ValueError where elements of an output share memory: each would be written, and one would stay."""
    if any(step == 0 and size > 1 for size, step in zip(written.shape, written.stride(), strict=True)):
        raise ValueError(f"{name}.stride()={written.stride()}: elements share memory; give {name}.contiguous()")
