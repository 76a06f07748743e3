"""PEFT's LoRA over frozen layers: it trains as it is; its own merge is refused by name, hb.merge_lora_ reports."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from llama_folder import TOKENS, folder, loaded

import halfbyte as hb
from halfbyte.integrations.transformers import load_exported

__all__ = ["folder"]
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def frozen(folder):
    model, state = loaded(folder)
    assert hb.freeze_(model).bits < 4.6
    return model, state


def adapted(folder, steps=4, **options):
    """Return a model with PEFT's adapters, trained some steps, and the losses."""
    model, state = frozen(folder)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**CONFIG | options))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
        losses.append(loss.item())
    return model.eval(), losses


def codes_of(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, hb.QuantTensor)}


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


def test_it_trains_and_its_adapters_load_again(folder, tmp_path):
    base, _ = frozen(folder)
    codes = {name: q.qdata.clone() for name, q in codes_of(base).items()}
    model, losses = adapted(folder)
    assert losses[-1] < losses[0] and len(codes) == len(codes_of(model)) == 14
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 28 and all(".lora_" in name for name in trained)
    for name, q in codes_of(model).items():
        plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
        assert torch.equal(q.qdata, codes[plain])
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_a_layer_is_our_own_but_for_roundings(folder):
    """Equal adapters beside equal codes; PEFT rounds the adapter's product before it adds it."""
    model, _ = adapted(folder)
    theirs = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    ours = hb.nn.LoRALinear.from_linear(theirs.base_layer, rank=4, alpha=8, dtype=torch.bfloat16)
    ours.lora_A.data.copy_(theirs.lora_A["default"].weight)
    ours.lora_B.data.copy_(theirs.lora_B["default"].weight)
    outcomes = []
    for layer in (theirs, ours):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        outcomes.append((y.detach().float(), x.grad.float()))
    assert ours.lora_B.grad is not None and outcomes[0][0].norm() > 0
    for a, b in zip(*outcomes, strict=True):
        assert (a - b).norm() < 2**-6 * a.norm()


@pytest.mark.parametrize("safe_merge", [False, True])
def test_its_own_merge_is_refused_by_name(folder, safe_merge):
    model, _ = adapted(folder, steps=1)
    codes = {name: q.qdata.clone() for name, q in codes_of(model).items()}
    with pytest.raises(TypeError, match=r"would change a QuantTensor in place.*hb.merge_lora_\(model\)"):
        copy.deepcopy(model).merge_and_unload(safe_merge=safe_merge)
    assert all(torch.equal(q.qdata, codes[name]) for name, q in codes_of(model).items())


def test_merging_requantizes_and_reports(folder, tmp_path):
    model, _ = adapted(folder)
    before = logits(model)
    name = "base_model.model.model.layers.1.mlp.down_proj"  # shares its amax with nobody
    layer = model.get_submodule(name)
    with torch.no_grad():
        values = layer.base_layer.weight.dequantize(torch.float32) + layer.get_delta_weight("default").float()
    merged = hb.merge_lora_(model)
    row = next(row for row in merged.rows if row.name == name)
    own = hb.quantize(values.bfloat16(), hb.NVFP4(block=(16, 16)))
    after = model.get_base_model()
    weight = after.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight.qdata, own.qdata) and weight.amax == own.amax
    lost = (own.dequantize(torch.float32) - values).norm() / values.norm()
    assert row.error == pytest.approx(float(lost), rel=1e-5) and 0.02 < row.error < 0.2 and row.changed > 0
    assert not torch.equal(logits(after), before)
    assert not [m for m in after.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    expected, exported = logits(after), hb.export.save(after, tmp_path / "served")
    assert exported.share_changed == 0 and torch.equal(logits(load_exported(tmp_path / "served")), expected)


def test_variants_that_add_more_than_a_product_are_refused(folder):
    model, _ = adapted(folder, steps=0, lora_bias=True, target_modules=["down_proj"])
    with pytest.raises(ValueError, match=r"down_proj: its adapter 'default' adds more than B A.*plain LoraConfig"):
        hb.merge_lora_(model)
