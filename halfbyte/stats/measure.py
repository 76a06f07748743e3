"""What one operand, one tensor or one product adds to a ledger, computed where its values are.

The values are those that were quantized: of a rotated operand the rotated ones. They are worked on in chunks of rows,
so that temporaries stay small, and every sum is fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte import ops, reference
from halfbyte.arithmetic import ERROR_SUMS, OPERAND_SUMS
from halfbyte.layout import Blocks, Operand
from halfbyte.ops.backends import REFERENCE, choose
from halfbyte.reference.scale import candidate_scale, scale_bytes, tensor_factors
from halfbyte.rng import Draw
from halfbyte.sides import Side
from halfbyte.spec import Eden, Hadamard, Spec, parse
from halfbyte.stats.figures import OUTLIER, SIDE_SUMS

Run = Callable[[Callable, tuple, Sequence[Tensor | None], Sequence[int]], tuple[tuple, Any]]
"""`ops.run`, or `anew`."""

CHUNK_ELEMENTS = 1 << 24
"""Of a chunk: 64 MiB in fp32, of which the reference has ten at a time. Kernels have no temporaries, and no chunks."""

assert ERROR_SUMS == ("signal", "restored", "noise"), "which `product_sums` returns"
assert ("elements", *OPERAND_SUMS, "chosen", "other_noise") == SIDE_SUMS, "which `side_sums` returns"

TILE = 16
"""Rows that share scales in tiles: chunks start at multiples of it."""


def anew(function: Callable, static: tuple, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Any:
    """Do what `ops.run` does and record nothing: for shapes that do not come again."""
    return function(static, tensors, numbers)


def _chunks(t: Tensor) -> Iterator[slice]:
    rows, cols = t.shape
    is_whole = choose(t.device, None) != REFERENCE
    step = rows if is_whole else max(TILE, CHUNK_ELEMENTS // max(1, cols) // TILE * TILE)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _signs(side: Side, device: torch.device) -> Tensor | None:
    """Return the signs of a side's rotation, None if it has none."""
    rotation = side.spec.rotation
    if rotation is None:
        return None
    if rotation.signs == "fresh":
        return reference.signs(rotation, side.sign_draw, device)
    return ops.constant(lambda: reference.signs(rotation, None, device))


def _coded(blocks: Blocks, spec: Spec, rows: slice) -> Operand:
    """Return some rows of an operand, whose columns are all that its codes have."""
    amax = blocks.amax[rows] if spec.has_row_amax else blocks.amax
    part = Blocks(blocks.qdata[rows], blocks.block_scale[rows], amax)
    return Operand(part, spec, part.qdata.shape[1] * spec.format.codes_per_byte)


def side_sums(t: Tensor, side: Side, blocks: Blocks, run: Run = anew) -> tuple[Tensor, Tensor]:
    """Return the sums of one operand, fp64 [len(SIDE_SUMS)], and the largest magnitude of its values, fp64 [].

    Args:
        t: [R, C], any strides, before rotation.
        side: how it was quantized.
        blocks: its bytes, with LINEAR scales.
        run: what runs the dozens of small ops.
    """
    places = side.draw, side.sign_draw
    bases = [None if place is None else place.base for place in places]
    shards = tuple([None if place is None else place[2:] for place in places])
    fixed, varying = (), tuple([0 if place is None else place.stream for place in places])
    if side.spec.needs_sign_rng:  # torch draws them, and computes with the value of the stream
        fixed, varying = varying, fixed
    sums, _ = run(_side_sums, (side.spec.key, shards, fixed), (t, *blocks, *bases), varying)
    return sums


def _side_sums(static: tuple, tensors: Sequence[Any], numbers: Sequence[int]) -> tuple[tuple[Tensor, Tensor], None]:
    key, shards, streams = static
    t, *made, draw_base, sign_base = tensors
    draw, sign_draw = (
        None if shard is None else Draw(base, stream, *shard)
        for base, stream, shard in zip((draw_base, sign_base), streams or numbers, shards, strict=True)
    )
    return _sums_of(t, Side(parse(key), draw, sign_draw), Blocks(*made)), None


