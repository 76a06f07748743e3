"""Recipes of every kind, and what a linear layer should return: each operand quantized apart, products in fp64."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import oracle
import torch
from torch import Tensor
from torch.nn.functional import pad

import halfbyte as hb
from halfbyte import recipes

# The documented streams of one linear: an operand takes two (row, then col), and each GEMM has its signs.
X, W, DY, FPROP_SIGNS, DGRAD_SIGNS, WGRAD_SIGNS = 0, 2, 4, 6, 7, 8


HEADROOM = 6 * 16 / 17  # fp4_max that leaves stochastic rounding room above the block maximum


def _fresh(size: int) -> hb.NVFP4:
    return hb.NVFP4(rotation=hb.Hadamard(size=size, signs="fresh"))


ROTATED_EVERYWHERE = hb.Recipe(
    fprop=hb.GemmSpec(a=_fresh(32), b=_fresh(32)),
    dgrad=hb.GemmSpec(a=dataclasses.replace(_fresh(64), rounding="stochastic"), b=_fresh(64)),
    wgrad=hb.GemmSpec(a=dataclasses.replace(_fresh(128), rounding="stochastic"), b=_fresh(128)),
)
HALF_OF_EACH = hb.Recipe(
    fprop=hb.GemmSpec(a=hb.NVFP4(outer="row")),
    dgrad=hb.GemmSpec(b=hb.NVFP4(block=(16, 16))),
    wgrad=hb.GemmSpec(a=hb.MXFP8(element="e5m2")),
)
STOCHASTIC_TILES = hb.Recipe(
    fprop=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(block=(16, 16), rounding="stochastic")),
    dgrad=hb.GemmSpec(a=hb.NVFP4(rounding="stochastic"), b=hb.NVFP4(block=(16, 16), rounding="stochastic")),
)
OTHER_TILES = hb.Recipe(
    fprop=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(block=(16, 16))),
    dgrad=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(block=(16, 16), e4m3_max=256.0)),
)

RECIPES: dict[str, hb.Recipe] = {
    **{name: preset() for name, preset in recipes.PRESETS.items()},
    "row_scaled": recipes.nvfp4(activation_outer="row"),
    "no_sr": recipes.nvfp4(stochastic_rounding=False),
    "no_rht": recipes.nvfp4(hadamard=None),
    "no_tiles": recipes.nvfp4(weight_block=(1, 16)),
    "bare": recipes.nvfp4(stochastic_rounding=False, hadamard=None, weight_block=(1, 16)),
    "headroom": recipes.nvfp4(fp4_max_gradient=HEADROOM),
    **{f"fresh{n}": recipes.nvfp4(hadamard=hb.Hadamard(size=n, signs="fresh")) for n in (16, 32, 64, 128)},
    "fixed128": recipes.nvfp4(hadamard=hb.Hadamard(size=128)),
    "4over6_weights": recipes.four_over_six(scope="weights", error="mse"),
    "4over6_activations": recipes.four_over_six(scope="activations", error_math="scaled"),
    "mxfp8_bwd_e5m2": recipes.nvfp4_mxfp8_bwd(element="e5m2"),
    "mxfp8_e5m2": recipes.mxfp8(element="e5m2"),
    "forward_row": recipes.nvfp4_forward(activation_outer="row"),
    "dequantized": recipes.nvfp4_forward(backward="dequantized"),
    "dequantized_row": recipes.nvfp4_forward(activation_outer="row", backward="dequantized"),
    "mean_split": recipes.nvfp4(activation_mean="split"),
    "requantized": dataclasses.replace(
        recipes.nvfp4(activation_outer="row", hadamard=hb.Hadamard(size=64, signs="fresh")), backward="dequantized"
    ),
    "rotated_everywhere": ROTATED_EVERYWHERE,
    "half_of_each": HALF_OF_EACH,
    "stochastic_tiles": STOCHASTIC_TILES,
    "other_tiles": OTHER_TILES,
}

VARIANTS: dict[str, hb.Recipe] = {
    "quartet2_original": recipes.quartet2(backward="original"),
    "row_scaled": recipes.row_scaled(),
    "row_scaled_activations": recipes.row_scaled(scope="activations"),
    "saved_sr": recipes.nvfp4(saved_rounding="stochastic"),
    "rl_mxfp8": recipes.rl(gradients="mxfp8", weight_block=(16, 16)),
    "requantized_no_tiles": dataclasses.replace(recipes.nvfp4(weight_block=(1, 16)), backward="dequantized"),
    "requantized_tiles": dataclasses.replace(recipes.four_over_six(), backward="dequantized"),
    "requantized_mxfp8": dataclasses.replace(recipes.nvfp4_mxfp8_bwd(), backward="dequantized"),
    "requantized_row_mxfp8": recipes.nvfp4_mxfp8_bwd(activation_outer="row", backward="dequantized"),
    "mxfp8_requantized": dataclasses.replace(recipes.mxfp8(element="e5m2"), backward="dequantized"),
    "requantized_half": hb.Recipe(fprop=hb.GemmSpec(b=hb.NVFP4()), wgrad=recipes.nvfp4().wgrad, backward="dequantized"),
    "mean_split_no_rht": recipes.nvfp4(hadamard=None, activation_mean="split"),
    "mean_split_forward": hb.Recipe(fprop=recipes.nvfp4_forward().fprop, activation_mean="split"),
    "mean_split_wgrad": hb.Recipe(wgrad=recipes.nvfp4().wgrad, activation_mean="split"),
    "outliers": recipes.outlier_channels(),
    "outliers_forward": recipes.outlier_channels(base="nvfp4_forward"),
    "outliers_wgrad": hb.Recipe(wgrad=recipes.nvfp4().wgrad, channels=recipes.outlier_channels().channels),
    "outliers_no_tiles": recipes.outlier_channels(base=recipes.nvfp4(weight_block=(1, 16))),
    "hot": recipes.hot_channels(),
    "hot_forward": recipes.hot_channels(base="nvfp4_forward"),
    "hot_four_over_six": recipes.hot_channels(base="four_over_six"),
    "mean_split_mxfp8": dataclasses.replace(recipes.mxfp8(), activation_mean="split"),
}
"""Recipes that differ from one of RECIPES in what is computed, not in how it is called."""


class Product(NamedTuple):
    """A matrix product in fp64 and the same product of absolute values, by which rounding errors are bounded."""

    value: Tensor
    bound: Tensor


class Places(NamedTuple):
    """Where a layer draws rounding bits, and where it draws signs."""

    bits: hb.Philox
    signs: hb.Philox


class Expected(NamedTuple):
    y: Product
    dx: Product
    dw: Product
    db: Tensor


def product(a: Tensor, b: Tensor) -> Product:
    """Return a @ b.T; zeros pad the shorter contraction."""
    length = max(a.shape[1], b.shape[1])
    a, b = (pad(t.double(), (0, length - t.shape[1])) for t in (a, b))
    return Product(a @ b.T, a.abs() @ b.abs().T)


def _values(t: Tensor, spec, places: Places, stream: int, sign_stream: int) -> Tensor:
    """Return what the quantized operand stands for in fp64, with the padding that enters a GEMM."""
    if spec is None:
        return t.double()
    t = pad(t, (0, -t.shape[1] % spec.alignment))
    q = hb.quantize(t, spec, rng=places.bits.at(stream), sign_rng=places.signs.at(sign_stream))
    return q.dequantize(torch.float32).double()


def _both(t: Tensor, row, col, places: Places, stream: int, signs: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (t, t.T) as operands: equal 16x16 specs share the bytes of t."""
    values = _values(t, row, places, stream, signs[0])
    if row is not None and row == col and row.is_tile:
        return values, hb.quantize(t, row, rng=places.bits.at(stream)).transpose().dequantize(torch.float32).double()
    return values, _values(t.T, col, places, stream + 1, signs[1])


