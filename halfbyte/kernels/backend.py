"""What ops calls where Triton runs: the functions of `halfbyte.reference`, under the same names."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.amax.plain import finite_amax
from halfbyte.kernels.fused import (
    activation_backward_with_amaxes,
    activation_with_amaxes,
    norm_backward,
    norm_with_amaxes,
)
from halfbyte.kernels.gemm.dense import gemm_nt, gemm_nt_add
from halfbyte.kernels.gemm.grouped import grouped_dequantize, grouped_gemm_nt, grouped_values
from halfbyte.kernels.quantize import both, grouped, one
from halfbyte.kernels.unpack.dequantize import Decoded, decode, dequantize, from_values
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, matrix_shape
from halfbyte.rng import Draw
from halfbyte.sides import Side, share_tiles
from halfbyte.spec import Spec

__all__ = [
    "activation_backward_with_amaxes",
    "activation_with_amaxes",
    "decode",
    "dequantize",
    "finite_amax",
    "from_values",
    "gemm_nt",
    "gemm_nt_add",
    "grouped_dequantize",
    "grouped_gemm_nt",
    "grouped_quantize_row_col",
    "grouped_values",
    "norm_backward",
    "norm_with_amaxes",
    "plain",
    "quantize",
    "quantize_row_col",
    "transpose",
]


def plain(x: Tensor) -> Decoded:
    """Return an unquantized matrix as a GEMM operand."""
    return Decoded(x)


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
) -> Blocks:
    """Quantize along the last dimension; see `halfbyte.reference.quantize`."""
    return one.quantize_side(x, Side(spec, draw, sign_draw, amax, scale_layout))


def quantize_row_col(x: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
    """Quantize both orientations; a transient one is returned decoded, as Blocks(values bf16, no scales, amax)."""
    if row is not None and col is not None:
        return both.quantize_rows_and_cols(x, row, col)
    # What a forward that nobody differentiates asks for.
    of_row = None if row is None else one.quantize_side(x, row)
    return of_row, None if col is None else one.quantize_side(x.reshape(matrix_shape(x.shape)).T, col)


def grouped_quantize_row_col(
    x: Tensor, offsets: Tensor | None, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Quantize every group both ways; a transient side is returned decoded, as in `quantize_row_col`."""
    if row is None or col is None or not share_tiles(row.spec, col.spec):
        return grouped.quantize_groups(x, offsets, row, col)
    codes = grouped.quantize_groups(x, offsets, row._replace(transient=False), col._replace(transient=False))
    out = []
    for i, (side, blocks) in enumerate(zip((row, col), codes, strict=True)):
        if side.transient and blocks is not None:
            total = x.shape[-2 if i else -1]
            split = bool(i) and offsets is not None
            values = grouped_values(blocks, side.spec, offsets, total, side.scale_layout, split=split)
            blocks = Blocks(values, blocks.block_scale.new_empty(0), blocks.amax)
        out.append(blocks)
    return out[0], out[1]
