"""Adapters over frozen models of transformers: trained, merged, exported, loaded; every byte on the way."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.17")

from llama_folder import TOKENS, folder, loaded  # noqa: E402

from halfbyte.integrations.transformers import load_exported  # noqa: E402

__all__ = ["folder"]


def train(model, state, steps=4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_merged_aware_trained_bytes_are_those_of_the_checkpoint(folder, tmp_path, form):
    model, state = loaded(folder)
    hb.lora_(model, rank=4, alpha=8, merge_aware=True)
    losses = train(model, state)
    assert losses[-1] < losses[0]
    trained = {n: m.merged_codes() for n, m in model.named_modules() if isinstance(m, hb.nn.LoRALinear)}
    expected = logits(model)
    hb.merge_lora_(model)
    exported = hb.export.save(model, tmp_path / "served", format=form)
    assert exported.share_changed == 0 and len(exported.layers) == len(trained) == 14
    checkpoint = hb.export.load(tmp_path / "served")
    for name, codes in trained.items():
        stored = checkpoint.quantized[f"{name}.weight"]
        assert torch.equal(stored.qdata, codes.qdata) and torch.equal(
            stored.block_scale.view(torch.uint8), codes.block_scale.view(torch.uint8)
        )
    assert torch.equal(logits(load_exported(tmp_path / "served")), expected)


def test_adapters_over_an_exported_checkpoint_begin_with_its_bytes(folder, tmp_path):
    model, _ = loaded(folder)
    expected = logits(model)
    hb.export.save(model, tmp_path / "served")
    again = load_exported(tmp_path / "served")
    hb.lora_(again, rank=4)
    stored = hb.export.load(tmp_path / "served").quantized
    for key, codes in stored.items():
        weight = again.state_dict()[key]
        assert torch.equal(weight.qdata, codes.qdata) and torch.equal(
            weight.block_scale.view(torch.uint8), codes.block_scale.view(torch.uint8)
        )
    assert len(stored) == 14 and torch.equal(logits(again), expected)


@pytest.mark.parametrize("merge_aware", [False, True])
def test_gradient_checkpointing_changes_no_loss(folder, merge_aware):
    losses = []
    for checkpoints in (False, True):
        model, state = loaded(folder)
        torch.manual_seed(3)
        hb.lora_(model, rank=4, alpha=8, merge_aware=merge_aware)
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        losses.append(train(model, state, steps=3))
    assert losses[0] == losses[1]


def test_an_unmerged_model_is_not_exported(folder, tmp_path):
    model, _ = loaded(folder)
    hb.lora_(model, rank=4)
    with pytest.raises(ValueError, match="it holds adapters; merge them into the weights first"):
        hb.export.save(model, tmp_path / "served")
    assert not (tmp_path / "served").exists()
