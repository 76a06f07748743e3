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
