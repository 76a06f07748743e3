"""Recipes that split the mean over tokens off x: the mean's bits, what it gains, and where it is refused.

That output and gradients are those of the definition is in test_linear_gradients.py, under every recipe.
"""

import dataclasses
import pickle

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from strategies import DTYPES, make, matrices
from torch.library import opcheck

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.functional import products
from halfbyte.nn.shared_input import input_specs
from halfbyte.spec import parse_recipe

SPLIT = hb.recipes.nvfp4(activation_mean="split")
RNG = hb.Philox(5, 3 << 32)
HB = torch.ops.halfbyte


def assert_is_definition(x: torch.Tensor) -> None:
    narrow, values = x.dtype == torch.bfloat16, x.float().numpy()
    expected = oracle.token_mean(values, narrow)
    mean = ops.token_mean(x)
    rest = reference.residual_of(x, mean)
    assert rest.dtype == mean.dtype == (torch.bfloat16 if narrow else torch.float32)
    np.testing.assert_array_equal(mean.float().numpy().view(np.uint32), expected.view(np.uint32), "mean")
    np.testing.assert_array_equal(rest.float().numpy(), oracle.residual(values, expected, narrow))


@settings(max_examples=60)
@given(x=matrices(max_rows=40))
def test_mean_and_rest_are_those_of_the_definition(x):
    assert_is_definition(x)


