"""The specification in plain torch: what every other backend must reproduce byte for byte, on any device.

It says what docs/numerics.md says, in whole-tensor operations, and shares nothing with `halfbyte.kernels`.
"""

from halfbyte.reference.activation import activation, activation_backward
from halfbyte.reference.fused import (
    activation_backward_with_amaxes,
    activation_with_amaxes,
    norm_with_amaxes,
    operand_amaxes,
)
from halfbyte.reference.grouped import (
    grouped_dequantize,
    grouped_gemm_nt,
    grouped_gemm_nt_batch_invariant,
    grouped_quantize_row_col,
    grouped_token_sum,
)
from halfbyte.reference.hadamard import rotate, signs
from halfbyte.reference.logits import logit_gradient_, logit_peak, logit_sums
from halfbyte.reference.matmul import Decoded, decode, dequantize, from_values, gemm_nt, plain
from halfbyte.reference.mean import (
    amax_with_product,
    quantize_residual,
    quantize_with_sum,
    residual_of,
    token_mean,
    token_sum,
)
from halfbyte.reference.norm import Statistics, norm, norm_backward
from halfbyte.reference.nvfp4 import quantize, quantize_row_col, row_col_amax, transpose
from halfbyte.reference.scale import finite_amax, greatest_amax
from halfbyte.reference.sums import column_outliers, error_sums, operand_noise, operand_sums, square_sum

__all__ = [
    "Decoded",
    "Statistics",
    "activation",
    "activation_backward",
    "activation_backward_with_amaxes",
    "activation_with_amaxes",
    "amax_with_product",
    "column_outliers",
    "decode",
    "dequantize",
    "error_sums",
    "finite_amax",
    "from_values",
    "gemm_nt",
    "greatest_amax",
    "grouped_dequantize",
    "grouped_gemm_nt",
    "grouped_gemm_nt_batch_invariant",
    "grouped_quantize_row_col",
    "grouped_token_sum",
    "logit_gradient_",
    "logit_peak",
    "logit_sums",
    "norm",
    "norm_backward",
    "norm_with_amaxes",
    "operand_amaxes",
    "operand_noise",
    "operand_sums",
    "plain",
    "quantize",
    "quantize_residual",
    "quantize_row_col",
    "quantize_with_sum",
    "residual_of",
    "rotate",
    "row_col_amax",
    "signs",
    "square_sum",
    "token_mean",
    "token_sum",
    "transpose",
]
