"""Checks that are made once for calls that look alike: one that looks otherwise is refused as if it came first."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.functional import grouped_checks, request
from halfbyte.functional.weights import cacheable, quantize_weight

E, N, K, M = 3, 32, 32, 16


def good() -> dict[str, Any]:
    return {
        "x": torch.zeros(M, K),
        "w_ENK": torch.zeros(E, N, K),
        "offsets": torch.tensor([4, 9, M], dtype=torch.int32),
        "bias_EN": torch.zeros(E, N),
        "main_grad": torch.zeros(E, N, K),
        "out_dtype": torch.float32,
    }


BAD: dict[str, tuple[str, Any]] = {
    "x of three dimensions": ("x", torch.zeros(2, M, K)),
    "x of another width": ("x", torch.zeros(M, K + 16)),
    "x of another dtype": ("x", torch.zeros(M, K, dtype=torch.bfloat16)),
    "weights of another width": ("w_ENK", torch.zeros(E, N, K + 16)),
    "weights of another dtype": ("w_ENK", torch.zeros(E, N, K, dtype=torch.bfloat16)),
    "weights elsewhere": ("w_ENK", torch.zeros(E, N, K, device="meta")),
    "weights in codes": ("w_ENK", hb.quantize(torch.zeros(N, K), hb.NVFP4())),
    "fewer groups": ("offsets", torch.tensor([4, M], dtype=torch.int32)),
    "ends as floats": ("offsets", torch.tensor([4.0, 9.0, M])),
    "ends as a list": ("offsets", [4, 9, M]),
    "ends elsewhere": ("offsets", torch.zeros(E, dtype=torch.int32, device="meta")),
    "bias of another shape": ("bias_EN", torch.zeros(E, N + 1)),
    "bias of ints": ("bias_EN", torch.zeros(E, N, dtype=torch.int32)),
    "main_grad in bf16": ("main_grad", torch.zeros(E, N, K, dtype=torch.bfloat16)),
    "main_grad of another shape": ("main_grad", torch.zeros(E, N, K + 16)),
    "main_grad of shared memory": ("main_grad", torch.zeros(1, 1, 1).expand(E, N, K)),
    "ints out": ("out_dtype", torch.int32),
}


def refusal(arguments: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError)) as error:
        hb.grouped_linear(**arguments, recipe="nvfp4", rng=hb.Philox(1))
    return error.type, re.sub(r"0x[0-9a-f]+", "", str(error.value))


@pytest.mark.parametrize("what", BAD)
def test_experts_are_refused_behind_a_call_that_passed(monkeypatch, what):
    monkeypatch.setattr(grouped_checks, "_CHECKED", set())
    name, value = BAD[what]
    first = refusal({**good(), name: value})
    for _ in range(2):
        hb.grouped_linear(**good(), recipe="nvfp4", rng=hb.Philox(1))
        assert grouped_checks._CHECKED
        assert refusal({**good(), name: value}) == first


def test_weights_of_another_dtype_pass_only_where_their_operands_are_cached(monkeypatch):
    """What covers a weight is no property of the weight."""
    monkeypatch.setattr(grouped_checks, "_CHECKED", set())
    layer = hb.nn.GroupedLinear(E, K, N, recipe="nvfp4_forward", state=hb.RunState(1))
    x, offsets = torch.zeros(M, K, dtype=torch.bfloat16), good()["offsets"]
    for _ in range(2):
        with pytest.raises(TypeError, match="cast one of them"):
            layer(x, offsets)
        layer(x.float(), offsets)


@pytest.mark.parametrize("limit", [2])
def test_what_passed_is_forgotten_some_day(monkeypatch, limit):
    monkeypatch.setattr(grouped_checks, "_CHECKED", set())
    monkeypatch.setattr(grouped_checks, "_MAX_CHECKED", limit)
    for rows in range(16, 22):
        offsets = torch.tensor([4, 9, rows], dtype=torch.int32)
        hb.grouped_linear(**{**good(), "x": torch.zeros(rows, K), "offsets": offsets}, recipe="nvfp4", rng=hb.Philox(1))
        assert len(grouped_checks._CHECKED) <= limit


def layer_of(**more: Any) -> hb.nn.Linear:
    return hb.nn.Linear(K, N, recipe="nvfp4", state=hb.RunState(1), **more)


CHANGES = {
    "the weight's dtype": lambda layer: layer.weight.data.to(torch.bfloat16),
    "the weight's width": lambda layer: torch.zeros(N, K + 16),
    "the weight's device": lambda layer: torch.zeros(N, K, device="meta"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_layer_whose_weight_was_replaced(monkeypatch, what):
    monkeypatch.setattr(request, "_CHECKED", {})
    layer, x = layer_of(), torch.zeros(M, K)
    layer(x), layer(x)
    kept, layer.weight = layer.weight, torch.nn.Parameter(CHANGES[what](layer))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            layer(x)
    layer.weight = kept
    layer(x)


def test_a_main_grad_of_shared_memory_is_refused_behind_one_that_passed(monkeypatch):
    monkeypatch.setattr(request, "_CHECKED", {})
    tensors = torch.zeros(M, K), torch.zeros(N, K)
    for _ in range(2):
        hb.linear(*tensors, recipe="nvfp4", rng=hb.Philox(1), main_grad=torch.zeros(N, K))
        with pytest.raises(ValueError, match=r"main_grad.stride\(\)=\(0, 0\): elements share memory"):
            hb.linear(*tensors, recipe="nvfp4", rng=hb.Philox(1), main_grad=torch.zeros(1, 1).expand(N, K))


def test_a_weight_of_which_codes_are_all_that_is_read_may_have_another_dtype():
    """Those of fprop, where the backward takes its values from them."""
    recipe = hb.recipes.nvfp4_forward(backward="dequantized")
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(N, K, generator=generator), torch.randn(M, K, generator=generator).bfloat16()
    codes = quantize_weight(w, cacheable(recipe), torch.bfloat16)
    assert torch.equal(hb.linear(x, w, recipe=recipe, cached_weight=codes), hb.linear(x, w.bfloat16(), recipe=recipe))
    with pytest.raises(TypeError, match="cast one of them"):
        hb.linear(x, w, recipe=recipe)


def changed_in_place(y: Tensor) -> Tensor:
    return y.mul_(2)


@pytest.mark.parametrize("shape", [(K,), (M, K), (2, 8, K), (2, 2, 4, K), (0, 8, K)])
@pytest.mark.parametrize("count", [1, 2])
def test_outputs_have_the_shape_of_x_and_may_be_changed_in_place(shape, count):
    layers = [layer_of(bias=False) for _ in range(count)]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    outputs = hb.nn.forward_shared(x, layers)
    flat = [t.detach().clone() for t in hb.nn.forward_shared(x.detach().reshape(-1, K), layers)]
    for y, rows in zip(outputs, flat, strict=True):
        assert y.shape == (*shape[:-1], N) and y.is_contiguous() and torch.equal(y.detach().reshape(-1, N), rows)
    before = [y.detach().clone() for y in outputs]
    sum(changed_in_place(y).sum() for y in outputs).backward()
    assert all(torch.equal(y.detach(), 2 * b) for y, b in zip(outputs, before, strict=True))
    assert x.grad is not None and x.grad.shape == shape and x.grad.is_contiguous()


def test_nothing_is_differentiated_through_an_output_in_the_wrong_order():
    """Outputs are no views, and what the backward reads is none of them: a change in place changes no gradient."""
    layer, x = layer_of(bias=False), torch.randn(2, 8, K)
    gradients = []
    for change in (lambda y: y, changed_in_place):
        x.grad = None
        x.requires_grad_()
        y = layer(x)
        scale = 1.0 if change is changed_in_place else 2.0
        change(y).backward(torch.full_like(y, scale))
        gradients.append(x.grad.clone())
    assert torch.equal(*gradients)
