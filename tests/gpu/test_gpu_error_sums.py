"""Sums of statistics on a GPU: numpy's figures."""

import pytest
import sums_checks as checks
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


LARGE = [(2050, 1100, 16, checks.NVFP4, torch.bfloat16, turned) for turned in (False, True)]
WHOLE = [(1024, 2048, size, checks.NVFP4, torch.bfloat16, turned) for size in (0, 16) for turned in (False, True)]


@pytest.mark.parametrize("case", [*checks.CASES, *LARGE, *WHOLE], ids=str)
def test_operand_sums(case):
    checks.check_operand_sums(case, "cuda")


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("shape", [(37, 600), (3000, 1030)])
def test_error_sums(shape, dtypes):
    checks.check_error_sums(shape, dtypes, "cuda")


def test_not_finite():
    checks.check_not_finite("cuda")


@pytest.mark.parametrize("shape", [(300, 700), (5000, 333)])
def test_columns(shape):
    checks.check_columns(shape, "cuda")
