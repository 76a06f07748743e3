"""gpt-oss: experts with biases that lie as [E, K, N], exported in the layout that ModelOpt itself writes."""

from __future__ import annotations

import pytest
import torch
import transformers
from export_decoder import stored
from export_models import NOTHING_KEPT, SMALL, TOKENS, build, loss, trained

import halfbyte as hb
from halfbyte.integrations.transformers import load_exported

EXPERTS = "model.layers.0.mlp.experts"


def gpt_oss(dtype=torch.bfloat16):
    config = transformers.GptOssConfig(**SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2, "pad_token_id": 0})
    model = build(transformers.GptOssForCausalLM, dtype, config)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):  # which begin as zeros
            parameter.data.normal_(std=0.1)
    return model


def test_the_files_are_those_that_modelopt_writes(tmp_path):
    """Of the same weights in 1x16 blocks, calibrated on the same tokens: names, shapes, dtypes, codes and factors."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint

    theirs = gpt_oss()
    theirs.set_experts_implementation("eager")
    theirs.config.architectures = ["GptOssForCausalLM"]
    mtq.quantize(theirs, mtq.NVFP4_DEFAULT_CFG, lambda model: model(input_ids=TOKENS))
    export_hf_checkpoint(theirs, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")

    ours = trained(gpt_oss(), "nvfp4_forward", steps=0)
    report = hb.export.save(ours, tmp_path / "ours", format="modelopt", activations="static", batches=[TOKENS])
    rows = {row.name: row for row in report.layers}
    assert rows[f"{EXPERTS}.up_recipe"].reason == "one global scale for all experts"
    assert report.share_changed > 0

    expected, found = (stored(tmp_path / name) for name in ("theirs", "ours"))
    experts = {key for key in expected if ".experts." in key and "input_scale" not in key}
    assert len(experts) == 2 * 2 * 4  # codes, scales, factor and bias
    for key in experts:
        assert (found[key].shape, found[key].dtype) == (expected[key].shape, expected[key].dtype), key
        left, right = (
            t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (expected[key], found[key])
        )
        assert key.endswith("_proj") or torch.equal(left, right), key
    assert set(found) - set(expected) <= {key for key in found if "input_scale" in key}, "ModelOpt calibrated fewer"
    excluded = hb.export.files.read_folder_json(tmp_path / "ours" / "hf_quant_config.json")["quantization"]
    assert {"lm_head", "model.layers.0.mlp.router"} <= set(excluded["exclude_modules"])

    read, others = (hb.export.load(tmp_path / name) for name in ("ours", "theirs"))
    assert read.transposed == others.transposed == tuple(sorted(k for k in read.quantized if ".experts." in k))
    for key in read.transposed:
        shape = dict(gpt_oss().named_parameters())[key].shape
        assert read.masters()[key].shape == shape
        mine, reads = (checkpoint.masters(torch.float32)[key] for checkpoint in (read, others))
        assert (mine != reads).float().mean() < 5e-3, key  # ModelOpt divides, which decides some ties otherwise
        assert torch.allclose(mine, reads, atol=float(mine.abs().max()) / 3), key


def test_it_trains_is_exported_and_trains_on(tmp_path):
    model = trained(gpt_oss(), "nvfp4", steps=3)
    with pytest.raises(
        ValueError, match=r"format='compressed-tensors': \S+gate_up_proj holds experts as \[E, K, N\], .*"
    ):
        hb.export.save(model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    report = hb.export.save(model, tmp_path / "out", format="modelopt", activations="static", batches=[TOKENS])
    changed = {row.name for row in report.layers if row.changed}
    assert changed and all(name.endswith(("up_recipe", "down_recipe")) for name in changed)
    checkpoint = hb.export.load(tmp_path / "out")
    assert checkpoint.contract.layers[f"{EXPERTS}.gate_up_proj"].layer == f"{EXPERTS}.up_recipe"
    assert len(checkpoint.input_amaxes) == len(report.layers)
    again = load_exported(tmp_path / "out")
    state = model.state_dict()
    for key, tensor in again.state_dict().items():
        if key not in checkpoint.quantized:
            assert torch.equal(tensor, state[key]), key  # biases of experts among them
        else:
            error = (tensor.float() - state[key].float()).norm() / state[key].float().norm()
            assert error < 0.13, (key, error)  # of a rounding to NVFP4
    assert loss(again) == pytest.approx(float(loss(model)), rel=0.02)
    optimizer = torch.optim.AdamW(again.parameters(), lr=3e-3)
    before = float(loss(again))
    for _ in range(3):
        again.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        again.hf_quantizer.report.state.advance()
    assert float(loss(again)) < before
    # Masters made of codes under one factor are exported as these codes.
    same = load_exported(tmp_path / "out")
    hb.export.save(same, tmp_path / "second", format="modelopt")
    second = hb.export.load(tmp_path / "second").masters(torch.float32)
    first = checkpoint.masters(torch.float32)
    assert all(torch.allclose(first[key], second[key], rtol=0.2, atol=1e-3) for key in checkpoint.transposed)


def test_a_bias_of_experts_learns_and_the_gate_is_the_models_own():
    model = gpt_oss(torch.float32)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    experts = model.model.layers[0].mlp.experts
    seen = {}
    original = type(experts)._apply_gate
    experts._apply_gate = lambda x: seen.setdefault("y", original(experts, seen.setdefault("x", x)))
    model(input_ids=TOKENS)
    gate, up = seen["x"][..., ::2].clamp(max=experts.limit), seen["x"][..., 1::2].clamp(-experts.limit, experts.limit)
    expected = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    assert torch.allclose(seen["y"], expected, rtol=1e-6) and report.converted
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        assert bias.grad.isfinite().all() and bias.grad.any()


def test_experts_of_a_class_that_modelopt_does_not_turn_are_refused(tmp_path):
    model = trained(gpt_oss(), "nvfp4", steps=0)
    experts = model.model.layers[0].mlp.experts
    experts.__class__ = type("AriaExperts", (type(experts),), {})
    with pytest.raises(
        ValueError, match=r"gate_up_proj: experts of AriaExperts lie as \[E, K, N\], and have no published"
    ):
        hb.export.save(model, tmp_path / "out", format="modelopt")
    assert not (tmp_path / "out").exists()
