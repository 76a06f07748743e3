"""The noise that ranks measure is that of the gradient which their optimizer steps by, the same on all."""

from __future__ import annotations

import contextlib

import noise_checks
import pytest
import ranks
import torch

import halfbyte as hb


def gradient(exact: bool) -> torch.Tensor:
    """Return the mean of both ranks' gradients, computed here."""
    parts = []
    for rank in range(2):
        model = noise_checks.converted(rank)
        with hb.high_precision(model) if exact else contextlib.nullcontext():
            noise_checks.loss(model, rank).backward()
        parts.append(model[0].weight.grad.double())
    return sum(parts) / 2


def test_two_ranks_measure_the_noise_of_their_mean_gradient():
    found = ranks.run(2, noise_checks.of_a_rank)
    assert found[0] == found[1]
    exact = gradient(True)
    wanted = float(exact.norm()), float((gradient(False) - exact).norm())
    assert found[0] == pytest.approx(wanted, rel=1e-5)
