"""Recipes that quantize x and dy with amaxes of earlier steps: every byte, as numerics.md section 3 says.

The amaxes are followed here in numpy, element by element, and every operand that a layer multiplies is held to the
oracle's, given that amax.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from delayed_follower import NAMES, SEED, Follower, assert_bytes
from delayed_steps import RECIPES as OTHERS
from delayed_steps import Spy, close, equal, restored, run_steps, steps_held_by, tokens
from repeating import kernels
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte import ops, recipes

__all__ = ["kernels"]
K, N, M = 40, 24, 18
NO_SIGNS = hb.Hadamard(size=16, signs="none")
RECIPES = {"nvfp4": recipes.delayed_amax(), **OTHERS}


def layer_of(recipe, state=None, n=N, k=K) -> hb.nn.Linear:
    torch.manual_seed(0)
    return hb.nn.Linear(k, n, recipe=recipe, state=state or hb.RunState(SEED))


def batch(number: int, m=M, k=K, n=N, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and dy, whose size goes up and down."""
    return tokens(number, m, k, n, scale)


@pytest.mark.parametrize("name", RECIPES)
def test_every_operand_of_several_steps_has_the_bytes_of_the_definition(name, monkeypatch):
    """Two micro-batches a step; what a step measures is the greatest of both."""
    recipe, state = RECIPES[name], hb.RunState(SEED)
    layer, follower, spy = layer_of(recipe, state), Follower(recipe), Spy(monkeypatch, "quantize_row_col")
    compared = later = 0
    for step in range(5):
        state.begin_step(layer)
        follower.begin()
        for micro in range(2):
            spy.made.clear()
            x, dy = batch(2 * step + micro)
            layer(x.clone().requires_grad_()).backward(dy)
            for tensor, letter in ((x, "x"), (dy, "dy")):
                for side, (spec, blocks) in spy.of(tensor).items():
                    key = f"{letter}.{side}"
                    if not spec.format.has_amax:
                        continue
                    assert spec == follower.specs[key]
                    values = (tensor if side == "row" else tensor.T.contiguous()).numpy()
                    want = follower.expected(key, values, 2 * step + micro)
                    assert_bytes(spec, blocks, want)
                    compared, later = compared + 1, later + int(follower.before[key] > 0)
            state.advance()
    wanted = sum(spec is not None and spec.format.has_amax for spec in follower.specs.values())
    assert compared == 10 * wanted and later >= 6
    numbers = state.amaxes.layers[layer.stream]
    for i, key in enumerate(NAMES):
        assert float(numbers.held[i]) == float(follower.held[key])
    assert numbers.exceeded.tolist() == [follower.exceeded[key] for key in NAMES]
    assert (state.amaxes.exceeded > 0) == (recipe.amax.every != 2), "sizes go up and down"


def steps(recipe, count=5, *, model=None, begin=0, run=None) -> tuple[list, hb.nn.Linear]:
    """Return outputs and gradients of steps, and the layer."""
    model = layer_of(recipe) if model is None else model
    return run_steps(model, batch, count, begin, run), model


@pytest.mark.parametrize("name", ["nvfp4", "every2", "quartet2"])
def test_a_resumed_run_goes_on_bit_for_bit(name):
    whole, _ = steps(RECIPES[name], 7)
    for stop in (1, 2, 3, 4):
        first, layer = steps(RECIPES[name], stop)
        saved = copy.deepcopy(layer.run_state.state_dict())
        fresh = hb.RunState(SEED)
        other = layer_of(RECIPES[name], fresh)
        fresh.load_state_dict(saved)
        rest, _ = steps(RECIPES[name], 7 - stop, model=other, begin=stop)
        assert equal(first + rest, whole), stop


def test_a_step_may_be_taken_back_in_its_middle():
    """As who measures a gradient's noise does: the step is what it would have been."""
    whole, _ = steps(RECIPES["nvfp4"], 5)
    layer = layer_of(RECIPES["nvfp4"])
    state = layer.run_state

    def run(x):
        before = state.state_dict()
        layer(100 * x.detach()).sum().backward()
        layer.weight.grad = None
        state.load_state_dict(before)
        return layer(x)

    assert equal(steps(None, 5, model=layer, run=run)[0], whole)


