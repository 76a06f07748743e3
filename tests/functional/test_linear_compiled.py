"""linear_shared under torch.compile: weights that share a random state and an amax."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte as hb


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, n, bias=n == 16) for n in (32, 16, 16))

    def forward(self, x):
        return torch.cat(hb.nn.forward_shared(x, (self.q_proj, self.k_proj, self.v_proj)), dim=-1)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_shared_projections_compile_without_a_graph_break(recipe):
    torch.manual_seed(0)
    module = Attention()
    report = hb.quantize_(module, recipe)
    assert module.q_proj.amax_group
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(2, 20, 32), torch.randn(2, 20, 64)
    results = []
    for function in (module, compiled):
        module.zero_grad()
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        y.backward(dy)
        results.append([y.detach(), inputs.grad, *(p.grad.clone() for p in module.parameters())])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
    report.state.advance()
