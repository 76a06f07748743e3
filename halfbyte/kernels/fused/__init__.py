"""What ops calls for norms and activations where Triton runs: the functions of `halfbyte.reference.fused`."""

from halfbyte.kernels.fused.activation import activation_backward_with_amaxes, activation_with_amaxes
from halfbyte.kernels.fused.norm import norm_with_amaxes
from halfbyte.kernels.fused.norm_gradient import norm_backward

__all__ = ["activation_backward_with_amaxes", "activation_with_amaxes", "norm_backward", "norm_with_amaxes"]
