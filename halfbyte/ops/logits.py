"""Of logits whose columns ranks share (docs/fsdp2.md): no torch ops, since autograd knows what calls them."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.define import implementation


def logit_peak(logits: Tensor, backend: str | None = None) -> Tensor:
    """Return the greatest logit of every token, fp32; see `halfbyte.reference.logit_peak`."""
    return implementation(logits.device, backend or "").logit_peak(logits)


def logit_sums(
    logits: Tensor, peak: Tensor, targets: Tensor, first: int, bits: int, backend: str | None = None
) -> Tensor:
    """Return sums of exponentials and the bits of targets' logits, int64; see `halfbyte.reference.logit_sums`."""
    return implementation(logits.device, backend or "").logit_sums(logits, peak, targets, first, bits)


def logit_gradient_(
    logits: Tensor, log_sum: Tensor, targets: Tensor, scale: Tensor, first: int, backend: str | None = None
) -> None:
    """Write over logits their gradient; see `halfbyte.reference.logit_gradient_`."""
    implementation(logits.device, backend or "").logit_gradient_(logits, log_sum, targets, scale, first)
