"""hb.nn.GroupedLinear: a place in quantize_, set_recipe_ and high_precision, streams of its own, plain parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from grouped_cases import RAGGED, ends, slices
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb

OFFSETS = ends(RAGGED)
X = torch.randn(sum(RAGGED) + 4, 40, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """Two expert layers and a router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(40, 5)
        self.up = hb.nn.GroupedLinear(5, 40, 24, recipe="bf16")
        self.down = hb.nn.GroupedLinear(5, 24, 40, recipe="bf16")

    def forward(self, x):
        return self.down(self.up(x, OFFSETS).relu(), OFFSETS)


def test_forward_is_the_function_at_its_place():
    layer = hb.nn.GroupedLinear(5, 40, 24, state=hb.RunState(3))
    other = hb.nn.GroupedLinear(5, 24, 40, state=layer.run_state)
    assert layer.weight.shape == (5, 24, 40) and layer.weight.abs().max() <= 40**-0.5
    assert other.stream > layer.stream
    for call in (0, 2):
        place = layer.run_state.philox(layer.stream + 16 * call)
        layer.weight.grad = None
        layer(X, OFFSETS, call=call).sum().backward()
        w = layer.weight.detach().clone().requires_grad_()
        hb.grouped_linear(X, w, OFFSETS, hb.recipes.nvfp4(), rng=place).sum().backward()
        assert torch.equal(layer.weight.grad, w.grad)


def test_quantize_converts_in_place_and_reports():
    model, plain = Experts(), Experts()
    plain.load_state_dict(model.state_dict())
    report = hb.quantize_(model, "nvfp4")
    assert report.converted == ("up", "down") and "router" in report.kept
    assert [row.shape for row in report.rows] == [(5, 40), (5, 24, 40), (5, 40, 24)]
    assert "5 x 24 x 40" in str(report)
    assert model.up.run_state is report.state and model.up.stream != model.down.stream
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not torch.equal(model(X), plain(X))
    with hb.high_precision(model):
        assert torch.equal(model(X), plain(X))
    hb.set_recipe_(model, "bf16")
    assert torch.equal(model(X), plain(X))
    hb.set_recipe_(model, "mxfp8")
    assert model.down.recipe == hb.recipes.mxfp8()
    again = hb.quantize_(model, "nvfp4", rules={"router": None})
    assert again.converted == () and "set_recipe_" in again.kept["up"]


def test_experts_that_were_kept_stay_as_they_are_when_the_recipe_changes():
    model = nn.Sequential(Experts(), Experts())
    report = hb.quantize_(model, "nvfp4", rules={"1.*": None})
    assert report.converted == ("0.up", "0.down")
    for recipe in ("nvfp4_mxfp8_bwd", "mxfp8"):
        hb.set_recipe_(model, recipe)
        assert model[0].up.recipe == hb.recipes.get(recipe)
        assert model[1].up.recipe == model[1].down.recipe == hb.Recipe()
    hb.set_recipe_(model, "four_over_six")  # draws, and kept layers need no RunState for it
    assert model[1].up.recipe == hb.Recipe() and model[1].up.run_state is None
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    hb.set_recipe_(model, "mxfp8")
    assert model[1].up.recipe == hb.recipes.mxfp8()


def test_experts_that_were_kept_follow_no_schedule_though_they_have_its_state():
    state = hb.RunState(0, schedule=hb.Schedule([(0, "mxfp8")]))
    model = nn.ModuleDict({n: hb.nn.GroupedLinear(5, 40, 24, recipe="bf16", state=state) for n in ("followed", "kept")})
    hb.quantize_(model, "nvfp4", rules={"kept": None}, state=state)
    assert state.begin_step(model) == hb.recipes.mxfp8() == model["followed"].recipe
    assert model["kept"].recipe == hb.Recipe()
    report = hb.memory_report(model, X, forward=lambda x: model["followed"](x, OFFSETS) + model["kept"](x, OFFSETS))
    assert report.weights == model["followed"].weight.numel() and model["kept"].recipe == hb.Recipe()


@pytest.mark.parametrize(
    "recipe, words",
    [
        (hb.recipes.outlier_channels(), "channels=None"),
        (hb.recipes.nvfp4(activation_mean="split"), "activation_mean='kept'"),
    ],
)
def test_recipes_that_experts_cannot_follow_are_refused_by_name_and_nothing_changes(recipe, words):
    model = nn.Sequential(nn.Linear(40, 40), hb.nn.GroupedLinear(5, 40, 24, recipe="bf16"))
    keep = hb.Keep(names=(), last_fraction=0)
    with pytest.raises(ValueError, match=rf"^1: .*experts.*{words}"):
        hb.quantize_(model, recipe, keep=keep)
    assert type(model[0]) is nn.Linear and model[1].recipe == hb.recipes.bf16()
    hb.quantize_(model, recipe, keep=keep, rules={"1": "nvfp4"})
    assert model[0].recipe == recipe and model[1].recipe == hb.recipes.nvfp4()
    with pytest.raises(ValueError, match=rf"hb.nn.GroupedLinear.*experts.*{words}"):
        hb.set_recipe_(model, recipe)
    assert model[1].recipe == hb.recipes.nvfp4()
    with pytest.raises(ValueError, match=rf"experts.*{words}"):
        hb.nn.GroupedLinear(5, 40, 24, recipe=recipe)


