"""A weight that comes quantized: fprop multiplies its codes, dgrad what they stand for, nothing trains it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from linear_cases import RECIPES, VARIANTS
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte import recipes

TILE = hb.NVFP4(block=(16, 16))
RNG = hb.Philox(3, 5)
EVERY = {name: r for name, r in (RECIPES | VARIANTS).items() if r.fprop is not None and r.fprop.b is not None}
FROZEN = {name: r for name, r in EVERY.items() if not r.fprop.b.needs_rng and r.fprop.b.rotation is None}


def tensors(dtype=torch.bfloat16, m=18, k=48, n=32):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=g).to(dtype) for shape in ((m, k), (n, k), (n,), (m, n)))


def run(x, w, bias, recipe, dy, **options):
    x = x.clone().requires_grad_()
    y = hb.linear(x, w, bias, recipe, rng=RNG, **options)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_weight_is_the_layer_on_its_values(name):
    """A bf16 master made of codes quantizes to these codes again, so the layer that has it is an independent path."""
    recipe = FROZEN[name]
    x, w, bias, dy = tensors()
    codes = hb.quantize(w, recipe.fprop.b)
    y, dx = run(x, codes, bias, recipe, dy)
    values = codes.dequantize().requires_grad_()
    same_y, same_dx = run(x, values, bias, recipe, dy)
    if recipe.channels is not None and recipe.channels.kind == "patch":
        # Values in bf16 differ from what the codes stand for by a rounding, which is their error: channels of nearly
        # equal errors change places. Codes have none. Without patches, x's rounding alone is 6 % of y.
        assert (y - same_y).norm() <= 0.02 * same_y.norm()
    else:
        assert torch.equal(y, same_y)
    assert torch.equal(dx, same_dx)
    assert values.grad is not None and codes.grad is None


def reads_the_codes(recipe):
    """Whether the trained layer's backward, too, reads nothing of the weight but the operand of fprop."""
    is_turned = recipe.fprop.b.is_tile and recipe.dgrad is not None and recipe.dgrad.b == recipe.fprop.b
    return is_turned or recipe.backward == "dequantized"


