"""HalfbyteConfig: from_pretrained converts, trains, writes and reads again with the same bytes."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

from export_models import NOTHING_KEPT, TOKENS, llama, loss, mixtral, trained  # noqa: E402

import halfbyte as hb  # noqa: E402
from halfbyte.integrations.transformers import HalfbyteConfig, load_exported  # noqa: E402

BUILDERS = {"llama": llama, "mixtral": mixtral}  # more families: tests/clients/test_families.py
AUTO = transformers.AutoModelForCausalLM


@pytest.mark.parametrize("name", ["llama"])
def test_round_trip_bit_for_bit(tmp_path, name):
    """Loaded with a config, trained, saved, loaded without one: the same weights, recipes and loss."""
    BUILDERS[name]().save_pretrained(tmp_path / "plain")
    rules = {"*layers.0*down*": None}
    wanted = HalfbyteConfig("nvfp4", rules=rules, keep=NOTHING_KEPT, seed=7)
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=wanted)
    by_hand = BUILDERS[name]()
    report = hb.quantize_(by_hand, "nvfp4", rules=rules, keep=NOTHING_KEPT, state=hb.RunState(7))
    quantizer = model.hf_quantizer
    assert quantizer.is_trainable and quantizer.is_qat_trainable and quantizer.is_serializable()
    assert quantizer.report.converted == report.converted and quantizer.report.state.seed == 7
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, by_hand)]
    for _ in range(2):
        losses = [m.train()(input_ids=TOKENS, labels=TOKENS).loss for m in (model, by_hand)]
        assert torch.equal(*losses)
        for one, optimizer, state in zip(losses, optimizers, (quantizer.report.state, report.state), strict=True):
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.advance()
    model.save_pretrained(tmp_path / "trained")
    again = AUTO.from_pretrained(tmp_path / "trained", device_map={"": "cpu"})
    assert again.hf_quantizer.report.converted == report.converted
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
    assert torch.equal(loss(again), loss(model))


GROUPS = (("*q_proj", "*k_proj", "*v_proj"), ("*gate_proj", "*up_proj", "*down_proj"))
"""The usual families, one of them larger."""


def test_layers_that_shared_an_amax_in_training_do_so_again(tmp_path):
    """Another amax is another fp32 factor and other codes."""
    model = trained(llama(), "nvfp4", share_amax=GROUPS)
    assert hb.export.save(model, tmp_path / "out").share_changed == 0
    again = load_exported(tmp_path / "out")
    assert torch.equal(loss(again), loss(model))
    assert len(again.model.layers[1].mlp.down_proj.amax_group) == 3
    hb.export.save(again, tmp_path / "again")
    ours, theirs = (hb.export.load(tmp_path / name).contract for name in ("out", "again"))
    assert ours == theirs and len({layer.shares for layer in ours.layers.values()}) == 2 * 2 + 1  # o_proj has its own


def test_a_layer_of_an_engines_family_and_of_another_group_joins_both(tmp_path):
    """The values that engines fuse with queries and keys have the amax that they share with the output."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 4
    model = trained(model, "nvfp4", steps=0, share_amax=(("*v_proj", "*o_proj"),))
    hb.export.save(model, tmp_path / "out")
    layers = hb.export.load(tmp_path / "out").contract.layers.values()
    for i in range(2):
        assert len({layer.shares for layer in layers if f"layers.{i}.self_attn" in layer.layer}) == 1
    again = hb.export.save(load_exported(tmp_path / "out"), tmp_path / "again")
    assert again.share_changed == 0
    first, second = (hb.export.load(tmp_path / name).contract.layers for name in ("out", "again"))
    assert {key: one.sha256 for key, one in first.items()} == {key: one.sha256 for key, one in second.items()}


def test_layers_that_had_amaxes_of_their_own_share_none(tmp_path):
    model = trained(llama(), "nvfp4", share_amax=(), rules={"*k_proj": None, "*v_proj": None, "*up_proj": None})
    hb.export.save(model, tmp_path / "out")
    again = load_exported(tmp_path / "out")
    assert torch.equal(loss(again), loss(model)) and not again.model.layers[0].self_attn.q_proj.amax_group


def test_siblings_that_the_export_united_stay_so(tmp_path):
    """Codes of the export are those that the loaded model multiplies by."""
    model = trained(llama(), "nvfp4", share_amax=())
    assert hb.export.save(model, tmp_path / "out").share_changed > 0
    again = hb.export.save(load_exported(tmp_path / "out"), tmp_path / "again")
    assert again.share_changed == 0
    first, second = (hb.export.load(tmp_path / name).contract.layers for name in ("out", "again"))
    assert {key: one.sha256 for key, one in first.items()} == {key: one.sha256 for key, one in second.items()}


