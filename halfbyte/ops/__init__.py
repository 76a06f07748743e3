"""Operations over plain tensors and the choice of the backend that runs them."""

from halfbyte.layout import Operand
from halfbyte.ops.backends import BackendStatus, backends
from halfbyte.ops.checkpointing import selective_checkpoint_ops
from halfbyte.ops.define import define_pass
from halfbyte.ops.explain import OPS as EXPLAINED
from halfbyte.ops.explain import Explanation, Step, explain
from halfbyte.ops.fused import (
    Amaxes,
    Following,
    NormKind,
    activation,
    activation_backward,
    add_norm,
    norm,
    norm_backward,
)
from halfbyte.ops.gemm import gemm_nt, gemm_nt_add, gemm_nt_batch_invariant, gemm_nt_outer
from halfbyte.ops.grouped import (
    check_offsets,
    copied_base,
    emulates,
    grouped_decode,
    grouped_dequantize,
    grouped_gemm_nt,
    grouped_gemm_nt_batch_invariant,
    grouped_quantize_row_col,
    grouped_row_col_amax,
    in_one_pass,
)
from halfbyte.ops.logits import logit_gradient_, logit_peak, logit_sums
from halfbyte.ops.mean import (
    amax_with_product,
    grouped_token_sum,
    quantize_residual,
    quantize_with_sum,
    token_mean,
    token_sum,
)
from halfbyte.ops.quantization import (
    amax,
    amax_of_all,
    decode,
    dequantize,
    quantize,
    quantize_row_col,
    row_col_amax,
    transpose,
)
from halfbyte.ops.repeat import constant, in_shape, run
from halfbyte.ops.sums import column_outliers, error_sums, operand_noise, operand_sums, square_sum

__all__ = [
    "EXPLAINED",
    "Amaxes",
    "BackendStatus",
    "Explanation",
    "Following",
    "NormKind",
    "Operand",
    "Step",
    "activation",
    "activation_backward",
    "add_norm",
    "amax",
    "amax_of_all",
    "amax_with_product",
    "backends",
    "check_offsets",
    "column_outliers",
    "constant",
    "copied_base",
    "decode",
    "define_pass",
    "dequantize",
    "emulates",
    "error_sums",
    "explain",
    "gemm_nt",
    "gemm_nt_add",
    "gemm_nt_batch_invariant",
    "gemm_nt_outer",
    "grouped_decode",
    "grouped_dequantize",
    "grouped_gemm_nt",
    "grouped_gemm_nt_batch_invariant",
    "grouped_quantize_row_col",
    "grouped_row_col_amax",
    "grouped_token_sum",
    "in_one_pass",
    "in_shape",
    "logit_gradient_",
    "logit_peak",
    "logit_sums",
    "norm",
    "norm_backward",
    "operand_noise",
    "operand_sums",
    "quantize",
    "quantize_residual",
    "quantize_row_col",
    "quantize_with_sum",
    "row_col_amax",
    "run",
    "selective_checkpoint_ops",
    "square_sum",
    "token_mean",
    "token_sum",
    "transpose",
]