@pytest.mark.parametrize("rows, dtype", list(zip((512, 513, 1100), DTYPES, strict=True)))
def test_many_rows(rows, dtype):
    """More than 32 groups of 16: a lane adds several."""
    assert_is_definition(make("heavy", (rows, 3), dtype, rows).T.contiguous().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    x, some = torch.randn(20, 32).to(dtype), {"test_utils": ("test_schema", "test_faketensor")}
    opcheck(HB.token_mean, (x, ""), **some)
    opcheck(HB.token_sum, (x, ""), **some)
    opcheck(HB.amax_with_product, (x, x[0].clone(), None, ""), **some)
    keys, draw = (hb.NVFP4().key, hb.NVFP4().key), (None, 0, 0, None, None, 0)
    opcheck(HB.quantize_residual, (x, ops.token_mean(x), *keys, *draw, None, None, "linear", True, False, ""), **some)
    opcheck(HB.quantize_with_sum, (x, *keys, *draw, None, None, "linear", True, True, ""), **some)
    products = x, None, None, "", "linear", x, None, None, "", "linear", 32, torch.randn(20), torch.randn(20)
    opcheck(HB.gemm_nt_outer, (*products, torch.bfloat16, ""), **some)
    opcheck(HB.gemm_nt_outer_add, (*products, torch.ones(20, 20), ""), **some)


def errors(recipe: hb.Recipe, x: torch.Tensor) -> tuple[float, float]:
    """Return the relative errors of y and dw."""
    g = torch.Generator().manual_seed(1)
    w, dy = torch.randn(96, x.shape[1], generator=g).requires_grad_(), torch.randn(len(x), 96, generator=g)
    y = hb.linear(x, w, None, recipe, rng=RNG)
    y.backward(dy)
    pairs = (y.detach(), x @ w.detach().T), (w.grad, dy.T @ x)
    return tuple(float((got - want).norm() / want.norm()) for got, want in pairs)


@pytest.mark.parametrize("hadamard", [None, hb.Hadamard()])
def test_a_mean_costs_nothing(hadamard):
    """Data with a large mean: the absolute error is as without it, where that of the plain recipe is far larger."""
    g = torch.Generator().manual_seed(0)
    centred, mean = torch.randn(256, 128, generator=g), 20 * torch.randn(128, generator=g)
    centred = centred - centred.mean(0)
    x = centred + mean
    scale = np.array([(centred.norm() / x.norm()).item()] * 2)  # of relative errors, to those without the mean
    split, kept, without = (
        np.array(errors(hb.recipes.nvfp4(hadamard=hadamard, activation_mean=how), data))
        for how, data in (("split", x), ("kept", x), ("kept", centred))
    )
    assert (split < 1.3 * without * scale).all() and (kept > 4 * split).all()


def test_what_is_not_finite_poisons_no_other_token():
    x, w = make("normal", (20, 32), torch.bfloat16, 2), make("normal", (8, 32), torch.bfloat16, 3)
    x[3, 5] = float("nan")
    y = hb.linear(x, w, None, SPLIT, rng=RNG)
    assert y[3].isnan().all() and y[torch.arange(20) != 3].isfinite().all()


def test_other_results_do_not_depend_on_it():
    """dgrad reads no x; where wgrad is bf16 it reads x itself."""
    x, w, dy = (make("normal", shape, torch.bfloat16, 4) for shape in ((20, 32), (24, 32), (20, 24)))

    def gradients(recipe):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        hb.linear(*leaves, None, recipe, rng=RNG).backward(dy)
        return [t.grad for t in leaves]

    kept, split = gradients(hb.recipes.nvfp4()), gradients(SPLIT)
    assert torch.equal(kept[0], split[0]) and not torch.equal(kept[1], split[1])
    forward = hb.recipes.nvfp4_forward()
    for a, b in zip(gradients(forward), gradients(dataclasses.replace(forward, activation_mean="split")), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_a_buffer(dtype):
    """The buffer, the mean's share, then the GEMM: nt(s, mean) is exact enough to compare with one of its own."""
    x, w, dy = (make("normal", shape, dtype, 4) for shape in ((20, 32), (24, 32), (20, 24)))
    w.requires_grad_()
    alone = torch.zeros(24, 32)
    hb.linear(x, w, None, SPLIT, rng=RNG, main_grad=alone).backward(dy)
    hb.linear(x, w, None, SPLIT, rng=RNG).backward(dy)
    assert torch.equal(alone.to(dtype), w.grad)
    buffer = torch.full((24, 32), 100.0)
    hb.linear(x, w, None, SPLIT, rng=RNG, main_grad=buffer).backward(dy)
    assert torch.allclose(buffer - 100, alone, atol=2e-4)


@pytest.mark.parametrize("bias", [None, torch.arange(24.0)])
def test_a_weight_is_read_once_for_its_amax_and_its_product(monkeypatch, bias):
    """Unless its amax is known, or its operands are: with equal results."""
    x, w = make("normal", (20, 32), torch.bfloat16, 4) + 3, make("normal", (24, 32), torch.bfloat16, 4)
    asked = []
    both = ops.amax_with_product
    monkeypatch.setattr(ops, "amax_with_product", lambda *arguments: asked.append(arguments) or both(*arguments))
    with monkeypatch.context() as patch:
        patch.setattr(products, "bias_with_mean", None)
        y = hb.linear(x, w, bias, SPLIT, rng=RNG)
    assert len(asked) == 1 and asked[0][0].data_ptr() == w.data_ptr()
    known = hb.linear(x, w, bias, SPLIT, rng=RNG, weight_amax=w.abs().max().float())
    kept = hb.linear(x, w, bias, hb.recipes.nvfp4(), rng=RNG)
    assert len(asked) == 1 and torch.equal(y, known) and not torch.equal(y, kept)


def test_one_weight_with_an_amax_a_row_is_multiplied_apart(monkeypatch):
    row = hb.NVFP4(outer="row")
    fprop = dataclasses.replace(SPLIT.fprop, b=row)
    recipe = dataclasses.replace(SPLIT, fprop=fprop, dgrad=None)
    monkeypatch.setattr(ops, "amax_with_product", None)
    x, w = make("normal", (20, 32), torch.bfloat16, 4) + 30, make("normal", (24, 32), torch.bfloat16, 4)
    y = hb.linear(x, w, None, recipe, rng=RNG)
    assert (y.float() - x.float() @ w.float().T).norm() < 0.1 * (x.float() @ w.float().T).norm()


def test_cached_weights_give_the_same():
    """The mean is multiplied by the weight as a forward in bf16 rounds it, cached or not."""
    torch.manual_seed(0)
    layer, x = hb.nn.Linear(32, 16, recipe=SPLIT, state=hb.RunState(1)), torch.randn(12, 32) + 3
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        cache = hb.cache_weights(torch.nn.Sequential(layer), dtype=torch.bfloat16)
        assert layer.cached_weight() is not None
        assert torch.equal(layer(x), before)
    cache.release()


def test_a_fused_norm_hands_no_amax_of_x_on():
    torch.manual_seed(0)
    fused = hb.nn.LayerNormLinear(32, 16, recipe=SPLIT, state=hb.RunState(1))
    plain = hb.nn.LayerNormLinear(32, 16, recipe=SPLIT, state=hb.RunState(1))
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(12, 32) + 3
    layer, place = fused.linear, plain.linear.run_state.philox(plain.linear.stream)
    assert input_specs(SPLIT, True) == (None, None)  # which collects no amaxes
    assert torch.equal(fused(x), hb.linear(fused.norm(x), layer.weight, layer.bias, SPLIT, rng=place))


def test_the_key_says_it_and_those_of_before_are_unchanged():
    assert SPLIT.key == f"{hb.recipes.nvfp4().key};activation_mean=split" and hb.recipes.nvfp4() != SPLIT
    assert parse_recipe(SPLIT.key) == SPLIT and pickle.loads(pickle.dumps(SPLIT)) == SPLIT
    with pytest.raises(ValueError, match="not a recipe's key"):
        parse_recipe(f"{hb.recipes.nvfp4().key};activation_mean=gone")
    older = dict(hb.recipes.nvfp4().__dict__)
    del older["activation_mean"]
    recipe = object.__new__(hb.Recipe)
    recipe.__setstate__(older)
    assert recipe == hb.recipes.nvfp4() and recipe.activation_mean == "kept"


def test_experts_refuse_it():
    x, w, offsets = torch.ones(4, 16), torch.ones(2, 16, 16), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"activation_mean='split': experts.*activation_mean='kept'"):
        hb.grouped_linear(x, w, offsets, SPLIT, rng=RNG)
