"""Channels of x in more bits on a GPU: the channels and bytes of the reference, in eager steps and in graphs."""

import pytest
import torch
from held_checks import hold_to_reference, near
from repeating import anew

import halfbyte as hb
from halfbyte.functional import channels
from halfbyte.train.graphs import WARM_UP, GraphedStep

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RECIPES = {
    "outliers": hb.recipes.outlier_channels(share=0.2),
    "outliers_wgrad": hb.Recipe(wgrad=hb.recipes.nvfp4().wgrad, channels=hb.recipes.outlier_channels().channels),
    "hot": hb.recipes.hot_channels(share=0.2),
    "hot_four_over_six": hb.recipes.hot_channels(base="four_over_six"),
}
M, K, N = 136, 256, 96
each = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def tensors(device, number=0):
    """Return x with loud channels, others for every number, and dy."""
    g = torch.Generator().manual_seed(number)
    x, dy = torch.randn(M, K, generator=g), torch.randn(M, N, generator=g)
    x[:, torch.randperm(K, generator=g)[:7]] *= 40
    return [t.to(device, torch.bfloat16) for t in (x, dy)]


def layer_of(recipe, device, main_grad=False):
    state = hb.RunState(3)
    torch.manual_seed(0)
    layer = hb.nn.Linear(K, N, bias=False, recipe=recipe, state=state, dtype=torch.bfloat16).to(device)
    state.to(device)
    if main_grad:
        layer.weight.main_grad = torch.zeros(N, K, device=device)
    return layer


def step_of(layer):
    """Return what computes output and gradients from x and dy, and moves on."""

    def step(x, dy):
        own = x.detach().requires_grad_()
        y = layer(own)
        y.backward(dy)
        grad = layer.weight.grad if layer.weight.grad is not None else layer.weight.main_grad
        found = y.detach(), own.grad, grad.clone()
        layer.weight.grad = None
        layer.run_state.advance()
        return found

    return step


def run(recipe, device, main_grad=False, numbers=(0, 1)):
    step = step_of(layer_of(recipe, device, main_grad))
    return [t for number in numbers for t in step(*tensors(device, number))]


@pytest.mark.parametrize("main_grad", [False, True])
@each
def test_a_layer(recipe, main_grad, monkeypatch):
    chosen, greatest = [], channels._greatest

    def seen(scores, how):
        chosen.append(greatest(scores, how))
        return chosen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(channels, "_greatest", seen)
        made = hold_to_reference(patch, "quantize_row_col")
        with anew():
            given, wanted = (run(recipe, device, main_grad) for device in (DEVICE, "cpu"))
    near(given, wanted)
    on_gpu, on_cpu = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    assert len(on_gpu) == len(on_cpu) == 2 and not torch.equal(*on_gpu), "chosen anew from every x"
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, on_cpu, strict=True)) and len(made) >= 8
    first, second = run(recipe, DEVICE, main_grad), run(recipe, DEVICE, main_grad)  # recorded, and repeated
    near(first, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_of_equal_channels_the_first_are_taken():
    x = torch.ones(4, 96, device=DEVICE)
    x[:, 70:90] = 2
    index = channels.outlier_index(x, hb.recipes.outlier_channels(share=0.3).channels)
    assert index.tolist() == [*range(12), *range(70, 90)]


@each
def test_replays_choose_anew(recipe):
    """Bit for bit the eager steps at their places, whose channels are others in each."""
    results = []
    for graph in (False, True):
        step = step_of(layer_of(recipe, DEVICE))
        step = GraphedStep(step, torch.device(DEVICE)) if graph else step
        results.append([t.clone() for number in range(WARM_UP + 3) for t in step(*tensors(DEVICE, number))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