def test_a_config_says_who_shares_an_amax(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    wanted = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT, share_amax=GROUPS)
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=wanted)
    model.save_pretrained(tmp_path / "trained")
    again = AUTO.from_pretrained(tmp_path / "trained")
    for one in (model, again):
        assert len(one.model.layers[0].mlp.up_proj.amax_group) == 3
    assert torch.equal(loss(again), loss(trained(llama(), "nvfp4", steps=0, share_amax=GROUPS)))
    with pytest.raises(TypeError, match=r"share_amax=\('\*q_proj',\): give groups of globs"):
        HalfbyteConfig(share_amax=("*q_proj",))
    with pytest.raises(TypeError, match="^keep=3: give a Keep"):
        HalfbyteConfig(keep=3)


def test_config_is_json_and_says_recipes_by_name_or_key():
    options = hb.recipes.nvfp4(hadamard=None)
    config = HalfbyteConfig(hb.recipes.nvfp4(), rules={"*k_proj": options, "*v_proj": None}, keep={"first_blocks": 1})
    values = json.loads(config.to_json_string())
    assert values["recipe"] == "nvfp4" and values["rules"] == {"*k_proj": options.key, "*v_proj": None}
    assert values["quant_method"] == "halfbyte" and values["keep"]["first_blocks"] == 1
    assert HalfbyteConfig.from_dict(values).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="recipe='nvpf4' is not a preset"):
        HalfbyteConfig("nvpf4")
    with pytest.raises(ValueError, match="quant_method='fp8'"):
        HalfbyteConfig(quant_method="fp8")
    with pytest.raises(TypeError, match="recipe=4"):
        HalfbyteConfig(4)


@pytest.mark.parametrize(("name", "form"), [("llama", "compressed-tensors"), ("mixtral", "modelopt")])
def test_an_export_trains_on(tmp_path, name, form):
    """Masters made of the codes give the loss of before, and the codes again when they are exported."""
    model = trained(BUILDERS[name](), "nvfp4", rules={"*layers.0*down*": None})
    hb.export.save(model, tmp_path / "out", format=form)
    again = load_exported(tmp_path / "out")
    assert torch.equal(loss(again), loss(model)) and again.dtype == torch.bfloat16
    hb.export.save(again, tmp_path / "again", format=form)
    first, second = (hb.export.load(tmp_path / folder).quantized for folder in ("out", "again"))
    assert first.keys() == second.keys() and len(first) > 8
    for key, quant in first.items():
        assert torch.equal(quant.qdata, second[key].qdata) and torch.equal(quant.amax, second[key].amax)
        assert torch.equal(quant.block_scale.view(torch.uint8), second[key].block_scale.view(torch.uint8))
    again.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in again.parameters())


def test_an_export_of_others_needs_a_recipe(tmp_path):
    model = trained(llama(), "nvfp4_forward")
    hb.export.save(model, tmp_path / "out")
    (tmp_path / "out" / "halfbyte.json").unlink()
    with pytest.raises(ValueError, match="has no contract of training: say how it is to be trained"):
        load_exported(tmp_path / "out")
    hb.export.save(model, tmp_path / "modelopt", format="modelopt")
    for folder, words in (("modelopt", "load_exported"), ("out", "CompressedTensorsConfig|compressed-tensors")):
        with pytest.raises((ValueError, ImportError), match=words):
            AUTO.from_pretrained(tmp_path / folder, quantization_config=HalfbyteConfig("nvfp4_forward"))
    again = load_exported(tmp_path / "out", HalfbyteConfig("nvfp4_forward", keep=NOTHING_KEPT))
    assert torch.equal(loss(again), loss(model))
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaForNothing"))
    with pytest.raises(ValueError, match=r"architectures=\['LlamaForNothing'\]"):
        load_exported(tmp_path / "out", HalfbyteConfig())


def test_weights_that_exist_in_nvfp4_only(tmp_path):
    """From values by from_pretrained, and from an export's codes: what each forward multiplies is what it was."""
    llama().save_pretrained(tmp_path / "plain")
    wanted = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT, weights="nvfp4")
    assert HalfbyteConfig.from_dict(json.loads(wanted.to_json_string())).weights == "nvfp4"
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=wanted)
    twin = AUTO.from_pretrained(tmp_path / "plain", quantization_config=HalfbyteConfig("nvfp4", keep=NOTHING_KEPT))
    kinds = {n: type(p) for n, p in model.named_parameters()}
    assert [n for n, kind in kinds.items() if kind is hb.tensor.PrimaryWeight] == [
        f"{name}.weight" for name in twin.hf_quantizer.report.converted
    ]
    assert torch.equal(loss(model), loss(twin))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "no")
    hb.export.save(model, tmp_path / "out")
    again = load_exported(tmp_path / "out", weights="nvfp4")
    assert torch.equal(loss(again.train()), loss(twin))
    for name, kind in kinds.items():
        own = again.get_parameter(name)
        assert type(own) is kind
        if kind is hb.tensor.PrimaryWeight:
            assert torch.equal(own.qdata, model.get_parameter(name).qdata)
            assert torch.equal(own.amax, model.get_parameter(name).amax)
    for call in (lambda: HalfbyteConfig(weights="codes"), lambda: load_exported(tmp_path / "out", weights="codes")):
        with pytest.raises(ValueError, match="weights='codes': give 'plain' or 'nvfp4'"):
            call()
