"""Every figure of a sampled step against numpy in fp64, on operands that the element-by-element oracle quantized."""

from __future__ import annotations

import dataclasses
import math

import linear_cases
import numpy as np
import oracle
import pytest
import torch

import halfbyte as hb

SEED = 7
M, K, N = 34, 52, 40
STREAMS = {"x": 0, "w": 2, "dy": 4}
SIGNS = {"x.row": 6, "w.row": 6, "dy.row": 7, "w.col": 7, "dy.col": 8, "x.col": 8}
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


def values(t: np.ndarray, spec, name: str, signs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return v and q, fp64 [rows, padded], and the scale bytes."""
    offset = STREAMS[name.partition(".")[0]] + name.endswith("col")
    place, sign_place = oracle.Place(SEED, offset), oracle.Place(SEED, signs)
    padded = np.pad(t, ((0, 0), (0, -t.shape[1] % spec.alignment)))
    if spec.format.has_amax:
        result = oracle.quantize(t, spec, place, sign_place)
        q = oracle.dequantize(result, spec).astype(np.float64)
        v = np.array(oracle.rotated(t, spec.rotation, sign_place), np.float64)
        v = np.pad(v, ((0, 0), (0, q.shape[1] - v.shape[1])))
    else:
        result, v = oracle.quantize_mxfp8(t, spec.element), padded.astype(np.float64)
        top = np.array(oracle.FP8[spec.element])
        codes, scales = np.array(result.codes), np.array(result.scales)
        q = np.where(codes >= 128, -1, 1) * top[codes % 128] * np.repeat(2.0 ** (scales - 127), 32, axis=1)
    return v, q, np.array(result.scales)


def standard_scales(t: np.ndarray, spec, signs: int) -> np.ndarray:
    """Return the scale bytes that the only candidate 1 gives."""
    plain = dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, candidates=(1.0,)))
    return np.array(oracle.quantize(t, plain, sign_place=oracle.Place(SEED, signs)).scales)


def limits(t: np.ndarray, spec, scales: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the largest magnitude that each element's block can hold."""
    if not spec.format.has_amax:
        return np.repeat(2.0 ** (scales - 127.0), 32, axis=1) * spec.format.element.max
    amax = np.abs(v).max(axis=1, keepdims=True) if spec.has_row_amax else np.abs(v).max()
    scale = np.vectorize(lambda byte: float(oracle.e4m3_value(byte)))(scales)
    return np.repeat(scale, 16, axis=1) * 6 * amax / (spec.e4m3_max * spec.fp4_max)


def figures(t: np.ndarray, spec, name: str) -> dict[str, float]:
    """Return what one operand should show."""
    signs = SIGNS[name]
    v, q, scales = values(t, spec, name, signs)
    d, block = q - v, spec.block_length
    maxima = np.abs(v).reshape(v.shape[0], -1, block).max(2)
    beyond = (np.abs(v) > 1.001 * limits(t, spec, scales, v)) & (np.repeat(scales, block, axis=1) != 0)
    found = {
        "amax": np.abs(v).max(),
        "snr_db": 10 * math.log10((v**2).sum() / (d**2).sum()),
        "relative_error": np.abs(d).sum() / np.abs(v).sum(),
        "underflow_share": ((v != 0) & (q == 0)).sum() / (v != 0).sum(),
        "saturation_share": beyond.sum() / (v != 0).sum(),
        "scale_underflow_share": ((maxima > 0) & (scales == 0)).sum() / (maxima > 0).sum(),
        "four_over_six_share": math.nan,
        "rht_gain_db": math.nan,
    }
    tries = isinstance(getattr(spec, "scaling", None), hb.FourOverSix)
    if tries:
        changed = (scales != standard_scales(t, spec, signs)) & (maxima > 0)
        found["four_over_six_share"] = changed.sum() / (maxima > 0).sum()
    if spec.format.has_amax and not spec.is_tile and (tries or not spec.tries_candidates):
        other = dataclasses.replace(spec, rotation=None if spec.rotation else hb.Hadamard())
        w, r, _ = values(t, other, name, signs)
        noises = (d**2).sum(), ((r - w) ** 2).sum()
        without, rotated = noises[::-1] if spec.rotation else noises
        found["rht_gain_db"] = 10 * math.log10(without / rotated)
    return found


def inputs(recipe: hb.Recipe, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, tuple[np.ndarray, object]]:
    """Return what is quantized as each operand, and how."""
    gemms = [getattr(recipe, name) or hb.GemmSpec() for name in ("fprop", "dgrad", "wgrad")]
    names = ("x.row", "w.row", "dy.row", "w.col", "dy.col", "x.col")
    specs = dict(zip(names, (spec for gemm in gemms for spec in (gemm.a, gemm.b)), strict=True))
    if recipe.activation_mean == "split":
        x = x - oracle.token_mean(x)
    of = {"x": x, "w": w, "dy": dy}
    found = {name: (of[name[:-4]] if name.endswith("row") else of[name[:-4]].T, spec) for name, spec in specs.items()}
    if recipe.backward == "dequantized":
        for name in ("x", "w"):
            t, spec = found[f"{name}.row"]
            q = values(t, spec, f"{name}.row", 6)[1][:, : t.shape[1]].astype(np.float32)
            found[f"{name}.col"] = q.T, specs[f"{name}.col"]
    return {name: (t, spec) for name, (t, spec) in found.items() if spec is not None}


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
    wanted = inputs(recipe, x.numpy(), w.numpy(), dy.numpy())
    assert set(layer.operands) == set(wanted)
    for side, (t, spec) in wanted.items():
        for figure, value in figures(t, spec, side).items():
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
