"""NVFP4 quantization: amax, then scales, then codes, in whole-tensor torch (docs/numerics.md sections 2 to 5).

A matrix is worked on as [rows, blocks, 16] in the memory order that it has (halfbyte/reference/blocks.py): quantizing
x.T moves no element before its codes are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import E4M3_NAN, NVFP4_BLOCK, f32
from halfbyte.layout import (
    LINEAR,
    Blocks,
    Operand,
    ceil_div,
    check_scale_layout,
    matrix_shape,
    pack,
    round_up,
    swizzle,
    unpack,
)
from halfbyte.reference import eden, mxfp8
from halfbyte.reference.blocks import block_maxima, elements_lead, in_blocks, ordered_sum
from halfbyte.reference.cast import e2m1_codes, round_nearest, round_stochastic, with_sign
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.matmul import decode
from halfbyte.reference.philox import block_bytes, block_numbers, bytes_of_both
from halfbyte.reference.scale import (
    TensorFactors,
    all_finite,
    block_scale,
    candidate_scale,
    encode_scale,
    finite_amax,
    scale_bytes,
    tensor_factors,
)
from halfbyte.rng import Draw
from halfbyte.sides import Side, share_tiles
from halfbyte.spec import MXFP8, NVFP4, BlockMax, Eden, FourOverSix, Spec

CHUNK_ELEMENTS = 1 << 18  # temporaries of a chunk stay in a cache, and an operation is longer than its call


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | Tensor | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    values: Tensor | None = None,
) -> Blocks:
    """Quantize along the last dimension.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        spec: NVFP4 or MXFP8.
        draw: random bytes of stochastic rounding: their place, or they themselves, uint8 [rows, blocks, 16].
        sign_draw: fresh signs of the rotation.
        amax: fp32 [] or [rows], used instead of the computed one.
        scale_layout: "linear" or "swizzled_32_4_4".
        values: fp32 [rows, padded K] to fill with element * scale, as `decode` returns it, instead of codes.

    Returns:
        Blocks of the [rows, K] matrix, `values` in the place of qdata and no scales if given; MXFP8 has an empty amax.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if isinstance(spec, MXFP8):
        blocks = mxfp8.quantize_mxfp8(x, spec, values)
    else:
        if spec.rotation is not None:
            x = rotate(x, spec.rotation, sign_draw)
        blocks = _quantize_nvfp4(x, spec, amax, draw, values)
    if values is not None:
        return blocks.decoded(values)
    if scale_layout == LINEAR:
        return blocks
    return blocks._replace(block_scale=swizzle(blocks.block_scale))