SAME = {  # a mean of x, and channels that are apart, are multiplied by w itself, or by what the codes stand for
    name: recipe
    for name, recipe in FROZEN.items()
    if reads_the_codes(recipe) and not recipe.splits_mean and recipe.channels is None
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_tiles_give_the_bytes_of_the_trained_layer(name, dtype):
    """The transposed codes are the operand that dgrad quantizes from the master, of fp32 weights too."""
    x, w, bias, dy = tensors(dtype)
    codes = hb.quantize(w, SAME[name].fprop.b)
    for got, expected in zip(run(x, codes, bias, SAME[name], dy), run(x, w, bias, SAME[name], dy), strict=True):
        assert torch.equal(got, expected)


class Quantizations(TorchDispatchMode):
    """Names the ops that run; one that is asked for neither orientation does nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_idle = func._schema.name == "halfbyte::quantize_row_col" and args[1] == args[2] == ""
        if func.namespace == "halfbyte" and not is_idle:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe, extra",
    [
        (recipes.nvfp4(), []),  # x and dy are quantized, the weight's codes are turned
        (recipes.nvfp4(weight_block=(1, 16)), ["dequantize", "quantize_row_col"]),
        (recipes.nvfp4_forward(), ["dequantize"]),
    ],
)
def test_what_the_backward_makes_of_the_codes(recipe, extra):
    x, w, bias, dy = tensors()
    codes = hb.quantize(w, recipe.fprop.b)
    x.requires_grad_()
    with Quantizations() as forward:
        y = hb.linear(x, codes, bias, recipe, rng=RNG)
    with Quantizations() as backward:
        y.backward(dy)
    assert forward.names == ["quantize_row_col", "gemm_nt"]
    quantized_dy = ["quantize_row_col"] if recipe.dgrad else []
    turned = ["transpose"] if recipe.fprop.b.is_tile else extra
    assert backward.names == [*quantized_dy, *turned, "gemm_nt"]


def test_nothing_but_the_codes_is_kept_for_the_backward():
    x, w, _, _ = tensors()
    codes = hb.quantize(w, TILE)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hb.linear(x.requires_grad_(), codes, None, recipes.nvfp4(), rng=RNG)
    addresses = {codes.qdata.data_ptr(), codes.block_scale.data_ptr(), codes.amax.data_ptr()}
    kept = {t.data_ptr() for t in saved if t.numel() > 2}  # the place of the random stream is two numbers
    assert {codes.qdata.data_ptr(), codes.block_scale.data_ptr()} <= kept <= addresses


@pytest.mark.parametrize("recipe", [recipes.nvfp4(), recipes.nvfp4_forward(), recipes.bf16()])
def test_scale_layout_autocast_and_siblings(recipe):
    x, w, bias, dy = tensors()
    spec = recipe.fprop.b if recipe.fprop else TILE
    codes = hb.quantize(w, spec)
    swizzled = hb.quantize(w, spec, scale_layout="swizzled_32_4_4")
    expected = run(x, codes, bias, recipe, dy)
    assert all(map(torch.equal, run(x, swizzled, bias, recipe, dy), expected))
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = run(x.float(), codes, bias.float(), recipe, dy)
    assert torch.equal(y, expected[0]) and torch.equal(dx, expected[1].float())
    both = hb.linear_shared(x, [codes, swizzled], [bias, None], recipe, rng=RNG)
    assert torch.equal(both[0], expected[0])


def test_high_precision_multiplies_what_the_codes_stand_for():
    x, w, bias, dy = tensors(torch.float32)
    for spec in (TILE, hb.NVFP4(), hb.MXFP8()):
        codes = hb.quantize(w, spec)
        y, dx = run(x, codes, bias, "bf16", dy)
        values = codes.dequantize(torch.float32).double()
        torch.testing.assert_close(y.double(), x.double() @ values.T + bias.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx.double(), dy.double() @ values, rtol=1e-5, atol=1e-5)


def test_nan_and_inf_reach_the_output():
    x, w, bias, dy = tensors()
    codes = hb.quantize(w, TILE)
    for value in (float("nan"), float("inf")):
        x[0, 0] = dy[1, 1] = value
        y, dx = run(x, codes, bias, recipes.weight_only(), dy)
        assert not y[0].isfinite().any() and not dx[1].isfinite().all() and y[1].isfinite().all()


def test_refusals_name_the_remedy():
    x, w, bias, _ = tensors()
    other = dataclasses.replace(TILE, e4m3_max=256.0)
    with pytest.raises(ValueError, match=r"recipe.fprop.b=nvfp4 16x16.*exists only as.*e4m3_max=256"):
        hb.linear(x, hb.quantize(w, other), bias, recipes.nvfp4(), rng=RNG)
    rotated = hb.NVFP4(rotation=hb.Hadamard(size=16))
    with pytest.raises(ValueError, match=r"codes are those of the rotated weight.*rotation=None"):
        hb.linear(x, hb.quantize(w, rotated), bias, "bf16")
    with pytest.raises(ValueError, match=r"w.shape=\(32, 48\).*needs \[out_features, 32\]"):
        hb.linear(x[:, :32], hb.quantize(w, TILE), bias, recipes.nvfp4(), rng=RNG)
    cached = hb.functional.weights.quantize_weight(w, (TILE, TILE), w.dtype)
    with pytest.raises(ValueError, match="leave cached_weight out"):
        hb.linear(x, hb.quantize(w, TILE), bias, recipes.nvfp4(), rng=RNG, cached_weight=cached)


def test_the_recipe_of_weights_alone():
    recipe = recipes.weight_only()
    assert recipe == hb.Recipe(fprop=hb.GemmSpec(b=TILE), dgrad=hb.GemmSpec(b=TILE))
    assert not recipe.needs_rng
    assert recipes.weight_only(base="nvfp4_forward") == hb.Recipe(fprop=hb.GemmSpec(b=hb.NVFP4()))
    assert recipes.weight_only(base=recipes.nvfp4(activation_mean="split")) == recipe
    quartet = recipes.weight_only(base="quartet2")  # dgrad rotates its weight
    assert quartet.dgrad is None and quartet.fprop.b == recipes.quartet2().fprop.b
