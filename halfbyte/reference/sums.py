"""Sums of statistics, fp64 (docs/statistics.md): what a quantized tensor lost, and outliers of every column."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.arithmetic import ERROR_SUMS
from halfbyte.reference.hadamard import rotate_by


def _norm(t: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(t, order, dtype=torch.float64)


def error_sums(
    values: Tensor, restored: Tensor, bounds: Tensor | None = None, signs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compare values v, rotated if `signs` are given, with what was made of them, q.

    Args:
        values: [R, C], any strides.
        restored: q, [R, C], with columns of padding behind them, where v is 0.
        bounds: fp32 [R, blocks]: the magnitude that a value of each block exceeds if it is saturated.
        signs: fp32 [size]: of the rotation, whose size it gives.

    Returns:
        The sums of `ERROR_SUMS`, fp64; and the largest |v| of every block, fp32 [R, blocks], None without `bounds`.
    """
    if not restored.numel():
        return torch.zeros(len(ERROR_SUMS), dtype=torch.float64, device=values.device), bounds
    v = values.float() if signs is None else rotate_by(values, signs).float()
    v, q = pad(v, (0, restored.shape[1] - v.shape[1])), restored.float()
    d, nonzero = q - v, torch.count_nonzero(v)
    saturated, maxima = torch.zeros((), device=v.device), None
    if bounds is not None:
        magnitudes = v.abs().unflatten(1, (bounds.shape[1], -1))
        saturated, maxima = torch.count_nonzero(magnitudes > bounds[..., None]), magnitudes.amax(2)
    sums = {
        "signal": _norm(v).square(),
        "restored": _norm(q).square(),
        "noise": _norm(d).square(),
        "magnitude": _norm(v, 1),
        "deviation": _norm(d, 1),
        "nonzero": nonzero,
        "underflow": nonzero - torch.count_nonzero(torch.where(v == 0, 0.0, q)),
        "saturated": saturated,
    }
    return torch.stack([sums[name].double() for name in ERROR_SUMS]), maxima


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of the squares of values [R, C], fp64 []."""
    return _norm(values).square()


def column_outliers(values: Tensor, limit: Tensor) -> Tensor:
    """Return how many magnitudes of each column of values [R, C] exceed `limit`, fp64 []: fp64 [C]."""
    return (values.abs().double() > limit).sum(0).double()  # beside bf16 the limit would be rounded to bf16
