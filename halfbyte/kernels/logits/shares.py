"""The parts of a cross entropy whose logits ranks share: each reads the logits once, a program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.launch import jit

COLUMNS = 4096
NUM_WARPS = 8  # a thread has 16 columns: two loads of 16 bytes in bf16, and 32 registers of partial sums
WHOLE = tl.constexpr(8388608.0)  # 2^23: from here on fp32 has integers alone


@triton.jit
def load_logits(at_ptr, is_inside):
    """Return fp32 logits, -inf outside."""
    return pm.to_fp32(tl.load(at_ptr, mask=is_inside, other=float("-inf")))


@triton.jit
def rounded(x):
    """Return fp32 x >= 0 as int64, nearest even."""
    return tl.where(x < WHOLE, (x + WHOLE) - WHOLE, x).to(tl.int64)


@jit
def logit_peak_kernel(logits_ptr, peak_ptr, width, stride_r, stride_c, C: tl.constexpr, OVERLAP: tl.constexpr):
    """Write the greatest logit of a token."""
    overlap.begin(OVERLAP)
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * stride_r
    most = tl.full((C,), float("-inf"), tl.float32)
    for start in range(0, width, C):
        col = start + tl.arange(0, C)
        x = load_logits(row_ptr + col.to(tl.int64) * stride_c, col < width)
        most = tl.maximum(most, tl.where(x != x, float("inf"), x))
    tl.store(peak_ptr + token, tl.max(most))


@jit(do_not_specialize=("first", "tokens"))
def logit_sums_kernel(
    logits_ptr, peak_ptr, targets_ptr, sums_ptr, tokens, width, first, unit, stride_r, stride_c, C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write to sums [2, tokens] those of exponentials in units of 1 / unit, and the bits of the target's logit."""
    overlap.begin(OVERLAP)
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * stride_r
    peak = tl.load(peak_ptr + token)
    total = tl.zeros((C,), tl.int64)
    for start in range(0, tl.where(peak - peak == 0.0, width, 0), C):  # of a peak that is not finite nothing is read
        col = start + tl.arange(0, C)
        x = load_logits(row_ptr + col.to(tl.int64) * stride_c, col < width)
        total += rounded(tl.exp(x - peak) * unit)
    column = tl.load(targets_ptr + token) - first  # of no target it is negative
    is_here = (column >= 0) & (column < width)
    logit = pm.to_fp32(tl.load(row_ptr + column.to(tl.int64) * stride_c, mask=is_here, other=0.0))
    out_ptr = sums_ptr + token.to(tl.int64)
    tl.store(out_ptr, tl.sum(total))
    tl.store(out_ptr + tokens, logit.to(tl.int32, bitcast=True).to(tl.int64))


@jit(do_not_specialize=("first",))
def logit_gradient_kernel(
    logits_ptr, log_sum_ptr, targets_ptr, scale_ptr, width, first, stride_r, stride_c, C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write over the logits of a token their gradient."""
    overlap.begin(OVERLAP)
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * stride_r
    log_sum, scale = tl.load(log_sum_ptr + token), tl.load(scale_ptr + token)
    column = tl.load(targets_ptr + token) - first  # of no target it is negative
    for start in range(0, width, C):
        col = start + tl.arange(0, C)
        at_ptr = row_ptr + col.to(tl.int64) * stride_c  # once: a second time for the store spills on sm_120
        share = tl.exp(load_logits(at_ptr, col < width) - log_sum)
        gradient = tl.where(col == column, share - 1.0, share) * scale
        tl.store(at_ptr, dc.cast(gradient, logits_ptr.dtype.element_ty), mask=col < width)


def logit_peak(logits: Tensor) -> Tensor:
    """Do what `halfbyte.reference.logit_peak` does."""
    tokens, width = logits.shape
    peak = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        logit_peak_kernel[(tokens,)](logits, peak, width, *logits.stride(), **_options(logits))
    return peak


def logit_sums(logits: Tensor, peak: Tensor, targets: Tensor, first: int, bits: int) -> Tensor:
    """Do what `halfbyte.reference.logit_sums` does, but for the last bits of an exponential."""
    tokens, width = logits.shape
    sums = torch.empty(2, tokens, dtype=torch.int64, device=logits.device)
    if tokens:
        logit_sums_kernel[(tokens,)](
            logits, peak, targets, sums, tokens, width, first, 2.0**bits, *logits.stride(), **_options(logits)
        )
    return sums


def logit_gradient_(logits: Tensor, log_sum: Tensor, targets: Tensor, scale: Tensor, first: int) -> None:
    """Do what `halfbyte.reference.logit_gradient_` does, but for the last bits of an exponential."""
    tokens, width = logits.shape
    if tokens and width:
        logit_gradient_kernel[(tokens,)](
            logits, log_sum, targets, scale, width, first, *logits.stride(), **_options(logits)
        )


def _options(logits: Tensor) -> dict:
    fixed = {"C": COLUMNS, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    return fixed | overlap.launch_options(logits.device)
