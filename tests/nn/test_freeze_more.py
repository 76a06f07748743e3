"""Freezing layers whose forward multiplied more of the weight than its codes: what changes is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte as hb


@pytest.mark.parametrize(
    ("recipe", "is_named"),
    [
        ("nvfp4", False),
        (hb.recipes.nvfp4(activation_mean="split"), True),
        (hb.recipes.hot_channels(), True),
        (hb.recipes.outlier_channels(), True),
    ],
)
def test_layers_whose_outputs_change_are_named(recipe, is_named):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    hb.quantize_(model, "nvfp4", rules={"1": recipe}, keep=hb.Keep(names=(), last_fraction=0))
    x = torch.randn(20, 64) + 1
    with torch.no_grad():
        hidden, before = model[0](x), model(x)
        frozen = hb.freeze_(model)
        assert torch.equal(model[0](x), hidden) and torch.equal(model(x), before) != is_named
    assert frozen.more_than_codes == (("1",) if is_named else ())
    assert ("outputs of 1 are others now" in str(frozen)) == is_named
    assert hb.freeze_(model).more_than_codes == frozen.more_than_codes


class Siblings(nn.Module):
    """Three projections of one input, whose weights share an amax."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(x) * self.v_proj(x)


def frozen_siblings(factor: float = 1.0, **options) -> nn.Sequential:
    model = nn.Sequential(Siblings())
    with torch.no_grad():
        model[0].q_proj.weight.mul_(factor)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), **options)
    hb.freeze_(model)
    return model


def test_what_is_loaded_into_one_sibling_leaves_the_others():
    torch.manual_seed(0)
    model = frozen_siblings()
    before = {name: weight.dequantize() for name, weight in model.named_parameters()}
    values = torch.randn(64, 64) * 30
    model.load_state_dict({"0.q_proj.weight": values}, strict=False)
    after = {name: weight.dequantize() for name, weight in model.named_parameters()}
    for name in ("0.k_proj.weight", "0.v_proj.weight"):
        assert torch.equal(after[name], before[name]), name
    assert torch.equal(after["0.q_proj.weight"], hb.quantize(values, hb.NVFP4(block=(16, 16))).dequantize())


def test_codes_of_a_model_whose_siblings_differ_are_loaded_as_they_are():
    torch.manual_seed(0)
    model, other = frozen_siblings(), frozen_siblings(8.0, share_amax=())
    expected = {name: weight.dequantize() for name, weight in other.named_parameters()}
    assert len({weight.amax.item() for weight in other.parameters()}) == 3
    model.load_state_dict(other.state_dict())
    for name, weight in model.named_parameters():
        assert torch.equal(weight.dequantize(), expected[name]), name
