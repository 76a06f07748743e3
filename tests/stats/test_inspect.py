"""hb.inspect names planted defects first, proposes what sensitivity ranks first, and shows it in text and pictures."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from torch import nn

import halfbyte as hb


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gate * self.down(torch.relu(self.up(x)))


def planted():
    """Return a model with an outlier channel (blocks.1.down), a dead layer (2.up), a layer of tiny gradients (3)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    with torch.no_grad():
        model[1].up.bias[3] = 300
        model[1].down.weight[:, 3] = 0
        model[2].up.bias.fill_(-100)
        model[3].gate.fill_(1e-7)
    return model


def loss(model):
    return model(torch.randn(40, 32, generator=torch.Generator().manual_seed(1))).square().mean()


@pytest.fixture(scope="module")
def report():
    return hb.inspect(planted(), loss, recipes=["nvfp4", "mxfp8"])


def test_planted_defects_are_named_first(report):
    found = [(one.kind, one.layer) for one in report.findings]
    assert found[:2] == [("dead", "2.up"), ("dead", "2.down")]
    assert found[2] == ("outlier channel", "1.down") and "channel 3 of x" in report.findings[2].text
    assert {layer for kind, layer in found if kind == "tiny gradients"} == {"3.up", "3.down"}
    text = str(report).splitlines()
    assert text[0].startswith("dead: 2.up: no gradient reaches it") and text[2].startswith("outlier channel: 1.down")


def test_a_sound_model_has_no_findings():
    torch.manual_seed(0)
    found = hb.inspect(nn.Sequential(*(Block() for _ in range(3))), loss)
    assert not found.findings and "nothing stands out" in str(found)


def test_the_proposal_is_that_of_sensitivity(report):
    assert report.ranking.targets[0] == "1.down"
    assert report.proposal == report.ranking.propose(0.1) and report.proposal.targets == ("1.down",)
    assert "'1.down': None" in str(report)


def test_weights_against_a_quantization_of_their_own(report):
    model = planted()
    for loss_of in report.weights:
        weight = model.get_submodule(loss_of.layer).weight.detach()
        recipe = hb.recipes.get(loss_of.recipe)
        assert set(loss_of.operands) == {"w.row", "w.col"}
        for name, spec, t in (("w.row", recipe.fprop.b, weight), ("w.col", recipe.dgrad.b, weight.T)):
            q = hb.quantize(t.contiguous(), spec).dequantize(torch.float32).double()
            snr = 10 * math.log10(t.double().square().sum() / (q - t).square().sum())
            assert loss_of.operands[name].snr_db == pytest.approx(snr, rel=1e-6)


def test_files(report, tmp_path):
    rows = list(csv.DictReader(report.csv().splitlines()))
    assert len(rows) == 10 * 2 * 2 + sum(len(row.operands) for row in report.step.layers)
    assert {row["operand"] for row in rows} >= {"w.row", "dy.col", "x.row"}
    paths = report.draw(tmp_path)
    assert [path.name for path in paths] == ["heatmap.png", "heatmap.svg", "histograms.png", "histograms.svg"]
    assert all(path.stat().st_size > 2000 for path in paths)
    assert b"1.down" in paths[1].read_bytes() or b"<svg" in paths[1].read_bytes()


def test_a_notebook_shows_it(report):
    page = report._repr_html_()
    assert page.count("<table>") == 4 and "outlier channel: 1.down" in page and "gradient cosine" in page


def test_weights_alone_and_the_model_stay_as_they_are():
    model = planted()
    before = [p.detach().clone() for p in model.parameters()]
    found = hb.inspect(model)
    assert found.step is None and found.proposal is None
    assert {one.recipe for one in found.weights} == {"nvfp4", "four_over_six", "mxfp8"}
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [nn.Linear] * 10
    hb.inspect(model, loss, recipes=["mxfp8"])
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


def test_refusals():
    with pytest.raises(TypeError, match="recipes='nvfp4'"):
        hb.inspect(planted(), recipes="nvfp4")
    with pytest.raises(TypeError, match="batch=Tensor"):
        hb.inspect(planted(), torch.ones(2))
    with pytest.raises(ValueError, match="no linear layer"):
        hb.inspect(nn.ReLU())
