"""NVFP4 quantization: amax, then scales, then codes, in whole-tensor torch (docs/numerics.md sections 2 to 5).

A chunk of rows is laid out as [16, rows, blocks], the elements of a block leading: a block maximum and the sequential
error sums of 4over6 become a few whole-row operations, and block scales broadcast along contiguous memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import E4M3_NAN, NVFP4_BLOCK, f32
from halfbyte.layout import (
    LINEAR,
    Blocks,
    ceil_div,
    check_scale_layout,
    matrix_shape,
    pack,
    round_up,
    swizzle,
    unpack,
)
from halfbyte.reference import mxfp8
from halfbyte.reference.cast import e2m1_nearest, e2m1_stochastic
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.philox import block_bytes
from halfbyte.reference.scale import (
    TensorFactors,
    block_scale,
    candidate_scale,
    encode_scale,
    finite_amax,
    tensor_factors,
)
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, FourOverSix, Spec

CHUNK_ELEMENTS = 1 << 17  # temporaries of a chunk stay in the L2 cache of two cores; measured best of 2^14 to 2^20


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
) -> Blocks:
    """Quantize along the last dimension.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        spec: NVFP4 or MXFP8.
        draw: random bytes of stochastic rounding.
        sign_draw: fresh signs of the rotation.
        amax: fp32 [] or [rows], used instead of the computed one.
        scale_layout: "linear" or "swizzled_32_4_4".

    Returns:
        Blocks of the [rows, K] matrix; MXFP8 has an empty amax.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if isinstance(spec, MXFP8):
        blocks = mxfp8.quantize(x, spec)
    else:
        if spec.rotation is not None:
            x = rotate(x, spec.rotation, sign_draw)
        if amax is None:
            amax = finite_amax(x, dim=-1 if spec.outer == "row" else None)
        blocks = _quantize_nvfp4(x, spec, amax, draw)
    if scale_layout == LINEAR:
        return blocks
    return blocks._replace(block_scale=swizzle(blocks.block_scale))


def quantize_row_col(
    x: Tensor,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    scale_layout: str = LINEAR,
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x, row_spec), quantize(x.T, col_spec)); equal 16x16 specs share one quantization.

    Args:
        x: bf16, fp16 or fp32 [..., K]; flattened to a matrix first.
        draw: the row's random bytes; the column uses the next offset.

    Returns:
        Blocks of [rows, K] and of [K, rows]; None where the spec is None.
    """
    x = x.reshape(matrix_shape(x.shape))
    layout = {"scale_layout": scale_layout}
    if row_spec is not None and row_spec == col_spec and row_spec.is_tile:
        row = quantize(x, row_spec, draw=draw, amax=row_amax)
        col = Blocks(*transpose(row.qdata, row.block_scale, *x.shape), row.amax)
        if scale_layout != LINEAR:
            row, col = (b._replace(block_scale=swizzle(b.block_scale)) for b in (row, col))
        return row, col
    row = col = None
    if row_spec is not None:
        row = quantize(x, row_spec, draw=draw, sign_draw=sign_draw, amax=row_amax, **layout)
    if col_spec is not None:
        next_draw = draw.next() if draw is not None else None
        col = quantize(x.T, col_spec, draw=next_draw, sign_draw=sign_draw, amax=col_amax, **layout)
    return row, col


def transpose(qdata: Tensor, block_scale: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Transpose a tensor of 16x16 tiles without rounding.

    Args:
        qdata: uint8 [rows, ceil(cols/16) * 8].
        block_scale: uint8 [rows, ceil(cols/16)], LINEAR, equal in the rows of a tile.
        rows, cols: the logical shape.

    Returns:
        qdata uint8 [cols, ceil(rows/16) * 8] and block_scale uint8 [cols, ceil(rows/16)].
    """
    codes = unpack(qdata)[:, :cols].T
    padded = codes.new_zeros(cols, round_up(rows, NVFP4_BLOCK))
    padded[:, :rows] = codes
    scale = block_scale[::NVFP4_BLOCK].T.repeat_interleave(NVFP4_BLOCK, dim=0)[:cols]
    return pack(padded), scale.contiguous()


