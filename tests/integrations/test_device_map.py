"""device_map of from_pretrained: what fits is exact, what would be offloaded is refused before any weight is loaded."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from llama_folder import TOKENS, folder  # noqa: E402, F401

import halfbyte as hb  # noqa: E402
from halfbyte.integrations.quantizer import _refuse_offload  # noqa: E402
from halfbyte.integrations.transformers import HalfbyteConfig  # noqa: E402

FIRST = "model.layers.0.self_attn.q_proj"
REST = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
REMEDY = r"\(max_memory, more GPUs\), or keep it in high precision, rules=\{'model.layers.0.self_attn.q_proj': None\}"


def step(folder, **options):  # noqa: F811
    """Return the loss and the gradients of a model that was loaded so."""
    config = HalfbyteConfig("nvfp4", keep=hb.Keep(last_fraction=0.5))  # the first of two blocks is converted
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)
    assert len(model.hf_quantizer.report.converted) == 7
    loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", {"": "cpu"}], ids=str)
def test_what_fits_is_exact(folder, device_map):  # noqa: F811
    expected, gradients = step(folder)
    loss, others = step(folder, device_map=device_map)
    assert torch.equal(loss, expected) and gradients.keys() == others.keys() and len(gradients) > 15
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


def test_layers_in_high_precision_may_lie_on_a_disk(folder, tmp_path):  # noqa: F811
    expected, _ = step(folder)
    places = REST | {"model.layers.0": "cpu", "model.layers.1": "disk"}
    config = HalfbyteConfig("nvfp4", keep=hb.Keep(last_fraction=0.5))
    options = {"device_map": places, "offload_folder": str(tmp_path)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)
    assert model.get_parameter("model.layers.1.mlp.up_proj.weight").is_meta
    with torch.no_grad():
        assert torch.equal(model.train()(input_ids=TOKENS, labels=TOKENS).loss, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": REST | {"model.layers.0": "disk", "model.layers.1": "cpu"}},
        {"device_map": "auto", "max_memory": {"cpu": 60_000}},
        {"device_map": {"": "disk"}},
    ],
    ids=["by hand", "too little memory", "all"],
)
def test_a_converted_layer_on_a_disk_is_refused(folder, tmp_path, options):  # noqa: F811
    with pytest.raises(ValueError, match=rf"device_map puts {FIRST} on 'disk': .*{REMEDY}"):
        step(folder, offload_folder=str(tmp_path), **options)


@pytest.mark.parametrize("gpu", [0, "cuda", "cuda:1", torch.device("cuda", 0)], ids=str)
def test_beside_a_gpu_the_hosts_memory_is_none_of_a_layer(gpu):
    places = {"": gpu, "model.layers.0": "cpu"}
    with pytest.raises(ValueError, match=f"device_map puts {FIRST} on 'cpu'"):
        _refuse_offload(places, ["model.layers.1.mlp.up_proj", FIRST])
    _refuse_offload(places, ["model.layers.1.mlp.up_proj"])  # the longest name decides
    with pytest.raises(ValueError, match=f"device_map puts {FIRST} on 'disk'"):
        _refuse_offload({"": gpu, f"{FIRST}.weight": "disk"}, [FIRST])  # accelerate cuts layers, too
    _refuse_offload({"": gpu, f"{FIRST}_other.weight": "disk"}, [FIRST])
    _refuse_offload({"": "cpu"}, [FIRST])
    _refuse_offload("auto", [FIRST])  # becomes a map later
