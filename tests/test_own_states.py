"""Layers of hb.nn built without `state=`: one RunState for a module, and that of the run once there is one."""

import copy
import warnings

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte import recipes
from halfbyte.nn.streams import STALE_FORWARDS, STREAMS_PER_MODULE

NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(hb.nn.LayerNormMLP(64, 96), nn.Linear(64, 64), hb.nn.LayerNormLinear(64, {"q": 64, "k": 64}))


def converted(state: hb.RunState | None = None) -> tuple[nn.Sequential, hb.RunState]:
    model = build()
    return model, hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=state).state


def followers(model: nn.Module) -> list[hb.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, hb.nn.Linear)]


def gradients(model: nn.Module, position: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(position))
    sum(y.square().sum() for y in model(x)).backward()
    return [layer.weight.grad.clone() for layer in followers(model)]


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: hb.nn.LayerNormMLP(32, 48, **options),
        lambda **options: hb.nn.MLP(32, 48, activation="gelu", **options),
        lambda **options: hb.nn.LayerNormLinear(32, {"q": 32, "k": 16}, **options),
    ],
)
def test_the_layers_of_a_module_share_one_state(make):
    first, *others = followers(make())
    assert first.run_state.is_private and all(layer.run_state is first.run_state for layer in others)
    assert len({layer.stream for layer in (first, *others)}) == 1 + len(others)
    assert all(layer.run_state is None for layer in followers(make(recipe="mxfp8")))
    state = hb.RunState(0)
    assert all(layer.run_state is state for layer in followers(make(state=state))) and not state.is_private


@pytest.mark.parametrize("given", [True, False])
def test_every_layer_of_a_converted_model_advances_and_has_streams_of_its_own(given):
    state = hb.RunState(5) if given else None
    model, found = converted(state)
    layers = followers(model)
    assert all(layer.run_state is found for layer in layers) and (found is state or not given) and not found.is_private
    assert len({layer.stream for layer in layers}) == len(layers) == 6
    before = gradients(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model, 0), strict=True))
    found.advance()
    assert not any(torch.equal(a, b) for a, b in zip(before, gradients(model, 0), strict=True))


def test_converted_layers_draw_as_if_there_were_no_others():
    """They come first: a checkpoint goes on with the bits it had."""
    model, _ = converted(hb.RunState(5))
    assert model[1].stream == 0


@pytest.mark.parametrize("function", ["quantize_", "set_recipe_"])
def test_a_state_that_somebody_gave_stays(function):
    own, state = hb.RunState(1), hb.RunState(2)
    model = nn.Sequential(hb.nn.MLP(32, 48, state=own), hb.nn.Linear(32, 32))
    model[0].up_proj.run_state.advance()
    if function == "quantize_":
        assert hb.quantize_(copy.deepcopy(model), "nvfp4").state.seed == 1  # rather than a private one
        hb.quantize_(model, "nvfp4", state=state)
    else:
        hb.set_recipe_(model, "four_over_six", state=state)
        assert model[1].recipe == recipes.four_over_six()
    assert all(layer.run_state is own for layer in followers(model[0])) and model[1].run_state is state
    assert model[0].gate_proj.stream == 0 and own.position == 1


def test_a_later_conversion_leaves_them_where_they_are():
    model, state = converted()
    streams = [layer.stream for layer in followers(model)]
    again = hb.quantize_(model, "mxfp8", state=hb.RunState(9))
    hb.set_recipe_(model, "nvfp4", state=again.state)
    assert all(layer.run_state is state for layer in followers(model))
    assert streams == [layer.stream for layer in followers(model)]


def test_layers_that_draw_nothing_join_too_and_high_precision_stays():
    model = nn.Sequential(nn.Linear(16, 16), hb.nn.Linear(16, 16, recipe="mxfp8"), hb.nn.Linear(16, 16, recipe="bf16"))
    model.append(hb.nn.GroupedLinear(2, 16, 16))
    state = hb.RunState(0, hb.Schedule([(0, "four_over_six")]))
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.begin_step(model)
    assert [layer.recipe for layer in model] == [recipes.four_over_six()] * 2 + [
        recipes.bf16(),
        recipes.four_over_six(),
    ]


