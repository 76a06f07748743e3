"""Models of transformers that are small enough to train and export in a test, and readers of what was exported."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers
from safetensors import safe_open

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
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


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


def stored(folder):
    """Return every tensor of a folder, with float8 as its bytes, read by safetensors alone."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key)
                result[key] = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return result


def config(folder):
    return json.loads((folder / "config.json").read_text())


def e4m3(codes):
    """Return the numbers that E4M3 bytes stand for, from the format's definition."""
    codes = np.asarray(codes)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


def nibbles(packed):
    packed = np.asarray(packed)
    return np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)


def decoded(tensors, prefix):
    """Return a weight as either form defines it, fp32 by numpy."""
    scale = e4m3(tensors[f"{prefix}.weight_scale"].numpy())
    if f"{prefix}.weight_packed" in tensors:
        codes = tensors[f"{prefix}.weight_packed"]
        scale = scale / tensors[f"{prefix}.weight_global_scale"].numpy()
    else:
        codes = tensors[f"{prefix}.weight"]
        scale = scale * tensors[f"{prefix}.weight_scale_2"].numpy()
    return E2M1[nibbles(codes.numpy())] * np.repeat(scale, 16, 1)
