"""hb.inspect names planted defects first, proposes what sensitivity ranks first, and shows it in text and pictures."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import math
import os

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


def test_a_picture_is_whole_or_as_it_was(report, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def on_a_full_disk(self, file, **_):
        with open(file, "wb") if isinstance(file, str | os.PathLike) else contextlib.nullcontext(file) as opened:
            opened.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    before = {path: path.read_bytes() for path in report.draw(tmp_path)}
    monkeypatch.setattr(Figure, "savefig", on_a_full_disk)
    with pytest.raises(OSError, match=r"what was saved before is whole: .*heatmap\.png"):
        report.draw(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, "and nothing lies beside them"


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


class Aside(nn.Module):
    """A layer that no loss depends on, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.aside, self.unused = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.two(torch.relu(self.one(x))) + self.aside(x).detach()


def test_a_weight_of_zeros_is_named_before_the_layers_that_it_silences():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    with torch.no_grad():
        model[3].weight.zero_()
    found = [(one.kind, one.layer) for one in hb.inspect(model, loss).findings]
    assert found == [("dead", layer) for layer in "30124"]
    assert [one.layer for one in hb.inspect(model).findings] == ["3"]


def test_layers_that_no_gradient_reaches_are_dead():
    found = hb.inspect(Aside(), loss)
    assert [(one.kind, one.layer) for one in found.findings] == [("dead", "aside"), ("dead", "unused")]
    assert "nothing ran forward and backward through it" in found.findings[0].text
    assert not hb.inspect(Aside()).findings  # weights alone: nobody knows


def test_one_layer_of_huge_gradients_makes_those_of_the_others_not_tiny():
    """The median of 1, 1 and 10^6 is 1, of which no layer is a ten-thousandth; of their mean two would be."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(40, 32)
    found = hb.inspect(
        model, lambda twin: sum(f * m(x).square().mean() for f, m in zip((1, 1, 1e6), twin, strict=True))
    )
    assert not [one for one in found.findings if one.kind == "tiny gradients"]


def test_a_dequantized_backward_reads_no_column_of_a_weight():
    recipe = dataclasses.replace(hb.recipes.nvfp4_mxfp8_bwd(), backward="dequantized")
    found = hb.inspect(planted(), recipes=[recipe, "nvfp4_mxfp8_bwd"])
    assert [set(one.operands) for one in found.weights] == [{"w.row"}] * 10 + [{"w.row", "w.col"}] * 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_before_all_else(bad, tmp_path):
    model = planted()
    with torch.no_grad():
        model[4].up.weight[3, 5] = bad
    alone = hb.inspect(model)
    assert [(one.kind, one.layer) for one in alone.findings] == [("not finite", "4.up")]
    assert {one.layer for one in alone.worst[:3]} == {"4.up"} and math.isnan(alone.worst[0].snr_db)
    assert sum(alone.histograms["4.up"]) == pytest.approx(1 - 1 / (64 * 32)) and alone.draw(tmp_path)
    found = hb.inspect(model, loss).findings
    assert (found[0].kind, found[0].layer) == ("not finite", "4.up") and "w" in found[0].text
    assert [one.layer for one in found if one.kind == "outlier channel"][:1] == ["1.down"]


def test_a_weight_of_zeros_loses_nothing():
    model = planted()
    torch.nn.init.zeros_(model[0].up.weight)
    found = hb.inspect(model, recipes=["nvfp4"])
    assert found.worst[-1].layer == "0.up" and math.isnan(found.worst[-1].snr_db)
    assert [one.layer for one in found.findings] == ["0.up"] and found.findings[0].text == "its weight is 0"


def test_a_layer_that_is_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(32, 32)

        def forward(self, x):
            return self.one(torch.relu(self.one(x)))

    row = hb.inspect(Twice(), loss).step["one"]
    assert row.tensors["x"].elements == 2 * 40 * 32 and math.isfinite(row.operands["dy.col"].snr_db)


def test_refusals():
    with pytest.raises(TypeError, match="recipes='nvfp4'"):
        hb.inspect(planted(), recipes="nvfp4")
    with pytest.raises(TypeError, match="batch=Tensor"):
        hb.inspect(planted(), torch.ones(2))
    with pytest.raises(ValueError, match="no linear layer"):
        hb.inspect(nn.ReLU())
    with pytest.raises(TypeError, match=r"model=NoneType: give a torch.nn.Module"):
        hb.inspect(None)
    with torch.device("meta"), pytest.raises(ValueError, match=r"weight of 0.up is on the meta device; load it first"):
        hb.inspect(nn.Sequential(Block()))


@pytest.mark.parametrize(
    "batch, options, message",
    [
        (None, {"recipes": []}, r"recipes=\[\]: give at least one"),
        (loss, {"recipes": ["bf16", "nvfp4"]}, r"recipes\[0\]='bf16' quantizes nothing"),
        (None, {"recipes": ["bf16"]}, r"recipes=\['bf16'\]: none quantizes a weight; name one that does"),
        (None, {"recipes": ["nvfp4", hb.recipes.nvfp4()]}, r"recipes=\['nvfp4', 'nvfp4'\]: name each once"),
        (None, {"budget": 0}, r"budget=0: give a share"),
        (None, {"by": "operand"}, r"by='operand': use 'layer' or 'kind'"),
        (lambda model: 3.0, {}, r"batch\(model\) returned float: return the loss"),
        (lambda model: model(torch.ones(2, 32)), {}, r"returned Tensor of shape \[2, 32\], requires_grad=True"),
        (lambda model: loss(model).detach(), {}, r"shape \[\], requires_grad=False: .* which require gradients"),
        ({"input": torch.ones(2, 32)}, {}, r"model\(\*\*batch\).loss returned NoneType: return the loss"),
    ],
)
def test_refusals_by_value(batch, options, message):
    with pytest.raises(ValueError, match=message):
        hb.inspect(planted(), batch, **options)
