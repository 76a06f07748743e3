"""What ops calls where Triton runs: the functions of `halfbyte.reference`, under the same names."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.amax import finite_amax
from halfbyte.kernels.dequantize import Decoded, decode, dequantize
from halfbyte.kernels.gemm import gemm_nt
from halfbyte.kernels.quantize import quantize
from halfbyte.kernels.row_col import quantize_row_col
from halfbyte.kernels.transpose import transpose
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
