"""Tokens that arrive as codes (numerics, section 8): what each GEMM reads of them, and gradients against fp64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import grouped_cases
import linear_cases
import pytest
import torch
from grouped_cases import ends, slices

import halfbyte as hb
from halfbyte import ops
from halfbyte.functional.dispatch import dispatch_problem, dispatch_spec
from halfbyte.reference.dispatch import dispatched_row_col
from halfbyte.sides import both_sides

EVERY = {**grouped_cases.RECIPES, **linear_cases.RECIPES, **linear_cases.VARIANTS}
ALL = {name: recipe for name, recipe in EVERY.items() if not recipe.splits_mean and recipe.channels is None}
TRAVELLING = {name: recipe for name, recipe in ALL.items() if dispatch_problem(recipe) is None}
SIZES, PADDING, N, K = (17, 0, 1, 33), 4, 24, 40
RNG = hb.Philox(12, 16)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    tokens = sum(SIZES) + PADDING
    shapes = (tokens, K), (len(SIZES), N, K), (tokens, N)
    x, w, dy = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    x[:, 3] *= 30
    x[-PADDING:], dy[-PADDING:] = torch.nan, torch.inf  # whatever lies behind the last group must not matter
    return x, w, dy


def one_by_one(x, recipe):
    """Return what the codes of every token stand for, each quantized as if there were no others."""
    spec = replace(recipe.fprop.a, outer="tensor")
    return torch.cat([hb.quantize(token[None], spec).dequantize() for token in x])


def of_values(recipe):
    """Return the recipe for tokens that are what codes stand for: fprop reads them as they are."""
    weights = recipe.fprop.b
    fprop = None if weights is None else hb.GemmSpec(b=weights)
    return replace(recipe, fprop=fprop, backward="original" if fprop is None else recipe.backward)


@pytest.mark.parametrize("recipe", TRAVELLING.values(), ids=TRAVELLING)
def test_gradients_against_fp64_of_the_dequantized_operands(recipe):
    x, w, dy = inputs()
    row, _ = hb.grouped_quantize_row_col(x, ends(SIZES), dispatch_spec(recipe), None)
    values, w = row.dequantize().requires_grad_(), w.requires_grad_()
    y = hb.grouped_linear(values, w, ends(SIZES), recipe, rng=RNG, x_row=row)
    y.backward(dy)
    assert not y[-PADDING:].any() and not values.grad[-PADDING:].any()
    for g, rows in enumerate(slices(SIZES)):
        x_g = one_by_one(x[rows], recipe) if rows.stop > rows.start else x[rows]
        want = linear_cases.expected(x_g, w[g].detach(), None, dy[rows], of_values(recipe), RNG.group(g))
        for got, product in zip((y[rows], values.grad[rows], w.grad[g]), want[:3], strict=True):
            assert ((got - product.value).abs() <= 2.0**-20 * product.bound).all(), "fp32 sums of some forty products"


@pytest.mark.parametrize("recipe", TRAVELLING.values(), ids=TRAVELLING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_definition(recipe, dtype, monkeypatch):
    """Row, values and column of the reference are what GEMMs read."""
    x, w, dy = inputs(dtype)
    found, product = [], ops.grouped_gemm_nt
    monkeypatch.setattr(
        ops, "grouped_gemm_nt", lambda a, b, *o, **named: found.append((a, b)) or product(a, b, *o, **named)
    )
    monkeypatch.setattr(ops, "grouped_gemm_nt_batch_invariant", ops.grouped_gemm_nt)
    wgrad = recipe.wgrad or hb.GemmSpec()
    draws = {"draw": RNG.on(x.device), "sign_draw": RNG.at(linear_cases.WGRAD_SIGNS).on(x.device)}
    made = dispatched_row_col(x, ends(SIZES), *both_sides(dispatch_spec(recipe), wgrad.b, **draws))
    row = hb.QuantTensor(made.row, dispatch_spec(recipe), shape=(len(x), K), dtype=dtype, group_offsets=ends(SIZES))
    hb.grouped_linear(made.values, w.requires_grad_(), ends(SIZES), recipe, rng=RNG, x_row=row).backward(dy)
    of_x, of_wgrad = found[0][0], found[-1][1]
    for got, want in zip(of_x.blocks, made.row, strict=True):
        assert torch.equal(got, want)
    if wgrad.b is None:
        assert torch.equal(of_wgrad[:, : sum(SIZES)], made.values.T[:, : sum(SIZES)])
    else:
        for got, want in zip(of_wgrad.blocks, made.col, strict=True):
            assert torch.equal(got, want)
    rows = slice(0, sum(SIZES))
    assert torch.equal(made.values[rows], one_by_one(x[rows], recipe)) and not made.values[sum(SIZES) :].any()


def test_a_token_that_is_not_finite_stays_alone():
    recipe = hb.recipes.nvfp4()
    x, w, _ = inputs()
    results = []
    for _ in range(2):
        row, _ = hb.grouped_quantize_row_col(x, ends(SIZES), dispatch_spec(recipe), None)
        results.append(hb.grouped_linear(row.dequantize(), w, ends(SIZES), recipe, rng=RNG, x_row=row))
        x[5, 7] = torch.inf
    assert results[1][5].isnan().all() and torch.equal(results[1][6:], results[0][6:])
    assert torch.equal(results[1][:5], results[0][:5])


@pytest.mark.parametrize("name, reason", [
    ("bf16", "fprop.a=None"),
    ("mxfp8", "fprop.a=MXFP8"),
    ("fresh_everywhere", "random bits"),
    ("rotated_everywhere", "rotation"),
])  # fmt: skip
def test_recipes_whose_tokens_cannot_travel_as_codes(name, reason):
    assert reason in dispatch_problem(ALL[name])
    tiles = replace(hb.recipes.nvfp4(), fprop=hb.GemmSpec(a=hb.NVFP4(block=(16, 16)), b=hb.NVFP4(block=(16, 16))))
    assert "a tile spans tokens" in dispatch_problem(tiles)
    if name == "bf16":
        assert dispatch_spec(ALL[name]) is None
    else:
        with pytest.raises(ValueError, match=f"{reason}.*use dispatch='plain'"):
            dispatch_spec(ALL[name])


def test_what_is_refused():
    x, w, _ = inputs()
    recipe, offsets = hb.recipes.nvfp4(), ends(SIZES)
    row, _ = hb.grouped_quantize_row_col(x, offsets, dispatch_spec(recipe), None)
    with pytest.raises(TypeError, match="x_row=Tensor: give a QuantTensor"):
        hb.grouped_linear(x, w, offsets, recipe, rng=RNG, x_row=x)
    with pytest.raises(ValueError, match=r"x_row.spec=.*quantize x so, or leave x_row out"):
        hb.grouped_linear(x, w, offsets, hb.recipes.four_over_six(), rng=RNG, x_row=row)
    with pytest.raises(ValueError, match=r"x_row has shape \(55, 40\).*x is \(54, 40\)"):
        hb.grouped_linear(x[:-1], w, offsets, recipe, rng=RNG, x_row=row)


def relative(got, want) -> float:
    return float((got.double() - want).square().sum() / want.square().sum())


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "nvfp4_mxfp8_bwd", "nvfp4_forward"])
def test_the_error_that_the_page_states(recipe):
    page = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    stated = [float(word) for word in re.search(rf"^\| `{recipe}` \| (.*) \|$", page, re.M).group(1).split(" | ")]
    torch.manual_seed(0)
    tokens, offsets = 2048, torch.tensor([2048], dtype=torch.int32)
    x, w, dy = (torch.randn(*s).bfloat16() for s in ((tokens, 256), (1, 256, 256), (tokens, 256)))
    row, _ = hb.grouped_quantize_row_col(x, offsets, dispatch_spec(hb.recipes.get(recipe)), None)
    found = {"y": [], "dw": []}
    for given, x_row in ((x, None), (row.dequantize(), row)):
        leaf = w.clone().requires_grad_()
        y = hb.grouped_linear(given, leaf, offsets, recipe, rng=hb.Philox(1), out_dtype=torch.float32, x_row=x_row)
        y.backward(dy.float())
        found["y"].append(relative(y.detach(), x.double() @ w[0].double().T))
        found["dw"].append(relative(leaf.grad[0], dy.double().T @ x.double()))
    assert [*found["y"], *found["dw"]] == pytest.approx(stated, rel=0.02, abs=6e-5)


@pytest.mark.parametrize(
    "spec, once, twice",
    [
        (hb.NVFP4(), 0.0090, 0.0180),
        (hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0), 0.0078, 0.0168),
        (hb.MXFP8(), 0.0007, 0.0097),
    ],
    ids=str,
)
def test_the_error_of_a_column_that_is_rounded_twice(spec, once, twice):
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    arrived = hb.quantize(x, hb.NVFP4(outer="row")).dequantize()
    errors = [
        relative(hb.quantize(t.T.contiguous(), spec).dequantize(torch.float32), x.T.double()) for t in (x, arrived)
    ]
    assert errors == pytest.approx([once, twice], rel=0.02)
