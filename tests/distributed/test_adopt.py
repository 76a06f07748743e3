"""Weights that become NVFP4 before any optimizer: the bytes of before, and masters that begin with their values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import halfbyte as hb

ALL = hb.Keep(names=(), last_fraction=0)
TILES = hb.NVFP4(block=(16, 16))


class Gated(nn.Module):
    """Siblings that share an amax, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 64, bias=False), nn.Linear(48, 64, bias=False)
        self.down_proj = nn.Linear(64, 48)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def build(recipe="nvfp4"):
    torch.manual_seed(0)
    model = Gated().bfloat16()
    with torch.no_grad():
        model.up_proj.weight.mul_(3)
    return model, hb.quantize_(model, recipe, keep=ALL).state


def x():
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(model, state):
    y = model(x())
    y.float().square().sum().backward()
    state.advance()
    return y


def test_output_and_gradients_are_those_of_before():
    model, state = build()
    twin, twin_state = build()
    names = hb.distributed.primary_weights_(model)
    assert names == ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert torch.equal(step(model, state), step(twin, twin_state))
    for name in names:
        weight, plain = model.get_parameter(name), twin.get_parameter(name)
        assert isinstance(weight, hb.tensor.PrimaryWeight)
        assert torch.equal(weight.grad, plain.grad)
    assert model.gate_proj.weight.blocks.amax.data_ptr() == model.up_proj.weight.blocks.amax.data_ptr()
    shared = max(p.detach().abs().max() for p in (twin.gate_proj.weight, twin.up_proj.weight)).float()
    expected = hb.quantize(twin.gate_proj.weight.detach(), TILES, amax=shared)
    assert torch.equal(model.gate_proj.weight.qdata, expected.qdata)


def test_codes_are_taken_as_they_are():
    model, _ = build()
    other = hb.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(7)).bfloat16(), TILES)
    thin = hb.quantize(torch.ones(64, 48, dtype=torch.bfloat16), hb.NVFP4())
    before = hb.quantize(model.gate_proj.weight.detach(), TILES, amax=model.up_proj.weight.detach().abs().max().float())
    hb.distributed.primary_weights_(model, {"down_proj.weight": other, "gate_proj.weight": thin})
    assert torch.equal(model.down_proj.weight.qdata, other.qdata)
    assert torch.equal(model.down_proj.weight.dequantize(), other.dequantize())
    assert torch.equal(model.gate_proj.weight.qdata, before.qdata)  # of another spec than the recipe's: not taken


def test_an_optimizer_begins_with_the_values_of_the_codes():
    model, state = build()
    hb.distributed.primary_weights_(model)
    values = {name: p.dequantize(torch.float32) for name, p in model.named_parameters() if p.dim() > 1}
    codes = {name: model.get_parameter(name).qdata.clone() for name in values}
    optimizer = hb.distributed.ZeroOptimizer(model, partial(torch.optim.SGD, lr=2e-3))
    masters = optimizer.state_dict()["masters"]
    assert all(torch.equal(masters[name], value) for name, value in values.items())
    optimizer.synchronize()
    assert all(torch.equal(model.get_parameter(name).qdata, code) for name, code in codes.items())
    losses = []
    for _ in range(4):
        losses.append(step(model, state).float().square().sum().item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    del optimizer
    with pytest.raises(ValueError, match="exists in NVFP4 only, of an earlier ZeroOptimizer"):
        hb.distributed.ZeroOptimizer(model)  # whose masters are lost


def test_refusals():
    for recipe in ("nvfp4_forward", "mxfp8"):
        with pytest.raises(ValueError, match="model=Gated: no weight has a recipe with one 16x16 spec for forward and"):
            hb.distributed.primary_weights_(build(recipe)[0])
    model, _ = build()
    weights = {f"{n}.weight": model.get_submodule(n).weight.detach() for n in ("gate_proj", "up_proj")}
    apart = {name: hb.quantize(weight, TILES) for name, weight in weights.items()}
    with pytest.raises(
        ValueError, match=r"quants\['up_proj.weight'\] has amax \S+ and 'gate_proj.weight', which shares"
    ):
        hb.distributed.primary_weights_(model, apart)
    assert not isinstance(model.gate_proj.weight, hb.tensor.PrimaryWeight)  # nothing changed
