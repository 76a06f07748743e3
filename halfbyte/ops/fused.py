"""Norms and activations on plain matrices, with the amaxes that quantizing their output needs (docs/fused.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.ops import fused_library as _library  # noqa: F401  defines torch.ops.halfbyte.norm, …
from halfbyte.ops.backends import check_reference
from halfbyte.ops.repeat import call_op
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec


class NormKind(NamedTuple):
    """eps added to the variance; centered: LayerNorm, whose mean is subtracted, rather than RMSNorm."""

    eps: float
    centered: bool


class Amaxes(NamedTuple):
    """The amaxes of one tensor's two orientations; None is left to the quantize kernels."""

    row: Tensor | None = None
    col: Tensor | None = None


class Following(NamedTuple):
    """How a tensor will be quantized next: the specs of both orientations, and where fresh signs are drawn."""

    row: Spec | None = None
    col: Spec | None = None
    sign_draw: Draw | None = None

    @property
    def arguments(self) -> tuple:
        """What the ops take: row, col_key, sign_rng, sign_stream.

        Left to the quantize kernels, "" here: the amax of a row operand that is rotated, of a column operand with one
        amax per row of it, and of tiles that both orientations share.
        """
        row = col = ""
        if isinstance(self.row, NVFP4) and self.row.rotation is None:
            row = self.row.outer
        shared = self.row == self.col and isinstance(self.row, NVFP4) and self.row.is_tile
        if isinstance(self.col, NVFP4) and self.col.outer == "tensor" and not shared:
            col = self.col.key
        fresh = bool(col) and isinstance(self.col, NVFP4) and self.col.needs_sign_rng
        place = (self.sign_draw.base, self.sign_draw.stream) if fresh and self.sign_draw is not None else (None, 0)
        return row, col, *place

    def known(self, row: Tensor, col: Tensor) -> Amaxes:
        """Return what an op computed, None where it computed nothing."""
        wants_row, wants_col = self.arguments[:2]
        return Amaxes(row if wants_row else None, col if wants_col else None)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: NormKind,
    dtype: torch.dtype,
    following: Following = Following(),  # noqa: B008  a frozen value
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Amaxes]:
    """Return ((x - mean) * rstd) * weight + bias, (mean, rstd) for the backward, and the amaxes of the result.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        weight, bias: [cols]; bias may be None.
        kind: RMSNorm or LayerNorm.
        dtype: of the result.
        following: how the result will be quantized.
    """
    y, mean, rstd, *amaxes = call_op(
        torch.ops.halfbyte.norm, x, weight, bias, *kind, dtype, *following.arguments, backend or ""
    )
    return y, (mean, rstd), following.known(*amaxes)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, Tensor],
    centered: bool,
    has_bias: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx of x's dtype and the gradients of weight and bias, fp32 [cols]; bias's is empty without one."""
    return call_op(torch.ops.halfbyte.norm_backward, dy, x, weight, *statistics, centered, has_bias, backend or "")


def split_mean(x: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Return a matrix without the mean of each column, fp32 [M, K], and these means, fp32 [K].

    Raises:
        ValueError: a backend would run that has no kernel for it.
    """
    check_reference("activation_mean='split'", x.device, backend)
    return call_op(torch.ops.halfbyte.split_mean, x, backend or "")


def activation(
    x: Tensor,
    up: Tensor | None,
    function: str,
    following: Following = Following(),  # noqa: B008
    backend: str | None = None,
) -> tuple[Tensor, Amaxes]:
    """Return h = f(x), or f(x) * up, of x's dtype, and its amaxes.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], the gate if there is an `up`.
        up: as x, or None.
        function: one of halfbyte.arithmetic.FUNCTIONS.
        following: how h will be quantized.
    """
    h, *amaxes = call_op(torch.ops.halfbyte.activation, x, up, function, *following.arguments, backend or "")
    return h, following.known(*amaxes)


def activation_backward(
    dh: Tensor,
    x: Tensor,
    up: Tensor | None,
    function: str,
    following: Following = Following(),  # noqa: B008
    backend: str | None = None,
) -> tuple[tuple[Tensor, Tensor | None], tuple[Amaxes, Amaxes]]:
    """Return the gradients of x and `up`, and the amaxes of each."""
    dx, dup, *amaxes = call_op(
        torch.ops.halfbyte.activation_backward, dh, x, up, function, *following.arguments, backend or ""
    )
    both = following.known(*amaxes[:2]), following.known(*amaxes[2:])
    return (dx, None if up is None else dup), both
