"""Operations over plain tensors and the choice of the backend that runs them."""

from halfbyte.ops.backends import BackendStatus, backends
from halfbyte.ops.checkpointing import selective_checkpoint_ops
from halfbyte.ops.dispatch import (
    Operand,
    amax,
    decode,
    dequantize,
    gemm_nt,
    gemm_nt_add,
    quantize,
    quantize_row_col,
    transpose,
)
from halfbyte.ops.explain import OPS as EXPLAINED
from halfbyte.ops.explain import Explanation, Step, explain
from halfbyte.ops.fused import (
    Amaxes,
    Following,
    NormKind,
    activation,
    activation_backward,
    norm,
    norm_backward,
    split_mean,
)
from halfbyte.ops.grouped import (
    check_offsets,
    emulates,
    grouped_decode,
    grouped_dequantize,
    grouped_gemm_nt,
    grouped_quantize_row_col,
)
from halfbyte.ops.repeat import define_pass, run

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
    "amax",
    "backends",
    "check_offsets",
    "decode",
    "define_pass",
    "dequantize",
    "emulates",
    "explain",
    "gemm_nt",
    "gemm_nt_add",
    "grouped_decode",
    "grouped_dequantize",
    "grouped_gemm_nt",
    "grouped_quantize_row_col",
    "norm",
    "norm_backward",
    "quantize",
    "quantize_row_col",
    "run",
    "selective_checkpoint_ops",
    "split_mean",
    "transpose",
]
