"""hb.memory_report: what it computes is what a forward keeps, and looking changes nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from linear_cases import RECIPES
from torch import nn

import halfbyte as hb
from halfbyte import recipes
from halfbyte.train import measure
from halfbyte.train import model as models


def decoder(name="tiny"):
    torch.manual_seed(0)
    model = models.Decoder(models.model_preset(name))
    hb.quantize_(model, "nvfp4")
    return model


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_computed_is_measured(name, dtype):
    model, tokens = decoder(name), torch.randint(256, (2, 32))
    report = hb.memory_report(model, tokens, recipes=("nvfp4", "mxfp8"), dtype=dtype)
    assert report.parameters == model.config.parameters
    for row in report.rows:
        for layer in model.modules():
            if getattr(layer, "run_state", None) is not None:
                layer.recipe = recipes.get(row.recipe)

        def forward():
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                return model(tokens)

        assert row.bytes(tokens.numel()) == pytest.approx(measure.saved_activation_bytes(model, forward), rel=2e-3)


@pytest.mark.parametrize(
    ("recipe", "per_element"),
    [("nvfp4", 9 / 16), ("mxfp8", 33 / 32), ("nvfp4_forward", 2), ("dequantized", 9 / 16), ("bf16", 2)],
)
def test_the_bytes_of_one_layer(recipe, per_element):
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    x = torch.randn(64, 64)
    report = hb.memory_report(model, x, recipes=[RECIPES[recipe]], forward=lambda x: model(x.requires_grad_()))
    row = report.rows[-1]
    assert row.linear_per_token == 64 * per_element
    assert row.linear_fixed == pytest.approx(64 * 96 * per_element, abs=64)  # amaxes and the random position


class Tied(nn.Module):
    """Experts that are kept, and two linear layers of one weight."""

    def __init__(self, state):
        super().__init__()
        self.experts = hb.nn.GroupedLinear(1, 64, 64, recipe="bf16", state=state)
        self.one, self.two = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(self.experts(x, torch.tensor([len(x)], dtype=torch.int32))))


def test_kept_layers_stay_in_high_precision_and_tied_weights_count_once():
    state = hb.RunState(0)
    model = Tied(state)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("experts",), last_fraction=0), state=state)
    assert model.experts.kept and model.experts.run_state is not None
    report = hb.memory_report(model, torch.randn(32, 64), dtype=None, forward=lambda x: model(x.requires_grad_()))
    assert report.weights == 64 * 64 and report["bf16"].linear_per_token == 2 * 4 * 64
    assert report["nvfp4"].linear_per_token == 2 * 9 / 16 * 64
    assert report["nvfp4"].per_token == report["nvfp4"].linear_per_token + 4 * 64, "what the experts multiply"


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_fused_activation_is_none_of_its_linear_layers(activation):
    mlp = hb.nn.LayerNormMLP(64, 96, activation=activation, recipe="mxfp8")
    report = hb.memory_report(mlp, torch.randn(64, 64), recipes=["bf16", "nvfp4", "nvfp4"], dtype=None)
    assert [row.recipe for row in report.rows] == ["bf16", "nvfp4"]
    assert [row.linear_per_token for row in report.rows] == [4 * (64 + 96), 9 / 16 * (64 + 96)]


def test_primary_weights_count_as_others():
    def report(is_primary):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64)).bfloat16()
        hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
        if is_primary:
            hb.distributed.ZeroOptimizer(model)
        return hb.memory_report(model, torch.randn(32, 64, dtype=torch.bfloat16))

    plain, primary = report(False), report(True)
    for recipe in ("bf16", "nvfp4"):
        assert primary[recipe].linear_per_token == plain[recipe].linear_per_token > 0
    assert primary["bf16"].linear_fixed == 2 * 128 * 64, "the values of the second layer, for its input's gradient"


def test_looking_changes_nothing():
    model, tokens = decoder(), torch.randint(256, (2, 32))
    state = model.layers[0].mlp.up_proj.run_state
    state.advance()
    before, base, recipe = model(tokens), state.base, model.layers[0].mlp.up_proj.recipe
    with hb.cache_weights(model) as cache:
        buffers = cache.bytes
        hb.memory_report(model, tokens, recipes=("mxfp8",), dtype=None)
        assert cache.bytes == buffers and torch.equal(model(tokens), before)
    assert state.base is base and model.layers[0].mlp.up_proj.recipe == recipe
    assert torch.equal(model(tokens), before)


def test_weights_stay_cached_and_forwards_are_not_counted():
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    with hb.cache_weights(model):
        held = [t.data_ptr() for t in model[0].cached_weight().tensors]
        model(x)
        hb.memory_report(model, x, recipes=("nvfp4", "mxfp8"))
        assert [t.data_ptr() for t in model[0].cached_weight().tensors] == held
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(62):  # the 64th draws a warning that nobody advances
                model(x)
        with pytest.warns(UserWarning, match="same random bits"):
            model(x)


def test_a_report_of_training_can_be_asked_for_without_gradients():
    model, tokens = decoder(), torch.zeros(2, 8, dtype=torch.int64)
    expected = hb.memory_report(model, tokens)
    with torch.no_grad():
        assert hb.memory_report(model, tokens) == expected


def test_a_large_model_needs_no_memory():
    with torch.device("meta"):
        model = models.Decoder(models.model_preset("60m"))
    hb.quantize_(model, "nvfp4")
    report = hb.memory_report(model, torch.zeros(1, 1024, dtype=torch.int64, device="meta"))
    assert report["nvfp4"].linear_per_token / report["bf16"].linear_per_token == pytest.approx(9 / 32)
    assert report["nvfp4"].linear_fixed / report.weights == pytest.approx(9 / 16, rel=1e-4)
    lines = str(report).splitlines()
    assert "61.8M" in lines[0] and lines[3].split()[0] == "nvfp4" and "0.281" in lines[3]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="quantize_ first"):
        hb.memory_report(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="first dimension"):
        hb.memory_report(decoder(), torch.tensor(1))
    model, tokens = decoder(), torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="not empty"):
        hb.memory_report(model, tokens[:0])
    with pytest.raises(TypeError, match="forward=lambda"):
        hb.memory_report(model, tokens, [1, 2])
    with pytest.raises(TypeError, match="recipes='mxfp8': give a list"):
        hb.memory_report(model, tokens, recipes="mxfp8")
    with pytest.raises(KeyError, match="recipe='mxfp8': the report has bf16, nvfp4"):
        hb.memory_report(model, tokens)["mxfp8"]
    with pytest.raises(ValueError, match="no gradient"):
        hb.memory_report(decoder().requires_grad_(False), torch.zeros(2, 8, dtype=torch.int64))
