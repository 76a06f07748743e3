"""Shared logits on a GPU: numpy's figures, and the same bits however columns are cut."""

import logit_checks as checks
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("case", [*checks.CASES, (300, 64128, torch.bfloat16, False)], ids=str)
def test_peaks_sums_and_gradients(case):
    checks.check_case(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [41, 5001, 64128])
def test_no_bit_depends_on_how_columns_are_cut(cols, dtype):
    checks.check_parts(8, cols, dtype, "cuda", 1)


def test_exact_exponentials():
    checks.check_exact("cuda")


def test_halves_are_rounded_to_even():
    checks.check_rounding("cuda")


def test_not_finite():
    checks.check_not_finite("cuda")


def test_nothing():
    checks.check_nothing("cuda")


def test_another_default_dtype():
    checks.check_another_default("cuda")
