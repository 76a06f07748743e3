"""Of logits whose columns ranks share, what each computes of its own for their cross entropy (docs/fsdp2.md)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WORK = 1 << 25
"""Logits in 64 bits at once, as their exponentials are added: 256 MiB."""


def logit_peak(logits: Tensor) -> Tensor:
    """Return the greatest of logits [tokens, columns] of every token, inf where one is NaN: fp32 [tokens]."""
    tokens, width = logits.shape
    if not width:
        return torch.full((tokens,), -torch.inf, dtype=torch.float32, device=logits.device)
    peak = logits.amax(1).float()
    return torch.where(peak.isnan(), torch.inf, peak)  # a maximum of ranks may lose NaN


def logit_sums(logits: Tensor, peak: Tensor, targets: Tensor, first: int, bits: int) -> Tensor:
    """Return what ranks add up: int64 [2, tokens].

    The first are sums of exp(logit - peak), each in fp32 and rounded to a multiple of 2^-bits, in units of that; 0 for
    a peak that is not finite. The others are the bits of the target's logit in fp32, 0 if that is not here.

    Args:
        logits: [tokens, columns].
        peak: fp32 [tokens], no logit of any rank is greater.
        targets: int32 [tokens], columns of all ranks; -1 for none.
        first: of all ranks' columns the first that is here.
        bits: so many that a sum over all ranks' columns stays below 2^63.
    """
    tokens, width = logits.shape
    sums = torch.zeros(2, tokens, dtype=torch.int64, device=logits.device)
    for part in _parts(logits):
        here = logits[part].float()
        # Of a peak that is not finite they are NaN or infinite; the sum is not read.
        powers = torch.where(peak[part, None].isfinite(), (here - peak[part, None]).exp(), 0.0)
        sums[0, part] = (powers * 2.0**bits).round_().to(torch.int64).sum(1)
        own, column = _targets_here(targets[part], width, first)
        if width:
            found = here.gather(1, column[:, None])[:, 0].view(torch.int32)
            sums[1, part] = torch.where(own, found, 0).to(torch.int64)
    return sums


def logit_gradient_(logits: Tensor, log_sum: Tensor, targets: Tensor, scale: Tensor, first: int) -> None:
    """Write over logits scale * (exp(logit - log_sum) - 1 of the target), computed in fp32.

    Args:
        logits: [tokens, columns].
        log_sum: fp32 [tokens], the logarithm of the sum of exponentials over all ranks.
        targets: int32 [tokens], columns of all ranks; -1 for none.
        scale: fp32 [tokens].
        first: of all ranks' columns the first that is here.
    """
    for part in _parts(logits):
        gradient = (logits[part].float() - log_sum[part, None]).exp_()
        own, column = _targets_here(targets[part], logits.shape[1], first)
        if logits.shape[1]:
            gradient.scatter_add_(1, column[:, None], -own[:, None].float())
        logits[part] = gradient.mul_(scale[part, None]).to(logits.dtype)  # NaN stays, of any token


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield tokens whose logits are WORK at most."""
    step = max(1, WORK // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _targets_here(targets: Tensor, width: int, first: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among these columns, and at which; of others any."""
    column = targets.long() - first
    own = (column >= 0) & (column < width) & (targets >= 0)
    return own, column.clamp(0, max(0, width - 1))
