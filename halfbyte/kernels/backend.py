"""What ops calls where Triton runs: the functions of `halfbyte.reference`, under the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.kernels.amax import finite_amax
from halfbyte.kernels.dequantize import Decoded, decode, dequantize
from halfbyte.kernels.gemm import gemm_nt
from halfbyte.kernels.quantize import quantize
from halfbyte.kernels.row_col import quantize_row_col as _quantize_row_col
from halfbyte.kernels.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, matrix_shape
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, Spec

__all__ = [
    "decode",
    "dequantize",
    "finite_amax",
    "from_values",
    "gemm_nt",
    "plain",
    "quantize",
    "quantize_row_col",
    "transpose",
]


def plain(x: Tensor) -> Decoded:
    """Return an unquantized matrix as a GEMM operand."""
    return Decoded(x)


def from_values(values: Tensor, amax: Tensor, spec: Spec) -> Decoded:
    """Return a transient operand as a GEMM operand."""
    return Decoded(values) if isinstance(spec, MXFP8) else Decoded(values, amax, spec.e4m3_max * spec.fp4_max)


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
    transient: tuple[bool, bool] = (False, False),
) -> tuple[Blocks | None, Blocks | None]:
    """Quantize both orientations; a transient one is returned decoded, as Blocks(values bf16, no scales, amax)."""
    row, col = _quantize_row_col(
        x,
        row_spec,
        col_spec,
        draw=draw,
        sign_draw=sign_draw,
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
    )
    rows, cols = matrix_shape(x.shape)
    if transient[0] and row is not None:
        row = _decoded(row, row_spec, cols, scale_layout)
    if transient[1] and col is not None:
        col = _decoded(col, col_spec, rows, scale_layout)
    return row, col


def _decoded(blocks: Blocks, spec: Spec, cols: int, scale_layout: str) -> Blocks:
    values = decode(blocks, spec, cols, scale_layout, torch.bfloat16).values
    return Blocks(values, blocks.block_scale.new_empty(0), blocks.amax)
