"""What calls of experts are refused for, before anything is computed or noted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.checks import check_main_grad
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.group_bias import check_bias
from halfbyte.functional.request import looks_of
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import check_value_dtype

_MAX_CHECKED = 4096

_CHECKED: set[tuple] = set()
"""Calls whose shapes, dtypes and options were found right: the latest."""


def check_alike(tensors: tuple[Any, ...], out_dtype: torch.dtype | None, is_covered: bool) -> None:
    """Check a call of experts, unless one that looks the same to the checks has passed them.

    Args:
        tensors: x, w_ENK, bias_EN, offsets and main_grad; after autocast's casts.
        out_dtype: as the caller gave it.
        is_covered: whether nothing is read of the weight but its cached operands.
    """
    x, w, bias, offsets, main_grad = tensors
    key = None
    if not torch.compiler.is_compiling():
        strides = main_grad.stride() if isinstance(main_grad, Tensor) else None
        key = (out_dtype, is_covered, strides, *[looks_of(t) for t in tensors])
        if key in _CHECKED:
            return
    refuse_foreign((("x", x), ("w_ENK", w), ("bias_EN", bias)))
    check_grouped_call(x, (w, bias), offsets, main_grad, is_covered)
    check_value_dtype("out_dtype", out_dtype or torch.float32, "name one of these and convert the result")
    if key is not None:
        if len(_CHECKED) >= _MAX_CHECKED:
            _CHECKED.clear()
        _CHECKED.add(key)


def refuse_what_is_no_tensor(x: object, w: object) -> None:
    """Raise TypeError where x or w_ENK is none."""
    for name, t in (("x", x), ("w_ENK", w)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}={t!r}: give a tensor, tokens [M, K] and experts [E, N, K]")


def check_tokens(x: Tensor, w: Tensor, offsets: Tensor) -> None:
    """Raise ValueError or TypeError where tokens, the weights of experts and the ends of groups do not fit."""
    for name, tensor in (("x", x), ("w_ENK", w)):
        if isinstance(tensor, QuantTensor) and not isinstance(tensor, PrimaryWeight):
            raise TypeError(
                f"{name} is a QuantTensor: grouped_linear quantizes it itself; pass {name}.dequantize() or use "
                "grouped_gemm_nt"
            )
    ops.check_offsets(offsets, x)
    if x.dim() != 2:
        raise ValueError(f"x.shape={tuple(x.shape)}: give tokens [M, in_features], sorted by expert")
    if w.dim() != 3 or w.shape[2] != x.shape[1] or w.shape[0] != offsets.shape[0]:
        raise ValueError(
            f"w_ENK.shape={tuple(w.shape)}: x.shape={tuple(x.shape)} and {offsets.shape[0]} offsets need "
            f"[{offsets.shape[0]}, out_features, {x.shape[1]}]"
        )
    if w.device != x.device:
        raise ValueError(f"w_ENK.device={w.device}, x.device={x.device}: move one of them")


def check_grouped_call(x: Tensor, experts: tuple, offsets: Tensor, main_grad: Tensor | None, is_covered: bool) -> None:
    """Raise ValueError or TypeError where shapes, dtypes or devices of a call do not fit; after autocast's casts."""
    w, bias = experts
    check_tokens(x, w, offsets)
    if main_grad is not None:
        check_main_grad(main_grad, w.shape, x.device)
    check_bias(bias, w)
    if w.dtype != x.dtype and not is_covered:
        raise TypeError(f"w_ENK.dtype={w.dtype}, x.dtype={x.dtype}: cast one of them, or use torch.autocast")