def test_a_state_without_amaxes_is_said_once():
    """As of a run that did not delay them, or one that was edited; before the first step there are none."""
    _, layer = steps(RECIPES["nvfp4"], 3)
    saved = layer.run_state.state_dict()
    assert saved.pop("amaxes") and saved["step"] == 3
    with pytest.warns(UserWarning, match="the state of step 3 has no amaxes of the layers that delay theirs") as said:
        layer.run_state.load_state_dict(saved)
    assert len(said) == 1 and not any(map(float, layer.amaxes.held))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.run_state.load_state_dict(saved | {"step": 0})


def test_a_state_may_be_loaded_before_there_are_layers():
    whole, _ = steps(RECIPES["nvfp4"], 5)
    _, layer = steps(RECIPES["nvfp4"], 3)
    fresh = restored(layer.run_state.state_dict())
    rest, _ = steps(RECIPES["nvfp4"], 2, model=layer_of(RECIPES["nvfp4"], fresh), begin=3)
    assert equal(rest, whole[9:])


def test_a_copy_goes_on_as_the_original_does():
    _, layer = steps(RECIPES["nvfp4"], 2)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert twin.amaxes is twin.run_state.amaxes.layers[twin.stream] is not layer.amaxes
    one, other = (steps(None, 3, model=each, begin=2)[0] for each in (layer, twin))
    assert equal(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_has_the_bytes_of_the_forward(use_reentrant):
    whole, plain = steps(RECIPES["every2"], 5)
    layer = layer_of(RECIPES["every2"])
    found, _ = steps(RECIPES["every2"], 5, model=layer, run=lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
    assert equal(found, whole)
    assert layer.run_state.state_dict() == plain.run_state.state_dict()


@pytest.mark.parametrize("name, inside", [("every2", False), ("nvfp4", True)])
def test_compiled_code_gives_the_same(name, inside):
    """With a checkpoint inside of what is compiled, too."""
    count = 5 - inside
    whole, plain = steps(RECIPES[name], count)
    layer = layer_of(RECIPES[name])
    torch._dynamo.reset()

    def run(x):
        return checkpoint(layer, x, use_reentrant=False) if inside else layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, _ = steps(None, count, model=layer, run=compiled)
    assert equal(found, whole)
    assert layer.run_state.state_dict() == plain.run_state.state_dict()


def test_kernels_and_their_repetition_give_the_same(kernels, monkeypatch):
    """The amaxes are tensors that change under a record of launches."""

    def results():
        layer, found = layer_of(RECIPES["nvfp4"], n=16, k=16), []
        for step in range(4):
            layer.run_state.begin_step(layer)
            x, dy = batch(step, 16, 16, 16)
            x = x.bfloat16().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            y.backward(dy.bfloat16())
            found += [y.detach(), x.grad, layer.weight.grad.clone()]
            layer.weight.grad = None
            layer.run_state.advance()
        return found, layer.run_state.state_dict()["amaxes"]

    made = results()
    monkeypatch.undo()
    wanted = results()
    assert made[1] == wanted[1] and close(made[0], wanted[0])


def test_what_is_not_finite_is_seen_and_leaves_no_trace():
    layer = layer_of("nvfp4", n=N)
    layer.recipe = recipes.delayed_amax(base=recipes.nvfp4(hadamard=None, stochastic_rounding=False))
    state = layer.run_state
    for step in range(4):
        state.begin_step(layer)
        x, dy = batch(step, scale=1.0)
        if step == 2:
            x[3, 5], x[4, 6], dy[7, 1] = float("nan"), float("inf"), float("-inf")
        x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        if step == 2:
            assert y[3].isnan().all() and y[4].isnan().all() and y[5:].isfinite().all()
            assert x.grad[7].isnan().all() and x.grad[:7].isfinite().all()
            assert layer.weight.grad[1].isnan().any()
            wanted = [float(t[t.isfinite()].abs().max()) for t in (x.detach(), x.detach(), dy, dy)]
        layer.weight.grad = None
        state.advance()
        if step == 3:
            assert [float(t) for t in layer.amaxes.held] == wanted


def test_an_operand_of_zeros_leaves_what_is_held_and_begins_with_its_own():
    """Gradients are zeros in the first steps behind a layer that begins at zero."""
    layer = layer_of(recipes.delayed_amax(base=recipes.nvfp4(hadamard=None, stochastic_rounding=False)))
    state, held = layer.run_state, []
    for step, size in enumerate((0.0, 1.0, 0.0, 1.0, 1.0)):
        state.begin_step(layer)
        x, dy = batch(step, scale=1.0)
        layer(x.requires_grad_()).backward(dy * size)
        if size:
            assert layer.weight.grad.abs().sum() > 0 and x.grad.abs().sum() > 0, "not flushed"
        layer.weight.grad = None
        held.append(float(layer.amaxes.held[2]))
        state.advance()
    greatest = float(batch(1, scale=1.0)[1].abs().max())
    assert held == pytest.approx([0.0, 0.0, greatest, greatest, float(batch(3, scale=1.0)[1].abs().max())])


def test_what_is_larger_saturates():
    """Codes at 6 and scales at 448: what was held is the largest value that decodes."""
    layer = layer_of(recipes.delayed_amax(base=recipes.nvfp4_forward()), n=K)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(K)), layer.bias.zero_()
    state = layer.run_state
    for step in range(3):
        state.begin_step(layer)
        x = torch.ones(4, K) * (1.0 if step < 2 else 50.0)
        y = layer(x.requires_grad_())
        y.sum().backward()
        state.advance()
    assert torch.equal(y, torch.ones(4, K)), "the amax of the step before"
    state.begin_step(layer)
    assert layer.amaxes.exceeded.tolist() == [1, 0, 0, 0] and state.amaxes.exceeded == 1


def test_eval_and_calls_without_gradients():
    layer = layer_of(RECIPES["nvfp4"])
    steps(None, 3, model=layer)
    state, (x, _) = layer.run_state, batch(3)
    held, seen = ([float(t) for t in tensors] for tensors in (layer.amaxes.held, layer.amaxes.seen))
    with torch.no_grad():
        used = layer(x)
        layer.eval()
        own = layer(x)
        layer.recipe = recipes.nvfp4()
        assert torch.equal(own, layer(x)) and not torch.equal(own, used)
    layer.recipe = RECIPES["nvfp4"]
    assert [float(t) for t in layer.amaxes.held] == held and [float(t) for t in layer.amaxes.seen] == seen
    layer.train()
    state.begin_step(layer)
    assert float(layer.amaxes.held[0]) == seen[0]


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_fused_modules_have_the_bits_of_their_parts(activation):
    """A norm hands amaxes on, siblings share one x, and the activation knows those of its gradients."""
    recipe = recipes.delayed_amax(every=2)

    def run(fused):
        torch.manual_seed(0)
        module = hb.nn.LayerNormMLP(32, 48, activation=activation, recipe=recipe, state=hb.RunState(SEED))
        layers = [getattr(module, name) for name in module.names]
        state, found = layers[0].run_state, []
        for step in range(5):
            state.begin_step(module)
            x, dy = batch(step, 16, 32, 32)
            x.requires_grad_()
            if fused:
                y = module(x)
            else:
                h = [layer(module.norm(x)) for layer in layers[:-1]]
                y = layers[-1](hb.functional.activation(activation, *h))
            y.backward(dy)
            found += [y.detach(), x.grad, *[layer.weight.grad.clone() for layer in layers]]
            module.zero_grad()
            state.advance()
        return found

    one, other = run(True), run(False)
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@pytest.mark.parametrize("kind", ["primary", "cached", "observed", "main_grad"])
def test_whatever_holds_the_weight_the_bits_are_the_same(kind):
    def run(kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False)).bfloat16()
        keep = hb.Keep(names=(), last_fraction=0)
        hb.quantize_(model, RECIPES["nvfp4"], keep=keep, state=hb.RunState(SEED))
        return steps_held_by(kind, model, model[0], batch, model)

    (one, amaxes), (other, same) = run(kind), run(None)
    assert equal(one, other) and amaxes == same


