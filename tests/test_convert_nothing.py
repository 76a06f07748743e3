"""quantize_ that converts nothing says so, and why; what was asked for on purpose is no mistake."""

from __future__ import annotations

import functools

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn

import halfbyte as hb


def snapshot(model: nn.Module) -> dict:
    return {name: (type(m), id(m)) for name, m in model.named_modules()}


def hooked(model: nn.Module) -> nn.Module:
    """Do what accelerate's add_hook_to_module does to every module with parameters."""
    for module in model.modules():
        if module._parameters:
            module._old_forward = module.forward
            module.forward = functools.update_wrapper(functools.partial(type(module).forward, module), module.forward)
    return model


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3), nn.MultiheadAttention(16, 2))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: hooked(decoder(2)), {}, ["15 x its forward was replaced on the instance", "layers.0.attn.q_proj"]),
        (lambda: decoder(2), {"filter_fn": lambda module, name: "nothing" in name}, ["of 15", "15 x filter_fn"]),
        (lambda: decoder(1), {"keep": hb.Keep(names=("*",))}, ["8 x kept: name matches '*'"]),
        (
            lambda: decoder(2),
            {"keep": hb.Keep(names=("*lm_head",), first_blocks=1, last_fraction=1.0)},
            ["1 x kept: name matches '*lm_head'", "7 x kept: first 1 of 2 blocks", "7 x kept: last 1 of 2 blocks"],
        ),
        (
            lambda: decoder(1),
            {"rules": {"layers*": None}},
            ["7 x rule 'layers*'", "1 x kept: name matches '*lm_head' (lm_head)"],
        ),
        (convolution, {}, ["1 x NonDynamicallyQuantizableLinear is a subclass", "2 x Conv1d (0, 1)"]),
        (lambda: convolution()[:2], {}, ["no torch.nn.Linear", "2 x Conv1d (0, 1)"]),
    ],
)
def test_nothing_converted_is_an_error_with_the_reasons_by_count(make, options, words):
    model, state = make(), hb.RunState(0)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"model={type(model).__name__}: ") as caught:
        hb.quantize_(model, "nvfp4", state=state, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert snapshot(model) == before and state.state_dict()["streams"] == 0


def test_a_second_call_may_convert_nothing():
    model = decoder(3)
    first = hb.quantize_(model, "nvfp4")
    for options in ({}, {"filter_fn": lambda module, name: False}):
        again = hb.quantize_(model, "nvfp4", **options)
        assert again.converted == () and again.state is first.state
    assert hb.quantize_(nn.Sequential(hb.nn.Linear(16, 16)), "nvfp4").converted == ()


@pytest.mark.parametrize("rules", [{"*": None}, {"layers*": None, "lm_head": None}])
def test_rules_may_say_none_to_every_layer(rules):
    model = nn.ModuleDict({"model": decoder(2)})["model"]
    before = snapshot(model)
    report = hb.quantize_(model, "nvfp4", rules=rules)
    assert report.converted == () and len(report.kept) == 15 and snapshot(model) == before
    with_attention = nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    assert hb.quantize_(with_attention, "nvfp4", rules={"0": None}).converted == ()


def test_hooks_of_one_layer_leave_the_others_to_convert():
    model = decoder(2)
    hooked(model.layers[0].mlp)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert len(report.converted) == 12 and sum("replaced on the instance" in w for w in report.kept.values()) == 3
    model(TOKENS).sum().backward()


def test_the_share_counts_every_matrix_that_is_multiplied_once():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 16))
            self.pos_embedding, self.bias = nn.Parameter(torch.ones(9, 16)), nn.Parameter(torch.ones(16))

    model = decoder(1)
    model.lm_head.weight = model.embed_tokens.weight  # [11, 16]: a product, and a lookup
    model.experts, model.router = nn.Module(), Router()
    model.experts.up = nn.Parameter(torch.ones(4, 32, 16))
    model.experts.down = model.experts.up  # held twice
    model.again = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    model.again[1].weight = model.again[0].weight
    linear = 4 * 16 * 16 + 3 * 16 * 32
    total = linear + 11 * 16 + 4 * 32 * 16 + 4 * 16 + 16 * 16
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("@heads",), last_fraction=0))
    assert report.weights == (linear + 16 * 16, total) and report.share == (linear + 16 * 16) / total
    assert str(report).splitlines()[-1] == (
        f"9 of 10 linear layers converted, {100 * (linear + 256) / total:.1f} % of all weights of the model that are "
        "multiplied"
    )


def test_the_last_tenth_of_a_percent_is_not_rounded_away():
    model = nn.Sequential(nn.Linear(256, 256), nn.Conv1d(2, 2, 4))
    assert "converted, 99.9 % of all weights" in str(hb.quantize_(model, "nvfp4"))
    assert "converted, 100.0 % of their weights" in str(hb.quantize_(nn.Sequential(nn.Linear(256, 256)), "nvfp4"))