def test_rules_and_filters_decide_about_experts_too():
    model = Experts()
    report = hb.quantize_(model, "nvfp4", rules={"down": "mxfp8"}, filter_fn=lambda module, name: name != "up")
    assert report.converted == ("down",) and model.down.recipe == hb.recipes.mxfp8() and not model.up.recipe.specs


def test_copies_and_files_keep_recipe_and_place():
    model = Experts()
    hb.quantize_(model, "nvfp4")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.up.recipe == model.up.recipe and other.up.stream == model.up.stream
        assert torch.equal(other(X), model(X))
    assert "experts=5, in_features=40, out_features=24, recipe=nvfp4" in repr(model)


def test_recomputed_and_offloaded_steps_draw_the_same_bits():
    layer, x = hb.nn.GroupedLinear(5, 40, 24, state=hb.RunState(3)), X.clone().requires_grad_()

    def gradients(forward):
        layer.weight.grad = x.grad = None
        forward(x, OFFSETS).square().sum().backward()
        return layer.weight.grad, x.grad

    expected = gradients(layer)
    recomputed = gradients(lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False))
    with torch.autograd.graph.save_on_cpu():
        offloaded = gradients(layer)
    for other in (recomputed, offloaded):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


def test_main_grad_of_the_weight_is_used():
    layer = hb.nn.GroupedLinear(5, 40, 24, state=hb.RunState(3))
    layer(X, OFFSETS).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.weight.main_grad = torch.zeros(5, 24, 40)
    layer(X, OFFSETS).sum().backward()
    assert layer.weight.grad is None and torch.allclose(layer.weight.main_grad, expected)


def test_a_recipe_for_weights_of_another_module():
    weight = torch.randn(5, 24, 40)
    layer = hb.nn.GroupedRecipe(5, 40, 24)
    assert not list(layer.parameters())
    y = layer(X, weight, OFFSETS)
    for g, rows in enumerate(slices(RAGGED)):
        assert torch.equal(y[rows], X[rows] @ weight[g].T)
    model = nn.ModuleDict({"experts": layer})
    report = hb.quantize_(model, "nvfp4")
    expected = hb.grouped_linear(X, weight, OFFSETS, hb.recipes.nvfp4(), rng=report.state.philox(layer.stream))
    assert torch.equal(layer(X, weight, OFFSETS), expected)


def test_a_bias_is_the_functions():
    state = hb.RunState(3)
    layer = hb.nn.GroupedLinear(5, 40, 24, state=state).add_bias_()
    assert list(layer.state_dict()) == ["weight", "bias"] and list(hb.nn.GroupedLinear(5, 40, 24).state_dict()) == [
        "weight"
    ]
    assert (
        layer.bias.shape == (5, 24)
        and 0 < layer.bias.abs().max() <= 40**-0.5
        and "recipe=nvfp4, bias=True" in repr(layer)
    )
    bias = layer.bias
    with pytest.raises(ValueError, match="has a bias already"):
        layer.add_bias_()
    assert layer.bias is bias
    leaves = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    y = hb.grouped_linear(X, leaves[0], OFFSETS, "nvfp4", bias_EN=leaves[1], rng=layer.run_state.philox(layer.stream))
    y.square().sum().backward()

    def gradients(forward):
        layer.zero_grad()
        out = forward(X, OFFSETS)
        out.square().sum().backward()
        return out.detach(), layer.weight.grad, layer.bias.grad

    for found in (gradients(layer), gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False))):
        assert all(torch.equal(a, b) for a, b in zip(found, (y, *(leaf.grad for leaf in leaves)), strict=True))
    hb.cache_weights(layer)
    assert torch.equal(gradients(layer)[2], leaves[1].grad) and torch.equal(layer(X, OFFSETS), y)
    with hb.high_precision(layer):
        rows = slices(RAGGED)[3]
        assert torch.allclose(layer(X, OFFSETS)[rows], X[rows] @ layer.weight[3].T + layer.bias[3], atol=1e-5)


def test_missing_state_and_call_out_of_range_are_refused():
    model = Experts()
    with pytest.raises(ValueError, match="state=None"):
        hb.set_recipe_(model, "nvfp4")
    hb.set_recipe_(model, "nvfp4", state=hb.RunState(1))
    with pytest.raises(ValueError, match="call=16"):
        model.up(X, OFFSETS, call=16)
