"""Training that goes on: bit for bit from the checkpoint of training, near it from an export alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from export_models import NOTHING_KEPT, llama

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteConfig, load_exported

BEFORE, AFTER = 40, 100


def batch(step):
    """Return sequences that count upwards from anywhere, a third of their tokens replaced by others."""
    generator = torch.Generator().manual_seed(step + 1000)
    counted = (torch.randint(61, (4, 1), generator=generator) + torch.arange(16)) % 61
    others = torch.randint(61, counted.shape, generator=generator)
    return torch.where(torch.rand(counted.shape, generator=generator) < 1 / 3, others, counted)


def train(model, optimizer, state, steps):
    losses = []
    for step in steps:
        model.train()
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
        losses.append(float(loss.detach()))
    return losses


def evaluate(model):
    with torch.no_grad():
        return [float(model.eval()(input_ids=batch(-step), labels=batch(-step)).loss) for step in range(1, 9)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def test_one_run_three_ways(tmp_path):
    model = llama(num_hidden_layers=1)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    optimizer = adamw(model)
    train(model, optimizer, report.state, range(BEFORE))
    before = evaluate(model)
    hb.export.save(model, tmp_path / "export")
    model.config.quantization_config = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT).to_dict()
    model.save_pretrained(tmp_path / "checkpoint")
    torch.save({"optimizer": optimizer.state_dict(), "state": report.state.state_dict()}, tmp_path / "rest.pt")
    steps = range(BEFORE, BEFORE + AFTER)
    whole = train(model, optimizer, report.state, steps)
    end = sum(evaluate(model)) / 8

    resumed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    rest = torch.load(tmp_path / "rest.pt", weights_only=True)
    again, state = adamw(resumed), resumed.hf_quantizer.report.state
    again.load_state_dict(rest["optimizer"])
    state.load_state_dict(rest["state"])
    assert train(resumed, again, state, steps) == whole

    alone = load_exported(tmp_path / "export")
    assert evaluate(alone) == before
    train(alone, adamw(alone), alone.hf_quantizer.report.state, steps)
    from_export = sum(evaluate(alone)) / 8
    print(f"before {sum(before) / 8:.4f}; 100 steps later {end:.4f}, from the export alone {from_export:.4f}")
    assert from_export == pytest.approx(end, rel=0.05) and from_export < sum(before) / 8 - 0.2
