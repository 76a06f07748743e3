"""Means over tokens on a GPU: sums, means, x quantized without them, and layers: the bits of the reference."""

import mean_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import ops
from halfbyte.kernels.quantize import both_route, residual

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLIT = hb.recipes.nvfp4(activation_mean="split")


@pytest.mark.parametrize("shape", [(4096, 512), (1000, 4104), (37, 83), (1, 8)])
def test_mean(shape):
    for dtype in (BF16, FP16, FP32):
        checks.check_mean(checks.values(shape, dtype), "cuda")
    if shape[1] > 7:
        checks.check_mean(checks.values(shape, BF16, bad=True), "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_sums_of_groups(dtype):
    checks.check_grouped_sum(checks.values((4096, 2880), dtype), (1030, 0, 17, 3000), "cuda")
    checks.check_grouped_sum(checks.values((40, 130), dtype, bad=True), (3, 30), "cuda", torch.int64)
    checks.check_grouped_sum(checks.values((6, 50), dtype).T, (0, 50), "cuda")


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_quantized(pair):
    for shape, dtype in (((256, 512), BF16), ((37, 83), BF16), ((64, 80), FP32)):
        checks.check_quantized(checks.values(shape, dtype), pair, "cuda")


@pytest.mark.parametrize("pair", checks.PAIRS[:2])
@pytest.mark.parametrize("shape", [(2048, 2304), (2040, 2312)])
def test_a_mean_subtracted_on_load(pair, shape, monkeypatch):
    """Whole tiles, and tiles with rows and columns that are not there; NaN and Inf are left out of both amaxes."""
    monkeypatch.setattr(both_route, "SMALL_PAIR_VALUES", 0)
    monkeypatch.setattr(residual, "residual_of", None)
    for bad in (False, True):
        checks.check_quantized(checks.values(shape, BF16, bad=bad), pair, "cuda")
    checks.check_quantized(checks.values(shape, BF16, calm=True), pair, "cuda")
    checks.check_transient(checks.values(shape, BF16), pair, "cuda")
    monkeypatch.setattr(residual, "token_sum", None)
    checks.check_with_sum(checks.values(shape, BF16), pair, "cuda")


def gradients(device: str, bias: bool, main_grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = (torch.randn(520, 256) + 8 * torch.randn(256)).to(device, BF16).requires_grad_()
    w, b, dy = torch.randn(384, 256) / 16, torch.randn(384), torch.randn(520, 384)
    w, b, dy = (t.to(device, BF16) for t in (w, b, dy))
    w.requires_grad_(), b.requires_grad_()
    grad = torch.ones(384, 256, device=device) if main_grad else None
    y = hb.linear(x, w, b if bias else None, SPLIT, rng=hb.Philox(1), main_grad=grad)
    y.backward(dy)
    found = [y.detach(), x.grad, grad if main_grad else w.grad, *([b.grad] if bias else [])]
    return [t.cpu() for t in found]


@pytest.mark.parametrize("bias, main_grad", [(False, False), (True, False), (True, True)])
def test_layers(bias, main_grad):
    """Equal operands in another order of summation: as far from the reference as two roundings."""
    for _ in range(2):  # the second is repeated
        for got, want in zip(gradients("cuda", bias, main_grad), gradients("cpu", bias, main_grad), strict=True):
            assert ((got.float() - want.float()).norm() / want.float().norm()) < 3e-3


def test_a_step_needs_few_launches():
    """Of the split: the mean, v beside the amax of w, s; nothing that reads or writes x again."""
    x = torch.randn(4096, 2048, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(1024, 2048, device="cuda", dtype=BF16, requires_grad=True)
    counts = []
    for recipe in (hb.recipes.nvfp4(), SPLIT):

        def step(recipe=recipe):
            hb.linear(x, w, None, recipe, rng=hb.Philox(1)).backward(torch.ones(4096, 1024, device="cuda", dtype=BF16))

        for _ in range(2):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        counts.append(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in trace.events()))
    assert counts[1] - counts[0] <= 3, counts


def test_a_weight_gradient_adds_the_outer_product_once():
    a, b = (torch.randint(-3, 4, (n, 4096), device="cuda").to(BF16) for n in (256, 384))
    left, right = torch.arange(256.0, device="cuda"), torch.arange(384.0, device="cuda").to(BF16)
    y = ops.gemm_nt_outer(a, b, (left, right), out_dtype=FP32)
    expected = a.double() @ b.double().T + left.double()[:, None] * right.double()
    assert torch.equal(y.double(), expected)
    out = torch.full((256, 384), 7.0, device="cuda")
    ops.gemm_nt_outer(a, b, (left, right), out=out)
    assert torch.equal(out.double(), expected + 7)
