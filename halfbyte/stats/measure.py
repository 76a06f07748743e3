"""What one operand, one tensor or one product adds to a ledger, computed where its values are.

The values are those that were quantized: of a rotated operand the rotated ones. They are worked on in chunks of rows,
so that temporaries stay small, and every sum is fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte import ops, reference
from halfbyte.layout import Blocks, Operand
from halfbyte.reference.scale import candidate_scale, global_scale, scale_bytes, tensor_factors
from halfbyte.sides import Side
from halfbyte.spec import FourOverSix, Hadamard, Spec
from halfbyte.stats.figures import CLIPPED, OUTLIER, SIDE_SUMS

CHUNK_ELEMENTS = 1 << 24
"""Of a chunk: 64 MiB in fp32."""

TILE = 16
"""Rows that share scales in tiles: chunks start at multiples of it."""


def _chunks(t: Tensor) -> Iterator[slice]:
    rows, cols = t.shape
    step = max(TILE, CHUNK_ELEMENTS // max(1, cols) // TILE * TILE)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _norm(t: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(t, order, dtype=torch.float64)


def values_of(t: Tensor, side: Side) -> Tensor:
    """Return what is quantized of t [R, C], fp32 [R, padded C]: rotated as the spec says."""
    if side.spec.rotation is not None:
        return reference.rotate(t, side.spec.rotation, side.sign_draw).float()
    return pad(t.float(), (0, -t.shape[1] % side.spec.alignment))


def values_of_codes(blocks: Blocks, spec: Spec, rows: slice) -> Tensor:
    """Return what the codes of some rows stand for, fp32, padding included."""
    amax = blocks.amax[rows] if spec.has_row_amax else blocks.amax
    part = Blocks(blocks.qdata[rows], blocks.block_scale[rows], amax)
    cols = part.qdata.shape[1] * spec.format.codes_per_byte
    return ops.dequantize(Operand(part, spec, cols), torch.float32)


def side_sums(t: Tensor, side: Side, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the sums of one operand, fp64 [len(SIDE_SUMS)], and the largest magnitude of its values, fp64 [].

    Args:
        t: [R, C], any strides, before rotation.
        side: how it was quantized.
        blocks: its bytes, with LINEAR scales.
    """
    other = _other(t, side)
    total = torch.zeros(len(SIDE_SUMS), dtype=torch.float64, device=t.device)
    largest = torch.zeros((), dtype=torch.float64, device=t.device)
    for rows in _chunks(t) if t.numel() else ():
        v, q = values_of(t[rows], side), values_of_codes(blocks, side.spec, rows)
        d = q - v
        limit = _limits(blocks, side.spec, rows)
        magnitudes = v.abs().unflatten(1, (-1, side.spec.block_length))
        maxima = magnitudes.amax(2)
        filled = maxima > 0
        empty_scale = blocks.block_scale[rows] == 0
        nonzero = torch.count_nonzero(v)
        sums = {
            "elements": torch.full((), v.numel(), device=t.device),
            "signal": _norm(v).square(),
            "noise": _norm(d).square(),
            "magnitude": _norm(v, 1),
            "deviation": _norm(d, 1),
            "nonzero": nonzero,
            "underflow": nonzero - torch.count_nonzero(torch.where(v == 0, 0.0, q)),
            "saturated": torch.count_nonzero((magnitudes > CLIPPED * limit[..., None]) & ~empty_scale[..., None]),
            "blocks": torch.count_nonzero(filled),
            "scale_underflow": torch.count_nonzero(filled & empty_scale),
            "chosen": _chosen(maxima, blocks, side.spec, rows),
            "other_noise": _other_noise(t, other, rows),
        }
        total += torch.stack([sums[name].double() for name in SIDE_SUMS])
        largest = torch.maximum(largest, maxima.amax().double())
    return total, largest


def _nothing(device: torch.device) -> Tensor:
    return torch.full((), torch.nan, device=device)


def _limits(blocks: Blocks, spec: Spec, rows: slice) -> Tensor:
    """Return the largest magnitude that every block can hold, fp32 [R, blocks]."""
    scale = blocks.block_scale[rows]
    if not spec.format.has_amax:
        return torch.exp2(scale.float() - spec.format.scale.bias) * spec.format.element.max
    factor = global_scale(blocks.amax, spec)
    factor = factor[rows, None] if spec.has_row_amax else factor
    return scale.view(torch.float8_e4m3fn).float() * factor * spec.format.element.max


def _chosen(maxima: Tensor, blocks: Blocks, spec: Spec, rows: slice) -> Tensor:
    """Return how many blocks that are not all 0 have another scale than that of the candidate 1."""
    if not isinstance(spec.scaling, FourOverSix):
        return _nothing(maxima.device)
    factors: Any = tensor_factors(blocks.amax, spec)  # type: ignore[arg-type]  # candidates are NVFP4's
    if spec.has_row_amax:
        factors = factors.rows(rows.start, rows.stop)
    of_block = maxima
    if spec.is_tile:
        tiles = pad(maxima, (0, 0, 0, -maxima.shape[0] % TILE)).unflatten(0, (-1, TILE)).amax(1)
        of_block = tiles.repeat_interleave(TILE, 0)[: maxima.shape[0]]
    standard = scale_bytes(candidate_scale(of_block, factors, 1.0))
    return torch.count_nonzero((blocks.block_scale[rows] != standard) & (maxima > 0))


def _other(t: Tensor, side: Side) -> tuple[Side, Blocks] | None:
    """Quantize once more, without the rotation or with one; None where there is nothing to compare with.

    Tiles do not rotate, MXFP8 does not either, and MS-EDEN needs its rotation.
    """
    spec: Any = side.spec
    if (
        spec.is_tile
        or not spec.format.has_amax
        or (spec.tries_candidates and not isinstance(spec.scaling, FourOverSix))
    ):
        return None
    turned = replace(spec, rotation=Hadamard() if spec.rotation is None else None)
    other = side._replace(spec=turned, amax=None, transient=False)
    return other, ops.quantize(t, other)


def _other_noise(t: Tensor, other: tuple[Side, Blocks] | None, rows: slice) -> Tensor:
    if other is None:
        return _nothing(t.device)
    side, blocks = other
    return _norm(values_of_codes(blocks, side.spec, rows) - values_of(t[rows], side)).square()


def tensor_sums(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of elements and outliers, fp64 [2], the outliers of each column [C], the largest magnitude.

    Args:
        t: [R, C].
    """
    rows, cols = t.shape
    limit = OUTLIER * _norm(t) / max(1, t.numel()) ** 0.5
    columns = torch.zeros(cols, dtype=torch.float64, device=t.device)
    for part in _chunks(t):
        columns += (t[part].abs().double() > limit).sum(0)  # beside bf16 the limit would be rounded to bf16
    amax = _norm(t, torch.inf) if t.numel() else torch.zeros((), dtype=torch.float64, device=t.device)
    return torch.stack((torch.full_like(amax, rows * cols), columns.sum())), columns, amax


def product_sums(got: Tensor, wanted: Tensor) -> Tensor:
    """Return elements and sums of squares of wanted, got and their difference, fp64 [4]."""
    got, wanted = got.float(), wanted.float()
    norms = [_norm(t).square() for t in (wanted, got, got - wanted)]
    return torch.stack((torch.full_like(norms[0], got.numel()), *norms))
