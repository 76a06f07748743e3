"""The bias of each group of a grouped linear layer: checked, and added to the rows of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def check_bias(bias_EN: Tensor | None, w_ENK: Tensor) -> None:
    """Raise ValueError or TypeError unless the bias is None or one row of floating point for each expert."""
    if bias_EN is None:
        return
    if tuple(bias_EN.shape) != tuple(w_ENK.shape[:2]):
        raise ValueError(f"bias_EN.shape={tuple(bias_EN.shape)}: w_ENK needs {tuple(w_ENK.shape[:2])}")
    if not bias_EN.is_floating_point():
        raise TypeError(f"bias_EN.dtype={bias_EN.dtype}: give a float dtype, such as {w_ENK.dtype}")
    if bias_EN.device != w_ENK.device:
        raise ValueError(f"bias_EN.device={bias_EN.device}, w_ENK.device={w_ENK.device}: move one of them")


def with_bias(y_MN: Tensor, bias_EN: Tensor, offsets: Tensor) -> Tensor:
    """Return fp32 y plus the bias of each token's group; tokens behind the last group stay as they are."""
    token = torch.arange(y_MN.shape[0], device=offsets.device, dtype=offsets.dtype)
    group = torch.searchsorted(offsets, token, right=True)
    rows = pad(bias_EN.float(), (0, 0, 0, 1))  # one more, +0, for the tokens of no group
    return y_MN + rows[group]
