"""Amaxes of earlier steps in odd orders: schedules that come and go, states loaded before layers follow, compiling."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import halfbyte as hb
from halfbyte import recipes
from halfbyte.amaxes import DelayedAmaxes
from halfbyte.delayed import Delayed
from halfbyte.formats import FLT_MAX

NONE_KEPT = hb.Keep(names=(), last_fraction=0)
STEPS = 12
SCHEDULES = {
    "measures more often later": [(3, recipes.delayed_amax())],
    "comes, goes and comes": [
        (2, recipes.delayed_amax(margin=1.5, every=3)),
        (5, "nvfp4"),
        (8, recipes.delayed_amax(margin=1.5)),
    ],
}


def built(changes=None, recipe="nvfp4", rules=None) -> tuple[torch.nn.Module, hb.RunState]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32))
    state = hb.RunState(3, None if changes is None else hb.Schedule(changes))
    hb.quantize_(model, recipe, rules=rules, keep=NONE_KEPT, state=state)
    return model, state


def train(model, state, begin, end) -> list[torch.Tensor]:
    """Return the weights' gradients of steps whose inputs grow and shrink."""
    found = []
    for step in range(begin, end):
        state.begin_step(model)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        model(x).square().mean().backward()
        found += [layer.weight.grad.clone() for layer in model]
        model.zero_grad()
        state.advance()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", ["all", "one", "none"])
def test_a_run_whose_schedule_delays_goes_on_bit_for_bit_from_every_step(schedule, first):
    """The model that loads the state follows the recipes that the schedule began with."""
    seldom = recipes.delayed_amax(every=4)
    recipe, rules = seldom if first == "all" else "nvfp4", {"0": seldom} if first == "one" else None
    whole = train(*built(SCHEDULES[schedule], recipe, rules), 0, STEPS)
    for stop in range(1, STEPS):
        model, state = built(SCHEDULES[schedule], recipe, rules)
        found = train(model, state, 0, stop)
        saved = copy.deepcopy(state.state_dict())
        model, state = built(SCHEDULES[schedule], recipe, rules)
        state.load_state_dict(saved)
        assert state.state_dict() == saved, "written again before a step begins"
        found += train(model, state, stop, STEPS)
        assert all(map(torch.equal, found, whole)), stop


def test_without_a_schedule_a_state_of_other_layers_is_refused():
    model, state = built(None, recipes.delayed_amax())
    train(model, state, 0, 2)
    _, other = built(None, "nvfp4", {"0": recipes.delayed_amax()})
    with pytest.raises(ValueError, match="no layer of this model that delays its amaxes"):
        other.load_state_dict(state.state_dict())


def test_a_damaged_schedule_changes_no_amax():
    model, state = built(None, recipes.delayed_amax())
    train(model, state, 0, 3)
    before = copy.deepcopy(state.state_dict())
    damaged = copy.deepcopy(before) | {"schedule": {"bad": 1}}
    for layer in damaged["amaxes"].values():
        layer["held"] = [9.0] * 4
    with pytest.raises(ValueError, match="not a Schedule"):
        state.load_state_dict(damaged)
    assert state.state_dict() == before


def test_layers_that_were_put_back_are_waited_for_no_longer():
    model, state = built(None, recipes.delayed_amax())
    hb.unquantize_(model)
    hb.quantize_(model, "nvfp4", keep=NONE_KEPT, state=state)
    model(torch.ones(4, 32)).sum().backward()
    state.advance()


@pytest.mark.parametrize("every, graphs", [(1, 2), (3, 4)])
def test_compiled_code_is_made_for_what_a_step_does_and_not_for_its_number(every, graphs):
    model, state = built(None, recipes.delayed_amax(every=every))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    for _ in range(10):
        state.begin_step(model)
        compiled(torch.ones(4, 32)).sum().backward()
        state.advance()
    assert counters["stats"]["unique_graphs"] == graphs


def test_transforms_are_refused_by_name_and_note_nothing():
    model, state = built(None, recipes.delayed_amax())
    state.begin_step(model)
    with pytest.raises(RuntimeError, match="halfbyte|hb\\."):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(4, 32))
    assert not any(map(float, model[0].amaxes.seen))


def test_every_layer_has_a_margin_of_its_own_and_none_leads_to_infinity():
    amaxes, cpu = DelayedAmaxes(), torch.device("cpu")
    layers = [amaxes.of(64 * i, Delayed(margin=margin), cpu) for i, margin in enumerate((1.0, 2.0, 1.5))]
    for step, (seen, held) in enumerate(((3.0, (3.0, 6.0, 4.5)), (FLT_MAX / 1.75, (FLT_MAX / 1.75, FLT_MAX, None)))):
        amaxes.begin(2 * step)
        for layer in layers:
            for operand in layer.seen:
                operand.fill_(seen)
        amaxes.begin(2 * step + 1)
        for layer, wanted in zip(layers, held, strict=True):
            expected = torch.tensor(FLT_MAX / 1.75 * 1.5 if wanted is None else wanted)
            assert all(torch.allclose(one, expected, rtol=1e-6) for one in layer.held), (step, layer.how)


def test_a_state_that_is_loaded_within_a_step_that_does_not_measure_does_not_let_it():
    """As where the noise of a gradient is measured, which loads the present state before and after."""
    found = []
    for is_loaded in (False, True):
        model, state = built(recipe=recipes.delayed_amax(every=2))
        for step in range(4):
            state.begin_step(model)
            if is_loaded and step == 1:
                state.load_state_dict(state.state_dict())
            model(torch.full((16, 32), 1.0 + step)).square().mean().backward()
            state.advance()
        found.append(state.state_dict()["amaxes"])
    assert found[0] == found[1] and all(row["held"][0] > 0 for row in found[0].values())
