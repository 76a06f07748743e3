"""The exported bytes are the trained bytes: codes and scales of the oracle, decoded by numpy from the files alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from export_decoder import config, decoded, nibbles, stored
from export_models import TOKENS, llama, loss, trained

import halfbyte as hb

HEADROOM = dataclasses.replace(
    hb.recipes.nvfp4_forward(), fprop=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(fp4_max=6 * 16 / 17))
)
RECIPES = {
    "nvfp4": hb.recipes.nvfp4(),
    "nvfp4_forward": hb.recipes.nvfp4_forward(),
    "four_over_six": hb.recipes.four_over_six(),
    "headroom": HEADROOM,
}
FORMS = ("modelopt", "compressed-tensors")
SIBLINGS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def expected(model, layer, name):
    """Return the oracle's codes, scales and amax of a layer: the weight in bf16, the greatest magnitude of siblings."""
    weights = {n: p.detach().to(torch.bfloat16).float().numpy() for n, p in model.named_parameters()}
    family = next((group for group in SIBLINGS if name in group), (name,))
    amax = max(np.abs(weights[f"model.layers.{layer}.{n}.weight"]).max() for n in family)
    spec = model.get_submodule(f"model.layers.{layer}.{name}").recipe.fprop.b
    return oracle.quantize(weights[f"model.layers.{layer}.{name}.weight"], spec, amax=[amax]), spec


def test_the_dtype_that_was_asked_for_comes_before_that_of_a_cache(tmp_path):
    model = trained(llama(torch.float32), hb.recipes.nvfp4_forward(), steps=0)
    with hb.cache_weights(model, dtype=torch.bfloat16):
        hb.export.save(model, tmp_path / "cached")
        hb.export.save(model, tmp_path / "asked", compute_dtype=torch.float32)
    for name, dtype in (("cached", torch.bfloat16), ("asked", torch.float32)):
        weight = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach().to(dtype).float().numpy()
        packed = stored(tmp_path / name)["model.layers.0.mlp.down_proj.weight_packed"].numpy()
        assert np.array_equal(nibbles(packed), np.array(oracle.quantize(weight, hb.NVFP4()).codes))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_files_hold_the_oracles_bytes(tmp_path, recipe, form):
    model = trained(llama(), RECIPES[recipe])
    report = hb.export.save(model, tmp_path / "out", format=form)
    assert report.changed[0] == 0 and report.share_changed == 0 and len(report.layers) == 14
    tensors = stored(tmp_path / "out")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        prefix = f"model.layers.1.{name}"
        result, spec = expected(model, 1, name)
        codes = tensors[f"{prefix}.weight" if form == "modelopt" else f"{prefix}.weight_packed"]
        assert np.array_equal(nibbles(codes.numpy()), np.array(result.codes))
        assert np.array_equal(tensors[f"{prefix}.weight_scale"].numpy(), np.array(result.scales))
        values = oracle.dequantize(result, spec)
        assert np.allclose(decoded(tensors, prefix), values, rtol=4e-7, atol=0)


def test_all_else_is_as_in_the_model(tmp_path):
    model = trained(llama(), "nvfp4")
    hb.export.save(model, tmp_path / "out", format="modelopt")
    tensors = stored(tmp_path / "out")
    plain = {k: v for k, v in model.state_dict().items() if "_proj" not in k}
    assert {k for k in tensors if "_proj" not in k} == plain.keys()
    assert all(torch.equal(tensors[key], value) and tensors[key].dtype == value.dtype for key, value in plain.items())
    shapes = {k.rpartition(".")[2]: tuple(v.shape) for k, v in tensors.items() if "layers.0.mlp.up_proj" in k}
    assert shapes == {"weight": (48, 16), "weight_scale": (48, 2), "weight_scale_2": ()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cast_of_training_is_repeated(tmp_path, dtype):
    """Weights in fp32: under autocast they are rounded to bf16 first, and the bytes are others."""
    model = llama(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        trained(model, hb.recipes.nvfp4_forward())
    with pytest.raises(ValueError, match=r"compute_dtype=None: .*q_proj.weight is float32.*torch.autocast"):
        hb.export.save(model, tmp_path / "out")
    with pytest.raises(ValueError, match="compute_dtype=torch.float64: layers compute in bfloat16, float16 or"):
        hb.export.save(model, tmp_path / "out", compute_dtype=torch.float64)
    assert not (tmp_path / "out").exists()
    hb.export.save(model, tmp_path / "out", compute_dtype=dtype)
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach().to(dtype).float().numpy()
    result = oracle.quantize(weight, hb.NVFP4())
    tensors = stored(tmp_path / "out")
    packed = tensors["model.layers.0.mlp.down_proj.weight_packed"].numpy()
    assert np.array_equal(nibbles(packed), np.array(result.codes))
    contract = hb.export.load(tmp_path / "out").contract
    assert {layer.compute_dtype for layer in contract.layers.values()} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("form", FORMS)
def test_load_returns_what_was_trained(tmp_path, form):
    model = trained(llama(), hb.recipes.four_over_six())
    hb.export.save(model, tmp_path / "out", format=form, activations="static", batches=[TOKENS])
    checkpoint = hb.export.load(tmp_path / "out")
    assert len(checkpoint.quantized) == 14 and checkpoint.format == form
    for key, quant in checkpoint.quantized.items():
        layer = model.get_submodule(key.removesuffix(".weight"))
        amax = max(float(member.weight.detach().abs().max()) for member in layer.amax_group or (layer,))
        same = hb.quantize(layer.weight, layer.recipe.fprop.b, amax=torch.tensor(amax))
        assert quant.spec == layer.recipe.fprop.b and float(quant.amax) == amax
        assert torch.equal(quant.qdata, same.qdata)
        assert torch.equal(quant.block_scale.view(torch.uint8), same.block_scale.view(torch.uint8))
    assert checkpoint.contract.recipes == {k.removesuffix(".weight"): layer.recipe.key for k in checkpoint.quantized}


def test_training_goes_on_from_the_values_with_the_same_bytes(tmp_path):
    """Masters made of codes quantize to those codes again, so the loss before a first step is that of before."""
    model = trained(llama(), "nvfp4")
    before = loss(model)
    hb.export.save(model, tmp_path / "out")
    checkpoint = hb.export.load(tmp_path / "out")
    fresh = llama(attn_implementation="sdpa")
    rules = {name: hb.spec.parse_recipe(key) for name, key in checkpoint.contract.recipes.items()}
    fresh.load_state_dict(checkpoint.masters())
    hb.quantize_(fresh, "nvfp4", rules=rules)
    assert torch.equal(loss(fresh), before)
    assert config(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]
