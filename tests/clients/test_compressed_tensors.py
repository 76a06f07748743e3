"""The package compressed-tensors, and transformers through it, read what hb.export.save wrote."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from export_decoder import config, decoded, stored
from export_models import TOKENS, llama, loss, mixtral, qwen_moe, trained
from safetensors.torch import load_file

import halfbyte as hb

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
AUTO = transformers.AutoModelForCausalLM
W1 = "model.layers.0.block_sparse_moe.experts.1.w1"
MODES = ("none", "static", "per-token")


def decompressed(folder):
    """Return {key: weight} by the package's compressor, under the scheme that config.json says."""
    scheme = QuantizationConfig.model_validate(config(folder)["quantization_config"]).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors = load_file(folder / "model.safetensors")
    prefixes = [key.removesuffix("weight_packed") for key in tensors if key.endswith(".weight_packed")]
    parts = {p: {key.removeprefix(p): t for key, t in tensors.items() if key.startswith(p)} for p in prefixes}
    return {f"{prefix}weight": compressor.decompress(part, scheme)["weight"] for prefix, part in parts.items()}


def exported(folder, model, mode):
    hb.export.save(model, folder, activations=mode, batches=[TOKENS] if mode == "static" else ())
    return hb.export.load(folder)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [llama, mixtral, qwen_moe])
@pytest.mark.parametrize("recipe", [hb.recipes.nvfp4(), hb.recipes.four_over_six(), hb.recipes.nvfp4_forward()])
def test_decompress_gives_our_values(tmp_path, build, recipe, mode):
    checkpoint = exported(tmp_path / "out", trained(build(), recipe, steps=1), mode)
    weights = decompressed(tmp_path / "out")
    assert weights.keys() == checkpoint.quantized.keys()
    tensors = stored(tmp_path / "out")
    for key, quant in checkpoint.quantized.items():
        by_numpy = torch.from_numpy(decoded(tensors, key.removesuffix(".weight"))).bfloat16()
        assert weights[key].dtype == torch.bfloat16 and torch.equal(weights[key], by_numpy)
        assert_same_but_ties(weights[key], quant)


def assert_same_but_ties(theirs, quant):
    """Equal in bf16 bit for bit, but where the exact value is midway between two numbers of bf16.

    Which of them comes then depends on the order in which a reader multiplies three numbers.
    """
    ours = quant.dequantize(torch.bfloat16)
    differ = ours != theirs
    exact = quant.dequantize(torch.float32).double()[differ]
    midway = (ours.double() + theirs.double())[differ] / 2
    step = (ours.double() - theirs.double())[differ].abs()
    assert ((exact - midway).abs() <= 1e-6 * midway.abs()).all() and (step <= midway.abs() / 100).all()


@pytest.mark.parametrize("mode", MODES)
def test_transformers_loads_values_and_codes(tmp_path, mode):
    """With dequantize=True masters, without it codes that the first forward takes apart."""
    model = trained(llama(**WIDE), "nvfp4")
    checkpoint = exported(tmp_path / "out", model, mode)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = AUTO.from_pretrained(tmp_path / "out", quantization_config=dense, dtype="bfloat16")
    packed = AUTO.from_pretrained(tmp_path / "out", dtype="bfloat16")
    layer = packed.model.layers[1].mlp.up_proj
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(layer.weight_packed, checkpoint.quantized[key].qdata)
    with torch.no_grad():
        packed(input_ids=TOKENS)
    for one in (loaded, packed):
        state = one.state_dict()
        for name, quant in checkpoint.quantized.items():
            assert_same_but_ties(state[name], quant)
        for name, tensor in checkpoint.tensors.items():
            assert name in checkpoint.quantized or torch.equal(state[name], tensor)


def test_transformers_leaves_out_the_factor_of_experts(tmp_path):
    """docs/export.md says so; once this fails, transformers reads them and the page can."""
    checkpoint = exported(tmp_path / "out", trained(mixtral(), "nvfp4", steps=1), "none")
    loaded = AUTO.from_pretrained(tmp_path / "out", dtype="bfloat16")
    quant = checkpoint.quantized["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    factor = float(load_file(tmp_path / "out" / "model.safetensors")[f"{W1}.weight_global_scale"])
    theirs = loaded.model.layers[0].mlp.experts.gate_up_proj[1, :48].float()
    assert torch.allclose(theirs / factor, quant.dequantize(torch.float32), rtol=0.01)


def test_transformers_refuses_experts_of_which_some_are_in_high_precision(tmp_path):
    """docs/export.md says so."""
    hb.export.save(trained(mixtral(), "nvfp4", steps=1, keep=hb.Keep()), tmp_path / "out")
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        AUTO.from_pretrained(tmp_path / "out")


def test_transformers_decodes_to_bf16_whatever_the_rest_is(tmp_path):
    """docs/export.md says what to pass then; once this fails, nothing needs to be passed."""
    hb.export.save(trained(llama(torch.float32), "nvfp4", steps=1), tmp_path / "out", compute_dtype=torch.float32)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        AUTO.from_pretrained(tmp_path / "out")(input_ids=TOKENS)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    for options in ({"dtype": "bfloat16"}, {"quantization_config": dense}):
        with torch.no_grad():
            assert AUTO.from_pretrained(tmp_path / "out", **options)(input_ids=TOKENS).logits.isfinite().all()


def test_logits_of_weights_alone(tmp_path):
    """W4A16: activations in bf16, here and there."""
    recipe = dataclasses.replace(hb.recipes.bf16(), fprop=hb.GemmSpec(b=hb.NVFP4(block=(16, 16))))
    model = trained(llama(**WIDE), recipe, steps=4)
    hb.export.save(model, tmp_path / "out")
    loaded = AUTO.from_pretrained(tmp_path / "out", dtype="bfloat16").eval()
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=TOKENS).logits.float() for m in (model, loaded))
    assert (ours - theirs).abs().max() < 1e-2 * ours.abs().max() and (ours - theirs).norm() < 1e-2 * ours.norm()


def test_inputs_are_quantized_alike(tmp_path):
    """W4A4: the package rounds inputs in the arithmetic of their dtype; in fp32 its codes are ours but near ties.

    It divides by a rounded scale where the definition multiplies by a rounded reciprocal. Where the codes agree, a
    layer's output does.
    """
    model = trained(llama(**WIDE), "nvfp4", steps=4)
    inputs, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            hook = (lambda key: lambda module, arguments: inputs.update({key: arguments[0].detach().float()}))(name)
            handles.append(module.register_forward_pre_hook(hook))
    loss(model)
    for handle in handles:
        handle.remove()
    checkpoint = exported(tmp_path / "out", model, "static")
    loaded = AUTO.from_pretrained(tmp_path / "out", dtype="bfloat16")
    with torch.no_grad():
        loaded(input_ids=TOKENS)
    for name, x in inputs.items():
        layer = loaded.get_submodule(name)
        theirs = forward_quantize(layer, x, "input", layer.quantization_scheme.input_activations)
        ours = hb.quantize(x, hb.NVFP4()).dequantize()
        same = (theirs - ours).abs() <= 1e-6 * ours.abs()
        assert same.float().mean() > 0.995, name
        weight = checkpoint.quantized[f"{name}.weight"]
        y = hb.gemm_nt(hb.quantize(x.flatten(0, 1), hb.NVFP4()), weight, out_dtype=torch.float32)
        z = torch.where(same, theirs, ours).flatten(0, 1) @ weight.dequantize(torch.float32).T
        assert (y - z).norm() < 1e-3 * y.norm(), name
