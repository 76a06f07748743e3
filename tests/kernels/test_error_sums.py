"""Sums of statistics in Triton's interpreter, and the reference's: numpy's figures."""

import pytest
import sums_checks as checks
import torch

from halfbyte import ops, reference
from halfbyte.kernels import backend
from halfbyte.kernels.amax import error_sums as kernels


@pytest.fixture(params=["kernels", "reference"])
def either(request, monkeypatch):
    """Check the kernels, and the reference in their place."""
    if request.param == "reference":
        for name in ("error_sums", "square_sum", "column_outliers"):
            monkeypatch.setattr(kernels, name, getattr(reference, name))


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_error_sums(case, either):
    checks.check_error_sums(case, "cpu")


def test_not_finite(either):
    checks.check_not_finite("cpu")


@pytest.mark.parametrize("shape", [(300, 700), (37, 5)])
def test_columns(shape, either):
    checks.check_columns(shape, "cpu")


def test_rows_that_one_program_does_not_count(monkeypatch):
    """Several programs share the columns, the last of them rows that do not fill its tile."""
    monkeypatch.setattr(kernels, "OUTLIER_PROGRAMS", 3)
    checks.check_columns((107, 9), "cpu")


@pytest.mark.parametrize("module", [backend, reference])
def test_nothing(module):
    x = torch.zeros(0, 32)
    sums, maxima = module.error_sums(x, x, torch.zeros(0, 2))
    assert sums.tolist() == [0] * 8 and maxima.shape == (0, 2)
    assert module.square_sum(x).item() == 0
    assert module.column_outliers(x, torch.ones((), dtype=torch.float64)).tolist() == [0] * 32


def test_ops_ask_the_backend():
    x, limit = torch.randn(20, 48), torch.ones((), dtype=torch.float64)
    sums, maxima = ops.error_sums(x, x)
    assert maxima is None and sums[0].item() == ops.square_sum(x).item() == pytest.approx(x.double().square().sum())
    assert torch.equal(ops.column_outliers(x, limit), (x.abs() > 1).sum(0).double())
    with pytest.raises(ValueError, match="backend='triton'"):
        ops.error_sums(x, x, backend="triton")
