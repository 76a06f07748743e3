"""Statistics of operands that are quantized with amaxes of earlier steps: with these, not with their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import torch
from delayed_follower import NAMES, SEED, SIGNS, Follower
from grouped_cases import ends, slices
from torch import nn

import halfbyte as hb

K, N = 40, 24
SIZES = ((7, 5, 0), (3, 9, 0), (6, 0, 4), (2, 8, 5))
"""Of experts in each step: in the last one some have amaxes and the third has none for dy yet that it could use."""
SCALES = (1.0, 1.0, 1.0, 30.0)
RECIPES = {
    "nvfp4": hb.recipes.delayed_amax(),
    "margin": hb.recipes.delayed_amax(margin=1.5, base=hb.recipes.nvfp4(weight_block=(1, 16))),
    "requantized": hb.recipes.delayed_amax(
        base=dataclasses.replace(hb.recipes.nvfp4_mxfp8_bwd(), backward="dequantized")
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:step .*quantization noise")


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and dy, which are larger in the last step than in those that measured."""
    g = torch.Generator().manual_seed(step)
    return (torch.randn(rows, K, generator=g) * SCALES[step]), (torch.randn(rows, N, generator=g) * SCALES[step])


def noise_and_clipped(follower: Follower, name: str, t: np.ndarray, position: int) -> tuple[float, float, float]:
    """Return sums of v² and (q − v)² in fp64, and how many values lie beyond their blocks, of the oracle's bytes."""
    spec, signs = follower.specs[name], oracle.Place(follower.seed, (position << 32) + SIGNS[name])
    result = follower.expected(name, t, position)
    q = oracle.dequantize(result, spec).astype(np.float64)
    v = t if spec.rotation is None else np.array(oracle.rotated(t, spec.rotation, signs))
    v = np.pad(v.astype(np.float64), ((0, 0), (0, q.shape[1] - v.shape[1])))
    scales = np.vectorize(lambda byte: float(oracle.e4m3_value(byte)))(np.array(result.scales))
    amax = np.array(result.amax, dtype=np.float64).reshape(-1, 1)
    top = np.repeat(scales, 16, axis=1) * 6 * amax / (spec.e4m3_max * spec.fp4_max)
    return (v**2).sum(), ((q - v) ** 2).sum(), ((np.abs(v) > 1.001 * top) & (top > 0)).sum()


def assert_ratio(product, got: torch.Tensor, wanted: torch.Tensor) -> None:
    noise = (got.double() - wanted).norm() / wanted.norm()
    assert product.noise_ratio == pytest.approx(noise.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nvfp4", "alone"), ("nvfp4", "shared"), ("nvfp4", "compiled"), ("margin", "alone"), ("requantized", "alone")],
)
def test_a_layer_is_measured_with_the_amaxes_that_it_used(name, kind):
    recipe, state = RECIPES[name], hb.RunState(SEED)
    torch.manual_seed(0)
    layers = [hb.nn.Linear(K, N, bias=False, recipe=recipe, state=state) for _ in range(1 + (kind == "shared"))]
    model = nn.ModuleList(layers)
    run = torch.compile(layers[0], backend="aot_eager") if kind == "compiled" else layers[0]
    statistics, follower = hb.collect_stats(model, every=1), Follower(recipe)
    for step in range(len(SCALES)):
        state.begin_step(model)
        follower.begin()
        x, dy = batch(step, 18)
        x.requires_grad_()
        outputs = hb.nn.forward_shared(x, layers) if kind == "shared" else [run(x)]
        sum((y * dy).sum() for y in outputs).backward()
        tensors = {"x": x.detach(), "dy": dy}
        sums = {}
        for key in NAMES:
            letter, side = key.split(".")
            t = tensors[letter] if side == "row" else tensors[letter].T.contiguous()
            if step < 2:  # nothing is held yet
                follower.note(key, t.numpy(), step)
            elif (spec := follower.specs[key]) is not None and spec.format.has_amax:
                sums[key] = noise_and_clipped(follower, key, t.numpy(), step)
        w, dw = layers[0].weight.detach().double(), layers[0].weight.grad
        state.advance()
        found = statistics.advance()["0"]
        for key, (signal, noise, clipped) in sums.items():
            one = found.operands[key]
            assert (one.signal, one.noise) == pytest.approx((signal, noise), rel=2e-5), (step, key)
            assert one.saturated == clipped, (step, key)
        assert_ratio(found.products["y"], outputs[0].detach(), x.detach().double() @ w.T)
        assert_ratio(found.products["dw"], dw, dy.double().T @ x.detach().double())
        if kind != "shared":  # there dx is the sum of both
            assert_ratio(found.products["dx"], x.grad, dy.double() @ w)
        model.zero_grad()
    assert found.operands["x.row"].saturation_share > 0.5 and found.products["y"].noise_ratio > 0.8


def test_experts_are_measured_with_the_amaxes_that_they_used():
    recipe, state, experts = hb.recipes.delayed_amax(), hb.RunState(SEED), len(SIZES[0])
    torch.manual_seed(0)
    layer = hb.nn.GroupedLinear(experts, K, N, recipe=recipe, state=state)
    statistics, clipped = hb.collect_stats(nn.ModuleDict({"experts": layer}), every=1), {}
    for step, sizes in enumerate(SIZES):
        state.begin_step(layer)
        x, dy = batch(step, sum(sizes))
        x.requires_grad_()
        y = layer(x, ends(sizes))
        y.backward(dy)
        state.advance()
        found = statistics.advance()["experts"]
        for g, rows in enumerate(slices(sizes)):
            if not sizes[g]:
                continue
            w, a, b = (t.detach().double() for t in (layer.weight[g], x[rows], dy[rows]))
            products = found.experts[g].products
            assert_ratio(products["y"], y[rows].detach(), a @ w.T)
            assert_ratio(products["dx"], x.grad[rows], b @ w)
            assert_ratio(products["dw"], layer.weight.grad[g], b.T @ a)
            clipped[step, g] = products["y"].noise_ratio > 0.8
        layer.zero_grad()
    assert clipped[3, 0] and clipped[3, 1] and not clipped[3, 2], "the third expert has its own"