def greatest(scores, count: int) -> list[int]:
    """Return the columns with the greatest scores in ascending order; of equal ones the first."""
    return sorted(sorted(range(len(scores)), key=lambda k: (-scores[k], k))[:count])


def outlier_index(x: Tensor, recipe: hb.Recipe) -> list[int]:
    """Return the channels that section 2 takes out of x."""
    values = x.float().numpy()
    return greatest(oracle.token_mean(values * values), recipe.channels.count(x.shape[1]))


def patch_of(x: Tensor, w: Tensor, X: Tensor, W: Tensor, recipe: hb.Recipe) -> Product:
    """Return what a patch adds to y: X and W are what the codes stand for."""
    X, W = X[:, : x.shape[1]].float(), W[:, : w.shape[1]].float()
    dX, dW = x.float() - X, w.float() - W
    scores = [oracle.token_mean(t.abs().numpy()) for t in (dX, dW)]
    index = greatest(scores[0] + scores[1], recipe.channels.count(x.shape[1]))
    parts = [t[:, index].to(x.dtype) for t in (dX, W, X, dW)]
    one, two = product(*parts[:2]), product(*parts[2:])
    return Product(one.value + two.value, one.bound + two.bound)


def with_outliers(y: Product, dw: Product, tensors: tuple, recipe: hb.Recipe, index: list[int]) -> tuple:
    """Return y and dw with the products of outlier channels in MXFP8."""
    x, w, dy = tensors
    nowhere, mx = Places(hb.Philox(0), hb.Philox(0)), hb.MXFP8()
    x_I, w_I, dy_T, x_IT = (_values(t, mx, nowhere, 0, 0) for t in (x[:, index], w[:, index], dy.T, x[:, index].T))
    if recipe.fprop is not None and recipe.fprop.a is not None:
        own = product(x_I, w_I)
        y = Product(y.value + own.value, y.bound + own.bound)
    if recipe.wgrad is not None and recipe.wgrad.b is not None:
        own, dw = product(dy_T, x_IT), Product(*(t.clone() for t in dw))
        assert not dw.value[:, index].any(), "zeros stay zeros"
        dw.value[:, index], dw.bound[:, index] = own.value, own.bound
    return y, dw


