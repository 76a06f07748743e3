"""Layers that something calls by another way than the module that was converted."""

import warnings

import pytest
import torch
from torch import nn

import halfbyte as hb

NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


def test_a_layer_put_into_torchs_encoder_by_hand_is_called_in_eval_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True).eval()
    for name in ("linear1", "linear2"):
        setattr(layer, name, hb.nn.Linear.from_linear(getattr(layer, name), "nvfp4_forward"))
    hb.set_recipe_(layer, "nvfp4_forward")
    x, seen = torch.randn(2, 16, 32), []
    for one in (layer.linear1, layer.linear2):
        forward = one.forward
        one.forward = lambda x, forward=forward, one=one: (seen.append(one), forward(x))[1]
    with torch.no_grad():
        layer(x)
    assert seen == [layer.linear1, layer.linear2]


class Held(nn.Module):
    """Calls its layers by what it keeps of them outside of its modules."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.order = {
            "list": [self.a, self.b],
            "tuple": (self.a,),
            "dict": {"first": self.a},
            "method": self.a.forward,
            "none": [torch.nn.functional.relu, "a", 3],
            "modules": nn.ModuleList([self.a]),
        }[how]


@pytest.mark.parametrize("how", ["list", "tuple", "dict", "method"])
def test_layers_that_are_held_elsewhere_too_are_named(how):
    model = nn.Sequential(Held(how))
    with pytest.warns(UserWarning, match=r"0\.a in 0\.order.*: held there as it was before.*ModuleList"):
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)


@pytest.mark.parametrize("how", ["none", "modules"])
def test_layers_that_are_held_nowhere_else_are_not(how):
    model = nn.Sequential(Held(how))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
