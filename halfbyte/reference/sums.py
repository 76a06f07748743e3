"""Sums of statistics, fp64 (docs/statistics.md): what operands and products lost, and outliers of every column."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.arithmetic import CLIPPED, ERROR_SUMS, OPERAND_SUMS
from halfbyte.layout import Operand, blocks_per_row
from halfbyte.reference.hadamard import rotate_by
from halfbyte.reference.matmul import dequantize
from halfbyte.reference.scale import global_scale


def _norm(t: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(t, order, dtype=torch.float64)


def _stacked(sums: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([sums[name].double() for name in names])


def error_sums(values: Tensor, restored: Tensor) -> Tensor:
    """Compare values v [R, C], any strides, with what was made of them, q [R, C]: the sums of `ERROR_SUMS`, fp64."""
    v, q = values.float(), restored.float()
    sums = {"signal": _norm(v).square(), "restored": _norm(q).square(), "noise": _norm(q - v).square()}
    return _stacked(sums, ERROR_SUMS)


def operand_sums(
    values: Tensor, operand: Operand, signs: Tensor | None = None, with_maxima: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compare values v, rotated if `signs` are given, with what an operand's codes stand for, q.

    Args:
        values: [R, C], any strides.
        operand: made of them, with LINEAR scales; of its padding v is 0.
        signs: fp32 [size]: of the rotation, whose size it gives.
        with_maxima: whether those of blocks are asked for.

    Returns:
        The sums of `OPERAND_SUMS`, fp64; the largest |v|, fp64 []; and the largest |v| of every block, fp32
        [R, blocks], or None.
    """
    blocks, spec, _, _ = operand
    shape = blocks.qdata.shape[0], blocks_per_row(blocks.qdata, spec)
    if not blocks.qdata.numel():
        nothing = torch.zeros(len(OPERAND_SUMS) + 1, dtype=torch.float64, device=values.device)
        return (
            nothing[1:],
            nothing[0],
            torch.zeros(shape, device=values.device, dtype=torch.float32) if with_maxima else None,
        )
    v, q = _compared(values, operand, signs)
    d, nonzero = q - v, torch.count_nonzero(v)
    magnitudes, is_empty = v.abs().unflatten(1, (shape[1], -1)), blocks.block_scale.view(torch.uint8) == 0
    maxima = magnitudes.amax(2)
    filled = maxima > 0
    bounds = _bounds(operand).masked_fill_(is_empty, torch.inf)
    sums = {
        "signal": _norm(v).square(),
        "noise": _norm(d).square(),
        "magnitude": _norm(v, 1),
        "deviation": _norm(d, 1),
        "nonzero": nonzero,
        "underflow": nonzero - torch.count_nonzero(torch.where(v == 0, 0.0, q)),
        "saturated": torch.count_nonzero(magnitudes > bounds[..., None]),
        "blocks": torch.count_nonzero(filled),
        "scale_underflow": torch.count_nonzero(filled & is_empty),
    }
    return _stacked(sums, OPERAND_SUMS), maxima.amax().double(), maxima if with_maxima else None


def operand_noise(values: Tensor, operand: Operand, signs: Tensor | None = None) -> Tensor:
    """Return the noise of `operand_sums` alone, fp64 []."""
    if not operand.blocks.qdata.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    v, q = _compared(values, operand, signs)
    return _norm(q - v).square()


def _compared(values: Tensor, operand: Operand, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return v and q, fp32 [R, padded columns]."""
    blocks, spec, _, _ = operand
    wide = blocks_per_row(blocks.qdata, spec) * spec.block_length
    v = values.float() if signs is None else rotate_by(values, signs).float()
    return pad(v, (0, wide - v.shape[1])), dequantize(operand._replace(cols=wide), torch.float32)


def _bounds(operand: Operand) -> Tensor:
    """Return the magnitude that a saturated value of each block exceeds, fp32 [R, blocks]."""
    blocks, spec, _, _ = operand
    most = CLIPPED * spec.format.element.max
    if not spec.format.has_amax:
        return torch.exp2(blocks.block_scale.float() - spec.format.scale.bias) * most
    factor = global_scale(blocks.amax, spec) * most
    return blocks.block_scale.view(torch.float8_e4m3fn).float() * (factor[:, None] if spec.has_row_amax else factor)


def square_sum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the squares of values [R, C], and their largest magnitude, both fp64 []."""
    if not values.numel():
        nothing = torch.zeros(2, dtype=torch.float64, device=values.device)
        return nothing[0], nothing[1]
    return _norm(values).square(), torch.linalg.vector_norm(values, torch.inf).double()


def column_outliers(values: Tensor, limit: Tensor) -> Tensor:
    """Return how many magnitudes of each column of values [R, C] exceed `limit`, fp64 []: fp64 [C]."""
    return (values.abs().double() > limit).sum(0).double()  # beside bf16 the limit would be rounded to bf16
