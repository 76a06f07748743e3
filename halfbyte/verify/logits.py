"""Checks of what ranks compute of the logits that they share, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED, named
from halfbyte.verify.record import Finding

GROUP = "shared logits"
SHAPES = ((7, 5001), (37, 83))
DTYPES = (torch.bfloat16, torch.float32)
BITS, FIRST = 45, 3
EXPONENTIAL = 1e-5
"""Relative: what the last bits of an exponential, of arguments down to -60, may change."""


def shared_logits(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """logit_peak, logit_sums and logit_gradient_ of whole rows, and of rows that are cut in two."""
    for what, shape, dtype in named(SHAPES, DTYPES):
        where = device, backend, shape, dtype
        yield GROUP, f"logit_peak, logit_sums and logit_gradient_, {what}", lambda w=where: _parts(*w)
        yield GROUP, f"the same, cut in two, {what}", lambda w=where: _cut(*w)


def _given(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets of which some are elsewhere, and scales."""
    generator = torch.Generator().manual_seed(SEED)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float32) * 5).to(dtype)
    targets = torch.randint(-1, shape[1] + 2 * FIRST, shape[:1], generator=generator, dtype=torch.int32)
    return logits, targets, torch.rand(shape[0], generator=generator, dtype=torch.float32)


def _parts(device: torch.device, backend: str | None, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    results = []
    for place, which in ((device, backend), (CPU, "reference")):
        logits, targets, scale = (t.to(place) for t in _given(shape, dtype))
        peak = ops.logit_peak(logits, backend=which)
        sums = ops.logit_sums(logits, peak + 1, targets, FIRST, BITS, backend=which)
        ops.logit_gradient_(logits, peak + 1, targets, scale, FIRST, backend=which)
        results.append((peak, sums, logits))
    (peak, sums, gradient), (most, theirs, expected) = results
    if wrong := difference(peak, most) or difference(sums[1], theirs[1]):
        return wrong
    last = EXPONENTIAL + torch.finfo(dtype).eps
    for name, got, want, error in (("sums", sums[0], theirs[0], EXPONENTIAL), ("gradient", gradient, expected, last)):
        got, want = got.cpu().double(), want.double()
        if not bool(((got - want).abs() <= error * want.abs() + 1e-30).all()):
            return f"{name}: {(got - want).abs().max().item()} from the reference's at most"
    return None


def _cut(device: torch.device, backend: str | None, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    logits, targets, scale = (t.to(device) for t in _given(shape, dtype))
    cut = shape[1] // 3
    parts = (0, logits[:, :cut].clone()), (cut, logits[:, cut:].clone())
    peak = ops.logit_peak(logits, backend=backend)
    found = [ops.logit_sums(part, peak, targets, begin, BITS, backend=backend) for begin, part in parts]
    if wrong := difference(found[0] + found[1], ops.logit_sums(logits, peak, targets, 0, BITS, backend=backend).cpu()):
        return wrong
    for begin, part in ((0, logits), *parts):
        ops.logit_gradient_(part, peak + 1, targets, scale, begin, backend=backend)
    return difference(torch.cat([part for _, part in parts], 1), logits.cpu())