def quantize_row_col(x: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x), quantize(x.T)) as they are asked for; equal 16x16 specs share one quantization.

    Args:
        x: bf16, fp16 or fp32 [..., K]; flattened to a matrix first.
        row, col: what is asked for, or None; a transient one is returned decoded, as Blocks(values fp32, no scales,
            amax).

    Returns:
        Blocks of [rows, K] and of [K, rows], or None. Values of a column lie in memory as its transpose: as x does, so
        that nothing is moved.
    """
    x = x.reshape(matrix_shape(x.shape))
    if row is not None and col is not None and isinstance(row.spec, NVFP4) and share_tiles(row.spec, col.spec):
        return _tiles(x, row.spec, row, col)
    row_draw, col_draw = _drawn(x, row, col)
    of_row = of_col = None
    if row is not None:
        of_row = _one(x, row, row_draw, _values(x, row.spec) if row.transient else None)
    if col is not None:
        of_col = _one(x.T, col, col_draw, _turned_values(x, col.spec) if col.transient else None)
    return of_row, of_col


def _one(x: Tensor, side: Side, draw: Draw | Tensor | None, values: Tensor | None) -> Blocks:
    options = {"sign_draw": side.sign_draw, "scale_layout": side.scale_layout, "values": values}
    return quantize(x, side.spec, draw=draw, amax=side.amax, **options)


def _drawn(x: Tensor, row: Side | None, col: Side | None) -> tuple[Draw | Tensor | None, Draw | Tensor | None]:
    """Return the draws of row and col; of whole blocks that both draw, and fit a chunk, the bytes: one computation."""
    draw, next_draw = draws = None if row is None else row.draw, None if col is None else col.draw
    if draw is None or next_draw is None or draw.first_block or draw.blocks_per_row is not None:
        return draws
    if next_draw.base is not draw.base or next_draw.stream != draw.stream + 1:
        return draws
    whole = 0 < x.numel() <= CHUNK_ELEMENTS
    for side, length in ((row, x.shape[1]), (col, x.shape[0])):
        if side is None or side.spec.rounding != "stochastic" or length % side.spec.alignment:
            whole = False
    if not whole:
        return draws
    of_row, of_col = bytes_of_both(x.shape[0], x.shape[1], draw)
    return of_row.movedim(0, 2), of_col.movedim(0, 2)


def _values(x: Tensor, spec: Spec) -> Tensor:
    """Return an empty tensor for the values of x, padded to whole blocks or rotations."""
    return torch.empty(x.shape[0], round_up(x.shape[1], spec.alignment), dtype=torch.float32, device=x.device)


def _turned_values(x: Tensor, spec: Spec) -> Tensor:
    """Return an empty tensor for the values of x.T, the columns of x contiguous in memory."""
    return torch.empty(round_up(x.shape[0], spec.alignment), x.shape[1], dtype=torch.float32, device=x.device).T


def _tiles(x: Tensor, spec: NVFP4, row: Side, col: Side) -> tuple[Blocks, Blocks]:
    """Return one quantization of 16x16 tiles and its transpose."""
    values = _values(x, spec) if row.transient else None
    rows, cols = x.shape
    turned_codes = torch.empty(cols, ceil_div(rows, NVFP4_BLOCK) * 8, dtype=torch.uint8, device=x.device)
    codes = _quantize_nvfp4(x, spec, row.amax, row.draw, values, turned_codes)
    turned = Blocks(turned_codes, _turned_scale(codes.block_scale, cols).contiguous(), codes.amax)
    turned_values = decode(Operand(turned, spec, x.shape[0])).values if col.transient else None
    return _stored(codes, row, values), _stored(turned, col, turned_values)


def _stored(blocks: Blocks, side: Side, values: Tensor | None) -> Blocks:
    """Return blocks as `side` asks for them: decoded, where there are `values`, or with scales in its layout."""
    if values is not None:
        return blocks.decoded(values)
    if side.scale_layout != LINEAR:
        return blocks._replace(block_scale=swizzle(blocks.block_scale))
    return blocks


def row_col_amax(
    x: Tensor, row_spec: Spec | None, col_spec: Spec | None, sign_draw: Draw | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes with which x [rows, cols] and x.T are quantized: fp32 [] or [rows], after the rotation.

    Args:
        x: bf16, fp16 or fp32, any strides.
        row_spec, col_spec: NVFP4, or None for none.
        sign_draw: the place of fresh signs.
    """
    amaxes = []
    for t, spec in ((x, row_spec), (x.T, col_spec)):
        if spec is not None and spec.rotation is not None:
            t = rotate(t, spec.rotation, sign_draw)
        amaxes.append(None if spec is None else finite_amax(t, dim=-1 if spec.has_row_amax else None))
    return amaxes[0], amaxes[1]


