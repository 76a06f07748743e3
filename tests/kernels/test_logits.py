"""Shared logits in Triton's interpreter, and the reference's: numpy's figures."""

import logit_checks as checks
import pytest
import torch

from halfbyte import ops, reference
from halfbyte.kernels.logits import shares as kernels
from halfbyte.reference import logits


@pytest.fixture(params=["kernels", "reference"], autouse=True)
def either(request, monkeypatch):
    """Check the kernels, and the reference in their place, which takes a few tokens at a time."""
    if request.param == "reference":
        monkeypatch.setattr(logits, "WORK", 100)
        for name in ("logit_peak", "logit_sums", "logit_gradient_"):
            monkeypatch.setattr(kernels, name, getattr(reference, name))


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_peaks_sums_and_gradients(case):
    checks.check_case(case, "cpu")


@pytest.mark.parametrize("cols, dtype", [(5001, torch.bfloat16), (41, torch.float32)], ids=str)
def test_no_bit_depends_on_how_columns_are_cut(cols, dtype):
    checks.check_parts(4, cols, dtype, "cpu", 1 if cols < 100 else 9)


def test_exact_exponentials():
    checks.check_exact("cpu")


def test_halves_are_rounded_to_even():
    checks.check_rounding("cpu")


def test_not_finite():
    checks.check_not_finite("cpu")


def test_nothing():
    checks.check_nothing("cpu")


def test_another_default_dtype():
    checks.check_another_default("cpu")


def test_ops_ask_the_backend_of_the_device():
    x, targets = checks.values(3, 7, torch.float32), checks.targets_of(3, 7, 0)
    peak = ops.logit_peak(x)
    assert torch.equal(peak, reference.logit_peak(x))
    assert torch.equal(ops.logit_sums(x, peak, targets, 0, 9), reference.logit_sums(x, peak, targets, 0, 9))
    mine, theirs = x.clone(), x.clone()
    ops.logit_gradient_(mine, peak, targets, peak, 0)
    reference.logit_gradient_(theirs, peak, targets, peak, 0)
    assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="Triton kernels need a CUDA GPU"):
        ops.logit_peak(x, backend="triton")
