"""What engines cannot read is quantized once more and reported; all else keeps the trained bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

import transformers
from export_decoder import E2M1, decoded, e4m3, nibbles, stored
from export_models import SMALL, build, llama, mixtral, qwen_moe, trained

import halfbyte as hb
from halfbyte.distributed import ZeroOptimizer
from halfbyte.export.trained import _differences

PREFIX = "model.layers.0.self_attn."


def by_name(report):
    return {row.name: row for row in report.layers}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_siblings_without_a_shared_amax_get_the_greatest(tmp_path, form):
    model = trained(llama(), "nvfp4_forward", share_amax=())
    report = hb.export.save(model, tmp_path / "out", format=form)
    tensors = stored(tmp_path / "out")
    weights = {n: model.get_parameter(f"{PREFIX}{n}.weight").detach().float().numpy() for n in ("q_proj", "v_proj")}
    weights["k_proj"] = model.get_parameter(f"{PREFIX}k_proj.weight").detach().float().numpy()
    amaxes = {name: np.abs(w).max() for name, w in weights.items()}
    assert len(set(amaxes.values())) == 3
    factor = "weight_scale_2" if form == "modelopt" else "weight_global_scale"
    assert len({float(tensors[f"{PREFIX}{n}.{factor}"]) for n in weights}) == 1
    for name, weight in weights.items():
        own = oracle.quantize(weight, hb.NVFP4())
        now = oracle.quantize(weight, hb.NVFP4(), amax=[max(amaxes.values())])
        codes = tensors[f"{PREFIX}{name}.{'weight' if form == 'modelopt' else 'weight_packed'}"].numpy()
        assert np.array_equal(nibbles(codes), np.array(now.codes))
        packed = [np.array(r.codes)[:, ::2] | np.array(r.codes)[:, 1::2] << 4 for r in (own, now)]
        changed = (packed[0] != packed[1]).sum() + (np.array(own.scales) != np.array(now.scales)).sum()
        row = by_name(report)[f"{PREFIX}{name}"]
        assert row.changed == pytest.approx(changed / (weight.size / 2 + weight.size / 16))
        assert ("one global scale" in row.reason) == (amaxes[name] < max(amaxes.values()))
    assert report.unfusable == () and "refuse" not in str(report)
    assert 0 < report.share_changed < 1 and report.changed[1] == sum(
        q.qdata.numel() + q.block_scale.numel() for q in hb.export.load(tmp_path / "out").quantized.values()
    )


@pytest.mark.parametrize(
    ("recipe", "is_named"),
    [
        ("nvfp4", False),
        (hb.recipes.nvfp4(activation_mean="split"), True),
        (hb.recipes.hot_channels(), True),
        (hb.recipes.outlier_channels(), True),
    ],
)
def test_layers_whose_training_read_more_than_codes_are_named(tmp_path, recipe, is_named):
    """With the weight that its codes stand for, such a forward gives another output, though no code changed."""
    model = trained(llama(), rules={"*down_proj": recipe})
    report = hb.export.save(model, tmp_path / "out")
    names = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    assert report.more_than_codes == (names if is_named else ()) and report.share_changed == 0
    assert (f"the training of {names[0]}" in str(report)) == is_named
    layer = model.get_submodule(names[0])
    x = torch.randn(20, SMALL["intermediate_size"], generator=torch.Generator().manual_seed(1)).bfloat16() + 1
    codes = hb.export.load(tmp_path / "out").quantized[f"{names[0]}.weight"]
    with torch.no_grad():
        before = layer(x)
        layer.weight.copy_(codes.dequantize(torch.bfloat16))
        assert torch.equal(layer(x), before) != is_named


def test_siblings_of_two_formats_get_one_factor(tmp_path):
    """256 and 448 as the greatest scale: the stored factor is one, each amax follows from it."""
    model = trained(llama(), "nvfp4_forward", rules={"*k_proj": hb.recipes.four_over_six()}, share_amax=())
    hb.export.save(model, tmp_path / "out", format="modelopt")
    tensors = stored(tmp_path / "out")
    assert len({float(tensors[f"{PREFIX}{n}_proj.weight_scale_2"]) for n in "qkv"}) == 1
    weight = model.get_parameter(f"{PREFIX}k_proj.weight").detach().float().numpy()
    assert np.abs(decoded(tensors, f"{PREFIX}k_proj") - weight).mean() < 0.15 * np.abs(weight).mean()


def test_rows_and_rotations_are_undone(tmp_path):
    rows = dataclasses.replace(
        hb.recipes.nvfp4_forward(), fprop=hb.GemmSpec(a=hb.NVFP4(outer="row"), b=hb.NVFP4(outer="row"))
    )
    turned = hb.NVFP4(rotation=hb.Hadamard())
    rotated = dataclasses.replace(hb.recipes.nvfp4_forward(), fprop=hb.GemmSpec(a=turned, b=turned))
    model = trained(llama(), rows, rules={"*o_proj": rotated, "*0*v_proj": None})
    report = hb.export.save(model, tmp_path / "out")
    assert report.unfusable == ("model.layers.0.self_attn.v_proj",)
    assert "engines fuse model.layers.0.self_attn.v_proj with layers in NVFP4 and refuse" in str(report)
    tensors, layers = stored(tmp_path / "out"), by_name(report)
    for name, reason in (("down_proj", "an amax for every row"), ("o_proj", "a rotation")):
        layer = next(n for n in layers if n.endswith(name))
        weight = model.get_parameter(f"{layer}.weight").detach().float().numpy()
        expected = oracle.quantize(weight, hb.NVFP4())
        assert np.array_equal(nibbles(tensors[f"{layer}.weight_packed"].numpy()), np.array(expected.codes))
        assert reason in layers[layer].reason and layers[layer].changed > 0


def test_primary_weights_are_written_as_they_are(tmp_path):
    """They exist only as codes; masters are elsewhere, and nothing here quantizes."""
    model = llama()
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(last_fraction=0))
    optimizer = ZeroOptimizer(model, lambda groups: torch.optim.SGD(groups, lr=0.1))
    tokens = torch.arange(12)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    report.state.advance()
    hb.export.save(model, tmp_path / "out", format="modelopt")
    tensors = stored(tmp_path / "out")
    for name, weight in model.named_parameters():
        if isinstance(weight, hb.tensor.PrimaryWeight):
            prefix = name.removesuffix(".weight")
            assert torch.equal(tensors[name], weight.qdata)
            assert torch.equal(tensors[f"{prefix}.weight_scale"], weight.linear_scale().view(torch.uint8))
            assert np.allclose(decoded(tensors, prefix), weight.dequantize(torch.float32).numpy(), rtol=4e-7, atol=0)


@pytest.mark.parametrize(("build", "names"), [(mixtral, "w1 w3 w2"), (qwen_moe, "gate_proj up_proj down_proj")])
def test_experts_lie_one_by_one_under_their_published_names(tmp_path, build, names):
    """Gate and up of an expert are one weight in training and share its amax; 24 rows of each cut a 16x16 tile."""
    size = {"intermediate_size": 24} if build is mixtral else {"moe_intermediate_size": 24}
    model = trained(build(**size), "nvfp4", rules={"*down_recipe": None})
    report = hb.export.save(model, tmp_path / "out", format="modelopt")
    tensors = stored(tmp_path / "out")
    path, experts = "model.layers.1.mlp.experts", model.model.layers[1].mlp.experts
    folder = "model.layers.1.block_sparse_moe.experts" if build is mixtral else path
    gate, up, down = (f"{folder}.2.{name}" for name in names.split())
    whole = oracle.quantize(experts.gate_up_proj[2].detach().float().numpy(), hb.NVFP4(block=(16, 16)))
    for prefix, rows in ((gate, slice(0, 24)), (up, slice(24, 48))):
        assert np.array_equal(nibbles(tensors[f"{prefix}.weight"].numpy()), np.array(whole.codes)[rows])
        assert np.array_equal(tensors[f"{prefix}.weight_scale"].numpy(), np.array(whole.scales)[rows])
        assert float(tensors[f"{prefix}.weight_scale_2"]) == pytest.approx(float(whole.amax[0]) / 2688, rel=1e-6)
    assert torch.equal(tensors[f"{down}.weight"], experts.down_proj[2]) and down in report.exclude
    assert any(name.endswith("gate") for name in report.exclude)
    checkpoint = hb.export.load(tmp_path / "out")
    scale = np.repeat(e4m3(np.array(whole.scales)[24:]), 16, 1) * whole.amax[0] / 2688
    quant = checkpoint.quantized[f"{up}.weight"]
    assert np.allclose(quant.dequantize(torch.float32).numpy(), E2M1[np.array(whole.codes)[24:]] * scale, rtol=1e-6)
    assert quant.spec.block == (1, 16)  # its first tile lies in two tensors of the checkpoint


def test_what_has_no_form_is_refused_by_name(tmp_path):
    def refused(model, match, **options):
        with pytest.raises(ValueError, match=match):
            hb.export.save(model, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    refused(torch.nn.Linear(16, 16), "model=Linear: engines load architectures of Hugging Face transformers")
    refused(llama(), "no layer's forward reads its weight in NVFP4")
    model = trained(llama(), "nvfp4", steps=0)
    refused(model, "format='gguf': use one of 'modelopt', 'compressed-tensors'", format="gguf")
    refused(model, "batches are given, and activations='none' needs none", batches=[torch.zeros(1, 1)])
    refused(model, "activations='static': give batches", activations="static")
    with hb.high_precision(model):
        refused(model, "model is in hb.high_precision")
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] = torch.nan
    refused(model, "model.layers.0.mlp.up_proj: its weight holds NaN or Inf")
    refused(trained(llama(), "mxfp8", steps=0), "q_proj: its weight is mxfp8 e4m3.*rules={glob: None}")
    stochastic = dataclasses.replace(
        hb.recipes.nvfp4_forward(), fprop=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(rounding="stochastic"))
    )
    refused(trained(llama(), stochastic, steps=0), "drawn anew in every forward")
    refused(trained(llama(hidden_size=40, head_dim=20), "nvfp4", steps=0), "in_features=40 is no multiple of 16")
    tied = llama(tie_word_embeddings=True)
    refused(
        trained(tied, "nvfp4", steps=0, rules={"lm_head": "nvfp4"}), "embed_tokens.weight: it is lm_head.weight too"
    )


def test_experts_and_convolutions_in_high_precision_are_excluded(tmp_path):
    """Engines take an architecture's experts for quantized ones unless they are named."""
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    for name, more in (("GptOss", {}), ("Llama4", {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48})):
        make = getattr(transformers, "Llama4TextConfig" if name == "Llama4" else f"{name}Config")
        config = make(**SMALL | options | more)
        model = build(getattr(transformers, f"{name}ForCausalLM"), torch.bfloat16, config)
        trained(model, "nvfp4", steps=0, rules={"*experts*": None} if name == "GptOss" else None)
        report = hb.export.save(model, tmp_path / name)
        layers = {key.removesuffix(".router") for key in report.exclude if key.endswith(".router")}
        assert len(layers) == 2 and {f"{layer}.experts" for layer in layers} < set(report.exclude)
    config = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    model = trained(build(transformers.Lfm2ForCausalLM, torch.bfloat16, config), "nvfp4", steps=0)
    assert "model.layers.0.conv.conv" in hb.export.save(model, tmp_path / "lfm2").exclude


