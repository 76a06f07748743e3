"""What the default policy keeps of models of transformers: heads, whatever they are called, and the last blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.23")

BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
LLAMA = {**BERT, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
SIDES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 3), ("attention_heads", 2))}
WHISPER = {**SIDES, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 40, "num_mel_bins": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER |= {**SPECIAL, "max_source_positions": 16, "max_target_positions": 16}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 16, **SPECIAL}
MIXTRAL = {**LLAMA, "num_local_experts": 4}
VIT = {**{key: BERT[key] for key in list(BERT)[:4]}, "image_size": 16, "patch_size": 8}

KEPT = [  # class, config, stacks of three blocks, layers outside of them that are kept, those that are converted
    ("LlamaForCausalLM", "LlamaConfig", LLAMA, ["model.layers"], ["lm_head"], []),
    ("LlamaForSequenceClassification", "LlamaConfig", LLAMA, ["model.layers"], ["score"], []),
    ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, ["model.layers"], ["lm_head"], []),
    ("Qwen3ForCausalLM", "Qwen3Config", LLAMA, ["model.layers"], ["lm_head"], []),
    ("GemmaForCausalLM", "GemmaConfig", LLAMA, ["model.layers"], ["lm_head"], []),
    ("PhiForCausalLM", "PhiConfig", LLAMA, ["model.layers"], ["lm_head"], []),
    ("MixtralForCausalLM", "MixtralConfig", MIXTRAL, ["model.layers"], ["lm_head"], []),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, ["transformer.h"], ["lm_head"], []),
    ("GPT2ForSequenceClassification", "GPT2Config", GPT2, ["transformer.h"], ["score"], []),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT, ["gpt_neox.layers"], ["lm_head"], []),
    (
        *("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
        *(["model.encoder.layers", "model.decoder.layers"], ["proj_out"], []),
    ),
    ("T5ForConditionalGeneration", "T5Config", T5, ["encoder.block", "decoder.block"], ["lm_head"], []),
    (
        *("BertForMaskedLM", "BertConfig", BERT, ["bert.encoder.layer"]),
        *(["cls.predictions.decoder"], ["cls.predictions.transform.dense"]),
    ),
    (
        "BertForSequenceClassification",
        "BertConfig",
        BERT,
        ["bert.encoder.layer"],
        ["classifier"],
        ["bert.pooler.dense"],
    ),
    ("BertForQuestionAnswering", "BertConfig", BERT, ["bert.encoder.layer"], ["qa_outputs"], []),
    (
        *("RobertaForSequenceClassification", "RobertaConfig", BERT, ["roberta.encoder.layer"]),
        *(["classifier.dense", "classifier.out_proj"], []),
    ),
    ("ViTForImageClassification", "ViTConfig", VIT, ["vit.layers"], ["classifier"], []),
]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case[0])
def test_heads_and_last_blocks_are_kept_and_nothing_else(case):
    name, config, options, stacks, kept, converted = case
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**options))
    linears = {
        name for name, m in model.named_modules() if isinstance(m, nn.Linear | transformers.pytorch_utils.Conv1D)
    }
    keys = list(model.state_dict())
    report = hb.quantize_(model, "nvfp4")
    last = tuple(f"{stack}.2." for stack in stacks)
    assert {name for name in report.kept if not name.startswith(last)} == set(kept)
    assert not any(name.startswith(last) for name in report.converted) and set(converted) <= set(report.converted)
    blocks = tuple(f"{stack}.{i}." for stack in stacks for i in range(2))
    assert {n for n in linears if n.startswith(blocks)} <= set(report.converted)
    assert all(any(n.startswith(block) for n in report.kept) for block in last)
    assert list(model.state_dict()) == keys