def expected(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, recipe: hb.Recipe, rng: hb.Philox | Places
) -> Expected:
    """Return the output and the gradients of one linear layer for x [M, K], w [N, K], dy [M, N]."""
    places = rng if isinstance(rng, Places) else Places(rng, rng)
    fprop, dgrad, wgrad = (gemm or hb.GemmSpec() for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    mean, quantized = None, x
    if recipe.activation_mean == "split":  # what is quantized is what remains
        narrow = x.dtype == torch.bfloat16
        values = oracle.token_mean(x.float().numpy(), narrow)
        rest = torch.from_numpy(oracle.residual(x.float().numpy(), values, narrow))
        mean, quantized = torch.from_numpy(values), rest.to(x.dtype) if narrow else rest
    index = []
    if recipe.channels is not None and recipe.channels.kind == "mxfp8":
        index, quantized = outlier_index(x, recipe), x.clone()
        quantized[:, index] = 0
    x_row, x_col = _both(quantized, fprop.a, wgrad.b, places, X, (FPROP_SIGNS, WGRAD_SIGNS))
    x_row, x_col = x_row if fprop.a else x.double(), x_col if wgrad.b else x.double().T
    w_row, w_col = _both(w, fprop.b, dgrad.b, places, W, (FPROP_SIGNS, DGRAD_SIGNS))
    dy_row, dy_col = _both(dy, dgrad.a, wgrad.a, places, DY, (DGRAD_SIGNS, WGRAD_SIGNS))
    if recipe.backward == "dequantized":  # the values of fprop's operands, rounded to the dtype of x
        x_back, w_back = (t[:, : x.shape[1]].to(x.dtype) for t in (x_row, w_row))
        x_col = _values(x_back.T, wgrad.b, places, X + 1, WGRAD_SIGNS)
        w_col = _values(w_back.T, dgrad.b, places, W + 1, DGRAD_SIGNS)
    y = product(x_row, w_row)
    if mean is not None and fprop.a is not None:
        v = product(mean[None], w)
        y = Product(y.value + v.value, y.bound + v.bound)
    if recipe.channels is not None and recipe.channels.kind == "patch":
        patch = patch_of(x, w, x_row, w_row, recipe)
        y = Product(y.value + patch.value, y.bound + patch.bound)
    if bias is not None:
        y = Product(y.value + bias.double(), y.bound + bias.double().abs())
    dw, dx = product(dy_col, x_col), product(dy_row, w_col)
    rows, cols = w.shape
    if mean is not None and wgrad.b is not None:
        outer = product(dy.double().sum(0)[:, None], mean[:, None])
        dw = Product(dw.value[:rows] + outer.value, dw.bound[:rows] + outer.bound)
    dx = Product(*(t[:, :cols] for t in dx))
    dw = Product(*(t[:rows, :cols] for t in dw))
    if index:
        y, dw = with_outliers(y, dw, (x, w, dy), recipe, index)
    return Expected(y, dx, dw, dy.double().sum(0))


def tensors(m: int = 18, k: int = 37, n: int = 21, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Return x [m, k], w [n, k], bias [n], dy [m, n], with an outlier row in dy and column in x."""
    g = torch.Generator().manual_seed(seed)
    x, w, bias, dy = (torch.randn(*shape, generator=g) for shape in ((m, k), (n, k), (n,), (m, n)))
    if x.numel() and dy.numel():
        x[:, 0] *= 20
        dy[0] *= 30
    return x.to(dtype), (w / max(k, 1) ** 0.5).to(dtype), bias.to(dtype), (dy / 1000).to(dtype)
