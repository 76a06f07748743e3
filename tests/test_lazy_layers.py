"""Lazy layers of torch: they have no shape before their first input."""

import pytest
import torch
from torch import nn

import halfbyte as hb


@pytest.mark.parametrize("lazy", [nn.LazyLinear(16), nn.LazyConv1d(16, 3)])
def test_a_lazy_layer_without_a_shape_is_refused_before_anything_changes(lazy):
    """torch's own error came after other layers had been converted."""
    model, state = nn.Sequential(nn.Linear(32, 32), lazy), hb.RunState(0)
    with pytest.raises(ValueError, match=r"1\.weight, 1\.bias not initialized.*run one forward first"):
        hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=state)
    assert type(model[0]) is nn.Linear and state.state_dict()["streams"] == 0
    model[1](torch.ones(4, 32, 32))
    assert "0" in hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=state).converted