def test_the_greatest_scale_of_siblings_of_two_recipes_is_no_matter_of_amaxes_alone(tmp_path):
    """Of amaxes 1 and 0.75 the second has the greater factor, 0.75 / (256 * 6); by the first's it would be cut off."""
    rules = {"*q_proj": "four_over_six", "*k_proj": "nvfp4", "*v_proj": "nvfp4"}
    model = trained(llama(), rules=rules, share_amax=(), steps=0)
    for name, amax in (("q_proj", 0.75), ("k_proj", 1.0), ("v_proj", 0.5)):
        weight = model.get_parameter(f"{PREFIX}{name}.weight")
        weight.data.mul_(amax / 2 / weight.abs().max())
        weight.data[0, 0] = amax
    report = hb.export.save(model, tmp_path / "out", format="modelopt")
    tensors, rows = stored(tmp_path / "out"), by_name(report)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert float(tensors[f"{PREFIX}{name}.weight_scale_2"]) == pytest.approx(0.75 / (256 * 6))
        assert bool(rows[f"{PREFIX}{name}"].reason) == (name != "q_proj")
    found = hb.export.load(tmp_path / "out").quantized[f"{PREFIX}q_proj.weight"]
    assert rows[f"{PREFIX}q_proj"].changed == 0 and float(found.dequantize().abs().max()) == pytest.approx(0.75)


def test_all_bytes_of_codes_that_lie_otherwise_have_changed():
    """A rotation of 64 pads 48 columns, which no engine's codes have."""
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    rotated = hb.quantize(x, hb.NVFP4(rotation=hb.Hadamard(size=64, signs="none")))
    plain = hb.quantize(x, hb.NVFP4())
    assert rotated.qdata.shape != plain.qdata.shape
    assert _differences(rotated, plain) == 8 * 48 // 2 + 8 * 48 // 16 and _differences(plain, plain) == 0
