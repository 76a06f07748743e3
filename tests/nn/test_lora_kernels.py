"""Frozen layers and adapters on kernels: whole passes are repeated from records, with the bits of passes run anew."""

from __future__ import annotations

import pytest
import torch
from repeating import anew, kernels, same
from torch import nn

import halfbyte as hb
from halfbyte import recipes
from halfbyte.functional.linear import backward_pass, forward_pass
from halfbyte.kernels import prepared

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["kernels"]

RECIPES = {
    "tiles": recipes.nvfp4(),
    "blocks, x and dy in high precision": recipes.weight_only(base="nvfp4_forward"),
}


def frozen(recipe, kind):
    """Return a frozen layer of a kind: "frozen", or one with an adapter, "beside" or "merge_aware"."""
    torch.manual_seed(0)
    layer = hb.nn.Linear(32, 48, recipe=recipe, state=hb.RunState(3)).bfloat16()
    hb.freeze_(layer)
    if kind == "frozen":
        return layer
    layer = hb.nn.LoRALinear.from_linear(layer, rank=2, alpha=4, merge_aware=kind == "merge_aware")
    nn.init.normal_(layer.lora_B, std=0.1)
    return layer


def step(layer, i):
    """Return the output and all gradients of step i; codes, adapters and random bits of the next one are others."""
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 32, generator=g).bfloat16().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(16, 48, generator=g).bfloat16())
    trained = [p for p in layer.parameters() if p.requires_grad]
    found = [y.detach(), x.grad, *[p.grad.clone() for p in trained]]
    with torch.no_grad():
        for p in trained:
            p.mul_(1.25).grad = None
        other = layer.weight.dequantize().roll(1, 0) * 2
    layer.weight = nn.Parameter(hb.quantize(other, layer.weight.spec), requires_grad=False)
    layer.run_state.advance()
    return found


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("tiles", "frozen"), ("tiles", "merge_aware"), ("blocks, x and dy in high precision", "beside")],
)
def test_frozen_layers_are_repeated(recipe, kind):
    with anew():
        layer = frozen(RECIPES[recipe], kind)
        wanted = [step(layer, i) for i in range(3)]
    prepared._RECORDS.clear()
    layer = frozen(RECIPES[recipe], kind)
    given = [step(layer, 0)]
    known = {key[0]: record for key, record in prepared._RECORDS.items()}
    assert {forward_pass, backward_pass} <= known.keys()
    assert not [record for record in known.values() if isinstance(record, str)]
    count = len(prepared._RECORDS)
    same([*given, step(layer, 1), step(layer, 2)], wanted)
    assert len(prepared._RECORDS) == count
