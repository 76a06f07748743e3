"""What the tests of shared logits' kernels share, on the CPU (interpreter) and on a GPU alike: figures by numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.kernels.logits import shares as kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BITS = 45
CASES = (
    # tokens, columns, dtype, whether tokens are neighbours in memory
    (5, 5001, BF16, False),
    (3, 4096, FP32, False),
    (4, 41, FP16, False),
    (6, 37, FP32, True),
    (2, 1, BF16, False),
)


def values(tokens: int, cols: int, dtype: torch.dtype, turned: bool = False) -> Tensor:
    """Return logits from -40 to 40."""
    g = torch.Generator().manual_seed(tokens + cols)
    x = (torch.randn((cols, tokens) if turned else (tokens, cols), generator=g) * 9).clamp(-40, 40).to(dtype)
    return x.T if turned else x


def targets_of(tokens: int, cols: int, first: int) -> Tensor:
    """Return the first column here, one before it, none, the last one here, and one behind it."""
    every = [first, first - 1, -1, first + cols - 1, first + cols]
    return torch.tensor([every[i % 5] for i in range(tokens)], dtype=torch.int32)


def as_fp64(t: Tensor) -> np.ndarray:
    return t.double().cpu().numpy()


def exponentials(x: Tensor, less: Tensor) -> np.ndarray:
    """Return exp of the fp32 difference, fp64."""
    return np.exp(as_fp64(x.float() - less[:, None]))


def error(x: Tensor, less: Tensor) -> np.ndarray:
    """Return the relative error of an fp32 exponential whose argument is rounded once more: 2^-24 of it, and three
    units."""
    return (np.abs(as_fp64(x.float() - less[:, None])) + 3) * 2.0**-23


def check_case(case: tuple, device: str) -> None:
    """Peaks and bits of targets are numpy's exactly; each exponential is within its error, and the sum is theirs."""
    tokens, cols, *_ = case
    x, first = values(*case), 1000
    targets = targets_of(tokens, cols, first)
    given = x.to(device)
    peak = kernels.logit_peak(given)
    np.testing.assert_array_equal(as_fp64(peak), as_fp64(x).max(1))
    above = peak + 0.625  # as of a rank that has a greater one
    sums = kernels.logit_sums(given, above, targets.to(device), first, BITS).cpu()
    exact, bound = exponentials(x, above.cpu()) * 2.0**BITS, error(x, above.cpu())
    assert np.all(np.abs(sums[0].numpy() - exact.sum(1)) <= (exact * bound + 0.5).sum(1))
    bits = x.float().numpy().view(np.int32).astype(np.int64)
    column = targets.numpy() - first
    here = (column >= 0) & (column < cols) & (targets.numpy() >= 0)
    np.testing.assert_array_equal(sums[1].numpy(), np.where(here, bits[np.arange(tokens), column % cols], 0))
    check_gradient(given, above, targets, first)


def check_gradient(given: Tensor, log_sum: Tensor, targets: Tensor, first: int) -> None:
    """It is written in place, where the logits were, rounded once."""
    x, (tokens, cols) = given.cpu(), given.shape
    scale = torch.where(targets >= 0, torch.arange(1, tokens + 1) / 7, 0.0)
    share, bound = exponentials(x, log_sum.cpu()), error(x, log_sum.cpu())
    column = targets.numpy()[:, None] - first
    ones = (np.arange(cols)[None] == column) & (targets.numpy() >= 0)[:, None]
    wanted, factor = (share - ones) * as_fp64(scale)[:, None], as_fp64(scale)[:, None]
    kernels.logit_gradient_(given, log_sum, targets.to(given.device), scale.to(given.device), first)
    last = torch.finfo(given.dtype).eps * np.abs(wanted) + torch.finfo(given.dtype).smallest_normal
    assert np.all(np.abs(as_fp64(given) - wanted) <= share * bound * factor + 2.0**-22 * np.abs(wanted) + last)


