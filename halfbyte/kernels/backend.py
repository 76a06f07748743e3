"""What ops calls where Triton runs: the functions of `halfbyte.reference`, under the same names."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.amax.plain import finite_amax
from halfbyte.kernels.gemm.dense import gemm_nt, gemm_nt_add
from halfbyte.kernels.gemm.grouped import grouped_dequantize, grouped_gemm_nt, grouped_values
from halfbyte.kernels.quantize import both, grouped, one
from halfbyte.kernels.quantize.both_route import Pair
from halfbyte.kernels.quantize.route import One
from halfbyte.kernels.unpack.dequantize import Decoded, decode, dequantize
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import LINEAR, Blocks, GroupedOperand, check_scale_layout, matrix_shape
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, Spec

__all__ = [
    "GroupedOperand",
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


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    decoded: bool = False,
) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        draw: random bytes of stochastic rounding.
        sign_draw: fresh signs of the rotation.
        amax: fp32 [] or [rows], used instead of the computed one.
        scale_layout: "linear" or "swizzled_32_4_4".
        decoded: return element * block_scale in bf16 [rows, padded K] as qdata, and no scales.
    """
    check_scale_layout(scale_layout)
    return one.quantize(One(x.reshape(matrix_shape(x.shape)), spec, draw, sign_draw, amax, scale_layout, decoded))


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
        draw: the row's random bytes; the column uses the next offset.
        transient: whether row and col are returned decoded; the others as for `quantize`.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    if row_spec is not None and col_spec is not None:
        return both.quantize(Pair(x, row_spec, col_spec, draw, sign_draw, row_amax, col_amax, scale_layout, transient))
    if row_spec is not None:  # what a forward that nobody differentiates asks for
        return one.quantize(One(x, row_spec, draw, sign_draw, row_amax, scale_layout, transient[0])), None
    if col_spec is not None:
        request = One(x.T, col_spec, draw and draw.next(), sign_draw, col_amax, scale_layout, transient[1])
        return None, one.quantize(request)
    return None, None


def grouped_quantize_row_col(
    x: Tensor,
    offsets: Tensor | None,
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
    """Quantize every group both ways; a transient side is returned decoded, as in `quantize_row_col`.

    Args:
        transient: whether row and col are returned decoded; the others as for `grouped.grouped_quantize_row_col`.
    """
    specs = row_spec, col_spec
    shared = row_spec is not None and row_spec == col_spec and row_spec.is_tile
    at_once = tuple(wanted and not shared for wanted in transient)
    sides = grouped.grouped_quantize_row_col(
        x,
        offsets,
        row_spec,
        col_spec,
        draw=draw,
        sign_draw=sign_draw,
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        transient=at_once,
    )
    out = []
    for i, (side, spec, wanted, done) in enumerate(zip(sides, specs, transient, at_once, strict=True)):
        if side is not None and spec is not None and wanted and not done:
            total = x.shape[-2 if i else -1]
            split = bool(i) and offsets is not None
            values = grouped_values(side, spec, offsets, total, scale_layout, split=split)
            side = Blocks(values, side.block_scale.new_empty(0), side.amax)
        out.append(side)
    return out[0], out[1]