def test_a_schedule_reaches_every_layer():
    model, state = converted(hb.RunState(5, hb.Schedule([(1, "bf16")])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.begin_step(model)
        state.begin_step(model)
    assert all(layer.recipe == recipes.bf16() for layer in followers(model))


@pytest.mark.parametrize("given", [True, False])
def test_a_resumed_run_draws_the_same_bits(given):
    model, state = converted(hb.RunState(5) if given else None)
    for position in range(3):
        gradients(model, position)
        state.advance()
    torch.manual_seed(99)
    twin = nn.Sequential(hb.nn.LayerNormMLP(64, 96), nn.Linear(64, 64), hb.nn.LayerNormLinear(64, {"q": 64, "k": 64}))
    other = hb.quantize_(twin, "nvfp4", keep=NOTHING_KEPT, state=hb.RunState(0) if given else None).state
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(state.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, 3), gradients(twin, 3), strict=True))


@pytest.mark.parametrize("given", [True, False])
def test_checkpoints_from_before_layers_joined_still_load(given):
    """They count the streams of the converted layer, and of one layer that had made the state, but of no others."""
    state = converted(hb.RunState(5) if given else None)[1]
    mine = state.state_dict()
    old = {**mine, "streams": STREAMS_PER_MODULE * (1 if given else 2), "position": 7}
    state.load_state_dict(old)
    assert state.position == 7 and state.state_dict()["streams"] == mine["streams"] == 6 * STREAMS_PER_MODULE
    for streams in (7 * STREAMS_PER_MODULE, 0):
        with pytest.raises(ValueError, match="streams"):
            state.load_state_dict({**mine, "streams": streams})
    alone = hb.nn.MLP(32, 48).up_proj.run_state
    alone.load_state_dict({**mine, "streams": STREAMS_PER_MODULE})


def test_the_warning_of_a_forgotten_advance_says_whose():
    x, words = torch.ones(1, 16), []
    for state in (None, hb.RunState(0)):
        layer = hb.nn.Linear(16, 16, state=state)
        for _ in range(STALE_FORWARDS - 1):
            layer(x)
        with pytest.warns(UserWarning, match=r"advance\(\)") as caught:
            layer(x)
        words.append(str(caught[0].message))
    assert "built without state=" in words[0] and "hb.set_recipe_(model, recipe, state=state)" in words[0]
    assert "built without" not in words[1] and "report.state" in words[1]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: hb.nn.LayerNormLinear(32, 64.0), TypeError, "out_features=64.0"),
        (lambda: hb.nn.GroupedLinear(0, 16, 16), ValueError, "experts=0"),
        (lambda: hb.nn.GroupedLinear(2.0, 16, 16), TypeError, "experts=2.0"),
    ],
)
def test_wrong_sizes_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_conversion_prefers_the_state_that_somebody_chose(is_first):
    """To that which a layer made for itself, wherever it lies in the model."""
    chosen = hb.RunState(7)
    own, given = hb.nn.Linear(32, 32, recipe="nvfp4"), hb.nn.Linear(32, 32, recipe="nvfp4", state=chosen)
    layers = (given, own) if is_first else (own, given)
    report = hb.quantize_(nn.Sequential(*layers, nn.Linear(32, 32)), "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    assert report.state is own.run_state is given.run_state is chosen


def test_a_state_that_is_named_was_chosen_whoever_made_it():
    layer = hb.nn.Linear(32, 32, recipe="nvfp4")
    assert layer.run_state.is_private
    hb.set_recipe_(nn.Sequential(layer), "nvfp4", state=layer.run_state)
    assert not layer.run_state.is_private
