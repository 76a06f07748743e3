"""Factors of activations: the greatest magnitude that a layer's input has in the batches, as engines read it."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from export_decoder import config, stored
from export_models import TOKENS, llama, mixtral, trained

import halfbyte as hb
from halfbyte.export.calibrate import input_amaxes

SCALES = (".input_scale", ".input_global_scale")
MODES = {"none": None, "static": "local", "per-token": True}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_static_factors_are_those_of_the_inputs(tmp_path, form):
    model = trained(llama(), "nvfp4").train()
    batches = [{"input_ids": TOKENS}, TOKENS[:1], (TOKENS[:, :4],)]
    seen = {}
    layer = model.model.layers[1].mlp

    def watch(module, arguments):
        seen["down_proj"] = max(seen.get("down_proj", 0.0), float(arguments[0].detach().abs().max()))

    handle = layer.down_proj.register_forward_pre_hook(watch)
    hb.export.save(model, tmp_path / "out", format=form, activations="static", batches=batches)
    handle.remove()
    assert model.training and not layer.down_proj._forward_pre_hooks
    tensors, prefix = stored(tmp_path / "out"), "model.layers.1.mlp."
    if form == "modelopt":
        factor = tensors[f"{prefix}down_proj.input_scale"]
        assert factor.shape == () and float(factor) == pytest.approx(seen["down_proj"] / 2688, rel=1e-6)
    else:
        factor = tensors[f"{prefix}down_proj.input_global_scale"]
        assert factor.shape == (1,) and float(factor) == pytest.approx(2688 / seen["down_proj"], rel=1e-6)
    names = [key for key in tensors if key.endswith(SCALES)]
    assert len(names) == 14
    part = names[0].rpartition(".")[2]
    assert tensors[f"{prefix}gate_proj.{part}"] == tensors[f"{prefix}up_proj.{part}"]
    assert hb.export.load(tmp_path / "out").input_amaxes[f"{prefix}down_proj"] == seen["down_proj"]


@pytest.mark.parametrize("mode", MODES)
def test_configs_say_how_activations_are_quantized(tmp_path, mode):
    model = trained(llama(), "nvfp4", steps=0)
    batches = [TOKENS] if mode == "static" else ()
    for form in ("modelopt", "compressed-tensors"):
        hb.export.save(model, tmp_path / form, format=form, activations=mode, batches=batches)
        said = config(tmp_path / form)["quantization_config"]
        group = said["config_groups"]["group_0"]
        dynamic = group.get("input_activations", {}).get("dynamic")
        assert dynamic == (False if form == "modelopt" and mode == "static" else MODES[mode])
        assert group["weights"]["group_size"] == 16 and said["ignore"] == ["lm_head"]
        assert any(key.endswith(SCALES) for key in stored(tmp_path / form)) == (mode == "static")
    said = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "W4A16_NVFP4" if mode == "none" else "NVFP4"
    assert said == {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }


def test_experts_get_the_greatest_of_their_layer(tmp_path):
    model = trained(mixtral(), "nvfp4", steps=1)
    hb.export.save(model, tmp_path / "out", format="modelopt", activations="static", batches=[TOKENS])
    tensors, prefix = stored(tmp_path / "out"), "model.layers.0.block_sparse_moe.experts"
    factors = {
        name: {float(tensors[f"{prefix}.{e}.{name}.input_scale"]) for e in range(3)} for name in ("w1", "w2", "w3")
    }
    assert all(len(found) == 1 for found in factors.values()) and factors["w1"] == factors["w3"] != factors["w2"]


def test_rows_behind_the_last_group_and_what_is_not_finite_count_nothing():
    """Of tokens 1 to 6, four in groups; 9 is an Inf's neighbour."""
    experts = hb.nn.grouped.GroupedRecipe(2, 16, 8)
    x = torch.arange(1.0, 7.0)[:, None].repeat(1, 16)
    x[1, 2], x[1, 3] = -9, torch.inf
    weight, ends = torch.randn(2, 8, 16), torch.tensor([1, 4], dtype=torch.int32)
    assert input_amaxes(experts, [""], [(x, weight, ends)]) == {"": 9}
    x[1] = 0
    assert input_amaxes(experts, [""], [(x, weight, ends), (x / 2, weight, ends)]) == {"": 4}


def test_256_of_the_inputs_is_in_their_factor(tmp_path):
    model = trained(llama(), hb.recipes.four_over_six(), steps=0)
    hb.export.save(model, tmp_path / "out", format="modelopt", activations="static", batches=[TOKENS])
    amaxes = hb.export.load(tmp_path / "out").input_amaxes
    for key, amax in amaxes.items():
        factor = float(stored(tmp_path / "out")[f"{key}.input_scale"])
        assert factor == pytest.approx(amax / (256 * 6), rel=1e-6) and amax > 0
    assert len(amaxes) == 14


def test_batches_that_say_nothing_are_refused(tmp_path):
    model = trained(llama(), "nvfp4", steps=0)
    with pytest.raises(ValueError, match="batches is empty"):
        hb.export.save(model, tmp_path / "out", activations="static", batches=[])
    aside = hb.high_precision(model)
    handles = [
        model.register_forward_pre_hook(lambda module, arguments: aside.__enter__() and None),
        model.register_forward_hook(lambda *arguments: aside.__exit__(None, None, None), always_call=True),
    ]
    with pytest.raises(ValueError, match=r"q_proj computes in high precision while the model is in eval mode"):
        hb.export.save(model, tmp_path / "out", activations="static", batches=[TOKENS])
    for handle in handles:
        handle.remove()
    model.model.layers[1].input_layernorm.weight.data.zero_()
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj \(\d+ layers\) saw nothing but zeros"):
        hb.export.save(model, tmp_path / "out", activations="static", batches=[TOKENS])
    assert not (tmp_path / "out").exists() and not torch.is_inference_mode_enabled()
