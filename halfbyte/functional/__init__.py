"""Functions of tensors with gradients: the GEMM and the linear layer."""

from halfbyte.functional.gemm import gemm_nt
from halfbyte.functional.linear import STREAMS_PER_LINEAR, linear, linear_shared

__all__ = ["STREAMS_PER_LINEAR", "gemm_nt", "linear", "linear_shared"]