def test_weights_keep_their_own_amax(monkeypatch):
    layer, spy = layer_of(RECIPES["nvfp4"]), Spy(monkeypatch, "quantize_row_col")
    state = layer.run_state
    for step in range(4):
        with torch.no_grad():
            layer.weight.mul_(3)
        state.begin_step(layer)
        x, dy = batch(step)
        layer(x.requires_grad_()).backward(dy)
        state.advance()
        found = spy.of(layer.weight.detach())
        assert float(found["row"][1].amax) == float(layer.weight.detach().abs().max())


def test_how_many_amaxes_are_measured(monkeypatch):
    """In steps between, no kernel looks for an amax of x or dy: that is what is gained."""
    calls, own = [], ops.row_col_amax
    monkeypatch.setattr(ops, "row_col_amax", lambda *a: calls.append(a) or own(*a))
    layer, counts = layer_of(recipes.delayed_amax(every=4)), []
    spy = Spy(monkeypatch, "quantize_row_col")
    for step in range(9):
        calls.clear(), spy.made.clear()
        steps(None, 1, model=layer, begin=step)
        given = [side.amax is not None for t, *sides, _ in spy.made if t.shape[0] == M for side in sides if side]
        counts.append((len(calls), sum(given), len(given)))
    assert counts[0] == (2, 4, 4) and counts[1] == (0, 0, 4), "own ones: measured, then searched as ever"
    assert counts[2:4] == [(0, 4, 4)] * 2 and counts[4] == (2, 4, 4) and counts[5:8] == [(0, 4, 4)] * 3


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s | {"amaxes": [1]}, "not a dict by stream"),
        (lambda s: s | {"amaxes": {"0": {"held": [1.0] * 4}}}, "not 4 finite numbers"),
        (lambda s: s | {"amaxes": {"0": s["amaxes"]["0"] | {"held": [1.0, 2.0, float("nan"), 0.0]}}}, "not 4 finite"),
        (lambda s: s | {"amaxes": {"0": s["amaxes"]["0"] | {"seen": [1.0, 2.0, -1.0, 0.0]}}}, "not 4 finite"),
        (lambda s: s | {"amaxes": {"77": s["amaxes"]["0"]}}, r"\['77'\]: no layer of this model"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(change, words):
    _, layer = steps(RECIPES["nvfp4"], 3)
    state = layer.run_state
    before = state.state_dict()
    with pytest.raises(ValueError, match=words):
        state.load_state_dict(change(copy.deepcopy(before)))
    assert state.state_dict() == before


@pytest.mark.parametrize(
    "x, call",
    [
        (torch.full((M, K), 50.0).half(), 0),
        (torch.full((M, K + 16), 50.0), 0),
        (torch.full((M, K), 50.0), 16),
        (torch.full((M, K), 50.0), 1.5),
    ],
)
def test_calls_that_are_refused_are_none_of_the_step(x, call):
    """What a step has seen is the greatest of the calls that went through."""
    layer = layer_of(RECIPES["nvfp4"])
    layer.run_state.begin_step(layer)
    with pytest.raises((ValueError, TypeError)):
        layer(x, call=call)
    assert [float(amax) for amax in layer.amaxes.seen] == [0.0] * 4
    good, _ = batch(0, scale=1.0)
    layer(good)
    assert float(layer.amaxes.seen[0]) == float(good.abs().max())
    with pytest.raises((ValueError, TypeError)):
        layer(x, call=call)
    assert float(layer.amaxes.seen[0]) == float(good.abs().max())


def test_a_schedule_changes_to_it_and_back():
    """What was held waits; a layer that comes back measures in the next step that does."""
    plain, delayed = recipes.nvfp4(), RECIPES["nvfp4"]
    state = hb.RunState(SEED, hb.Schedule([(2, delayed), (5, plain)]))
    layer = layer_of(plain, state)
    found, _ = steps(None, 6, model=layer)
    own, _ = steps(plain, 6)
    assert equal(found[:6], own[:6]) and equal(found[15:], own[15:]), "before and after"
    assert equal(found[6:12], own[6:12]), "its first two steps take their own amax"
    assert not equal(found[12:15], own[12:15])
