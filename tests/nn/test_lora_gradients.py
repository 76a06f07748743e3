"""Gradients of adapters over codes against fp64: beside the weight, and straight through the merged one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte import recipes

TILE = hb.NVFP4(block=(16, 16))
SCALING = 2.0


def layer(merge_aware, recipe, dtype):
    torch.manual_seed(0)
    linear = hb.nn.Linear(64, 48, dtype=dtype, recipe=recipe, state=hb.RunState(3))
    hb.freeze_(linear)
    lora = hb.nn.LoRALinear.from_linear(linear, rank=4, alpha=8, merge_aware=merge_aware)
    nn.init.normal_(lora.lora_B, std=0.1)
    return lora


def data(dtype):
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, 7, 64, generator=g).to(dtype), torch.randn(3, 7, 48, generator=g).to(dtype)


def expected(lora, x, dy):
    """Return y, dx, dA, dB in fp64, of the dequantized weight; quantization of the merged one is a constant added."""
    x, a, b = (t.detach().double().requires_grad_() for t in (x, lora.lora_A, lora.lora_B))
    w = lora.weight.dequantize(torch.float32).double() + SCALING * b @ a
    if lora.merge_aware:
        rounded = hb.quantize(w.detach().float().to(lora.weight.dtype), lora.weight.spec)
        w = w + (rounded.dequantize(torch.float32).double() - w).detach()
    y = x @ w.T + lora.bias.detach().double()
    y.backward(dy.double())
    return y.detach(), x.grad, a.grad, b.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("merge_aware", [False, True])
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_in_high_precision_all_but_the_weight(block, merge_aware, dtype, tolerance):
    recipe = recipes.weight_only(base=recipes.nvfp4(weight_block=(16, 16)) if block[0] == 16 else "nvfp4_forward")
    lora = layer(merge_aware, recipe, dtype)
    assert lora.weight.spec.block == block
    x, dy = data(dtype)
    x.requires_grad_()
    y = lora(x)
    y.backward(dy)
    got = y.detach(), x.grad, lora.lora_A.grad, lora.lora_B.grad
    for mine, right in zip(got, expected(lora, x, dy), strict=True):
        assert (mine.double() - right).norm() < tolerance * right.norm()


@pytest.mark.parametrize("merge_aware", [False, True])
def test_quantized_operands_of_the_base_do_not_enter_gradients_of_adapters(merge_aware):
    """x and dy are quantized for the base's GEMMs; A and B see them as they are."""
    lora = layer(merge_aware, "nvfp4", torch.float32)
    x, dy = data(torch.float32)
    x.requires_grad_()
    y = lora(x)
    y.backward(dy)
    right_y, right_dx, right_da, right_db = expected(lora, x, dy)
    for mine, right in ((lora.lora_A.grad, right_da), (lora.lora_B.grad, right_db)):
        assert (mine.double() - right).norm() < 2e-6 * right.norm()
    for mine, right in ((y.detach(), right_y), (x.grad, right_dx)):  # 4 bits of x, of dy
        assert 1e-3 < (mine.double() - right).norm() / right.norm() < 0.2


def test_autocast_casts_the_adapters():
    lora = layer(False, recipes.weight_only(), torch.bfloat16)
    x, dy = data(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora(x.requires_grad_())
    y.backward(dy.bfloat16())
    assert y.dtype == torch.bfloat16 and lora.lora_A.grad.dtype == torch.float32
    for mine, right in zip(
        (y.detach(), x.grad, lora.lora_A.grad, lora.lora_B.grad), expected(lora, x, dy), strict=True
    ):
        assert (mine.double() - right).norm() < 2e-2 * right.norm()


@pytest.mark.parametrize("merge_aware", [False, True])
def test_nan_and_inf_reach_output_and_gradients(merge_aware):
    for value in (float("nan"), float("inf")):
        lora = layer(merge_aware, "nvfp4", torch.float32)
        x, dy = data(torch.float32)
        x[0, 0, 0] = value
        y = lora(x)
        y.backward(dy)
        assert not y[0, 0].isfinite().any() and not lora.lora_A.grad.isfinite().all()
        lora = layer(merge_aware, "nvfp4", torch.float32)
        lora.lora_B.data[0, 0] = value
        assert not lora(data(torch.float32)[0])[..., 0].isfinite().any()
