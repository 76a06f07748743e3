"""Sums over the tokens of each group, in Triton's interpreter: the reference's bits."""

import mean_checks as checks
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_groups(dtype):
    checks.check_grouped_sum(checks.values((620, 83), dtype), (530, 0, 17, 70), "cpu")
    checks.check_grouped_sum(checks.values((40, 130), dtype, bad=True), (3, 30), "cpu")
    checks.check_grouped_sum(checks.values((6, 50), dtype).T, (0, 50), "cpu", torch.int64)
    checks.check_grouped_sum(checks.values((20, 64), dtype)[:, 3:40], (20, 0), "cpu")


def test_nothing():
    checks.check_grouped_sum(torch.zeros(0, 8), (0, 0), "cpu")
    checks.check_grouped_sum(torch.zeros(4, 0), (1, 3), "cpu")
    checks.check_grouped_sum(torch.ones(4, 8), (0, 0), "cpu")
