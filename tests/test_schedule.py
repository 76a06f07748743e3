"""Schedules: which recipe a step follows, in any loop, across checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from small_models import TOKENS, decoder

import halfbyte as hb
from halfbyte import recipes
from halfbyte.nn.linear import describe_recipe
from halfbyte.schedule import parse_schedule
from halfbyte.spec import parse_recipe

LATE = dataclasses.replace(recipes.nvfp4(), fprop=None)


@pytest.mark.parametrize("name", [*recipes.PRESETS, "bf16/nvfp4", "nvfp4/mxfp8"])
def test_names_and_keys_come_back(name):
    recipe = recipes.get(name)
    assert parse_recipe(recipe.key) == recipe
    assert recipes.get(describe_recipe(recipe)) == recipe
    assert "=" not in describe_recipe(recipe)


def test_a_mixed_recipe_has_the_forward_of_one_and_the_backward_of_the_other():
    assert recipes.get("bf16/nvfp4") == LATE
    assert recipes.mixed(recipes.mxfp8(), recipes.bf16()).fprop == recipes.mxfp8().fprop
    # Nothing is dequantized behind a forward in high precision.
    assert recipes.mixed("bf16", recipes.nvfp4_forward(backward="dequantized")) == hb.Recipe()
    late = recipes.get("bf16/quartet2")
    assert late == dataclasses.replace(recipes.quartet2(backward="original"), fprop=None)
    assert recipes.get(describe_recipe(late)) == late


def test_a_mixed_recipe_differentiates_what_its_forward_multiplied_where_one_of_its_parts_does():
    for name in ("rl", "qat", "quartet2"):
        forward = recipes.get(name)
        wanted = dataclasses.replace(recipes.mxfp8(), fprop=forward.fprop, backward="dequantized")
        assert recipes.get(f"{name}/mxfp8") == wanted and recipes.get(f"{name}/{name}") == forward
        without = dataclasses.replace(forward, backward="original")
        assert recipes.mixed(without, "mxfp8") == dataclasses.replace(wanted, backward="original")
        assert recipes.mixed("nvfp4", forward).backward == "dequantized"
        assert recipes.get(f"bf16/{name}").backward == "original"
        for recipe in (wanted, dataclasses.replace(wanted, backward="original"), recipes.mixed("nvfp4", forward)):
            assert recipes.read_recipe(describe_recipe(recipe)) == recipe, "a name says which of the two"
    assert recipes.get("rl/mxfp8") == recipes.rl(gradients="mxfp8") and recipes.get("rl/bf16") == recipes.rl()
    assert describe_recipe(recipes.rl(gradients="mxfp8")) == "rl/nvfp4_mxfp8_bwd"


@pytest.mark.parametrize("apart", ["outlier_channels", "nvfp4_split"])
def test_a_dequantized_forward_refuses_a_backward_that_takes_x_apart(apart):
    """By the names of both: which of the two has it is not seen in what they make."""
    split = recipes.nvfp4(activation_mean="split")
    rest, words = (
        (split, "activation_mean='split'") if apart == "nvfp4_split" else (recipes.outlier_channels(), "channels")
    )
    for forward in (recipes.qat(activations="none"), *([] if rest is split else ["qat"])):
        with pytest.raises(ValueError, match=rf"^backward='dequantized' in the forward, {words}.*or the backward's"):
            recipes.mixed(forward, rest)
    original = dataclasses.replace(recipes.qat(activations="none"), backward="original")
    assert recipes.mixed(original, rest) == dataclasses.replace(rest, fprop=original.fprop)


def test_a_mixed_recipe_splits_the_mean_of_x_where_its_parts_do():
    split = recipes.nvfp4(activation_mean="split")
    forward = recipes.mixed(split, "bf16")
    assert forward == hb.Recipe(fprop=split.fprop, activation_mean="split")
    x, w = torch.randn(16, 32) + 4, torch.randn(8, 32)
    assert torch.equal(hb.linear(x, w, None, forward), hb.linear(x, w, None, split, rng=hb.Philox(1)))
    assert recipes.mixed("bf16", split) == dataclasses.replace(split, fprop=None)
    assert recipes.mixed("bf16", recipes.nvfp4_forward()) == recipes.bf16()
    assert recipes.mixed("bf16", dataclasses.replace(recipes.nvfp4_forward(), activation_mean="split")) == hb.Recipe()
    assert recipes.mixed(split, split) == split
    for pair in ((split, "mxfp8"), ("mxfp8", split)):
        with pytest.raises(ValueError, match=r"^activation_mean='(split|kept)' in the forward.*give both recipes one"):
            recipes.mixed(*pair)


def test_a_schedule_that_no_loop_begins_is_refused():
    state = hb.RunState(0, hb.Schedule([(1, "mxfp8")]))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    hb.quantize_(model, "nvfp4", state=state)
    model(torch.randn(4, 16)).sum().backward()
    for go_on in (state.advance, lambda: state.interleave(2)):
        with pytest.raises(ValueError, match=r"has a schedule and its begin_step was never called.*call begin_step"):
            go_on()
    state.follow(model)
    model(torch.randn(4, 16)).sum().backward()
    with pytest.raises(ValueError, match="begin_step was never called"):
        model(torch.randn(4, 16))
    state.begin_step(model)
    model(torch.randn(4, 16)).sum().backward()
    state.advance()
    hb.RunState(0, hb.Schedule([])).advance()


def test_steps_and_shares():
    schedule = hb.Schedule([(3, "nvfp4_mxfp8_bwd"), (0.5, LATE), (0.9, "bf16")], steps=20)
    found = [schedule.at(step) for step in range(20)]
    assert found[:3] == [None] * 3
    assert found[3:10] == [recipes.nvfp4_mxfp8_bwd()] * 7
    assert found[10:18] == [LATE] * 8 and found[18:] == [recipes.bf16()] * 2
    assert hb.Schedule.from_state_dict(schedule.state_dict()) == schedule
    assert parse_schedule("3:nvfp4_mxfp8_bwd, 0.5:bf16/nvfp4,0.9:bf16", 20) == schedule
    assert parse_schedule("", 20) is None


@pytest.mark.parametrize(
    ("share", "steps", "first"),
    [
        *[(0.29, 100, 29), (0.57, 100, 57), (0.58, 100, 58), (0.07, 100, 7)],  # 28.999…, 56.999… in binary
        *[(0.66, 10, 7), (0.9, 37, 33), (0.99, 37, 36), (0.3, 8, 2), (0.0, 8, 0), (0.85, 1000, 850)],
    ],
)
def test_a_share_begins_at_the_nearest_step(share, steps, first):
    schedule = hb.Schedule([(share, "bf16")], steps=steps)
    assert [schedule.at(step) is not None for step in range(steps)] == [step >= first for step in range(steps)]


@pytest.mark.parametrize(
    ("changes", "steps", "words"),
    [
        ([(0.5, "nvfp4")], None, "pass steps="),
        ([(1.5, "nvfp4")], 10, "share"),
        ([(10, "nvfp4")], 10, "outside"),
        ([(-1, "nvfp4")], None, "outside"),
        ([(0.5, "nvfp4"), (4, "bf16")], 10, "order of time"),
        ([(0.5, "nvfp4"), (5, "bf16")], 10, "0.5 and 5 both fall on step 5 of 10"),
        ([(0.96, "nvfp4"), (0.99, "bf16")], 10, "0.96 and 0.99 both fall on step 9 of 10"),
        ([(5, "nvfp4"), (5, "bf16")], None, "5 and 5 both fall on step 5;"),
        ([(1, "fp5")], 10, "not a preset"),
        ([(1, None)], 10, "no recipe"),
        ([("1", "nvfp4")], 10, "no step"),
        ([1], 10, "not a pair"),
        ([(1, "nvfp4")], 0, "steps=0"),
        (None, 10, "changes=None"),
        ("1:nvfp4", None, "changes='1:nvfp4'"),
        ({1: "nvfp4"}, None, "changes={1: 'nvfp4'}"),
    ],
)
def test_what_makes_no_schedule_is_refused(changes, steps, words):
    with pytest.raises((ValueError, TypeError), match=words):
        hb.Schedule(changes, steps)


def test_a_point_makes_a_share_and_a_number_without_one_is_a_step():
    """Both 0 and 0.0 are the first step; a run of more steps keeps the one, not the other."""
    found = parse_schedule("0:bf16,0.5:nvfp4,9:bf16", 10)
    assert [(type(when), when) for when, _ in found.changes] == [(int, 0), (float, 0.5), (int, 9)]
    assert [type(when) for when, _ in parse_schedule("0.0:bf16", 10).changes] == [float]


@pytest.mark.parametrize("text", ["nvfp4", "0.5", "0.5:", "x:nvfp4", "0.5=nvfp4", "0.5:nvfp4:bf16"])
def test_what_the_command_line_refuses(text):
    words = "recipe='nvfp4:bf16' is not a preset" if text.count(":") == 2 else "schedule=.*is not WHEN:RECIPE"
    with pytest.raises(ValueError, match=words):
        parse_schedule(text, 10)


def run(state, model, steps):
    """Return the recipe of one layer at every step."""
    seen = []
    for _ in range(steps):
        state.begin_step(model)
        model(TOKENS).sum().backward()
        state.advance()
        seen.append(model.layers[0].mlp.up_proj.recipe)
    return seen


def test_any_loop_follows_it_and_goes_on_from_a_checkpoint():
    schedule = hb.Schedule([(2, LATE), (4, "bf16")])
    state, model = hb.RunState(1, schedule), decoder(4)
    hb.quantize_(model, "nvfp4", state=state)
    seen = run(state, model, 3)
    assert seen == [recipes.nvfp4(), recipes.nvfp4(), LATE]
    saved = state.state_dict()
    assert type(model.lm_head) is torch.nn.Linear and type(model.layers[3].mlp.up_proj) is torch.nn.Linear
    for own in (None, schedule):
        again, twin = hb.RunState(1, own), decoder(4)
        hb.quantize_(twin, "nvfp4", state=again)
        again.load_state_dict(saved)
        assert again.state_dict() == saved
        assert run(again, twin, 3) == [LATE, recipes.bf16(), recipes.bf16()]


def test_a_run_that_goes_back_has_its_first_recipes_again():
    state, model = hb.RunState(1, hb.Schedule([(1, LATE), (2, "bf16")])), decoder(4)
    hb.quantize_(model, "nvfp4", rules={"*.down_proj": "mxfp8"}, state=state)
    start = state.state_dict()
    run(state, model, 3)
    state.load_state_dict(start)
    assert run(state, model, 3) == [recipes.nvfp4(), LATE, recipes.bf16()]
    state.load_state_dict(start)
    assert state.begin_step(model) == recipes.nvfp4() and model.layers[0].mlp.down_proj.recipe == recipes.mxfp8()
    assert model.layers[0].mlp.up_proj.recipe_before is None


@pytest.mark.parametrize(("share", "steps", "step"), [(0.29, 100, 29), (0.58, 50, 29), (0.7, 9, 6), (1 / 3, 200, 67)])
def test_a_share_is_rounded_to_the_nearest_step(share, steps, step):
    """0.29 * 100 is 28.999999999999996 in floating point."""
    schedule = hb.Schedule([(share, "bf16")], steps)
    assert schedule.at(step - 1) is None and schedule.at(step) == recipes.bf16()


def test_the_last_share_is_the_last_step_at_the_latest():
    assert hb.Schedule([(0.99, "bf16")], steps=10).starts == (9,) and hb.Schedule([(0.95, "bf16")], steps=1).starts == (
        0,
    )


def test_a_schedule_of_ones_own_stays():
    state = hb.RunState(1, hb.Schedule([(1, "bf16")]))
    saved = hb.RunState(1, hb.Schedule([(1, "mxfp8")])).state_dict()
    state.load_state_dict(saved)
    assert state.schedule == hb.Schedule([(1, "bf16")])
    with pytest.raises(TypeError, match="hb.Schedule"):
        hb.RunState(1, "0.9:bf16")
    with pytest.raises(ValueError, match="step"):
        state.load_state_dict({**saved, "step": -1})


def test_a_layer_outside_of_the_run_keeps_its_recipe():
    """Experts of a block that quantize_ kept in high precision draw from no RunState."""
    kept = hb.nn.GroupedLinear(2, 16, 16, recipe="bf16")
    followed = hb.nn.GroupedLinear(2, 16, 16, recipe="nvfp4")
    model = torch.nn.ModuleList([kept, followed])
    followed.run_state.schedule = hb.Schedule([(0, "mxfp8")])
    assert followed.run_state.begin_step(model) == recipes.mxfp8()
    assert followed.run_state.begin_step(model) is None
    assert kept.recipe == recipes.bf16() and followed.recipe == recipes.mxfp8()


def test_layers_outside_of_the_run_are_named_once():
    """Layers that somebody gave another RunState keep it; those that draw nothing and have none follow no schedule."""
    schedule, own = hb.Schedule([(1, "bf16")]), hb.RunState(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), hb.nn.Linear(16, 16, state=own))
    state = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0, schedule)).state
    model.append(hb.nn.Linear(16, 16, recipe="mxfp8"))
    assert model[1].run_state is own
    with pytest.warns(UserWarning, match=r"2 layers follow a recipe but not this RunState .*\(1, 2\)"):
        state.begin_step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.begin_step(model)
    assert [layer.recipe for layer in model] == [recipes.bf16(), recipes.nvfp4(), recipes.mxfp8()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.schedule = schedule  # follows one of its own
        other = hb.RunState(0, schedule)
        hb.set_recipe_(model[2], "nvfp4", state=other)
        for one in (own, other):
            one.begin_step(model)


def test_a_copied_layer_is_named_and_moves_to_the_run():
    """Its RunState is a copy that nobody advances: it would miss the schedule and draw its original's bits again."""
    state = hb.RunState(0, hb.Schedule([(0, "nvfp4"), (1, "mxfp8")]))
    model = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=state)
    model.append(copy.deepcopy(model[0]))
    with pytest.warns(UserWarning, match=r"1 layers follow a recipe but not this RunState .*\(2\).*copied"):
        state.begin_step(model)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=state)
    assert [layer.run_state is state for layer in model] == [True] * 3
    assert len({layer.stream for layer in model}) == 3, "bits of its own"
    state.advance()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.begin_step(model)
    assert [layer.recipe for layer in model] == [recipes.mxfp8()] * 3
    whole = copy.deepcopy(model)
    hb.quantize_(whole, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    assert len({id(layer.run_state) for layer in whole}) == 1 and whole[0].run_state is not state, "one of its own"


def test_no_step_begins_within_high_precision():
    """The context would have put back the recipe from before the change."""
    model, state = decoder(2), hb.RunState(0, hb.Schedule([(1, "mxfp8")]))
    hb.quantize_(model, "nvfp4", state=state)
    state.begin_step(model)
    with hb.high_precision(model):
        with hb.high_precision(model):
            pass
        with pytest.raises(ValueError, match="hb.high_precision.*before or after the context"):
            state.begin_step(model)
        twin = copy.deepcopy(model)
    assert state.step == 1 and twin.layers[0].mlp.up_proj.times_aside == 0
    assert state.begin_step(model) == recipes.mxfp8() == model.layers[0].mlp.up_proj.recipe


def test_a_model_that_does_not_know_the_run_state_is_refused():
    """`quantize_` without `state=` makes a RunState of its own, whose schedule is None."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    state = hb.RunState(0, hb.Schedule([(1, "bf16")]))
    hb.quantize_(model, "nvfp4")
    with pytest.raises(ValueError, match="no layer follows this RunState.*state="):
        state.begin_step(model)
    assert state.step == 0
    hb.RunState(0).begin_step(model)  # nothing to follow


def test_experts_that_were_kept_follow_no_schedule():
    state = hb.RunState(0, hb.Schedule([(1, "mxfp8")]))
    experts = hb.nn.GroupedLinear(2, 32, 16, recipe="bf16", state=state)
    model = torch.nn.ModuleDict({"experts": experts, "up": torch.nn.Linear(32, 16)})
    hb.quantize_(model, "nvfp4", rules={"experts": None}, state=state)
    assert [state.begin_step(model) for _ in range(2)] == [None, recipes.mxfp8()]
    assert (experts.recipe, model["up"].recipe) == (recipes.bf16(), recipes.mxfp8())
