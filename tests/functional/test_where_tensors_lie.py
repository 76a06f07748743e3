"""Tensors of another device, and outputs whose elements share memory, are refused by name before anything is lost."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb

X, W = torch.ones(16, 32), torch.ones(48, 32)
ENDS = torch.tensor([4, 16], dtype=torch.int32)
ELSEWHERE = {
    "bias": torch.zeros(48, device="meta"),
    "main_grad": torch.zeros(48, 32, device="meta"),
    "weight_amax": torch.zeros((), device="meta"),
}


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_of_a_linear_layer(name, recipe):
    if recipe == "bf16" and name == "weight_amax":
        return  # nobody reads it
    for _ in range(2):  # a call that looks like one that was refused is refused too
        with pytest.raises(ValueError, match=rf"{name}\.device=meta, x\.device=cpu: move one of them"):
            hb.linear(X, W, recipe=hb.recipes.get(recipe), rng=hb.Philox(1, 0), **{name: ELSEWHERE[name]})


def test_of_experts():
    with pytest.raises(ValueError, match=r"main_grad\.device=meta"):
        hb.grouped_linear(
            X, W[None].expand(2, -1, -1).contiguous(), ENDS, recipe=hb.recipes.nvfp4(), rng=hb.Philox(1, 0),
            main_grad=torch.zeros(2, 48, 32, device="meta"),
        )  # fmt: skip


def test_of_norms():
    layer = hb.nn.LayerNormLinear(32, 48, recipe="nvfp4")
    layer.norm.to("meta")
    with pytest.raises(ValueError, match=r"weight\.device=meta, x\.device=cpu"):
        layer(X)


def test_outputs_that_overlap():
    a, b = (hb.quantize(t.bfloat16(), hb.NVFP4()) for t in (X, W))
    with pytest.raises(ValueError, match=r"out\.stride\(\)=\(0, 1\).*give out\.contiguous"):
        hb.gemm_nt(a, b, out=torch.zeros(1, 48).expand(16, 48))
    hb.gemm_nt(a, b, out=torch.zeros(16, 96)[:, :48])  # rows apart share nothing
    good, bad = torch.zeros(48, 32), torch.zeros(1, 32).expand(48, 32)
    recipe = hb.recipes.nvfp4_forward()
    hb.linear(X, W, recipe=recipe, main_grad=good)
    with pytest.raises(ValueError, match=r"main_grad\.stride\(\)=\(0, 1\)"):  # and looks like the good one else
        hb.linear(X, W, recipe=recipe, main_grad=bad)
