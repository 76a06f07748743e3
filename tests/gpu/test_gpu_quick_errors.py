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


@pytest.mark.parametrize("shape", [SHAPE, (4096, 1024)], ids=str)
@pytest.mark.parametrize("name", checks.PAIRS)
def test_bytes_of_both_orientations_are_those_of_the_reference(name, shape):
    checks.check_pair(name, torch.device("cuda"), shape, tuple(checks.inputs((16, 16), torch.device("cuda"))))


@pytest.mark.parametrize("name", ["two", "codes"])
def test_bytes_of_groups_are_those_of_the_defined_errors(name):
    checks.check_groups(name, torch.device("cuda"), (4100, 1072), (700, 700, 3011, 4090))


@pytest.mark.parametrize("name", ["tiles-mae", "tiles-mse"])
def test_scales_of_tiles_are_stored_together(name):
    checks.check_tiles_together(name, torch.device("cuda"), (4096, 1024))


@pytest.mark.parametrize("name", ["tiles-mae", "tiles-mse"])
@pytest.mark.parametrize("shape,four,two", [((2048, 1024), 509, 4), ((4096, 384), 0, 766), ((1024, 2880), 0, 0)])
def test_neighbours_of_whole_tiles(name, shape, four, two):
    checks.check_neighbours(name, torch.device("cuda"), shape, four, two)
