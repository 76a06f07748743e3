"""The measured figures of docs/numerics.md sections 4 and 5, within a stated tolerance on N(0, 1)."""

import dataclasses

import pytest
import torch
from strategies import EDEN, HEADROOM

import halfbyte as hb
from halfbyte import reference
from halfbyte.layout import Operand
from halfbyte.reference import hadamard

MANY = (0.875, 1.0, 1.25, 1.5)


def gaussian(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def spec_of(error: str | None, block: tuple[int, int], candidates=(1.0, 1.5)) -> hb.NVFP4:
    if error is None:
        return hb.NVFP4(block=block)
    return hb.NVFP4(block=block, scaling=hb.FourOverSix(error=error, candidates=candidates), e4m3_max=256.0)


@pytest.mark.parametrize(
    "error, candidates, row, tile",
    [
        (None, (), 9.04e-3, 12.40e-3),
        ("mse", (1.0, 1.5), 7.57e-3, 12.39e-3),
        ("mse", MANY, 7.26e-3, 11.64e-3),
        ("mae", (1.0, 1.5), 7.79e-3, 12.39e-3),
        ("mae", MANY, 7.66e-3, 11.78e-3),
    ],
)
def test_relative_mse(error, candidates, row, tile):
    x = gaussian(1024, 1024)
    for block, expected in (((1, 16), row), ((16, 16), tile)):
        d = hb.quantize(x, spec_of(error, block, candidates)).dequantize(torch.float32) - x
        assert float(d.square().mean()) == pytest.approx(expected, rel=0.01)


def draws(x: torch.Tensor, spec: hb.NVFP4, count: int, seed: int = 1) -> torch.Tensor:
    """Return `count` stochastic roundings of one row [K], as [count, K]; every row of one call draws other bits."""
    return hb.quantize(x.expand(count, -1), spec, rng=hb.Philox(seed)).dequantize(torch.float32)


def test_the_error_of_the_mean_falls_by_four_from_64_to_1024_draws():
    x = gaussian(1, 1024)
    spec = hb.NVFP4(rounding="stochastic", fp4_max=HEADROOM)
    values = draws(x, spec, 1024).double()
    few = (values.unflatten(0, (16, 64)).mean(1) - x).square().mean().sqrt()
    many = (values.mean(0) - x).square().mean().sqrt()
    assert 3.6 < few / many < 4.2
    nearest = hb.quantize(x, hb.NVFP4(fp4_max=HEADROOM)).dequantize(torch.float32) - x
    assert many < nearest.square().mean().sqrt() / 5


def slope(spec: hb.NVFP4) -> float:
    x = gaussian(1024, 1024, 2)
    q = hb.quantize(x, spec, rng=hb.Philox(4)).dequantize(torch.float32)
    return float((q.double() * x).sum() / x.double().square().sum())


def test_slopes():
    assert slope(hb.NVFP4(rounding="stochastic")) == pytest.approx(0.9960, abs=4e-4)
    assert slope(hb.NVFP4(rounding="stochastic", fp4_max=HEADROOM)) == pytest.approx(0.9993, abs=4e-4)
    assert slope(hb.NVFP4(rounding="toward_zero")) < 0.9


def relative_mse(x: torch.Tensor, spec: hb.NVFP4) -> float:
    q = hb.quantize(x, spec, rng=hb.Philox(5)).dequantize(torch.float32)
    return float((q - x).square().mean() / x.square().mean())


def test_eden_has_half_the_error_of_stochastic_rounding_and_no_bias():
    x = gaussian(2048, 2048, 2)
    assert relative_mse(x, EDEN) == pytest.approx(9.33e-3, rel=0.005)
    assert relative_mse(x[:512], hb.NVFP4(rounding="stochastic")) == pytest.approx(18.9e-3, rel=0.01)
    assert relative_mse(x[:512], hb.NVFP4(rounding="stochastic", fp4_max=HEADROOM)) == pytest.approx(23.5e-3, rel=0.01)
    q = hb.quantize(x, EDEN, rng=hb.Philox(4)).dequantize(torch.float32)
    assert float((q.double() * x).sum() / x.double().square().sum()) == pytest.approx(1, abs=2e-4)


def hadamard_matrix(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / size**0.5


def turned_back(x: torch.Tensor, spec: hb.NVFP4) -> torch.Tensor:
    """Return what 256 draws leave of x, in its own directions: [256, *x.shape], fp64."""
    values = []
    for place in (hb.Philox(8, i) for i in range(256)):
        q = hb.quantize(x.float(), spec, rng=place, sign_rng=place)
        rotated = reference.dequantize(Operand(q.blocks, spec, 128)).double()
        signs = hadamard.signs(spec.rotation, place.on(x.device), x.device)
        values.append(rotated @ hadamard_matrix(128) * signs)
    return torch.stack(values)


def test_rotated_with_fresh_signs_eden_is_unbiased_on_data_with_outliers():
    """The error of the mean falls by almost four from 16 to 256 draws; with fixed signs a bias stays."""
    x = (gaussian(4, 128, 6) * 1.5).sinh()
    x[:, 3] += 8

    def fall(rotation: hb.Hadamard) -> float:
        means = turned_back(x, dataclasses.replace(EDEN, rotation=rotation)).unflatten(0, (16, 16)).mean(1)
        return float((means - x).square().mean().sqrt() / (means.mean(0) - x).square().mean().sqrt())

    assert 3.5 < fall(hb.Hadamard(size=128, signs="fresh")) < 4.5
    assert fall(hb.Hadamard(size=128)) < 1.2


@pytest.mark.parametrize(
    ("spec", "largest", "slope", "spread"),
    [
        (EDEN, 100.0, 1.31, 0.02),
        (EDEN, 30.0, 1.008, 0.007),
        (hb.NVFP4(rounding="stochastic", fp4_max=HEADROOM), 100.0, 1.0, 0.02),
    ],
    ids=["eden-100", "eden-30", "stochastic-100"],
)
def test_behind_signs_one_element_alone_leaves_eden_biased(spec, largest, slope, spread):
    """The others of its group come out larger than they are; stochastic rounding has no such bias."""
    x = gaussian(8, 128, 9).bfloat16().double()
    x[:, 3] = largest
    rotated = dataclasses.replace(spec, rotation=hb.Hadamard(size=128, signs="fresh"))
    mean, others = turned_back(x, rotated).mean(0), torch.arange(128) != 3
    found = float((mean * x)[:, others].sum() / x.square()[:, others].sum())
    assert found == pytest.approx(slope, abs=spread)


def test_headroom_costs_a_quarter_more_variance():
    x = gaussian(512, 1024, 3)
    errors = [
        (hb.quantize(x, hb.NVFP4(rounding="stochastic", fp4_max=m), rng=hb.Philox(1)).dequantize() - x).square().mean()
        for m in (6.0, HEADROOM)
    ]
    assert float(errors[1] / errors[0]) == pytest.approx(1.25, abs=0.02)


@pytest.mark.parametrize("value", [0.2, 0.8, 1.1, 2.3, 3.7, 5.9])
def test_unbiased_up_to_the_truncation_of_eight_bits(value):
    """The mean of one value is value - step / 512 within four standard errors."""
    x = torch.full((4096, 256), value)
    x[:, ::16] = 6.0
    drawn = hb.quantize(x, hb.NVFP4(rounding="stochastic"), rng=hb.Philox(7), amax=torch.tensor(2688.0)).dequantize()
    sample = drawn.view(-1, 16)[:, 1:].double()
    step = 2.0 if value >= 4 else 1.0 if value >= 2 else 0.5
    error = sample.std() / sample.numel() ** 0.5
    low = step * ((value / step * 256) % 1) / 256  # what the comparison with k / 256 drops
    assert abs(sample.mean() - (torch.tensor(value).double() - low)) < 4 * error
    assert low < step / 256


def test_neighbouring_draws_are_uncorrelated():
    x = torch.full((2048, 256), 1.25)
    x[:, ::16] = 6.0
    drawn = hb.quantize(x, hb.NVFP4(rounding="stochastic"), rng=hb.Philox(2), amax=torch.tensor(2688.0)).dequantize()
    centred = (drawn.view(-1, 16)[:, 1:].double() - 1.25) / 0.25
    n = centred.shape[0]
    within = (centred.T @ centred / n).fill_diagonal_(0).abs().max()
    assert within < 6 / n**0.5
    assert abs((centred[1:] * centred[:-1]).mean()) < 6 / centred.numel() ** 0.5
