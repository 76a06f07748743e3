"""Models of transformers that are small enough to train and export in a test."""

from __future__ import annotations

import torch
import transformers

import halfbyte as hb

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
NOTHING_KEPT = hb.Keep(last_fraction=0)


def build(cls, dtype, config):
    """Return a model with weights of a dtype, and rotary frequencies in fp32 as from_pretrained leaves them."""
    torch.manual_seed(0)
    model = cls(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def llama(dtype=torch.bfloat16, **options):
    return build(transformers.LlamaForCausalLM, dtype, transformers.LlamaConfig(**SMALL | options))


def mixtral(dtype=torch.bfloat16, **options):
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2}
    return build(transformers.MixtralForCausalLM, dtype, transformers.MixtralConfig(**SMALL | sizes | options))


def qwen_moe(dtype=torch.bfloat16, **options):
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return build(transformers.Qwen3MoeForCausalLM, dtype, transformers.Qwen3MoeConfig(**SMALL | sizes | options))


def trained(model, recipe="nvfp4", steps=2, **options):
    """Convert a model, train it a few steps and return it; by default only the head stays in high precision."""
    options.setdefault("keep", NOTHING_KEPT)
    report = hb.quantize_(model, recipe, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.state.advance()
    return model


def loss(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS, labels=TOKENS).loss
