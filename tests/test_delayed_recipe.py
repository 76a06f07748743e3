"""Recipes that delay their amaxes: how they are written, with what they go, and who refuses them."""

import dataclasses
import pickle

import pytest
import torch

import halfbyte as hb
from halfbyte import recipes
from halfbyte.delayed import Delayed
from halfbyte.spec import parse_recipe

DELAYED = recipes.delayed_amax()
K = 40


def layer_of(recipe) -> hb.nn.Linear:
    return hb.nn.Linear(K, 24, recipe=recipe, state=hb.RunState(3))


def test_the_key_says_it_and_those_of_before_are_unchanged():
    recipe = recipes.delayed_amax(every=16, margin=1.5)
    assert recipe.key == f"{recipes.nvfp4().key};amax=delayed,16,1.5" and recipe != recipes.nvfp4()
    assert parse_recipe(recipe.key) == recipe and pickle.loads(pickle.dumps(recipe)) == recipe
    older = dict(recipe.__dict__)
    del older["amax"]
    without = object.__new__(hb.Recipe)
    without.__setstate__(older)
    assert without == recipes.nvfp4()
    for text in ("latest,1,1.0", "delayed,1", "delayed,0,1.0"):
        with pytest.raises(ValueError, match="not a recipe's key"):
            parse_recipe(f"{recipes.nvfp4().key};amax={text}")


def test_states_without_it_have_no_key_of_it():
    layer = layer_of("nvfp4")
    assert "amaxes" not in layer.run_state.state_dict() and layer.amaxes is None
    assert set(layer.state_dict()) == set(layer_of(DELAYED).state_dict())


@pytest.mark.parametrize("field, value", [("every", 0), ("every", 1.5), ("every", True), ("margin", 0.5)])
def test_bounds(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value}: give"):
        Delayed(**{field: value})


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), "1", 0, True])
def test_no_margin(margin):
    with pytest.raises(ValueError, match="margin="):
        Delayed(margin=margin)


@pytest.mark.parametrize(
    "base, words",
    [
        (recipes.nvfp4(activation_mean="split"), "activation_mean='kept'"),
        (recipes.outlier_channels(), "channels=None"),
        (recipes.bf16(), "none has one; use None"),
        (recipes.mxfp8(), "none has one; use None"),
        (recipes.row_scaled(), "none has one; use None"),
        (recipes.rl(), "none has one; use None"),
    ],
)
def test_refused_together(base, words):
    with pytest.raises(ValueError, match=rf"amax=Delayed.*{words}"):
        recipes.delayed_amax(base=base)
    with pytest.raises(ValueError, match=r"amax='delayed': use None"):
        dataclasses.replace(recipes.nvfp4(), amax="delayed")


def test_recipes_made_of_two():
    delayed = recipes.delayed_amax(every=3)
    assert recipes.mixed("bf16", delayed).amax == recipes.mixed(delayed, "mxfp8").amax == delayed.amax
    assert recipes.mixed(delayed, recipes.delayed_amax(every=5)).amax.every == 5
    assert recipes.mixed("bf16", recipes.delayed_amax(base="nvfp4_mxfp8_bwd")).amax is None, "nothing is left to delay"
    assert recipes.mixed(delayed, recipes.outlier_channels()).amax is None
    assert recipes.rl(gradients=delayed).amax == delayed.amax and recipes.rl(gradients="mxfp8").amax is None
    assert recipes.four_over_six(base=delayed).amax == delayed.amax
    assert recipes.weight_only(base=delayed).amax is None


def test_who_cannot_follow_it():
    recipe, x = DELAYED, torch.ones(4, 32)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"recipe.amax=Delayed.*experts whose amaxes no layer keeps .*amax=None"):
        hb.grouped_linear(x, torch.ones(2, 16, 32), offsets, recipe, rng=hb.Philox(1))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(1))
    with pytest.raises(ValueError, match=r"recipe.amax=Delayed.*trial steps of 0"):
        hb.stats.sensitivity(model, lambda: model(torch.ones(4, 64)).sum())


def test_a_loop_that_never_begins_a_step_is_told_so():
    layer = layer_of(DELAYED)
    layer(torch.ones(4, K).requires_grad_()).sum().backward()
    with pytest.raises(ValueError, match=r"begin_step was never called.*begin_step\(model\)"):
        layer.run_state.advance()
    layer.recipe = "nvfp4"
    layer.run_state.advance()


def test_a_layer_without_a_run_state_is_told_so():
    layer = hb.nn.Linear(32, 16, recipe="nvfp4_forward")
    assert layer.run_state is None
    with pytest.raises(ValueError, match="the recipe delays amaxes"):
        hb.set_recipe_(torch.nn.Sequential(layer), recipes.delayed_amax(base="nvfp4_forward"))
    assert hb.nn.Linear(32, 16, recipe=recipes.delayed_amax(base="nvfp4_forward")).run_state is not None
