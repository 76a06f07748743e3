"""What ops calls where Triton runs: the functions of `halfbyte.reference`, under the same names."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels import row_col
from halfbyte.kernels.amax import finite_amax
from halfbyte.kernels.dequantize import Decoded, decode, dequantize
from halfbyte.kernels.gemm import gemm_nt
from halfbyte.kernels.quantize import quantize
from halfbyte.kernels.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, matrix_shape
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, BlockMax, Spec

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
    """Quantize both orientations; a transient one is returned decoded, as Blocks(values bf16, no scales, amax).

    Args:
        transient: whether row and col are returned decoded; the others as for `row_col.quantize_row_col`.
    """
    specs = row_spec, col_spec
    at_once = tuple(wanted and _stores_values(spec) for wanted, spec in zip(transient, specs, strict=True))
    sides = row_col.quantize_row_col(
        x,
        row_spec,
        col_spec,
        draw=draw,
        sign_draw=sign_draw,
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        transient=at_once,
    )
    rows, cols = matrix_shape(x.shape)
    out = []
    for side, spec, length, wanted, done in zip(sides, specs, (cols, rows), transient, at_once, strict=True):
        if side is not None and wanted and not done:
            values = decode(side, spec, length, scale_layout).values
            side = Blocks(values, side.block_scale.new_empty(0), side.amax)
        out.append(side)
    return out[0], out[1]


def _stores_values(spec: Spec | None) -> bool:
    """Whether the quantize kernels may store decoded values of `spec` themselves.

    Not with candidate scales: on sm_90 one state of those kernels stored other values than its codes decode to. Until
    the cause is known, their codes are decoded by a kernel of its own.
    """
    return not isinstance(spec, NVFP4) or isinstance(spec.scaling, BlockMax)
