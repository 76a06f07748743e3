"""A linear layer whose weight exists only in NVFP4 is the layer that quantizes that weight itself."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.distributed import cast_master_weights_to_nvfp4, post_all_gather_processing
from halfbyte.functional.primary import primary_operands
from halfbyte.tensor import PrimaryWeight, QuantTensor

TILE = hb.NVFP4(block=(16, 16))
NVFP4 = hb.recipes.nvfp4()


def layers(recipe, *, turned: bool):
    """Return a layer with a bf16 weight and its twin whose weight is cast from it."""
    torch.manual_seed(0)
    plain, primary = (hb.nn.Linear(48, 40, dtype=torch.bfloat16, recipe=recipe, state=hb.RunState(3)) for _ in range(2))
    primary.load_state_dict(plain.state_dict())
    weight = PrimaryWeight.empty((40, 48))
    cast_master_weights_to_nvfp4([weight], [plain.weight.detach().flatten()], [0], None)
    if turned:
        post_all_gather_processing([weight])
    primary.weight = weight.as_parameter()
    return plain, primary


def outputs_and_gradients(layer):
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("recipe", (NVFP4, hb.Recipe(fprop=NVFP4.fprop, backward="dequantized")), ids=("nvfp4", "qat"))
def test_output_and_gradients_are_those_of_the_whole_weight(recipe, turned):
    plain, primary = (outputs_and_gradients(layer) for layer in layers(recipe, turned=turned))
    assert all(torch.equal(a, b) for a, b in zip(plain, primary, strict=True))
    assert type(primary[2]) is torch.Tensor


@pytest.mark.parametrize("recipe", (hb.recipes.bf16(), replace(NVFP4, dgrad=None)), ids=("bf16", "bf16_dgrad"))
def test_a_gemm_in_high_precision_reads_the_values(recipe):
    plain, primary = layers(recipe, turned=True)
    with torch.no_grad():
        plain.weight.copy_(primary.weight.dequantize())
    ours, theirs = outputs_and_gradients(primary), outputs_and_gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_split_mean_is_multiplied_by_what_the_weight_stands_for():
    _, primary = layers(replace(NVFP4, activation_mean="split"), turned=False)
    x = torch.randn(8, 48).bfloat16() + 4
    mean = ops.token_mean(x)
    rest = reference.residual_of(x, mean)
    v = mean.float() @ primary.weight.dequantize().float().T
    expected = hb.gemm_nt(hb.quantize(rest, hb.NVFP4()), primary.weight, torch.float32) + v + primary.bias.float()
    assert torch.allclose(primary(x).float(), expected, rtol=2.0**-8, atol=1e-5)


def test_a_forward_in_another_dtype_is_told_which_weight_and_how_to_build_it():
    _, primary = layers(NVFP4, turned=True)
    with pytest.raises(ValueError, match=r"^w is a primary weight, rounded to torch.bfloat16 .*weight_dtype=torch.fl"):
        primary(torch.randn(8, 48))


@pytest.mark.parametrize("turned", (False, True))
def test_values_written_into_the_weight_reach_forward_and_backward(turned):
    """The other orientation was that of the bytes before: a gradient of another weight."""
    plain, primary = layers(NVFP4, turned=turned)
    whole = {"weight": torch.randn(40, 48).bfloat16(), "bias": torch.randn(40).bfloat16()}
    primary.load_state_dict(whole)
    plain.load_state_dict(whole)
    assert all(torch.equal(a, b) for a, b in zip(*map(outputs_and_gradients, (plain, primary)), strict=True))
    for layer in (plain, primary):
        layer.weight.grad = None
        layer.weight.detach().copy_(whole["weight"] / 3)
    assert all(torch.equal(a, b) for a, b in zip(*map(outputs_and_gradients, (plain, primary)), strict=True))


def test_values_of_more_bits_are_rounded_as_masters_are():
    """Once to bf16, then to NVFP4: their amax is that of the rounded values."""
    values = torch.randn(40, 48, generator=torch.Generator().manual_seed(2)) * 1.003
    weight = PrimaryWeight.empty((40, 48))
    weight.copy_(values)
    expected, unrounded = hb.quantize(values.bfloat16(), TILE), hb.quantize(values, TILE)
    assert torch.equal(weight.qdata, expected.qdata) and torch.equal(weight.amax, expected.amax)
    assert not torch.equal(expected.amax, unrounded.amax) and not torch.equal(expected.qdata, unrounded.qdata)


def test_a_saved_layer_trains_on():
    _, primary = layers(NVFP4, turned=True)
    file = io.BytesIO()
    torch.save(primary, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again.weight) is PrimaryWeight and again.weight.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*map(outputs_and_gradients, (primary, again)), strict=True))
    file = io.BytesIO()
    torch.save(primary.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"].qdata, primary.weight.qdata)


def test_a_weight_that_is_given_twice_is_refused():
    weight, master = PrimaryWeight.empty((16, 16)), torch.randn(256)
    with pytest.raises(
        ValueError, match=r"model_weights\[1\] has the codes of model_weights\[0\]: give every weight once"
    ):
        cast_master_weights_to_nvfp4([weight, weight], [master, master], [0, 0], None)


def test_the_gradient_goes_to_main_grad_if_there_is_one():
    _, primary = layers(NVFP4, turned=True)
    *_, expected, _ = outputs_and_gradients(primary)
    primary.weight.grad = None
    primary.weight.main_grad = torch.ones(40, 48)
    outputs_and_gradients(primary)
    assert primary.weight.grad is None
    assert torch.equal((primary.weight.main_grad - 1).bfloat16(), expected) or torch.allclose(
        primary.weight.main_grad - 1, expected.float(), rtol=1e-2, atol=1e-4
    )


def test_another_recipe_is_refused():
    _, primary = layers("four_over_six", turned=False)
    with pytest.raises(ValueError, match=r"recipe.fprop.b=nvfp4 16x16 nearest 4over6.*exists only as nvfp4 16x16"):
        primary(torch.zeros(2, 48, dtype=torch.bfloat16))


def test_an_orientation_of_before_is_refused():
    _, primary = layers(NVFP4, turned=True)
    master = torch.randn(40 * 48)
    cast_master_weights_to_nvfp4([primary.weight], [master], [0], None)
    with pytest.raises(ValueError, match="call post_all_gather_processing"):
        primary(torch.zeros(2, 48, dtype=torch.bfloat16))
    post_all_gather_processing([primary.weight])
    primary(torch.zeros(2, 48, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ("qdata", "block_scale", "amax"))
def test_the_other_orientation_follows_tensors_put_in_later(name):
    weight = PrimaryWeight.empty((32, 48), TILE)
    for factor in (1, 5):
        cast_master_weights_to_nvfp4([weight], [factor * torch.randn(32 * 48)], [0], None)
        post_all_gather_processing([weight])
        whole = hb.quantize(weight.dequantize().T.contiguous(), TILE, amax=weight.amax)
        assert torch.equal(weight.turned.qdata, whole.qdata) and torch.equal(weight.turned.amax, weight.amax)
        assert torch.equal(weight.turned.block_scale, whole.block_scale.view(torch.uint8))
        setattr(weight, name, torch.zeros_like(getattr(weight, name)))


def test_a_cast_into_shards_cannot_turn_weights_by_itself():
    weight, shard = PrimaryWeight.empty((16, 16), TILE), torch.zeros(128, dtype=torch.uint8)
    arguments = [weight], [torch.randn(256)], [0], None, [shard]
    with pytest.raises(ValueError, match="codes go to fsdp_shard_model_weights"):
        cast_master_weights_to_nvfp4(*arguments, manual_post_all_gather_processing=False)
    cast_master_weights_to_nvfp4(*arguments)


def test_a_copied_weight_prepares_its_own_cast():
    layer = torch.nn.Linear(32, 32, bias=False)
    layer._parameters["weight"] = PrimaryWeight.empty((32, 32), TILE).as_parameter()
    weights = []
    for own in (layer, copy.deepcopy(layer), copy.deepcopy(layer)):
        cast_master_weights_to_nvfp4([own.weight], [torch.full((32 * 32,), len(weights) + 1.0)], [0], None)
        post_all_gather_processing([own.weight])
        weights.append(own.weight)
    copied = copy.deepcopy(layer).weight
    assert getattr(copied, "_prepared_cast", None) is None and getattr(copied, "_prepared_transpose", None) is None
    assert [weight.amax.item() for weight in weights] == [1, 2, 3]


def test_a_primary_weight_is_a_parameter_of_zeros():
    weight = PrimaryWeight.empty((20, 33), TILE, scale_layout="swizzled_32_4_4", dtype=torch.float32)
    parameter = weight.as_parameter()
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad and parameter.is_leaf
    assert parameter.dtype == torch.float32 and not parameter.dequantize().any()
    assert parameter.qdata is weight.qdata or parameter.qdata.data_ptr() == weight.qdata.data_ptr()
    assert not parameter.requires_grad_(False).requires_grad
    with pytest.raises(RuntimeError, match="have no gradient"):
        QuantTensor.requires_grad_(weight)
    with pytest.raises(ValueError, match="needs 16x16 tiles"):
        PrimaryWeight.empty((16, 16), hb.NVFP4())
    with pytest.raises(ValueError, match=r"^shape=\(16,\): give N and K"):
        PrimaryWeight.empty((16,))
    with pytest.raises(ValueError, match="^qdata starts at an address that is no multiple of 8"):
        PrimaryWeight.empty((16, 16), qdata=torch.zeros(129, dtype=torch.uint8)[1:].view(16, 8))


def test_copies_views_and_files_of_a_weight_know_what_it_knows():
    """What shares its amax, is stale or frozen is so in every form of it: bytes would be read too early."""
    amax = torch.zeros(())
    weights = [PrimaryWeight.empty((32, 48), TILE, amax=amax) for _ in range(2)]
    cast_master_weights_to_nvfp4(weights, [torch.randn(32 * 48) for _ in weights], [0, 0], None)
    for form in (weights[0], weights[0].as_parameter(), weights[0].detach(), weights[0].as_parameter().detach()):
        before = weights[1].dequantize()
        with pytest.raises(ValueError, match="shares its amax with others"), torch.no_grad():
            form.copy_(torch.ones(32, 48))
        assert torch.equal(weights[1].dequantize(), before)
    _, primary = layers(NVFP4, turned=True)
    for requires_grad in (False, True):
        file = io.BytesIO()
        torch.save(primary.weight.requires_grad_(requires_grad), file)
        file.seek(0)
        assert torch.load(file, weights_only=False).requires_grad == requires_grad
    cast_master_weights_to_nvfp4([primary.weight], [torch.randn(40 * 48)], [0], None)
    view = primary.weight.detach()
    primary.weight = torch.nn.Parameter(view)
    with pytest.raises(ValueError, match="call post_all_gather_processing"):
        primary(torch.zeros(2, 48, dtype=torch.bfloat16))
    with torch.no_grad():
        primary.weight.copy_(torch.randn(40, 48))  # turns it too
    primary(torch.zeros(2, 48, dtype=torch.bfloat16))


def test_operands_are_kept_until_something_that_they_are_made_of_is_another():
    weight = layers(NVFP4, turned=True)[1].weight
    kept = primary_operands(weight, NVFP4)[1]
    assert primary_operands(weight, NVFP4)[1] is kept
    other = layers(NVFP4, turned=True)[1].weight
    parts = {name: getattr(other, name) for name in ("qdata", "block_scale", "amax", "turned", "header")}
    parts |= {"turn": lambda: None, "rounded": torch.float32, "dgrad": torch.zeros(48, 40)}
    for name, part in parts.items():
        before = primary_operands(weight, NVFP4)[1]
        setattr(weight, name, part)
        now = primary_operands(weight, NVFP4)[1]
        assert now is not before and primary_operands(weight, NVFP4)[1] is now, name
    assert now.row.blocks.qdata.data_ptr() == other.qdata.data_ptr() and now.col is weight.dgrad
    assert now.dtype == torch.float32 and now.before_backward is weight.turn


def test_what_is_made_where_somebody_watches_or_for_inference_is_not_kept():
    weight = layers(NVFP4, turned=True)[1].weight
    with torch.inference_mode():
        assert primary_operands(weight, NVFP4)[1].row.blocks.qdata.is_inference() and weight.operands is None
    with FlopCounterMode(display=False):
        primary_operands(weight, NVFP4)
    assert weight.operands is None
    primary_operands(weight, NVFP4)
    assert weight.operands is not None and copy.deepcopy(weight).operands is None


def test_an_orientation_that_is_transposed_in_every_forward_is_not_kept():
    weight = layers(NVFP4, turned=False)[1].weight
    first, then = (primary_operands(weight, NVFP4)[1] for _ in range(2))
    assert first.col.blocks.qdata.data_ptr() != then.col.blocks.qdata.data_ptr()
