"""Amaxes of earlier steps on a GPU, of layers and of experts: bytes and amaxes of the reference, in graphs too."""

import pytest
import torch
from grouped_cases import ends
from held_checks import hold_to_reference, near
from repeating import anew

import halfbyte as hb
from halfbyte.train.graphs import GraphedStep

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RECIPES = {
    "every": hb.recipes.delayed_amax(margin=1.25),
    "every3": hb.recipes.delayed_amax(every=3),
    "eden": hb.recipes.delayed_amax(every=2, base="quartet2"),
    "mxfp8_bwd": hb.recipes.delayed_amax(base="nvfp4_mxfp8_bwd"),
}
SIZES = ((70, 3, 0, 30), (2, 97, 0, 1), (0, 40, 0, 60), (33, 33, 0, 33), (4, 40, 50, 0))
"""Of experts in each step: some have no token in a step that measures, one gets its first late."""
K, N, PADDING = 96, 64, 4
M = max(map(sum, SIZES)) + PADDING
each = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
both = pytest.mark.parametrize("experts", [False, True], ids=["layer", "experts"])


def tensors(device, number, experts):
    """Return x, ends of groups or nothing, and dy, whose sizes go up and down."""
    g = torch.Generator().manual_seed(number)
    size = (1.0, 4.0, 0.3, 9.0, 2.0, 0.1, 30.0)[number % 7]
    x, dy = torch.randn(M, K, generator=g) * size, torch.randn(M, N, generator=g) * size / 1000
    more = [ends(SIZES[number % len(SIZES)]).to(device)] if experts else []
    return [x.to(device, torch.bfloat16), *more, dy.to(device, torch.bfloat16)]


def layer_of(recipe, device, experts):
    state, options = hb.RunState(3), {"recipe": recipe, "dtype": torch.bfloat16}
    if experts:
        layer = hb.nn.GroupedLinear(len(SIZES[0]), K, N, state=state, **options)
    else:
        layer = hb.nn.Linear(K, N, bias=False, state=state, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)) / 8)
    state.to(device)
    return layer.to(device)


def compute_of(layer):
    """Return what computes output and gradients from x, more, and dy, and moves on."""

    def compute(x, *more):
        *offsets, dy = more
        own = x.detach().requires_grad_()
        y = layer(own, *offsets)
        y.backward(dy)
        found = y.detach(), own.grad, layer.weight.grad.clone()
        layer.weight.grad = None
        layer.run_state.advance()
        return found

    return compute


def run(recipe, device, experts, steps=6, graph=False):
    """Return outputs and gradients of steps, of tokens that are in a group, what the state keeps, and how many replays.

    A step that does what the next does not is eager, and what is captured is forgotten when held amaxes come into use,
    as the training loop does it.
    """
    layer = layer_of(recipe, device, experts)
    compute, amaxes, found, replays = compute_of(layer), layer.run_state.amaxes, [], 0
    graphed = GraphedStep(compute, torch.device(device)) if graph else None
    for number in range(steps):
        before = amaxes.changes
        layer.run_state.begin_step(layer)
        if graphed is not None and amaxes.changes != before:
            graphed.reset()
        one = compute if graphed is None else graphed.eagerly if amaxes.measures_now_and_then else graphed
        replays += int(one is graphed and graphed is not None and graphed._graph is not None)
        y, dx, dw = one(*tensors(device, number, experts))
        count = sum(SIZES[number % len(SIZES)]) if experts else M
        found += [y[:count].clone(), dx[:count].clone(), dw.clone()]
    return found, layer.run_state.state_dict()["amaxes"], replays


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@both
@each
def test_steps(recipe, experts, monkeypatch):
    name = "grouped_quantize_row_col" if experts else "quantize_row_col"
    with monkeypatch.context() as patch:
        made = hold_to_reference(patch, name)
        with anew():
            given, kept, _ = run(recipe, DEVICE, experts)
        count = len(made)
    wanted, expected, _ = run(recipe, "cpu", experts)
    near(given, wanted)
    assert kept == expected and count >= 10
    (numbers,) = kept.values()
    assert sum(numbers["exceeded"]) > 0 and any(numbers["is_held"]), "sizes go up and down, and earlier amaxes are used"
    first, second = (run(recipe, DEVICE, experts) for _ in range(2))  # recorded, and repeated
    near(first[0], wanted)
    assert equal(first[0], second[0]) and first[1] == second[1] == expected


@both
@pytest.mark.parametrize("name", ["every", "every3"])
def test_replays_use_the_amaxes_of_the_steps_before(name, experts):
    eager, replayed = (run(RECIPES[name], DEVICE, experts, 14, graph) for graph in (False, True))
    assert equal(eager[0], replayed[0]) and eager[1] == replayed[1]
    assert replayed[2] >= 2 or DEVICE == "cpu", "steps were captured"