def _quantize_nvfp4(x: Tensor, spec: NVFP4, amax: Tensor, draw: Draw | None) -> Blocks:
    rows, cols = x.shape
    blocks = ceil_div(cols, NVFP4_BLOCK)
    qdata = torch.empty(rows, blocks * 8, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.uint8, device=x.device)
    factors = tensor_factors(amax, spec)
    step = max(NVFP4_BLOCK, CHUNK_ELEMENTS // max(1, cols) // NVFP4_BLOCK * NVFP4_BLOCK)
    for start in range(0, rows if blocks else 0, step):
        stop = min(start + step, rows)
        chunk = pad(x[start:stop], (0, blocks * NVFP4_BLOCK - cols)) if cols % NVFP4_BLOCK else x[start:stop]
        x_16RB = chunk.unflatten(1, (blocks, NVFP4_BLOCK)).permute(2, 0, 1)
        x_16RB = x_16RB.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        random = _random_bytes(draw, start, stop, blocks) if spec.rounding == "stochastic" else None
        codes, scale_RB = _encode(x_16RB, spec, factors.rows(start, stop), random)
        packed = codes[0::2] | (codes[1::2] << 4)
        qdata[start:stop] = packed.permute(1, 2, 0).reshape(stop - start, blocks * 8)
        scale[start:stop] = scale_RB.view(torch.uint8)
    return Blocks(qdata, scale, amax)


def _random_bytes(draw: Draw | None, start: int, stop: int, blocks: int) -> Tensor:
    assert draw is not None, "stochastic rounding needs a draw"
    per_row = blocks if draw.blocks_per_row is None else draw.blocks_per_row
    row = torch.arange(start, stop, device=draw.base.device)[:, None] * per_row
    return block_bytes(row + torch.arange(blocks, device=draw.base.device) + draw.first_block, draw)


def _encode(x: Tensor, spec: NVFP4, factors: TensorFactors, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [16, rows, blocks] and scales float8_e4m3fn [rows, blocks] of x fp32 [16, rows, blocks]."""
    raw_amax = x.abs().amax(0)
    poison = ~raw_amax.isfinite() | factors.poison
    if spec.is_tile:
        poison = _over_tile(poison, torch.any)
    any_poison = x.device.type != "cpu" or bool(poison.any())  # on a GPU, mask rather than ask
    if any_poison:
        x = torch.where(poison, 0.0, x)
        raw_amax = torch.where(poison, 0.0, raw_amax)
    block_amax = _over_tile(raw_amax, torch.amax) if spec.is_tile else raw_amax
    if isinstance(spec.scaling, FourOverSix):
        codes, scale = _choose_candidate(x, block_amax, spec, spec.scaling, factors)
    else:
        scale = block_scale(block_amax, factors)
        v = x * encode_scale(scale.float(), factors)
        codes = e2m1_nearest(v)[0] if spec.rounding == "nearest" else e2m1_stochastic(v, random)
    if any_poison:
        codes = codes.masked_fill(poison, 0)
        nan = torch.full_like(scale.view(torch.uint8), E4M3_NAN)
        scale = torch.where(poison, nan, scale.view(torch.uint8)).view(scale.dtype)
    return codes, scale


def _choose_candidate(
    x: Tensor, block_amax: Tensor, spec: NVFP4, scaling: FourOverSix, factors: TensorFactors
) -> tuple[Tensor, Tensor]:
    """4over6: the candidate of least error per block or tile, 1 winning ties and NaN (section 5)."""
    exact = scaling.error_math == "exact"
    target = x if exact else x * factors.s

    def attempt(ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        scale = candidate_scale(block_amax, factors, ratio)
        scale_f32 = scale.float()
        v = x * encode_scale(scale_f32, factors)
        codes, magnitude = e2m1_nearest(v)
        decoded = torch.copysign(magnitude, v) * scale_f32
        if exact:
            decoded = (decoded * factors.a) / torch.full_like(factors.a, f32(6 * spec.e4m3_max))
        return codes, scale.view(torch.uint8), _error(decoded - target, scaling.error, spec.is_tile)

    first, *others = scaling.candidates
    best_codes, best_scale, best_error = attempt(first)
    for ratio in others:
        codes, scale, error = attempt(ratio)
        better = error < best_error
        best_codes = torch.where(better, codes, best_codes)
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_codes, best_scale.view(torch.float8_e4m3fn)


def _error(d: Tensor, error_kind: str, is_tile: bool) -> Tensor:
    """Sum |d| or d*d over the 16 elements in order, then over the 16 rows of a tile as a tree: [rows, blocks]."""
    d = d.abs() if error_kind == "mae" else d * d
    error = d[0].clone()
    for element in d[1:]:
        error += element
    return _over_tile(error, _tree_sum) if is_tile else error


def _tree_sum(rows: Tensor, dim: int) -> Tensor:
    assert dim == 1 and rows.shape[1] == NVFP4_BLOCK
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _over_tile(values_RB: Tensor, reduce) -> Tensor:
    """Reduce [rows, blocks] over each group of 16 rows (missing rows are 0) and give every row the result."""
    rows, blocks = values_RB.shape
    tiles = pad(values_RB, (0, 0, 0, round_up(rows, NVFP4_BLOCK) - rows)).view(-1, NVFP4_BLOCK, blocks)
    reduced = reduce(tiles, dim=1)
    return reduced[:, None].expand_as(tiles).reshape(-1, blocks)[:rows]
