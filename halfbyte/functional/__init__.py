"""Functions of tensors: the GEMM, and with gradients the linear layer, norms and activations."""

from halfbyte.functional.activation import activation
from halfbyte.functional.distill import distillation_loss
from halfbyte.functional.gemm import gemm_nt
from halfbyte.functional.grouped import grouped_gemm_nt, grouped_linear
from halfbyte.functional.linear import linear, linear_shared
from halfbyte.functional.norm import layer_norm, rms_norm
from halfbyte.functional.places import STREAMS_PER_LINEAR

__all__ = [
    "STREAMS_PER_LINEAR",
    "activation",
    "distillation_loss",
    "gemm_nt",
    "grouped_gemm_nt",
    "grouped_linear",
    "layer_norm",
    "linear",
    "linear_shared",
    "rms_norm",
]
