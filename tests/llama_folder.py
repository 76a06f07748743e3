"""A Llama of transformers, small, in a folder, and loaded as quantized layers that are all followed."""

import pytest
import torch
import transformers

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteConfig

TOKENS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained(path)
    return path


def loaded(folder):
    """Return the model and its RunState."""
    config = HalfbyteConfig("nvfp4", keep=hb.Keep(last_fraction=0))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model, model.hf_quantizer.report.state
