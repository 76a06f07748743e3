"""Operations over plain tensors and the choice of the backend that runs them."""

from halfbyte.ops.backends import BackendStatus, backends
from halfbyte.ops.dispatch import Operand, amax, dequantize, gemm_nt, quantize, quantize_row_col, transpose

__all__ = [
    "BackendStatus",
    "Operand",
    "amax",
    "backends",
    "dequantize",
    "gemm_nt",
    "quantize",
    "quantize_row_col",
    "transpose",
]
