"""Statistics of layers and of experts on a GPU are those of the reference on the CPU: its bytes, its sums in fp64."""

import pytest
import torch
from grouped_cases import RAGGED, ends
from torch import nn

import halfbyte as hb

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:step .. quantization noise"),
]
K, N = 128, 96


def statistics(device, recipe, experts):
    """Return the records of two steps, the second repeated from the first where kernels run."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(RAGGED)
    x, dy = (torch.randn(tokens, size, generator=g).bfloat16() for size in (K, N))
    x[:, 7] *= 100
    state = hb.RunState(5)
    if experts:
        layer = hb.nn.GroupedLinear(len(RAGGED), K, N, recipe=recipe, state=state, dtype=torch.bfloat16)
    else:
        layer = hb.nn.Linear(K, N, bias=False, recipe=recipe, state=state, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=g) / 8)
    model = nn.ModuleDict({"one": layer}).to(device)
    state.to(device)
    collector = hb.collect_stats(model, every=1)
    more = (ends(RAGGED).to(device),) if experts else ()
    found = []
    for factor in (1, -3):
        layer((factor * x).to(device).requires_grad_(), *more).backward(dy.to(device))
        state.advance()
        found += collector.advance().records()
    return found


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "quartet2", "nvfp4_mxfp8_bwd", "mxfp8"])
def test_figures_are_those_of_the_cpu(recipe, experts):
    found, wanted = (statistics(device, recipe, experts) for device in (DEVICE, "cpu"))
    assert len(found) == len(wanted) == 18
    for one, other in zip(found, wanted, strict=True):
        loose = "product" in other  # whose GEMMs add up in another order
        numbers = {key: value for key, value in other.items() if isinstance(value, float)}
        assert {key: one[key] for key in numbers} == pytest.approx(numbers, rel=2e-3 if loose else 1e-6, abs=1e-9)
        others = other.keys() - numbers
        assert {key: one[key] for key in others} == {key: other[key] for key in others}
