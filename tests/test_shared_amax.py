"""Siblings of one parent share one weight amax: the bytes of their weights under the amax of the group."""

import copy

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder

import halfbyte as hb
from halfbyte import recipes
from halfbyte.convert import SHARE_AMAX


def weight_operand(layer, amax=None) -> hb.QuantTensor:
    return hb.quantize(layer.weight.detach(), hb.NVFP4(block=(16, 16)), amax=amax)


def test_siblings_share_one_amax():
    """The layer computes with the bytes of its weight under the group's amax."""
    model = decoder(2)
    attn = model.layers[0].attn
    attn.k_proj.weight.data *= 5
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    group = torch.stack([m.weight.detach().abs().max() for m in (attn.q_proj, attn.k_proj, attn.v_proj)]).max()
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attn, name)
        a = hb.quantize(x, hb.NVFP4())
        shared = hb.gemm_nt(a, weight_operand(layer, group), torch.float32)
        assert torch.equal(layer(x), shared)
        alone = hb.gemm_nt(a, weight_operand(layer), torch.float32)
        assert torch.equal(shared, alone) == (name == "k_proj")
    assert torch.equal(attn.o_proj(x), hb.gemm_nt(a, weight_operand(attn.o_proj), torch.float32))
    other = model.layers[1].attn
    assert attn.q_proj.amax_group == (attn.q_proj, attn.k_proj, attn.v_proj)
    assert other.q_proj.amax_group == (other.q_proj, other.k_proj, other.v_proj)
    mlp = model.layers[0].mlp
    assert mlp.up_proj.amax_group == (mlp.gate_proj, mlp.up_proj) and mlp.down_proj.amax_group == ()


def test_the_shared_amax_follows_the_weights_and_reaches_the_backward():
    model = decoder(1)
    recipe = recipes.nvfp4(stochastic_rounding=False, hadamard=None)
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    mlp = model.layers[0].mlp
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for factor in (1.0, 8.0):
        mlp.gate_proj.weight.data *= factor
        amax = torch.maximum(*(m.weight.detach().abs().max() for m in (mlp.gate_proj, mlp.up_proj)))
        x.grad = None
        y = mlp.up_proj(x)
        y.backward(torch.ones_like(y))
        w = weight_operand(mlp.up_proj, amax)
        dy = hb.quantize(torch.ones(7, 32), hb.NVFP4())
        assert torch.equal(x.grad, hb.gemm_nt(dy, w.transpose(), torch.float32))


def test_share_amax_can_be_chosen_and_left_out():
    model = decoder(2)
    hb.quantize_(model, "nvfp4", share_amax=())
    assert all(m.amax_group == () for m in model.modules() if isinstance(m, hb.nn.Linear))
    model = decoder(2)
    hb.quantize_(model, "nvfp4", share_amax=(("*q_proj", "*o_proj"),), keep=NOTHING_KEPT)
    attn = model.layers[1].attn
    assert attn.o_proj.amax_group == (attn.q_proj, attn.o_proj) and attn.k_proj.amax_group == ()
    assert SHARE_AMAX[0] == ("*q_proj", "*k_proj", "*v_proj")


def test_a_deepcopied_model_shares_within_itself():
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    twin = copy.deepcopy(model)
    attn = twin.layers[0].attn
    assert attn.q_proj.amax_group == (attn.q_proj, attn.k_proj, attn.v_proj)
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_under_autocast_the_amax_is_that_of_the_cast_weights():
    """fp32 weights in a bf16 region compute what bf16 weights do."""
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    attn = model.layers[0].attn
    narrow = copy.deepcopy(attn).bfloat16()
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        with torch.autocast("cpu", torch.bfloat16):
            y = getattr(attn, name)(x)
        assert torch.equal(y, getattr(narrow, name)(x))


