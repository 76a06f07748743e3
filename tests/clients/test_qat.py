"""A model that was distilled in its own rounding is served with the bytes and the logits of its training."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from export_decoder import decoded, stored
from export_models import TOKENS, llama

import halfbyte as hb
from halfbyte.functional import distillation_loss

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}


def distilled(activations: str, steps: int = 4):
    """Return a llama after some steps towards what it was before its rounding."""
    teacher = llama(**WIDE)
    model = copy.deepcopy(teacher)
    hb.quantize_(model, hb.recipes.qat(activations=activations))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        with torch.no_grad():
            wanted = teacher(input_ids=TOKENS).logits
        loss = distillation_loss(model(input_ids=TOKENS).logits, wanted).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True) if p.dim() > 1)
    return model.eval()


@pytest.mark.parametrize("activations", ["none", "static", "per-token"])
def test_exported_bytes_are_the_trained_ones(tmp_path, activations):
    model = distilled(activations)
    batches = [TOKENS] if activations == "static" else ()
    report = hb.export.save(model, tmp_path / "out", activations=activations, batches=batches)
    assert report.share_changed == 0
    tensors, checkpoint = stored(tmp_path / "out"), hb.export.load(tmp_path / "out")
    assert len(checkpoint.quantized) == 7
    for name, module in model.named_modules():
        if isinstance(module, hb.nn.Linear) and module.recipe.specs:
            amax = hb.nn.sibling_amax.shared_amax(module, None) if module.amax_group else None
            trained = hb.quantize(module.weight.detach(), module.recipe.fprop.b, amax=amax)
            assert torch.equal(tensors[f"{name}.weight_packed"], trained.qdata), name
            values = torch.from_numpy(decoded(tensors, name))
            torch.testing.assert_close(values.float(), trained.dequantize(torch.float32), rtol=1e-6, atol=0)


def test_logits_of_the_compressed_tensors_load(tmp_path):
    model = distilled("none")
    hb.export.save(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="bfloat16").eval()
    with torch.no_grad():
        ours, theirs = (m(input_ids=TOKENS).logits.float() for m in (model, loaded))
        with hb.high_precision(model):
            unrounded = model(input_ids=TOKENS).logits.float()
    gap = (ours - theirs).norm()
    assert gap < 1e-2 * ours.norm() and gap < (ours - unrounded).norm() / 5
