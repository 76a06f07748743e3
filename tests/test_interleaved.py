"""RunState.interleave: micro-batches whose forwards and backwards take turns draw what they do one after the other."""

import copy
import warnings

import pytest
import torch
from test_following import ALL, Net, build, data, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.nn.streams import STALE_FORWARDS

COUNT = 4
ORDERS = {
    "all forwards first": [("f", 0), ("f", 1), ("f", 2), ("f", 3), ("b", 0), ("b", 1), ("b", 2), ("b", 3)],
    "one and one": [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)],
}


def turns_of(state, model, order, forward):
    """Run micro-batches in an order; model gathers their gradients."""
    turns, losses = state.interleave(COUNT), {}
    for kind, index in order:
        turns.turn(index)
        if kind == "f":
            losses[index] = forward(model, data(index)).square().mean()
        else:
            losses.pop(index).backward()
    turns.end()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def one_after_the_other(steps=2):
    model, state = build()
    found = []
    for _ in range(steps):
        for index in range(COUNT):
            model(data(index)).square().mean().backward()
            state.advance()
        found.append(gradients(model))
        model.zero_grad()
    return found, state


def call(model, x):
    return model(x)


def recomputed(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [call, recomputed])
@pytest.mark.parametrize("order", ORDERS)
def test_in_turns_they_draw_what_they_do_one_after_the_other(order, forward):
    (first, second), alone = one_after_the_other()
    model, state = build()
    turns_of(state, model, ORDERS[order], forward)
    assert same(gradients(model), first) and state.next_position == state.state_dict()["position"] == COUNT
    model.zero_grad()
    turns_of(state, model, ORDERS[order], forward)
    assert same(gradients(model), second) and not same(first, second)
    assert state.state_dict() == alone.state_dict()


def test_whoever_moves_the_position_besides_moves_nothing_twice():
    (first, _), _ = one_after_the_other()
    model, state = build()
    state.follow(model)  # sees backwards between these forwards
    turns_of(state, model, ORDERS["one and one"], call)
    assert same(gradients(model), first) and (state.position, state.next_position) == (COUNT - 1, COUNT)
    state.advance()
    assert state.position == state.next_position == COUNT
    model(data(0)).square().mean().backward()
    assert (state.position, state.next_position) == (COUNT, COUNT + 1)
    turns = state.interleave(2)
    turns.turn(1)
    assert state.position == COUNT + 2


def test_compiled_code_keeps_the_place_of_its_forward():
    (first, second), _ = one_after_the_other()
    model, state = build()
    for block in model:
        block.compile(backend="aot_eager")
    turns_of(state, model, ORDERS["all forwards first"], call)
    assert same(gradients(model), first)
    model.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        turns_of(state, model, ORDERS["one and one"], call)
    assert same(gradients(model), second)


def test_amaxes_for_later_steps_are_noted_in_turns_alone():
    models = []
    for is_interleaved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Net(), Net())
        state = hb.quantize_(model, hb.recipes.delayed_amax(), keep=ALL, state=hb.RunState(1)).state
        for _ in range(3):
            state.begin_step(model)
            if is_interleaved:
                turns = state.interleave(1)
                model(1e6 * data(8)).sum().backward()  # as a pipeline learns shapes
                turns.turn(0)
            model.zero_grad()
            model(data(0)).square().mean().backward()
            turns.end() if is_interleaved else state.advance()
        models.append((gradients(model), state.state_dict()))
    assert same(models[0][0], models[1][0]) and models[0][1] == models[1][1]
    assert len(models[0][1]["amaxes"]) == 4


def test_refusals():
    model, state = build()
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count={count}: give the number of micro-batches, an int above 0"):
            state.interleave(count)
    for count in (True, 2.0):
        with pytest.raises(TypeError, match=f"count={count}: give an int"):
            state.interleave(count)
    turns = state.interleave(2)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"index={index}: give 0 <= index < 2, or call interleave with more"):
            turns.turn(index)
    hb.set_recipe_(model, hb.recipes.delayed_amax())
    with pytest.raises(ValueError, match="begin_step was never called"):
        state.interleave(2)


def test_who_has_ended_moves_nothing_any_more():
    _, state = build()
    turns = state.interleave(2)
    turns.turn(1)
    turns.end()
    state.advance()
    turns.end()
    assert (state.position, state.next_position) == (2, 2)
    with pytest.raises(ValueError, match="index=0: these micro-batches have ended; interleave the next ones"):
        turns.turn(0)
    assert state.position == 2
    before = state.interleave(2)
    state.load_state_dict(state.state_dict() | {"position": 7})
    before.end()
    with pytest.raises(ValueError, match="have ended"):
        before.turn(1)
    assert (state.position, state.next_position) == (7, 7)


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_amax"])
def test_a_step_that_failed_is_told_until_it_has_ended(recipe):
    """Else a model that is followed would stand where it failed, and draw the same bits again and again."""
    torch.manual_seed(0)
    model = Net()
    state = hb.quantize_(model, getattr(hb.recipes, recipe)(), keep=ALL, state=hb.RunState(1)).state
    state.follow(model)
    state.begin_step(model)
    turns = state.interleave(3)
    calls = {
        "advance": state.advance,
        "begin_step": lambda: state.begin_step(model),
        "set_rank": lambda: state.set_rank(1),
        "interleave": lambda: state.interleave(2),
    }
    for name, call_it in calls.items():
        with pytest.raises(ValueError, match=rf"{name}\(\) before interleaved micro-batches have ended: call end\(\)"):
            call_it()
    assert (state.rank, state.step) == (0, 1)
    turns.end()
    assert state.next_position == 3
    for position in (3, 4):
        model(data(0)).square().mean().backward()
        assert state.position == position
    for call_it in calls.values():
        call_it()


def test_a_copy_in_the_middle_stands_where_the_turn_is():
    _, state = build()
    state.interleave(3).turn(1)
    twin = copy.deepcopy(state)
    twin.advance()
    assert (state.position, twin.position) == (1, 2)


@pytest.mark.parametrize("index", [True, 1.0, None])
def test_an_index_is_an_int(index):
    _, state = build()
    with pytest.raises(TypeError, match=f"index={index}: give an int"):
        state.interleave(2).turn(index)


def test_more_micro_batches_than_forwards_at_one_position_hear_of_no_forgotten_advance():
    layer = hb.nn.Linear(32, 32, recipe="nvfp4", state=hb.RunState(0))
    turns = layer.run_state.interleave(STALE_FORWARDS + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(STALE_FORWARDS + 1):
            turns.turn(index)
            layer(data(0))


def test_micro_batches_that_end_before_their_first_turn_let_amaxes_be_noted_again():
    """As where a pipeline fails before it begins, and the step is tried once more."""
    torch.manual_seed(0)
    model = Net()
    state = hb.quantize_(model, hb.recipes.delayed_amax(), keep=ALL, state=hb.RunState(1)).state
    state.begin_step(model)
    state.interleave(2).end()
    model(data(0)).square().mean().backward()
    assert all(min(row["seen"][:2]) > 0 for row in state.state_dict()["amaxes"].values())
