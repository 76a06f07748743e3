"""Tokens that arrive as codes, on the grouped kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import ends

import halfbyte as hb
from halfbyte.functional.dispatch import dispatch_spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on a GPU")


@pytest.mark.parametrize("recipe", ["nvfp4", "rl"])
def test_layer(recipe, monkeypatch):
    sizes, K, N = (17, 9), 24, 16
    generator = torch.Generator().manual_seed(6)
    x, w, dy = (torch.randn(*s, generator=generator).bfloat16() for s in ((28, K), (2, N, K), (28, N)))
    row, _ = hb.grouped_quantize_row_col(x, ends(sizes), dispatch_spec(hb.recipes.get(recipe)), None)
    results = []
    for on_kernels in (False, True):
        if on_kernels:
            for module in ("define", "grouped"):
                monkeypatch.setattr(f"halfbyte.ops.{module}.choose", lambda *arguments: "triton")
            monkeypatch.setattr("halfbyte.ops.emulates", lambda device: True)
        leaves = [t.clone().requires_grad_() for t in (row.dequantize(), w)]
        y = hb.grouped_linear(*leaves, ends(sizes), recipe, rng=hb.Philox(5, 8), x_row=row)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=2**-7, atol=1e-6
        )  # one rounding to bf16 of sums in two orders
        assert actual.ne(expected).float().mean() < 0.01