def check_parts(tokens: int, cols: int, dtype: torch.dtype, device: str, each: int) -> None:
    """However columns are cut, into neighbours or `each` alone, peaks, sums and gradients have the same bits."""
    x = values(tokens, cols, dtype).to(device)
    targets = torch.arange(tokens, dtype=torch.int32, device=device) * (cols // tokens)
    peak = kernels.logit_peak(x)
    whole = kernels.logit_sums(x, peak, targets, 0, BITS)
    scale, gradient = torch.rand(tokens, device=device), x.clone()
    kernels.logit_gradient_(gradient, peak + 1, targets, scale, 0)
    for cuts in ((cols // 2,), (1, 3, cols - 7), (0, cols // 3, 2 * cols // 3, cols)):
        edges = [0, *cuts, cols]
        parts = [(begin, x[:, begin:end]) for begin, end in pairwise(edges)]
        assert torch.equal(torch.stack([kernels.logit_peak(part) for _, part in parts]).amax(0), peak)
        found = sum(kernels.logit_sums(part, peak, targets, begin, BITS) for begin, part in parts)
        assert torch.equal(found, whole)
        turned = [part.clone() for _, part in parts]
        for (begin, _), part in zip(parts, turned, strict=True):
            kernels.logit_gradient_(part, peak + 1, targets, scale, begin)
        assert torch.equal(torch.cat(turned, 1), gradient)
    for token in range(0, tokens, each):  # every column is a token of its own
        column = torch.arange(cols, dtype=torch.int32, device=device)
        alone = kernels.logit_sums(x[token, :, None], peak[token].repeat(cols), -1 - column * 0, 0, BITS)[0]
        exact = np.exp(as_fp64(x[token].float() - peak[token])) * 2.0**BITS
        bound = exact * error(x[token, None], peak[token, None])[0] + 0.5
        assert int(alone.sum()) == int(whole[0, token]), "integers, in any order"
        assert np.all(np.abs(alone.cpu().numpy() - exact) <= bound)


def check_exact(device: str) -> None:
    """Exponentials that fp32 has exactly: the sum is a count, of more columns than a program reads at once."""
    x = torch.full((3, 9001), -torch.inf)
    x[0, ::3], x[1, 9000], x[2] = 7.25, -3.5, 0.0
    given = x.to(device)
    peak = kernels.logit_peak(given)
    found = kernels.logit_sums(given, peak, torch.full((3,), -1, dtype=torch.int32, device=device), 0, 48)
    assert peak.tolist() == [7.25, -3.5, 0.0]
    assert found.tolist() == [[3001 << 48, 1 << 48, 9001 << 48], [0, 0, 0]]


def check_rounding(device: str) -> None:
    """To the nearest integer, a half to the even one: bits of which exp(0) = 1 is a unit, two, or half of one."""
    x, none = torch.zeros(1, 3, device=device), torch.tensor([-1], dtype=torch.int32, device=device)
    sums = [int(kernels.logit_sums(x, torch.zeros(1, device=device), none, 0, bits)[0]) for bits in (-2, -1, 0, 1, 24)]
    assert sums == [0, 0, 3, 6, 3 << 24]
    x = torch.tensor([[0.4, 0.6, 1.4, 1.6, 2.4, 2.6]], device=device).log()
    assert int(kernels.logit_sums(x, torch.zeros(1, device=device), none, 0, 0)[0]) == 0 + 1 + 1 + 2 + 2 + 3


def check_not_finite(device: str) -> None:
    """NaN and infinities come out as the reference's."""
    x = values(6, 41, FP32)
    x[0, 3], x[1, 5], x[2, 7], x[3], x[4, 0] = torch.nan, torch.inf, -torch.inf, -torch.inf, -torch.nan
    targets = torch.tensor([3, 5, 7, 0, 1, -1], dtype=torch.int32)
    peak = reference.logit_peak(x)
    given = x.to(device)
    assert torch.equal(kernels.logit_peak(given).cpu(), peak) and peak[0] == peak[4] == torch.inf
    found = kernels.logit_sums(given, peak.to(device), targets.to(device), 0, BITS).cpu()
    wanted = reference.logit_sums(x, peak, targets, 0, BITS)
    assert found[0, [0, 1, 3, 4]].tolist() == [0] * 4 and torch.equal(found[1, 1:], wanted[1, 1:])
    assert found[1, :1].to(torch.int32).view(torch.float32).isnan()
    torch.testing.assert_close(found[0].double(), wanted[0].double(), rtol=1e-6, atol=0.0)
    log_sum, scale = torch.tensor([torch.nan, torch.nan, 30.0, torch.nan, 1.0, 1.0]), torch.tensor([1.0] * 4 + [0] * 2)
    kernels.logit_gradient_(given, log_sum.to(device), targets.to(device), scale.to(device), 0)
    reference.logit_gradient_(x, log_sum, targets, scale, 0)
    assert given.cpu()[4, 0].isnan(), "of a token that does not count, too"
    torch.testing.assert_close(given.cpu(), x, rtol=2e-6, atol=1e-12, equal_nan=True)


def check_nothing(device: str) -> None:
    """A rank without columns, and one without tokens."""
    for tokens, cols in ((3, 0), (0, 5)):
        x, targets = torch.empty(tokens, cols, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
        peak = kernels.logit_peak(x)
        assert peak.tolist() == [-torch.inf] * tokens and peak.dtype == FP32
        sums = kernels.logit_sums(x, torch.ones(tokens, device=device), targets, 0, BITS)
        assert sums.tolist() == [[0] * tokens] * 2 and sums.dtype == torch.int64
        kernels.logit_gradient_(x, peak, targets, peak, 0)


def check_another_default(device: str) -> None:
    """What torch makes where nobody names a dtype, such as bf16 while a model is loaded, changes no bit."""
    given, targets = values(4, 41, BF16).to(device), targets_of(4, 41, 0).to(device)
    given[:, 0] = 20.125  # of more bits than bf16 has beside -2^-9
    found = []
    for dtype in (FP32, BF16):
        try:
            torch.set_default_dtype(dtype)
            logits = given.float() - 2.0**-9
            peak = kernels.logit_peak(logits)
            sums = kernels.logit_sums(logits, peak, targets, 0, BITS)
            kernels.logit_gradient_(logits, peak + 1, targets, peak, 0)
        finally:
            torch.set_default_dtype(FP32)
        found.append((peak, sums, logits))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))
