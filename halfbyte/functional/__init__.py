"""Functions of tensors with gradients: the GEMM and the linear layer."""

from halfbyte.functional.gemm import gemm_nt
from halfbyte.functional.grouped import grouped_gemm_nt, grouped_linear
from halfbyte.functional.linear import STREAMS_PER_LINEAR, linear, linear_shared

__all__ = ["STREAMS_PER_LINEAR", "gemm_nt", "grouped_gemm_nt", "grouped_linear", "linear", "linear_shared"]