def test_nan_in_one_sibling_does_not_reach_the_others():
    """amax leaves non-finite values out; the sibling's own tiles are NaN."""
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    attn = model.layers[0].attn
    attn.k_proj.weight.data[3, 4] = float("nan")
    x = torch.ones(2, 16)
    assert attn.k_proj(x).isnan().all()
    assert attn.q_proj(x).isfinite().all() and attn.v_proj(x).isfinite().all()


@pytest.mark.parametrize("forward", [hb.NVFP4(outer="row"), hb.NVFP4(), hb.NVFP4(block=(16, 16))], ids=str)
def test_row_scaled_weights_keep_the_amaxes_of_their_rows(forward):
    """An amax of siblings is one per tensor; weights with one per row have their own, cached or not."""
    spec = hb.NVFP4(outer="row")
    recipe = hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4(), b=forward), dgrad=hb.GemmSpec(a=hb.NVFP4(), b=spec))
    model = decoder(1)
    attn = model.layers[0].attn
    attn.k_proj.weight.data *= 5
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    assert len(attn.q_proj.amax_group) == 3
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    a, dy = hb.quantize(x, hb.NVFP4()), torch.ones(7, 16)
    amax = None if forward.outer == "row" else attn.k_proj.weight.detach().abs().max()
    for is_cached in (False, True):
        if is_cached:
            hb.cache_weights(model)
        for layer in (attn.q_proj, attn.k_proj):
            assert (layer.cached_weight() is not None) == is_cached
            leaf, w = x.clone().requires_grad_(), layer.weight.detach()
            y = layer(leaf)
            y.backward(dy)
            assert torch.equal(y, hb.gemm_nt(a, hb.quantize(w, forward, amax=amax), torch.float32))
            right = hb.quantize(w.T.contiguous(), spec)
            assert torch.equal(leaf.grad, hb.gemm_nt(hb.quantize(dy, hb.NVFP4()), right, torch.float32))


def test_a_sibling_put_in_later_joins_those_converted_before():
    model = decoder(2)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    attn = model.layers[0].attn
    attn.k_proj = torch.nn.Linear(16, attn.k_proj.out_features, bias=False)
    with torch.no_grad():
        attn.k_proj.weight.mul_(50)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    group = torch.stack([m.weight.detach().abs().max() for m in (attn.q_proj, attn.k_proj, attn.v_proj)]).max()
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    for layer in (attn.q_proj, attn.k_proj, attn.v_proj):
        expected = hb.gemm_nt(hb.quantize(x, hb.NVFP4()), weight_operand(layer, group), torch.float32)
        assert torch.equal(layer(x), expected)
    other = model.layers[1].attn  # none of which this call converted
    assert other.q_proj.amax_group == (other.q_proj, other.k_proj, other.v_proj)


def test_siblings_converted_one_by_one_share_their_amax():
    model = decoder(1)
    for name in ("q_proj", "k_proj", "v_proj"):
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, filter_fn=lambda module, fqn, own=name: fqn.endswith(own))
    attn = model.layers[0].attn
    for layer in (attn.q_proj, attn.k_proj, attn.v_proj):
        assert layer.amax_group == (attn.q_proj, attn.k_proj, attn.v_proj)


def test_siblings_that_another_tool_has_put_elsewhere_are_named():
    """As accelerate's offloading does: the weight of each layer is there in its own forward alone."""
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    attn = model.layers[0].attn
    attn.k_proj.to("meta")
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.q_proj.*layers\.0\.attn\.k_proj.*meta.*share_amax=\(\)"):
        attn.q_proj(torch.randn(7, 16))


def test_a_second_call_leaves_siblings_alone_of_which_it_converts_none():
    model = decoder(2)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, share_amax=())
    model.layers[0].attn.k_proj = torch.nn.Linear(16, model.layers[0].attn.k_proj.out_features, bias=False)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert len(model.layers[0].attn.q_proj.amax_group) == 3 and model.layers[1].attn.q_proj.amax_group == ()
