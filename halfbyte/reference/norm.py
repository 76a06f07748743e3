"""RMSNorm and LayerNorm with every rounding fixed (halfbyte/arithmetic.py): fp32 inside, one rounding at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.arithmetic import GROUP_LANES, LANES, ROW_GROUP, Normed
from halfbyte.formats import f32
from halfbyte.layout import round_up


class Statistics(NamedTuple):
    """fp32 [rows]: the mean (empty for RMSNorm) and 1 / sqrt(variance + eps)."""

    mean: Tensor
    rstd: Tensor


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Statistics]:
    """Return ((x - mean) * rstd) * weight + bias; RMSNorm is not centered: mean 0.

    Args:
        x: [rows, cols].
        weight, bias: [cols]; bias may be None.
        eps: added to the variance.
        centered: LayerNorm rather than RMSNorm.
        dtype: of the result.
    """
    x = x.float().contiguous()
    count = torch.full((), float(x.shape[1]), device=x.device, dtype=torch.float32)
    mean = row_sum(x) / count if centered else x.new_empty(0)
    d = x - mean[:, None] if centered else x
    variance = row_sum(d * d) / count
    # In fp64, whose rounding disappears in that to fp32: torch's fp32 square root is not always correctly rounded.
    rstd = torch.ones_like(variance) / (variance + f32(eps)).double().sqrt().float()
    y = (d * rstd[:, None]) * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype), Statistics(mean, rstd)


def norm_backward(dy: Tensor, normed: Normed, dtotal: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx of x's dtype and the gradients of weight and bias, fp32 [cols]; bias's is empty without one.

    Args:
        dy: of the norm, [rows, cols].
        normed: statistics as `norm` returned them.
        dtotal: another gradient of x, of its dtype, which is added to dx once that is rounded; or None.
    """
    x, weight, statistics, centered, has_bias = normed
    dtype, mean, rstd = x.dtype, statistics[0], statistics[1][:, None]
    x, dy = x.float().contiguous(), dy.float().contiguous()
    normal = (x - mean[:, None] if centered else x) * rstd
    g = dy * weight.float()
    count = torch.full((), float(x.shape[1]), device=x.device, dtype=torch.float32)
    along = (row_sum(g * normal) / count)[:, None]
    rest = g - (row_sum(g) / count)[:, None] if centered else g
    dx = (rest - normal * along) * rstd
    dx = dx.to(dtype) if dtotal is None else dx.to(dtype) + dtotal
    return dx.contiguous(), column_sum(dy * normal), column_sum(dy) if has_bias else dy.new_empty(0)


def row_sum(values: Tensor) -> Tensor:
    """Return the sum of each row, fp32 [rows], in the order of halfbyte/arithmetic.py."""
    rows, cols = values.shape
    lanes = pad(values, (0, round_up(cols, LANES) - cols)).view(rows, round_up(cols, LANES) // LANES, LANES)
    return _meet(_in_order(lanes, 1), 1).view(rows)


def column_sum(values: Tensor) -> Tensor:
    """Return the sum of each column, fp32 [cols], in the order of halfbyte/arithmetic.py."""
    rows, cols = values.shape
    padded = round_up(rows, ROW_GROUP)
    groups = _in_order(pad(values, (0, 0, 0, padded - rows)).view(padded // ROW_GROUP, ROW_GROUP, cols), 1)
    count = round_up(groups.shape[0], GROUP_LANES)
    lanes = pad(groups, (0, 0, 0, count - groups.shape[0])).view(count // GROUP_LANES, GROUP_LANES, cols)
    return _meet(_in_order(lanes, 0), 0).view(cols)


def _in_order(terms: Tensor, dim: int) -> Tensor:
    total = terms.new_zeros([size for d, size in enumerate(terms.shape) if d != dim])
    for term in terms.unbind(dim):
        total = total + term
    return total


def _meet(lanes: Tensor, dim: int) -> Tensor:
    while lanes.shape[dim] > 1:
        even, odd = lanes.unflatten(dim, (-1, 2)).unbind(dim + 1)
        lanes = even + odd
    return lanes
