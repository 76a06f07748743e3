"""Graphs of torch.export: the forward, bit for bit, and a refusal by name where a backward is asked for."""

import pytest
import torch

import halfbyte as hb

REFUSED = (
    r"^torch\.ops\.halfbyte\.{} was given a tensor that requires a gradient.*hold the forward alone\. Run it under "
    r"torch\.no_grad\(\)"
)


@pytest.mark.parametrize(
    ("recipe", "op"), (("nvfp4", "linear_forward"), ("mxfp8", "linear_forward"), ("nvfp4_forward", "quantize_row_col"))
)
def test_a_graph_holds_the_forward_alone(recipe, op):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.SiLU(), torch.nn.Linear(48, 32))
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0))
    x = torch.randn(8, 64)
    graph: torch.nn.Module = torch.export.export(model, (x,), strict=False).module()
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))
    with pytest.raises(ValueError, match=REFUSED.format(op)):
        graph(x)


def test_what_measures_takes_parameters():
    weight = torch.nn.Parameter(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
    assert hb.ops.amax(weight) == 3
