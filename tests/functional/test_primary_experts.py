"""Experts that exist as codes alone: the products of `grouped_linear` are those of their quantization, bit for bit."""

import pytest
import torch

import halfbyte as hb
from halfbyte.functional.primary import turned_experts
from halfbyte.layout import Blocks, Operand
from halfbyte.tensor.primary import PrimaryWeight

TILES = hb.NVFP4(block=(16, 16))


def experts(spec: hb.NVFP4, w: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> PrimaryWeight:
    """The quantization of w [E, N, K]."""
    quantized, _ = hb.grouped_quantize_row_col(w, None, spec, None)
    offsets = torch.arange(1, len(w) + 1, dtype=torch.int32) * w.shape[1]
    options = {"shape": tuple(w.shape), "dtype": dtype, "group_offsets": offsets}
    return PrimaryWeight(quantized.blocks, spec, **options).as_parameter()


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "rl", "qat"])
@pytest.mark.parametrize("size", [(3, 37, 40), (1, 16, 16), (4, 64, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_of_experts_multiply_as_the_weight_does(recipe, size, dtype):
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(size, generator=generator).to(dtype) * torch.rand(size[0], 1, 1, generator=generator)
    w = w.to(dtype)
    ends = torch.linspace(0, 9, size[0]).int() if size[0] > 1 else torch.tensor([9], dtype=torch.int32)
    chosen, rng = hb.recipes.get(recipe), hb.Philox(5, 0)
    results = []
    for weight in (w.clone().requires_grad_(), experts(chosen.fprop.b, w, dtype)):
        x = torch.randn(11, size[2], generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
        y = hb.grouped_linear(x, weight, ends, chosen, rng=rng)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(dtype))
        results.append((y.detach(), x.grad, weight.grad))
    for plain, coded in zip(*results, strict=True):
        assert plain.dtype == coded.dtype and torch.equal(plain, coded) and plain.any()


def test_tiles_of_experts_are_turned_without_rounding():
    w = torch.randn(3, 37, 40).bfloat16()
    row, _ = hb.grouped_quantize_row_col(w, None, TILES, None)
    want, _ = hb.grouped_quantize_row_col(w.mT.contiguous(), None, TILES, None)
    codes, scales = (t.view(3, 37, -1) for t in (row.qdata, row.block_scale.view(torch.uint8)))
    turned = turned_experts(Operand(Blocks(codes, scales, row.amax), TILES, 40))
    assert torch.equal(turned.blocks.qdata.flatten(0, 1), want.qdata) and turned.cols == 37
    assert torch.equal(turned.blocks.block_scale.flatten(0, 1), want.block_scale.view(torch.uint8))


def test_without_quantization_experts_multiply_as_their_values():
    w, ends = experts(TILES, torch.randn(2, 32, 32).bfloat16()), torch.tensor([2, 4], dtype=torch.int32)
    x, values = torch.randn(4, 32).bfloat16(), w.dequantize()
    assert torch.equal(hb.grouped_linear(x, w, ends, "bf16"), hb.grouped_linear(x, values, ends, "bf16"))


def test_a_product_in_high_precision_reads_what_the_codes_stand_for():
    """Forward or backward alone, as a schedule may come to it: the other one goes on reading codes."""
    w, ends = torch.randn(2, 40, 24).bfloat16(), torch.tensor([3, 7], dtype=torch.int32)
    decoded = experts(TILES, w).dequantize()
    runs = {
        name: products(weight, ends, recipe)
        for name, weight, recipe in (
            ("codes", w, "nvfp4"),
            ("values", decoded, "bf16"),
            ("codes, then values", experts(TILES, w), hb.recipes.mixed("nvfp4", "bf16")),
            ("values, then codes", experts(TILES, w), hb.recipes.mixed("bf16", "nvfp4")),
        )
    }
    for (first, second), name in (
        (("codes", "values"), "codes, then values"),
        (("values", "codes"), "values, then codes"),
    ):
        assert torch.equal(runs[name][0], runs[first][0]) and torch.equal(runs[name][1], runs[second][1]), name
        assert torch.equal(runs[name][2], runs[second][2]), name


def products(weight: torch.Tensor, ends: torch.Tensor, recipe: hb.Recipe | str) -> list[torch.Tensor]:
    """Output and gradients."""
    weight = weight if isinstance(weight, PrimaryWeight) else weight.clone().requires_grad_()
    x = torch.randn(7, weight.shape[2], generator=torch.Generator().manual_seed(4)).bfloat16().requires_grad_()
    y = hb.grouped_linear(x, weight, ends, recipe, rng=hb.Philox(5, 0))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).bfloat16())
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("recipe", ["rl", "mxfp8", "nvfp4_mxfp8_bwd"])
def test_another_recipe_than_the_codes_are_for_is_refused(recipe):
    weight, ends = experts(TILES, torch.randn(2, 32, 32).bfloat16()), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"these experts exist only as .*16.*use a recipe with that spec for weights"):
        hb.grouped_linear(torch.ones(4, 32).bfloat16(), weight, ends, recipe, rng=hb.Philox(1, 0))


def test_a_forward_in_another_dtype_than_codes_were_made_of_is_refused():
    weight, ends = experts(TILES, torch.randn(2, 32, 32).bfloat16()), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="rounded to torch.bfloat16 .* computes in torch.float32"):
        hb.grouped_linear(torch.ones(4, 32), weight, ends, "nvfp4", rng=hb.Philox(1, 0))
