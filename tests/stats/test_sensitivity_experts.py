"""Counterfactuals of experts are those of each group's linear layer; sensitivity and inspect know experts."""

from __future__ import annotations

import math

import pytest
import torch
from grouped_cases import RECIPES, ends, slices
from linear_cases import STOCHASTIC_TILES
from torch import nn

import halfbyte as hb
from halfbyte.stats.counterfactual import Counterfactual
from halfbyte.stats.figures import SIDES

SEED, K, N = 11, 40, 24
SIZES, PADDING = (17, 0, 1, 20), 3


def run(recipe, exact=None):
    """Return y, dx and dw of experts; exact None: of the layer itself."""
    g = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(sum(SIZES) + PADDING, size, generator=g) for size in (K, N))
    layer = hb.nn.GroupedLinear(len(SIZES), K, N, recipe=recipe, state=hb.RunState(SEED))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=g))
    if exact is not None:
        layer.instead = Counterfactual({id(layer): frozenset(exact)}).of_experts
    x.requires_grad_()
    y = layer(x, ends(SIZES))
    y.backward(dy)
    return (y.detach(), x.grad, layer.weight.grad), (x.detach(), layer.weight.detach(), dy)


@pytest.mark.parametrize("name", ["nvfp4", "quartet2", "fresh_everywhere", "nvfp4_mxfp8_bwd", "dequantized", "bf16"])
def test_with_nothing_in_high_precision_the_bits_are_those_of_the_experts(name):
    ours, _ = run(RECIPES[name], ())
    plain, _ = run(RECIPES[name])
    for got, expected in zip(ours, plain, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("side", SIDES)
def test_one_operand_in_high_precision_is_that_of_every_group(side):
    recipe = RECIPES["fresh_everywhere"]
    (y, dx, dw), (x, w, dy) = run(recipe, (side,))
    for g, rows in enumerate(slices(SIZES)):
        if not SIZES[g]:
            assert not dw[g].any()
            continue
        one = hb.nn.Linear(K, N, bias=False, recipe=recipe, state=hb.RunState(hb.Philox(SEED).group(g).seed))
        with torch.no_grad():
            one.weight.copy_(w[g])
        one.instead = Counterfactual({id(one): frozenset((side,))})
        x_g = x[rows].clone().requires_grad_()
        y_g = one(x_g)
        y_g.backward(dy[rows])
        for got, expected in zip((y[rows], dx[rows], dw[g]), (y_g, x_g.grad, one.weight.grad), strict=True):
            assert torch.equal(got, expected)
    assert not y[sum(SIZES) :].any() and not dx[sum(SIZES) :].any()


class Mixture(nn.Module):
    """Experts of which one layer has an outlier channel, between two linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down = (hb.nn.GroupedLinear(3, *shape, recipe="bf16") for shape in ((32, 64), (64, 32)))
        with torch.no_grad():
            self.down.weight[:, :, 3] = 0

    def forward(self, x):
        h = torch.relu(self.up(self.first(x), ends((8, 0, 12))))
        h = torch.cat((h[:, :3], torch.full_like(h[:, :1], 3e4), h[:, 4:]), 1)
        return self.last(x + 4 * self.down(h, ends((8, 0, 12))))


def loss(model):
    return model(torch.randn(40, 32, generator=torch.Generator().manual_seed(1))).square().mean()


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    return hb.inspect(Mixture(), loss, recipes=["nvfp4", "mxfp8"], budget=0.4)


def test_experts_are_ranked_by_what_they_multiply(report):
    assert report.ranking.targets[0] == "down" and report.proposal.targets[0] == "down"
    shares = {one.target: one.share for one in report.ranking.candidates}
    total = 2 * 40 * 32 * 32 + 2 * 20 * 32 * 64  # tokens behind the last group are multiplied with nothing
    assert shares["down"] == pytest.approx(20 * 32 * 64 / total)
    assert shares["first"] == pytest.approx(40 * 32 * 32 / total)


def test_experts_are_inspected(report):
    assert ("outlier channel", "down") in [(one.kind, one.layer) for one in report.findings]
    assert {row.name for row in report.step.layers} == {"first", "last", "up", "down"}
    torch.manual_seed(0)
    model = Mixture()
    for name in ("up", "down"):
        weight = model.get_submodule(name).weight.detach()
        for recipe in ("nvfp4", "mxfp8"):
            (one,) = [loss for loss in report.weights if (loss.layer, loss.recipe) == (name, recipe)]
            spec = hb.recipes.get(recipe).fprop.b
            parts = [(w, hb.quantize(w, spec).dequantize(torch.float32).double()) for w in weight]
            noise = sum((q - w).square().sum() for w, q in parts)
            assert one.operands["w.row"].snr_db == pytest.approx(
                10 * math.log10(weight.double().square().sum() / noise), rel=1e-6
            )
        assert report.spreads[name].elements == weight.numel()
    assert "down" in str(report) and "down" in report.csv()


def test_each_expert_draws_bits_of_its_own_and_outliers_are_those_of_all():
    """Expert 1 is expert 0 again: with its bits it would lose the same once more. 64 beside ones is beyond 6 rms."""
    torch.manual_seed(0)
    model, spec = Mixture(), STOCHASTIC_TILES.fprop.b
    with torch.no_grad():
        model.up.weight[0, :, 5] = 0
        model.up.weight[1] = model.up.weight[0]
        model.up.weight[2] = 1
        model.up.weight[2, :20, 7] = 64
    found = hb.inspect(model, recipes=[STOCHASTIC_TILES])
    (one,) = [loss for loss in found.weights if loss.layer == "up"]
    noises = []
    for index, w in enumerate(model.up.weight.detach()):
        place = hb.Philox(0).group(index)
        noises.append((hb.quantize(w, spec, rng=place).dequantize(torch.float32).double() - w).square().sum().item())
    assert noises[0] != noises[1] and one.operands["w.row"].noise == pytest.approx(sum(noises), rel=1e-6)
    outliers = (model.up.weight.abs() > 6 * model.up.weight.square().mean((1, 2), keepdim=True).sqrt()).sum((0, 1))
    assert outliers[7] == 20 and found.spreads["up"].channels == tuple(outliers.tolist())


def test_a_converted_model_is_inspected_too():
    torch.manual_seed(0)
    model = Mixture()
    hb.quantize_(model, "mxfp8", keep=hb.Keep(names=(), last_fraction=0))
    found = hb.inspect(model, loss, recipes=["nvfp4"])
    assert {row.recipe for row in found.step.layers} == {"nvfp4"} and len(found.step.layers) == 4
    assert model.up.recipe == hb.recipes.mxfp8()
