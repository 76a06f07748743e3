"""Every figure of a sampled step against numpy in fp64, on operands that the element-by-element oracle quantized."""

from __future__ import annotations

import dataclasses

import linear_cases
import numpy as np
import pytest
import torch
from operand_figures import figures_of, inputs, sums_of

import halfbyte as hb
from halfbyte.stats.measure import tensor_sums

SEED = 7
M, K, N = 34, 52, 40
RECIPES = {
    "nvfp4": hb.recipes.nvfp4(),
    "fresh": hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"), weight_block=(1, 16)),
    "four_over_six": hb.recipes.four_over_six(error="mse"),
    "row_scaled": hb.recipes.row_scaled(base=hb.recipes.four_over_six(base=hb.recipes.nvfp4(weight_block=(1, 16)))),
    "quartet2": hb.recipes.quartet2(backward="original"),
    "requantized": dataclasses.replace(hb.recipes.nvfp4_mxfp8_bwd(element="e5m2"), backward="dequantized"),
    "mean_split": hb.recipes.nvfp4(activation_mean="split"),
    "half": linear_cases.HALF_OF_EACH,
}


def tensors():
    """Return x, w, dy with an outlier channel each, values that underflow, and blocks whose scale does."""
    g = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((M, K), (N, K), (M, N)))
    x[:, 5] *= 200
    x[3, :16] = 1e-6  # next to channel 5 they vanish
    x[20:30, 32:48] *= 1e-7
    w[4] *= 50
    dy[:, 7] *= 300
    dy[2] = 0
    return x, w / 8, dy / 1000


def observed(recipe: hb.Recipe):
    """Return the statistics of one step of one layer, and its tensors."""
    x, w, dy = tensors()
    model = torch.nn.Sequential(hb.nn.Linear(K, N, bias=False, recipe=recipe, state=hb.RunState(SEED)))
    with torch.no_grad():
        model[0].weight.copy_(w)
    statistics = hb.collect_stats(model)
    model(x.requires_grad_()).backward(dy)
    return statistics.advance()["0"], (x.detach(), w, dy)


pytestmark = pytest.mark.filterwarnings("ignore:step 1. quantization noise")


@pytest.mark.parametrize("name", RECIPES)
def test_operands_and_products(name):
    recipe = RECIPES[name]
    layer, (x, w, dy) = observed(recipe)
    wanted = inputs(recipe, (x.numpy(), w.numpy(), dy.numpy()), SEED)
    assert set(layer.operands) == set(wanted)
    for side, (t, spec) in wanted.items():
        for figure, value in figures_of(sums_of(t, spec, side, SEED), spec).items():
            got = getattr(layer.operands[side], figure)
            assert got == pytest.approx(value, rel=2e-5, abs=1e-9, nan_ok=True), f"{side} {figure}"
    expected = linear_cases.expected(x, w, None, dy, recipe, hb.Philox(SEED))
    exact = {"y": x.double() @ w.double().T, "dx": dy.double() @ w.double(), "dw": dy.double().T @ x.double()}
    for product, reference in exact.items():
        got, value = layer.products[product], getattr(expected, product).value
        cosine = (value * reference).sum() / (value.norm() * reference.norm())
        assert got.cosine == pytest.approx(cosine.item(), abs=1e-5), product
        noise = (value - reference).norm() / reference.norm()
        assert got.noise_ratio == pytest.approx(noise.item(), rel=1e-3, abs=1e-6), product


def test_outliers_of_every_channel():
    layer, given = observed(RECIPES["nvfp4"])
    for (name, spread), t in zip(layer.tensors.items(), given, strict=True):
        array = t.double().numpy()
        beyond = np.abs(array) > 6 * np.sqrt((array**2).mean())
        assert np.array_equal(spread.channels, beyond.sum(0)), name
        assert spread.channel_shares == pytest.approx(beyond.mean(0))
        assert spread.outlier_share == pytest.approx(beyond.mean())
        assert spread.amax == np.abs(array).max()
    assert layer.tensors["x"].top_channel == 5 and layer.tensors["dy"].top_channel == 7
    assert layer.tensors["x"].outlier_share > 0.005


def test_outliers_of_bf16_are_those_beyond_a_limit_that_is_not_rounded():
    """6 times the root mean square lies between two bf16 numbers; rounded up to the greater, that is no outlier."""
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        t = torch.randn(64, 32, generator=g).bfloat16()
        t[:8] *= 4.5
        array = t.double().numpy()
        beyond = np.abs(array) > 6 * np.sqrt((array**2).mean())
        (elements, outliers), channels, _ = tensor_sums(t)
        assert (elements, outliers) == (array.size, beyond.sum()) and np.array_equal(channels, beyond.sum(0))


def test_the_cases_reach_what_they_are_about():
    layer, _ = observed(RECIPES["nvfp4"])
    x = layer.operands["x.row"]
    assert x.underflow_share > 0.1 and x.saturation_share > 0 and x.scale_underflow_share > 0
    assert 0 < observed(RECIPES["four_over_six"])[0].operands["x.row"].four_over_six_share < 1


def test_chunks_do_not_show(monkeypatch):
    whole, _ = observed(RECIPES["four_over_six"])
    monkeypatch.setattr("halfbyte.stats.measure.CHUNK_ELEMENTS", 16 * K)
    parts, _ = observed(RECIPES["four_over_six"])
    for name, one in whole.operands.items():
        sums = {key: value for key, value in dataclasses.asdict(one).items() if key not in ("name", "spec")}
        got = dataclasses.asdict(parts.operands[name])
        assert {key: got[key] for key in sums} == pytest.approx(sums, rel=1e-12, nan_ok=True), name
    assert parts.tensors == whole.tensors
