"""Calls of a sampled layer in any order: before the first backward, with a retained graph, without tokens."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import ends
from torch import nn

import halfbyte as hb

K, N, SIZES = 32, 48, (17, 0, 15)
pytestmark = pytest.mark.filterwarnings("ignore:step 1. quantization noise")


def layer_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    recipe, state = hb.recipes.nvfp4(), hb.RunState(5)
    return (
        hb.nn.Linear(K, N, recipe=recipe, state=state)
        if kind == "linear"
        else hb.nn.GroupedLinear(len(SIZES), K, N, recipe=recipe, state=state)
    )


def inputs():
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(sum(SIZES), K, generator=g) * (1 + 9 * i), torch.randn(sum(SIZES), N, generator=g))
        for i in range(2)
    ]


def called(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return layer(x) if isinstance(layer, hb.nn.Linear) else layer(x, ends(SIZES))


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_two_calls_before_a_backward_are_those_of_two_micro_batches(kind):
    """As stages of a pipeline do it, a weight that is shared, or a sum of two losses."""
    layer = layer_of(kind)
    statistics = hb.collect_stats(nn.ModuleDict({"one": layer}))
    for x, dy in inputs():
        called(layer, x).backward(dy)
    wanted = statistics.advance()["one"]

    layer = layer_of(kind)
    statistics = hb.collect_stats(nn.ModuleDict({"one": layer}))
    outputs = [(called(layer, x), dy) for x, dy in inputs()]
    for y, dy in outputs:
        y.backward(dy)
    assert repr(statistics.advance()["one"]) == repr(wanted)  # NaN stands for what a spec does not have
    assert wanted.products["dw"].elements == 2 * N * K * (1 if kind == "linear" else 2)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_layer_that_feeds_itself_and_a_graph_that_is_kept(kind):
    layer = layer_of(kind)
    statistics = hb.collect_stats(nn.ModuleDict({"one": layer}))
    y = called(layer, inputs()[0][0])
    loss = called(layer, nn.functional.pad(y, (0, K - N))).square().sum() + y.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    calls = 4 * (1 if kind == "linear" else 2)
    assert statistics.advance()["one"].products["dw"].elements == calls * N * K


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "mxfp8", "quartet2", "nvfp4_mxfp8_bwd"])
def test_a_batch_without_tokens_adds_nothing_but_its_weight(recipe):
    layer = hb.nn.Linear(K, N, recipe=recipe, state=hb.RunState(5))
    statistics = hb.collect_stats(nn.ModuleDict({"one": layer}), every=1)
    (x, dy), _ = inputs()
    called(layer, x).backward(dy)
    wanted = statistics.advance()["one"]
    empty = called(layer, x[:0])
    empty.sum().backward()
    assert empty.shape == (0, N)
    found = statistics.advance()
    assert found["one"].tensors["w"].elements == N * K and "x" not in found["one"].tensors
    assert set(found["one"].operands) <= {"w.row", "w.col"} and str(found) and found._repr_html_()
    assert repr(found["one"].operands["w.row"]) == repr(wanted.operands["w.row"])


def test_of_two_collectors_the_later_measures_and_the_earlier_says_so():
    """As where the cell of a notebook runs again; in steps of their own both measure."""
    layer = layer_of("linear")
    model = nn.ModuleDict({"one": layer})

    def step(*collectors):
        called(layer, inputs()[0][0]).sum().backward()
        return [one.advance() for one in collectors]

    first = hb.collect_stats(model, every=3)
    second = hb.collect_stats(model, every=4)
    early, late = step(first, second)
    assert not early.layers and "a later hb.collect_stats measured it" in early.unobserved["one"]
    assert [row.name for row in late.layers] == ["one"] and not late.unobserved
    assert step(first, second) == [None, None]
    assert step(first, second)[0].layers and layer.ledger is not None  # the second one's step is next
    assert repr(step(first, second)[1]["one"]) == repr(late["one"])
    second.remove()
    assert step(first) == [None] and step(first)[0].layers and layer.ledger is None
