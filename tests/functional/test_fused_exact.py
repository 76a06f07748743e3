"""A norm and an MLP whose parts know each other's quantization, and the same parts one after the other: equal bits."""

import pytest
import torch
from linear_cases import RECIPES

import halfbyte as hb
from halfbyte import functional as HF
from halfbyte import ops
from halfbyte.arithmetic import ACTIVATIONS
from halfbyte.functional.activation import linear_activation
from halfbyte.functional.linear import Layers
from halfbyte.functional.norm import norm
from halfbyte.nn.shared_input import input_specs

PLACE, DOWN_PLACE = hb.Philox(3, 64), hb.Philox(3, 128)
WGRAD_SIGNS = 8  # of a layer's streams, docs/fused.md
M, K, N = 37, 48, 40


def following(recipe: hb.Recipe, place: hb.Philox) -> ops.Following:
    return ops.Following(*input_specs(recipe, True), place.at(WGRAD_SIGNS).on(torch.device("cpu")))


def leaves(gated: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    n = 1 + gated
    shapes = [(M, K), (K,), (K,), *[(N, K)] * n, *[(N,)] * n, (K, N)]
    return [(torch.randn(s, generator=g) / max(1, s[-1] / 8) ** 0.5).to(dtype).requires_grad_() for s in shapes]


def fused(tensors, activation: str, recipe: hb.Recipe, centered: bool):
    x, weight, bias, *rest = tensors
    n = (len(rest) - 1) // 2
    kind = ops.NormKind(1e-5, centered)
    y, amaxes = norm(x, weight, bias if centered else None, kind, following(recipe, PLACE))
    nothing = [None] * n
    layers = Layers(rest[:n], rest[n : 2 * n], nothing, nothing, list(nothing), [PLACE.at(16 * i) for i in range(n)])
    h, amaxes = linear_activation(y, layers, activation, recipe, following(recipe, DOWN_PLACE), amaxes)
    return hb.linear_shared(h, [rest[-1]], None, recipe, rng=[DOWN_PLACE], x_amaxes=amaxes)[0]


def unfused(tensors, activation: str, recipe: hb.Recipe, centered: bool):
    x, weight, bias, *rest = tensors
    n = (len(rest) - 1) // 2
    y = HF.layer_norm(x, weight, bias) if centered else HF.rms_norm(x, weight)
    pre = hb.linear_shared(y, rest[:n], rest[n : 2 * n], recipe, rng=[PLACE.at(16 * i) for i in range(n)])
    return hb.linear(HF.activation(activation, *pre), rest[-1], None, recipe, rng=DOWN_PLACE)


def run(function, activation: str, recipe: hb.Recipe, dtype=torch.float32, centered=False):
    tensors = leaves(ACTIVATIONS[activation].gated, dtype)
    y = function(tensors, activation, recipe, centered)
    y.backward(torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(dtype))
    return [y.detach(), *[t.grad for t in tensors]]


@pytest.mark.parametrize("name", RECIPES)
def test_fused_is_unfused(name):
    recipe = RECIPES[name]
    for activation, dtype, centered in (("swiglu", torch.float32, False), ("gelu", torch.bfloat16, True)):
        got, expected = (run(f, activation, recipe, dtype, centered) for f in (fused, unfused))
        for a, b in zip(got, expected, strict=True):
            assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    got, expected = (run(f, activation, RECIPES["nvfp4"]) for f in (fused, unfused))
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(a, b)


def test_the_amaxes_are_those_that_quantize_computes():
    """For every orientation that the ops leave to nobody else; a smaller amax would saturate, unseen."""
    recipe = RECIPES["fresh32"]
    how = following(recipe, PLACE)
    y, amaxes = norm(torch.randn(M, K), torch.rand(K), None, ops.NormKind(1e-5, False), how)
    assert torch.equal(amaxes.row, hb.quantize(y, how.row).amax)
    sign = PLACE.at(WGRAD_SIGNS)
    assert torch.equal(amaxes.col, hb.quantize(y.T, how.col, rng=PLACE, sign_rng=sign).amax)


@pytest.mark.parametrize(
    "row,col,expected",
    [
        (None, None, ("", "")),
        (hb.MXFP8(), hb.MXFP8(), ("", "")),
        (hb.NVFP4(outer="row"), hb.NVFP4(outer="row"), ("row", "")),
        (hb.NVFP4(rotation=hb.Hadamard()), None, ("", "")),
        (hb.NVFP4(block=(16, 16)), hb.NVFP4(block=(16, 16)), ("tensor", "")),
        (hb.NVFP4(), hb.NVFP4(), ("tensor", hb.NVFP4().key)),
    ],
)
def test_which_amaxes_are_left_to_the_quantization(row, col, expected):
    assert ops.Following(row, col).arguments[:2] == expected
