"""Families of models: trained, exported in both forms, read back by compressed-tensors and here, exported again."""

from __future__ import annotations

import pytest
import torch
import transformers
from export_models import SMALL, TOKENS, build, loss, mixtral, qwen_moe, trained
from test_compressed_tensors import assert_same_but_ties, decompressed
from test_gpt_oss import gpt_oss

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteConfig, load_exported

DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
}


def family(name, **options):
    def make(dtype=torch.bfloat16):
        config = getattr(transformers, f"{name}Config")(**SMALL | {"pad_token_id": 0} | options)
        return build(getattr(transformers, f"{name}ForCausalLM"), dtype, config)

    return make


FAMILIES = {
    "llama tied": family("Llama", tie_word_embeddings=True),
    "mistral": family("Mistral"),
    "qwen2": family("Qwen2"),
    "qwen3": family("Qwen3"),
    "gemma2": family("Gemma2"),
    "phi3": family("Phi3"),
    "olmo2": family("Olmo2"),
    "granite": family("Granite"),
    "mixtral": mixtral,
    "qwen3_moe": qwen_moe,
    "deepseek_v3": family("DeepseekV3", **DEEPSEEK),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(tmp_path, name):
    model = trained(FAMILIES[name](), "nvfp4", steps=1)
    before = loss(model)
    for form in ("modelopt", "compressed-tensors"):
        folder = tmp_path / form
        report = hb.export.save(model, folder, format=form, activations="static", batches=[TOKENS])
        checkpoint = hb.export.load(folder)
        if name != "deepseek_v3":  # its q_a_proj and kv_a_proj_with_mqa are fused by engines and not in training
            assert report.share_changed == 0
        again = load_exported(folder)
        if report.share_changed == 0:
            assert torch.equal(loss(again), before)
        else:
            assert loss(again) == pytest.approx(float(before), rel=0.02)
        hb.export.save(again, tmp_path / f"{form} again", format=form)
        second = hb.export.load(tmp_path / f"{form} again").quantized
        assert checkpoint.quantized.keys() == second.keys()
        for key, quant in checkpoint.quantized.items():
            assert torch.equal(quant.qdata, second[key].qdata), key
            assert torch.equal(quant.block_scale.view(torch.uint8), second[key].block_scale.view(torch.uint8)), key
            assert torch.equal(quant.amax, second[key].amax), key
    weights = decompressed(tmp_path / "compressed-tensors")
    assert weights.keys() == checkpoint.quantized.keys()
    for key, quant in checkpoint.quantized.items():
        assert_same_but_ties(weights[key], quant)


@pytest.mark.parametrize("name", FAMILIES | {"gpt_oss": gpt_oss})
def test_the_quantizer_round_trips(tmp_path, name):
    """from_pretrained with a HalfbyteConfig, a step, save_pretrained, from_pretrained without one."""
    make = gpt_oss if name == "gpt_oss" else FAMILIES[name]  # test_gpt_oss.py exports it
    make().save_pretrained(tmp_path / "plain")
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=HalfbyteConfig("nvfp4"))
    model.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.hf_quantizer.report.state.advance()
    model.save_pretrained(tmp_path / "trained")
    again = auto.from_pretrained(tmp_path / "trained")
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
    assert again.hf_quantizer.report.converted == model.hf_quantizer.report.converted
    assert torch.equal(loss(again), loss(model))
