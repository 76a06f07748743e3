"""Sums of statistics on a GPU: numpy's figures."""

import pytest
import sums_checks as checks
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("case", [*checks.CASES, (2050, 1100, 16, 16, torch.bfloat16, True)], ids=str)
def test_error_sums(case):
    checks.check_error_sums(case, "cuda")


def test_not_finite():
    checks.check_not_finite("cuda")


@pytest.mark.parametrize("shape", [(300, 700), (5000, 333)])
def test_columns(shape):
    checks.check_columns(shape, "cuda")