def _sums_of(t: Tensor, side: Side, blocks: Blocks) -> tuple[Tensor, Tensor]:
    spec, other, signs = side.spec, _other(t, side), _signs(side, t.device)
    judged = spec.tries_candidates and not isinstance(spec.scaling, Eden)
    sums, maxima = [], []
    for rows in _chunks(t) if t.numel() else ():
        found, largest, of_blocks = ops.operand_sums(t[rows], _coded(blocks, spec, rows), signs, judged)
        elements = _number(blocks.block_scale[rows].numel() * spec.block_length, t.device)
        beside = _chosen(of_blocks, blocks, spec, rows), _other_noise(t, other, rows)
        sums.append(torch.cat((elements, found, *beside)))
        maxima.append(largest)
    if len(sums) == 1:
        return sums[0], maxima[0]
    if not sums:
        zeros = torch.zeros(len(SIDE_SUMS) + 1, dtype=torch.float64, device=t.device)
        return zeros[1:], zeros[0]
    return torch.stack(sums).sum(0), torch.stack(maxima).amax()


def _number(value: float, device: torch.device) -> Tensor:
    """Return fp64 [1]; what is recorded does not fill it again."""
    return ops.constant(lambda: torch.full((1,), value, dtype=torch.float64, device=device))


def _chosen(maxima: Tensor | None, blocks: Blocks, spec: Spec, rows: slice) -> Tensor:
    """Return how many blocks that are not all 0 have another scale than that of the candidate 1; NaN without maxima."""
    if maxima is None:
        return _number(torch.nan, blocks.qdata.device)
    amaxes = blocks.amax.reshape(-1)  # a vector: of one number on the CPU its value would be asked
    factors = tensor_factors(amaxes, spec)  # type: ignore[arg-type]  # candidates are NVFP4's
    if spec.has_row_amax:
        factors = factors.rows(rows.start, rows.stop)
    of_block = maxima
    if spec.is_tile:
        tiles = pad(maxima, (0, 0, 0, -maxima.shape[0] % TILE)).unflatten(0, (-1, TILE)).amax(1)
        of_block = tiles.repeat_interleave(TILE, 0)[: maxima.shape[0]]
    standard = scale_bytes(candidate_scale(of_block, factors, 1.0))
    return ((blocks.block_scale[rows] != standard) & (maxima > 0)).sum().double().reshape(1)


def _other(t: Tensor, side: Side) -> tuple[Side, Blocks] | None:
    """Quantize once more, without the rotation or with one; None where there is nothing to compare with.

    Tiles do not rotate, MXFP8 does not either, and MS-EDEN needs its rotation.
    """
    spec: Any = side.spec
    if spec.is_tile or not spec.format.has_amax or isinstance(spec.scaling, Eden):
        return None
    turned = replace(spec, rotation=Hadamard() if spec.rotation is None else None)
    other = side._replace(spec=turned, amax=None, transient=False)
    return other, ops.quantize(t, other)


def _other_noise(t: Tensor, other: tuple[Side, Blocks] | None, rows: slice) -> Tensor:
    if other is None:
        return _number(torch.nan, t.device)
    side, blocks = other
    return ops.operand_noise(t[rows], _coded(blocks, side.spec, rows), _signs(side, t.device)).reshape(1)


def tensor_sums(t: Tensor, run: Run = anew) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of elements and outliers, fp64 [2], the outliers of each column [C], the largest magnitude.

    Args:
        t: [R, C].
        run: what runs the small ops.
    """
    sums, _ = run(_tensor_sums, (), (t,), ())
    return sums


def _tensor_sums(
    static: tuple, tensors: Sequence[Any], numbers: Sequence[int]
) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    (t,) = tensors
    if not t.numel():
        nothing = torch.zeros(t.shape[1], dtype=torch.float64, device=t.device)
        return (nothing.new_zeros(2), nothing, nothing.new_zeros(())), None
    squares, amax = ops.square_sum(t)
    limit = OUTLIER * (squares / t.numel()).sqrt()
    counts = [ops.column_outliers(t[rows], limit) for rows in _chunks(t)]
    columns = counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)
    return (torch.cat((_number(t.numel(), t.device), columns.sum(0, keepdim=True))), columns, amax), None


def product_sums(got: Tensor, a: Tensor, b: Tensor, run: Run = anew) -> Tensor:
    """Return elements and sums of squares of a b.T, got and their difference, fp64 [4].

    Args:
        got: [M, N].
        a, b: [M, K] and [N, K].
        run: what runs the small ops.
    """
    (sums,), _ = run(_product_sums, (), (got, a, b), ())
    return sums


def _product_sums(static: tuple, tensors: Sequence[Any], numbers: Sequence[int]) -> tuple[tuple[Tensor], None]:
    got, a, b = tensors
    found = ops.error_sums(ops.gemm_nt(a, b, out_dtype=torch.float32), got)
    return (torch.cat((_number(got.numel(), got.device), found)),), None
