"""Grouped operands as a loop over their groups (docs/numerics.md section 8): the definition, so it reads the offsets.

An operand is tokens in groups, [M, C] with the cumulative ends [E] of the groups, or the weights of E experts,
[E, N, K]. Its row orientation has the groups along the rows, the col orientation of tokens along the contraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.layout import (
    LINEAR,
    Blocks,
    Operand,
    StoredShapes,
    blocks_per_row,
    group_alignment,
    grouped_shapes,
    round_up,
    row_bytes,
    swizzled_numel,
    unswizzle,
)
from halfbyte.reference.matmul import Decoded, decode, dequantize, gemm_nt, plain
from halfbyte.reference.norm import column_sum
from halfbyte.reference.nvfp4 import quantize_row_col
from halfbyte.sides import Epilogue, Side, of_group
from halfbyte.spec import Spec

Bounds = Sequence[tuple[int, int]]


def group_bounds(offsets: Tensor, total: int) -> list[tuple[int, int]]:
    """Return (start, end) of each group on the host.

    Args:
        offsets: integer [E], cumulative ends.
        total: the size of the dimension that the groups share.

    Raises:
        ValueError: the ends decrease or exceed `total`.
    """
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if any(end < start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > total):
        raise ValueError(f"offsets={ends}: give the cumulative ends of the groups, not decreasing, at most {total}")
    return list(zip(starts, ends, strict=True))


def grouped_quantize_row_col(
    x: Tensor, offsets: Tensor | None, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Return quantize_row_col of every group, joined; group g draws with its own seed.

    Args:
        x: tokens [M, C] with offsets [E], or expert weights [E, N, K] with offsets None.
        row, col: what is asked for, or None; an amax in the shape of `layout.grouped_shapes`, of expert weights [E] or
            [E, rows]. Codes are returned of transient ones too.

    Returns:
        Blocks in the shapes of `layout.grouped_shapes`; of expert weights, every tensor has a leading [E].
    """
    bounds = None if offsets is None else group_bounds(offsets, x.shape[0])
    groups = x.unbind(0) if bounds is None else [x[start:end] for start, end in bounds]
    parts: tuple[list, list] = ([], [])
    for g, x_g in enumerate(groups):
        own_row, own_col = of_group((row, col), g)
        if own_row is not None and own_row.amax is not None:
            is_flat = bounds is not None and own_row.spec.has_row_amax  # one amax a token
            own_row = own_row._replace(amax=own_row.amax[slice(*bounds[g]) if bounds and is_flat else g])
        if own_col is not None and own_col.amax is not None:
            own_col = own_col._replace(amax=own_col.amax[g])
        for part, blocks in zip(parts, quantize_row_col(x_g, own_row, own_col), strict=True):
            part.append(blocks)
    return (
        None if row is None else _join(parts[0], row, x, bounds, contraction=False),
        None if col is None else _join(parts[1], col, x, bounds, contraction=True),
    )


