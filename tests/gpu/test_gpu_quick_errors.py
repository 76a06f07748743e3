"""Scales chosen by quick errors, on a GPU: what decides there between nearly equal ones is another function."""

import pytest
import quick_checks as checks
import torch

SHAPE = (4112, 1072)  # large enough for them


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bf16") for name in checks.SPECS] + [("rotated-mae", "fp16"), ("rotated-mse", "fp32")],
)
def test_bytes_are_those_of_the_reference(name, dtype):
    checks.check_bytes(name, checks.DTYPES[dtype], torch.device("cuda"), SHAPE)
