"""Sums of statistics in Triton's interpreter, and the reference's: numpy's figures."""

import pytest
import sums_checks as checks
import torch

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.kernels import backend
from halfbyte.kernels.sums import error_sums as kernels
from halfbyte.kernels.sums import operand_sums as operand_kernels
from halfbyte.kernels.sums import partial
from halfbyte.layout import Blocks, Operand


@pytest.fixture(params=["kernels", "reference"])
def either(request, monkeypatch):
    """Check the kernels, and the reference in their place."""
    if request.param == "reference":
        for name in ("error_sums", "square_sum", "column_outliers"):
            monkeypatch.setattr(kernels, name, getattr(reference, name))
        for name in ("operand_sums", "operand_noise"):
            monkeypatch.setattr(operand_kernels, name, getattr(reference, name))


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_operand_sums(case, either):
    checks.check_operand_sums(case, "cpu")


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("shape", [(37, 600), (9, 3)])
def test_error_sums(shape, dtypes, either):
    checks.check_error_sums(shape, dtypes, "cpu")


def test_not_finite(either):
    checks.check_not_finite("cpu")


@pytest.mark.parametrize("shape", [(300, 700), (37, 5)])
def test_columns(shape, either):
    checks.check_columns(shape, "cpu")


def test_rows_that_one_program_does_not_count(monkeypatch):
    """Several programs share the columns, the last of them rows that do not fill its tile."""
    monkeypatch.setattr(kernels, "OUTLIER_PROGRAMS", 3)
    checks.check_columns((107, 9), "cpu")


@pytest.mark.parametrize("turned", [False, True])
def test_programs_that_take_several_tiles(monkeypatch, turned):
    """The last of them takes fewer, and what they found is more than the kernel that adds it up reads at once."""
    monkeypatch.setattr(partial, "PROGRAMS", 3)
    monkeypatch.setattr(partial, "STEP", 2)
    checks.check_operand_sums((530, 1100, 16, checks.NVFP4, torch.bfloat16, turned), "cpu")
    checks.check_error_sums((41, 700), (torch.float32, torch.bfloat16), "cpu")
    checks.check_columns((107, 300), "cpu")


@pytest.mark.parametrize("limit", [1.7, 0.0, 1e-60, 2**-149 * 0.75, 3.4028235e38, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("scale", [1.0, 2.0**-149])
def test_fp32_beyond_any_limit(either, limit, scale):
    """Outliers are compared with the fp64 limit, not with the fp32 number next to it."""
    x = torch.tensor([[1.7, 0, -3.4028235e38, torch.inf], [1.7000001, -(2**-149), torch.nan, 3]]) * scale
    wide = torch.tensor(limit, dtype=torch.float64)
    for near in (wide, wide.nextafter(torch.zeros_like(wide)), wide.float().double()):
        wanted = (x.abs().double() > near).sum(0).double()
        assert torch.equal(kernels.column_outliers(x, near), wanted), near


@pytest.mark.parametrize("module", [backend, reference])
def test_nothing(module):
    x = torch.zeros(0, 32)
    operand = Operand(Blocks(torch.zeros(0, 16).byte(), torch.zeros(0, 2).byte(), torch.zeros(())), hb.NVFP4(), 32)
    sums, largest, maxima = module.operand_sums(x, operand, None, True)
    assert sums.tolist() == [0] * 9 and largest.item() == 0 and maxima.shape == (0, 2)
    assert module.operand_noise(x, operand).item() == 0
    assert module.error_sums(x, x).tolist() == [0] * 3
    assert [t.item() for t in module.square_sum(x)] == [0, 0]
    assert module.column_outliers(x, torch.ones((), dtype=torch.float64)).tolist() == [0] * 32


def test_ops_ask_the_backend():
    x, limit = torch.randn(20, 48), torch.ones((), dtype=torch.float64)
    squares, largest = ops.square_sum(x)
    assert ops.error_sums(x, x)[0].item() == squares.item() == pytest.approx(x.double().square().sum())
    assert largest.item() == x.abs().max().item()
    assert torch.equal(ops.column_outliers(x, limit), (x.abs() > 1).sum(0).double())
    operand = Operand(reference.quantize(x, hb.NVFP4()), hb.NVFP4(), 48)
    sums, of_operand, maxima = ops.operand_sums(x, operand)
    assert maxima is None and of_operand.item() == largest.item() and sums[0].item() == squares.item()
    assert ops.operand_noise(x, operand).item() == sums[1].item()
    for run in (
        lambda: ops.error_sums(x, x, backend="triton"),
        lambda: ops.operand_sums(x, operand, backend="triton"),
        lambda: ops.operand_noise(x, operand, backend="triton"),
    ):
        with pytest.raises(ValueError, match="backend='triton'"):
            run()