def _join(parts: list[Blocks], side: Side, x: Tensor, bounds: Bounds | None, *, contraction: bool) -> Blocks:
    """Lay the groups' blocks out as `layout.grouped_shapes` says; expert weights are stacked."""
    spec, scale_layout = side.spec, side.scale_layout
    if bounds is None:
        amax = torch.stack([part.amax for part in parts]) if spec.format.has_amax else parts[0].amax
        return Blocks(torch.stack([p.qdata for p in parts]), torch.stack([p.block_scale for p in parts]), amax)
    shape = (x.shape[1], x.shape[0]) if contraction else (x.shape[0], x.shape[1])
    shapes = grouped_shapes(shape, len(bounds), spec, scale_layout, contraction=contraction)
    if not contraction:
        amaxes = [part.amax[None] if spec.has_tensor_amax else part.amax for part in parts]
        return _fill(shapes, [p.qdata for p in parts], [p.block_scale for p in parts], amaxes)
    widths = [round_up(end - start, group_alignment(spec)) for start, end in bounds]
    qdata = [_widen(part.qdata, row_bytes(width, spec)) for part, width in zip(parts, widths, strict=True)]
    scales = [part.block_scale for part in parts]
    if scale_layout == LINEAR:
        scales = [_widen(scale, width // spec.block_length) for scale, width in zip(scales, widths, strict=True)]
    return _fill(shapes, qdata, scales, [p.amax[None] if spec.format.has_amax else p.amax for p in parts], dim=-1)


def _widen(t: Tensor, cols: int) -> Tensor:
    return pad(t, (0, cols - t.shape[1]))


def _fill(shapes: StoredShapes, qdata: list, block_scale: list, amax: list, dim: int = 0) -> Blocks:
    """Join the groups' tensors along `dim` (amaxes along their first) and fill up with zeros behind the last group."""
    out = []
    for tensors, shape, along in zip((qdata, block_scale, amax), shapes, (dim, dim, 0), strict=True):
        joined = torch.cat(tensors, dim=along)
        whole = joined.new_zeros(shape)
        whole[tuple(slice(size) for size in joined.shape)] = joined
        out.append(whole)
    return Blocks(*out)


def group_blocks(
    blocks: Blocks, spec: Spec, bounds: Bounds, g: int, *, scale_layout: str = LINEAR, contraction: bool = False
) -> Blocks:
    """Return the blocks of group g as `quantize` of that group alone gives them, scales LINEAR.

    Args:
        blocks: a grouped operand of tokens.
        bounds: (start, end) of each group, unpadded.
        contraction: whether the groups split the columns.
    """
    start, end = bounds[g]
    has_amax, length, codes_per_byte = spec.format.has_amax, spec.block_length, spec.format.codes_per_byte
    rows = blocks.qdata.shape[0]
    if contraction:
        storage = [round_up(stop - begin, group_alignment(spec)) for begin, stop in bounds]
        first, width = sum(storage[:g]), round_up(end - start, spec.alignment)
        qdata = blocks.qdata[:, first // codes_per_byte : (first + width) // codes_per_byte]
        sizes = [(rows, round_up(stop - begin, spec.alignment) // length) for begin, stop in bounds]
        linear = (slice(None), slice(first // length, (first + width) // length))
        amax = blocks.amax[g] if has_amax else blocks.amax
    else:
        qdata = blocks.qdata[start:end]
        count = blocks_per_row(blocks.qdata, spec)
        sizes = [(stop - begin, count) for begin, stop in bounds]
        linear = (slice(start, end), slice(None))
        amax = blocks.amax[start:end] if spec.has_row_amax else blocks.amax[g] if has_amax else blocks.amax
    if scale_layout == LINEAR:
        return Blocks(qdata, blocks.block_scale[linear], amax)
    numels = [swizzled_numel(*size) for size in sizes]
    first = sum(numels[:g])
    return Blocks(qdata, unswizzle(blocks.block_scale[first : first + numels[g]], *sizes[g]), amax)


def expert_blocks(blocks: Blocks, spec: Spec, g: int, scale_layout: str = LINEAR) -> Blocks:
    """Return the blocks of one expert of [E, N, K] weights, scales LINEAR."""
    qdata, scale = blocks.qdata[g], blocks.block_scale[g]
    if scale_layout != LINEAR:
        scale = unswizzle(scale, qdata.shape[0], blocks_per_row(qdata, spec))
    return Blocks(qdata, scale, blocks.amax[g] if spec.format.has_amax else blocks.amax)


def grouped_dequantize(operand: Operand, offsets: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of tokens in groups along the rows, or of expert weights (offsets None).

    Args:
        operand: quantized.

    Returns:
        dtype [M, cols], zeros behind the last group, or [E, N, cols].
    """
    blocks, spec, cols, scale_layout = operand
    if offsets is None:
        experts = [expert_blocks(blocks, spec, g, scale_layout) for g in range(blocks.qdata.shape[0])]
        return torch.stack([dequantize(Operand(expert, spec, cols), dtype) for expert in experts])
    rows = blocks.qdata.shape[0]
    out = torch.zeros(rows, cols, dtype=dtype, device=blocks.qdata.device)
    bounds = group_bounds(offsets, rows)
    for g, (start, end) in enumerate(bounds):
        group = group_blocks(blocks, spec, bounds, g, scale_layout=scale_layout)
        out[start:end] = dequantize(Operand(group, spec, cols), dtype)
    return out


def grouped_gemm_nt(
    a: Operand | Tensor,
    b: Operand | Tensor,
    offsets: Tensor,
    K: int,
    out: Tensor,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Write gemm_nt of every group to `out`; without `accumulate`, rows behind the last group become zero.

    Args:
        a: tokens [M, K]; or, groups along the contraction, [R, K]; quantized or plain.
        b: experts [E, N, K]; or [C, K].
        offsets: integer [E], cumulative ends along M or, of the contraction, along K.
        K: the logical contraction length, of all groups together if they split it.
        out: [M, N] or [E, R, C].
        accumulate: add to what `out` holds.
    """
    return _products(a, b, offsets, K, out, Epilogue(), accumulate=accumulate)


def grouped_gemm_nt_batch_invariant(
    a: Operand | Tensor, b: Operand | Tensor, offsets: Tensor, K: int, out: Tensor
) -> Tensor:
    """Do what `grouped_gemm_nt` does, with the bits of a row that it has in every batch, as `Epilogue` says."""
    return _products(a, b, offsets, K, out, Epilogue(batch_invariant=True), accumulate=False)


def _products(
    a: Operand | Tensor,
    b: Operand | Tensor,
    offsets: Tensor,
    K: int,
    out: Tensor,
    epilogue: Epilogue,
    *,
    accumulate: bool,
) -> Tensor:
    contraction = out.dim() == 3
    bounds = group_bounds(offsets, K if contraction else out.shape[0])
    for g, (start, end) in enumerate(bounds):
        length = end - start if contraction else K
        left, right = (_decoded(operand, bounds, g, length, contraction=contraction) for operand in (a, b))
        if isinstance(a, Tensor) or isinstance(b, Tensor):  # padding takes part only if both operands have it
            left, right = (t._replace(values=t.values[:, :length]) for t in (left, right))
        own = out[g] if contraction else out[start:end]
        addend = own if accumulate else None
        gemm_nt(left, right, epilogue._replace(addend=addend, out=own))
    if not contraction and not accumulate:
        out[bounds[-1][1] if bounds else 0 :] = 0
    return out


def _decoded(operand: Operand | Tensor, bounds: Bounds, g: int, cols: int, *, contraction: bool) -> Decoded:
    if isinstance(operand, Tensor):
        start, end = bounds[g]
        own = slice(None, None), slice(start, end)
        return plain(operand[g] if operand.dim() == 3 else operand[own if contraction else own[1]])
    whole, spec, _, scale_layout = operand
    if whole.qdata.dim() == 3:
        return decode(Operand(expert_blocks(whole, spec, g, scale_layout), spec, cols))
    blocks = group_blocks(whole, spec, bounds, g, scale_layout=scale_layout, contraction=contraction)
    return decode(Operand(blocks, spec, cols))


def grouped_token_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each column of every group of tokens x [M, N]: fp32 [E, N], each as `token_sum` adds."""
    return torch.stack([column_sum(x[start:end].float()) for start, end in group_bounds(offsets, x.shape[0])])
