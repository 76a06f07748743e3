"""Inductor on a CPU: equal bytes from equal inputs, and layers that train to within rounding of eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte as hb

X = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_quantized_bytes_are_those_of_eager():
    """What precedes is exact, so equal input bytes reach the op in both."""
    place = hb.Philox(3)
    row, col = hb.NVFP4(rounding="stochastic"), hb.NVFP4(rotation=hb.Hadamard())

    def quantize(x):
        return [t for q in hb.quantize_row_col(x * 2, row, col, rng=place) for t in (q.qdata, q.block_scale, q.amax)]

    for eager, graph in zip(quantize(X), torch.compile(quantize, fullgraph=True)(X), strict=True):
        assert torch.equal(eager.reshape(-1).view(torch.uint8), graph.reshape(-1).view(torch.uint8))


def test_a_module_is_eager_with_precision_casts_emulated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    dy = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    with torch._inductor.config.patch(emulate_precision_casts=True):
        for function in (model, torch.compile(model, fullgraph=True)):
            x = X.clone().requires_grad_()
            y = function(x)
            y.backward(dy)
            results.append([y.detach(), x.grad])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