def transpose(
    qdata: Tensor, block_scale: Tensor, rows: int, cols: int, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Transpose a tensor of 16x16 tiles without rounding.

    Args:
        qdata: uint8 [rows, ceil(cols/16) * 8].
        block_scale: uint8 [rows, ceil(cols/16)], LINEAR, equal in the rows of a tile.
        rows, cols: the logical shape.
        into: what to write and return, of the shapes of what is returned; None: new memory.

    Returns:
        qdata uint8 [cols, ceil(rows/16) * 8] and block_scale uint8 [cols, ceil(rows/16)].
    """
    turned = _turned_codes(unpack(qdata), cols), _turned_scale(block_scale, cols)
    if into is None:
        return turned[0].contiguous(), turned[1].contiguous()
    return into[0].copy_(turned[0]), into[1].copy_(turned[1])


def _turned_codes(codes: Tensor, cols: int) -> Tensor:
    """Return the packed codes of the transpose: codes [rows, padded columns] -> uint8 [cols, ceil(rows/16) * 8]."""
    if codes.shape[0] % NVFP4_BLOCK:
        codes = pad(codes, (0, 0, 0, -codes.shape[0] % NVFP4_BLOCK))
    even, odd = codes.unflatten(0, (-1, 2)).unbind(1)  # of the transpose, columns
    return (even | (odd << 4)).T[:cols]


def _turned_scale(block_scale: Tensor, cols: int) -> Tensor:
    """Return the block scales of the transpose of tiles, uint8 [cols, ceil(rows/16)]."""
    return block_scale[::NVFP4_BLOCK].T.repeat_interleave(NVFP4_BLOCK, dim=0)[:cols]


def _quantize_nvfp4(
    x: Tensor,
    spec: NVFP4,
    amax: Tensor | None,
    draw: Draw | Tensor | None,
    values: Tensor | None,
    turned: Tensor | None = None,
) -> Blocks:
    """Return codes, scales and amax; or no codes, and fill `values` [rows, padded columns] with element * scale.

    `turned`, uint8 [cols, ceil(rows/16) * 8], is filled with the codes of the transpose: of tiles.
    """
    rows, cols = x.shape
    blocks = ceil_div(cols, NVFP4_BLOCK)
    if amax is None and (rows == 0 or cols == 0):
        amax = finite_amax(x, dim=-1 if spec.has_row_amax else None)
    qdata = torch.empty(rows, blocks * 8, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.uint8, device=x.device)
    if rows == 0 or cols == 0:
        assert amax is not None
        return Blocks(qdata, scale, amax)
    x_RB16 = in_blocks(x, NVFP4_BLOCK)
    if not isinstance(spec.scaling, BlockMax) and x_RB16.stride(2) == 1:
        x_RB16 = elements_lead(x_RB16)  # sums over a block are made element by element
    step = max(NVFP4_BLOCK, CHUNK_ELEMENTS // cols // NVFP4_BLOCK * NVFP4_BLOCK)
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    maxima = [block_maxima(x_RB16[chunk]) for chunk in chunks]
    is_finite = False
    if amax is None:
        amax, is_finite = _outer_amax(x, maxima, spec)
    factors = tensor_factors(amax, spec)
    for chunk, maxima_RB in zip(chunks, maxima, strict=True):
        own, random = factors.rows(chunk.start, chunk.stop), _random(draw, spec, chunk, x_RB16)
        magnitude, signs, scale_RB = _round(x_RB16[chunk], maxima_RB, spec, own, random, is_finite)
        if values is None or turned is not None:
            codes = e2m1_codes(magnitude, signs)
            scale[chunk] = scale_bytes(scale_RB)
            if values is None:
                qdata.view(rows, blocks, 8)[chunk] = _pack(codes)
            if turned is not None:
                first, stop = chunk.start // 2, round_up(chunk.stop, NVFP4_BLOCK) // 2
                turned[:, first:stop] = _turned_codes(codes.flatten(1), cols)
        if values is not None:
            out = values.view(rows, blocks, NVFP4_BLOCK)[chunk]
            torch.mul(with_sign(magnitude, signs), scale_RB[..., None], out=out)
    return Blocks(qdata, scale, amax)


def _outer_amax(x: Tensor, maxima: list[Tensor], spec: NVFP4) -> tuple[Tensor, bool]:
    """Return finite_amax of x, [] or [rows], given the maxima of its blocks; and whether x is known to be finite."""
    by_row = spec.has_row_amax
    each = [t.amax(1) if by_row else t.amax() for t in maxima]
    amax = each[0] if len(each) == 1 else torch.cat(each) if by_row else torch.stack(each).amax()
    if x.device.type == "cpu" and all_finite(amax):
        return amax, True
    return finite_amax(x, dim=-1 if by_row else None), False


def _random(draw: Draw | Tensor | None, spec: NVFP4, chunk: slice, x_RB16: Tensor) -> Tensor | None:
    """Return the random bytes of some rows as fp32 in x's order, of Eden a number per block; or None."""
    if not spec.needs_rng:
        return None
    if isinstance(draw, Tensor):
        return torch.empty_like(x_RB16[chunk], dtype=torch.float32).copy_(draw[chunk])
    assert draw is not None, "what is random needs a draw"
    blocks = x_RB16.shape[1]
    per_row = blocks if draw.blocks_per_row is None else draw.blocks_per_row
    device = draw.base.device
    first = torch.arange(chunk.start, chunk.stop, device=device) * per_row + draw.first_block
    block = torch.arange(blocks, device=device)
    if isinstance(spec.scaling, Eden):
        return block_numbers(first[:, None] + block, draw)
    if x_RB16.stride(2) == 1:
        drawn = block_bytes(first[:, None] + block, draw).movedim(0, 2)
    else:
        drawn = block_bytes(first + block[:, None], draw, together=False).permute(2, 1, 0)
    return torch.empty_like(x_RB16[chunk], dtype=torch.float32).copy_(drawn)


def _round(
    x: Tensor, maxima: Tensor, spec: NVFP4, factors: TensorFactors, random: Tensor | None, is_finite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return E2M1 magnitudes fp32 and what has their signs [rows, blocks, 16], and scales fp32 [rows, blocks].

    Args:
        x: [rows, blocks, 16].
        maxima: `block_maxima` of x.
        random: fp32 0 to 255 of x's shape for stochastic rounding, 0 to 2^24 - 1 [rows, blocks] for Eden.
        is_finite: whether that is known of x.
    """
    x = x.float()
    # On a GPU, mask rather than ask.
    of_amax = factors.poison
    any_poison = x.device.type != "cpu" or not (is_finite or all_finite(maxima))
    any_poison = any_poison or (of_amax is not None and bool(of_amax.any()))
    poison = None
    if any_poison:
        poison = ~maxima.isfinite() if of_amax is None else ~maxima.isfinite() | of_amax
        poison = _over_tile(poison, torch.any) if spec.is_tile else poison
        x = torch.where(poison[..., None], 0.0, x)
        maxima = torch.where(poison, 0.0, maxima)
    block_amax = _over_tile(maxima, torch.amax) if spec.is_tile else maxima
    if isinstance(spec.scaling, FourOverSix):
        scale = _choose_scale(x, block_amax, spec, spec.scaling, factors)
    else:
        scale = block_scale(block_amax, factors)
    if isinstance(spec.scaling, Eden):
        assert random is not None
        magnitude, v, scale = _round_eden(x, scale, factors, random)
    else:
        v = x * encode_scale(scale, factors)[..., None]
        magnitude = round_nearest(v) if spec.rounding == "nearest" else round_stochastic(v, random)
    if poison is not None:
        magnitude = magnitude.masked_fill_(poison[..., None], 0.0)
        scale = scale_bytes(scale).masked_fill_(poison, E4M3_NAN).view(torch.float8_e4m3fn).float()
    return magnitude, v, scale


def _round_eden(x: Tensor, scale: Tensor, factors: TensorFactors, random: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MS-EDEN: codes of nearest, and the scale that makes up for their error on average (section 5)."""
    rounded_with = eden.code_scale(scale)
    v = x * encode_scale(rounded_with, factors)[..., None]
    magnitude = round_nearest(v)
    return magnitude, v, eden.stored_scale(v, magnitude, rounded_with, random).float()


def _choose_scale(x: Tensor, block_amax: Tensor, spec: NVFP4, scaling: FourOverSix, factors: TensorFactors) -> Tensor:
    """4over6: the scale of least error per block or tile, 1 winning ties and NaN (section 5)."""
    exact = scaling.error_math == "exact"
    target = x if exact else x * factors.s[..., None]

    def attempt(ratio: float) -> tuple[Tensor, Tensor]:
        scale = candidate_scale(block_amax, factors, ratio)
        v = x * encode_scale(scale, factors)[..., None]
        decoded = with_sign(round_nearest(v), v).mul_(scale[..., None])
        if exact:
            decoded.mul_(factors.a[..., None]).div_(torch.full_like(factors.a, f32(6 * spec.e4m3_max))[..., None])
        return scale, _error(decoded.sub_(target), scaling.error, spec.is_tile)

    first, *others = scaling.candidates
    best_scale, best_error = attempt(first)
    for ratio in others:
        scale, error = attempt(ratio)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_scale


def _error(d: Tensor, error_kind: str, is_tile: bool) -> Tensor:
    """Sum |d| or d*d over the 16 elements in order, then over the 16 rows of a tile as a tree: [rows, blocks]."""
    error = ordered_sum(d.abs_() if error_kind == "mae" else d.mul_(d))
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
    if rows % NVFP4_BLOCK:
        values_RB = pad(values_RB, (0, 0, 0, round_up(rows, NVFP4_BLOCK) - rows))
    tiles = values_RB.reshape(-1, NVFP4_BLOCK, blocks)
    reduced = reduce(tiles, dim=1)
    return reduced[:, None].expand_as(tiles).reshape(-1, blocks)[:rows]


def _pack(codes: Tensor) -> Tensor:
    """Pack codes [rows, blocks, 16] into bytes [rows, blocks, 8]."""
    if not codes.is_contiguous():
        return pack(codes)
    pairs = codes.view(torch.int16)  # little-endian: the even column is the low byte
    return ((pairs >> 4) | pairs).to(torch.uint8)
