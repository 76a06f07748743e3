"""Means over tokens and x quantized without them, in Triton's interpreter: the reference's bits."""

import mean_checks as checks
import pytest
import torch

from halfbyte.kernels import backend
from halfbyte.kernels.amax import route as amax_route
from halfbyte.kernels.amax import token_sum
from halfbyte.kernels.gemm import dense
from halfbyte.kernels.quantize import both_route, residual
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.sides import Epilogue

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_mean(dtype):
    for shape in ((1, 3), (37, 83), (530, 20)):
        checks.check_mean(checks.values(shape, dtype), "cpu")
    checks.check_mean(checks.values((40, 33), dtype, bad=True), "cpu")
    checks.check_mean(checks.values((6, 50), dtype).T, "cpu")
    checks.check_mean(checks.values((20, 64), dtype)[:, 3:40], "cpu")


@pytest.mark.parametrize("rows, cols", [(1024, 64), (3072, 128), (2100, 70), (2048, 20)])
def test_mean_of_many_turns(rows, cols):
    """Whole tiles and others, two groups before one is added; from 2048 rows on x is read in two halves."""
    tile = token_sum.SumTile(64, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_sum, "sum_tile", lambda cols, device: tile)
        checks.check_mean(checks.values((rows, cols), BF16), "cpu")


def test_programs_that_meet_leave_their_tickets_as_they_were():
    x = checks.values((40, 5000), BF16)  # several tiles of columns, each with a ticket
    for _ in range(3):
        checks.check_mean(x, "cpu")


def test_parts_of_a_sum():
    """More parts than are added at once; whole numbers, which no order changes."""
    for parts, cols in ((1, 5), (128, 32), (300, 70)):
        sums = torch.randint(-99, 100, (parts, cols)).float()
        assert torch.equal(token_sum.parts_added(sums), sums.sum(0))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_nothing(shape):
    x = torch.zeros(shape)
    assert torch.equal(backend.token_mean(x), torch.zeros(shape[1]))
    assert torch.equal(backend.token_sum(x), torch.zeros(shape[1]))


FEW = checks.PAIRS[1], checks.PAIRS[5]  # the others differ in what comes after x without its mean


@pytest.mark.parametrize(
    "pair", [pair if pair in FEW else pytest.param(pair, marks=pytest.mark.full) for pair in checks.PAIRS]
)
def test_quantized(pair):
    for shape, dtype in (((48, 80), BF16), ((20, 40), FP16)):
        checks.check_quantized(checks.values(shape, dtype), pair, "cpu")
    checks.check_quantized(checks.values((40, 48), BF16, bad=True), pair, "cpu")


def full(*case: object):
    return pytest.param(*case, marks=pytest.mark.full)


WHOLE, CUT = (64, 128), (40, 72)
ON_LOAD = (
    (checks.PAIRS[0], CUT, True),
    (checks.PAIRS[1], WHOLE, False),
    full(checks.PAIRS[0], WHOLE, True),
    full(checks.PAIRS[1], CUT, False),
)


@pytest.mark.parametrize("pair, shape, bad", ON_LOAD)
def test_a_mean_subtracted_on_load(pair, shape, bad, monkeypatch):
    """As large tensors have it: whole tiles, and tiles with rows and columns that are not there."""
    monkeypatch.setattr(both_route, "SMALL_PAIR_VALUES", 0)
    monkeypatch.setattr(residual, "residual_of", None)
    checks.check_quantized(checks.values(shape, BF16, bad=bad), pair, "cpu")
    checks.check_transient(checks.values(shape, BF16, calm=True), pair, "cpu")
    monkeypatch.setattr(residual, "token_sum", None)
    checks.check_with_sum(checks.values(shape, BF16), pair, "cpu")


@pytest.mark.parametrize("rows", [176, 170])
def test_rows_are_read_from_the_end(rows, monkeypatch):
    """Programs of several groups of rows, of which the last may be cut: each is read once, wherever the largest is."""
    monkeypatch.setattr(both_route, "SMALL_PAIR_VALUES", 0)
    monkeypatch.setattr(residual, "residual_of", None)
    monkeypatch.setattr(amax_route.mg, "parts_of", lambda units, beside, per_sm, device: min(units, 4))
    for row in (0, 20, 50, 100, 130, rows - 1):
        x = checks.values((rows, 72), BF16, calm=True)
        x[row, 3] = 500.0
        checks.check_quantized(x, checks.PAIRS[0], "cpu")


@pytest.mark.parametrize("variant", ["tma", "pointer"])
@pytest.mark.parametrize("shape", [(37, 53, 40), (64, 64, 2048)])  # the second splits its contraction
def test_outer_product(variant, shape):
    M, N, K = shape
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (n, K), generator=g).bfloat16() for n in (M, N))
    left, right = (torch.randint(-100, 100, (n,), generator=g) for n in (M, N))
    addend = torch.randint(-9, 9, (M, N), generator=g).float()
    expected = a.double() @ b.double().T + left[:, None].double() * right.double()
    outer = left.float(), right.bfloat16()
    y = dense.gemm_nt(Decoded(a), Decoded(b), Epilogue(FP32, outer=outer), variant=variant)
    assert torch.equal(y.double(), expected)
    out = addend.clone()
    dense.gemm_nt(Decoded(a), Decoded(b), Epilogue(addend=out, out=out, outer=outer), variant=variant)
    assert torch.equal(out.double(), expected + addend)


def test_an_outer_product_is_added_once_to_a_sum_of_several_launches(monkeypatch):
    monkeypatch.setattr(dense, "MAX_CHAIN", 64)
    a, b, outer = torch.ones(8, 160).bfloat16(), torch.ones(8, 160).bfloat16(), (torch.ones(8) * 3, torch.ones(8) * 5)
    y = dense.gemm_nt(Decoded(a), Decoded(b), Epilogue(FP32, outer=outer), variant="pointer")
    assert torch.equal(y, torch.full((8, 8), 175.0))


def test_an_outer_product_without_products():
    outer, a = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0, 7.0])), Decoded(torch.zeros(2, 0))
    y = dense.gemm_nt(a, Decoded(torch.zeros(3, 0)), Epilogue(FP32, torch.ones(3), outer=outer))
    assert torch.equal(y, torch.outer(*outer) + 1)
