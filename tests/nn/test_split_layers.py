"""Layers that split the mean over tokens off x: with kernels, repeated and compiled, what they are without."""

import pytest
import torch
from repeating import anew, kernels, same

import halfbyte as hb
from halfbyte.kernels import prepared

__all__ = ["kernels"]
SPLIT = hb.recipes.nvfp4(activation_mean="split")
KINDS = {
    "Linear": lambda state: hb.nn.Linear(32, 16, recipe=SPLIT, state=state),
    "LayerNormLinear": lambda state: hb.nn.LayerNormLinear(32, 16, bias=False, recipe=SPLIT, state=state),
    "LayerNormMLP": lambda state: hb.nn.LayerNormMLP(32, 48, recipe=SPLIT, state=state),
}


def steps(kind: str, count: int, *, main_grad: bool = False, compiled: bool = False) -> list[torch.Tensor]:
    """Return outputs and gradients of steps in bf16."""
    torch.manual_seed(0)
    seen, state = [], hb.RunState(3)
    layer = KINDS[kind](state).to(torch.bfloat16)
    matrices = [p for p in layer.parameters() if p.dim() == 2]
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for _ in range(count):
        x = (torch.randn(2, 8, 32) + 4 * torch.randn(32)).bfloat16().requires_grad_()
        for p in matrices if main_grad else ():
            p.main_grad = torch.ones(p.shape)
        y = run(x)
        y.backward(torch.randn_like(y))
        seen += [y.detach(), x.grad, *(getattr(p, "main_grad", None) if main_grad else p.grad for p in matrices)]
        layer.zero_grad()
        state.advance()
    return seen


SAMPLE = ("LayerNormLinear", False)
CASES = [(kind, main_grad) for kind in KINDS for main_grad in (False, True)]


@pytest.mark.parametrize(
    "kind, main_grad", [case if case == SAMPLE else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_kernels(kind, main_grad, request):
    """Up to the order of sums the layer of the reference; a repeated step has the bits of one that is worked out."""
    wanted = steps(kind, 1, main_grad=main_grad)
    request.getfixturevalue("kernels")
    with anew():
        again = steps(kind, 2, main_grad=main_grad)
    for actual, expected in zip(again, wanted, strict=False):
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < (0.02 if kind == "LayerNormMLP" else 0.003), error
    same(steps(kind, 2, main_grad=main_grad), again)
    refused = [record for record in prepared._RECORDS.values() if isinstance(record, str)]
    assert prepared._RECORDS and not refused, refused


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind):
    same(steps(kind, 2, compiled=True), steps(kind, 2))
