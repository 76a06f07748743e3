"""Sums and means over tokens, and x quantized without its mean (docs/numerics.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.arithmetic import residual_dtype
from halfbyte.layout import Blocks
from halfbyte.ops.define import DRAW, implementation, op, uncast
from halfbyte.ops.grouped import check_offsets
from halfbyte.ops.quantization import asked_of, both_blocks, checked_arguments, outputs, row_col_fake
from halfbyte.ops.repeat import call_op
from halfbyte.sides import Side


def token_sum(x: Tensor, backend: str | None = None) -> Tensor:
    """Return the sum of each column of x [M, K], fp32 [K]."""
    return call_op(torch.ops.halfbyte.token_sum, x, backend or "")


def token_mean(x: Tensor, backend: str | None = None) -> Tensor:
    """Return the mean of each column of x [M, K]: [K], bf16 if x is bf16, else fp32."""
    return call_op(torch.ops.halfbyte.token_mean, x, backend or "")


def amax_with_product(
    w: Tensor, a: Tensor, bias: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the finite amax of w [N, K], fp32 [], and a @ w.T + bias of a row a [K], fp32 [N]."""
    return call_op(torch.ops.halfbyte.amax_with_product, w, a, bias, backend or "")


def grouped_token_sum(x: Tensor, offsets: Tensor, backend: str | None = None) -> Tensor:
    """Return the sum of each column of every group of tokens x [M, N]: fp32 [E, N], +0 for a group without tokens.

    Raises:
        TypeError, ValueError: offsets is no integer tensor [E] on x's device.
    """
    check_offsets(offsets, x)
    return call_op(torch.ops.halfbyte.grouped_token_sum, x, offsets, backend or "")


def quantize_residual(
    x: Tensor, mean: Tensor, row: Side | None, col: Side | None, backend: str | None = None
) -> tuple[Blocks | None, Blocks | None]:
    """Return what `quantize_row_col` does of x without its mean.

    Args:
        x: [M, K].
        mean: [K], of `token_mean`.
        row, col: as for `quantize_row_col`.

    Raises:
        TypeError, ValueError: as `quantize_row_col` does.
    """
    arguments = checked_arguments(x, (row, col), backend)
    return both_blocks(call_op(torch.ops.halfbyte.quantize_residual, x, mean, *arguments), (row, col))


def quantize_with_sum(
    x: Tensor, row: Side | None, col: Side | None, backend: str | None = None
) -> tuple[Blocks | None, Blocks | None, Tensor]:
    """Return what `quantize_row_col` does of x [M, K], and the sum of its columns, fp32 [K].

    Raises:
        TypeError, ValueError: as `quantize_row_col` does.
    """
    arguments = checked_arguments(x, (row, col), backend)
    *made, total = call_op(torch.ops.halfbyte.quantize_with_sum, x, *arguments)
    return *both_blocks(tuple(made), (row, col)), total


def _amax_with_product(w, a, bias, backend) -> tuple[Tensor, Tensor]:
    with uncast(w.device):
        return implementation(w.device, backend).amax_with_product(w, a, bias)


def _token_sum(x, backend) -> Tensor:
    return implementation(x.device, backend).token_sum(x)


def _grouped_token_sum(x, offsets, backend) -> Tensor:
    return implementation(x.device, backend).grouped_token_sum(x, offsets)


def _token_mean(x, backend) -> Tensor:
    return implementation(x.device, backend).token_mean(x)


def _quantize_residual(x, mean, *arguments) -> tuple[Tensor, ...]:
    asked, given, shared = asked_of(x, arguments)
    both = implementation(x.device, arguments[-1]).quantize_residual(x, mean, *asked)
    return outputs(x, both, given, shared)


def _quantize_with_sum(x, *arguments) -> tuple[Tensor, ...]:
    asked, given, shared = asked_of(x, arguments)
    *both, total = implementation(x.device, arguments[-1]).quantize_with_sum(x, *asked)
    return *outputs(x, tuple(both), given, shared), total


op(
    "amax_with_product(Tensor w, Tensor a, Tensor? bias, str backend) -> (Tensor, Tensor)",
    _amax_with_product,
    lambda w, a, bias, backend: (w.new_empty((), dtype=torch.float32), w.new_empty(w.shape[0], dtype=torch.float32)),
    lambda w_shape, *rest, out_shape=None, **named: 2 * w_shape[0] * w_shape[1],
)
op(
    "token_sum(Tensor x, str backend) -> Tensor",
    _token_sum,
    lambda x, backend: x.new_empty(x.shape[1], dtype=torch.float32),
)
op(
    "token_mean(Tensor x, str backend) -> Tensor",
    _token_mean,
    lambda x, backend: x.new_empty(x.shape[1], dtype=residual_dtype(x.dtype)),
)
op(
    "grouped_token_sum(Tensor x, Tensor offsets, str backend) -> Tensor",
    _grouped_token_sum,
    lambda x, offsets, backend: x.new_empty(offsets.shape[0], x.shape[1], dtype=torch.float32),
)
_BOTH = (
    f"str row_key, str col_key, {DRAW}, Tensor? row_amax, Tensor? col_amax, str scale_layout, bool row_transient, "
    "bool col_transient, str backend"
)
op(
    f"quantize_residual(Tensor x, Tensor mean, {_BOTH}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_residual,
    lambda x, mean, *arguments: row_col_fake(x, *arguments),
)
op(
    f"quantize_with_sum(Tensor x, {_BOTH}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_with_sum,
    lambda x, *arguments: (*row_col_fake(x, *arguments), x.new_empty(x.shape[1], dtype=torch.float32)),
)
