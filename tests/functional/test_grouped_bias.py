"""The bias of grouped_linear: a loop of hb.linear over the groups, bit for bit; its gradient is a defined sum."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import GROUPS, RAGGED, RECIPES, ends, slices
from torch.library import opcheck

import halfbyte as hb
from halfbyte import ops

N, K = 24, 40  # neither a multiple of 16
SOME = ("nvfp4", "bf16", "mxfp8", "nvfp4_mxfp8_bwd", "four_over_six", "rl", "dequantized")


def inputs(sizes, padding, dtype=torch.float32):
    """Return x, w, bias and dy; whatever lies behind the last group is NaN or Inf."""
    generator = torch.Generator().manual_seed(7)
    tokens, experts = sum(sizes) + padding, len(sizes)
    shapes = (tokens, K), (experts, N, K), (experts, N), (tokens, N)
    x, w, bias, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    x[sum(sizes) :], dy[sum(sizes) :] = torch.nan, torch.inf
    return x, w, bias, dy


def grouped(tensors, offsets, recipe, **options):
    x, w, bias, dy = tensors
    x, w, bias = (t.clone().requires_grad_() for t in (x, w, bias))
    y = hb.grouped_linear(x, w, offsets, recipe, bias_EN=bias, **options)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, bias.grad


def loop(tensors, sizes, recipe, rng):
    """hb.linear on every group; zeros where there is no token."""
    x, w, bias, dy = tensors
    y, dx, dw, db = (torch.zeros_like(t) for t in (dy, x, w, bias))
    for g, rows in enumerate(slices(sizes)):
        x_g, w_g, b_g = x[rows].clone(), w[g].clone(), bias[g].clone()
        y_g = hb.linear(*(t.requires_grad_() for t in (x_g, w_g, b_g)), recipe, rng=rng.group(g))
        y_g.backward(dy[rows])
        assert torch.allclose(b_g.grad.double(), dy[rows].double().sum(0), rtol=2**-7, atol=1e-5)
        total = ops.token_sum(dy[rows]).to(bias.dtype)  # a layer of its own leaves the order to torch
        y[rows], dx[rows], dw[g], db[g] = y_g.detach(), x_g.grad, w_g.grad, total
    return y, dx, dw, db


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("recipe", SOME)
def test_equals_a_loop_over_experts(recipe, groups, dtype):
    sizes, padding = GROUPS[groups]
    tensors, recipe, rng = inputs(sizes, padding, dtype), RECIPES[recipe], hb.Philox(3, 48)
    mine = grouped(tensors, ends(sizes), recipe, rng=rng)
    for name, got, want in zip(("y", "dx", "dw", "db"), mine, loop(tensors, sizes, recipe, rng), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want), name


def test_the_product_and_its_bias_are_rounded_once():
    x, w, bias, dy = inputs(RAGGED, 3, torch.bfloat16)
    recipe, offsets = hb.recipes.nvfp4_forward(), ends(RAGGED)
    y, *_, db = grouped((x, w, bias, dy), offsets, recipe)
    wide = hb.grouped_linear(x, w, offsets, recipe, out_dtype=torch.float32)
    rounded_twice = wide.bfloat16().clone()
    for g, rows in enumerate(slices(RAGGED)):
        assert torch.equal(y[rows], (wide[rows] + bias[g].float()).bfloat16())
        assert torch.allclose(db[g].double(), dy[rows].double().sum(0), rtol=2**-8, atol=1e-6)
        rounded_twice[rows] += bias[g]
    assert not y[sum(RAGGED) :].any() and not torch.equal(y[: sum(RAGGED)], rounded_twice[: sum(RAGGED)])


def test_a_bias_that_is_not_finite_stays_in_its_group():
    x, w, bias, dy = inputs(RAGGED, 3)
    clean = grouped((x, w, bias, dy), ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(1))
    bias[2] = torch.nan  # of no token
    again = grouped((x, w, bias, dy), ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(1))
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True)) and not again[3][2].any()
    bias[0, 3], dy[4, 5] = torch.inf, torch.nan
    y, _, _, db = grouped((x, w, bias, dy), ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(1))
    assert (y[:17, 3] == torch.inf).all() and torch.equal(y[17:], clean[0][17:])
    assert db[0, 5].isnan() and int(db.isnan().sum()) == 1 and torch.equal(db[1:], clean[3][1:])


def test_sums_of_many_tokens_are_those_of_each_group_alone():
    """1,100 tokens in a group: every lane of the order adds more than one group of rows."""
    sizes = (1100, 0, 3, 530)
    x = torch.randn(sum(sizes) + 5, 9, generator=torch.Generator().manual_seed(2)).to(torch.float16)
    x[-5:] = torch.nan
    sums = ops.grouped_token_sum(x, ends(sizes, torch.int64))
    assert sums.dtype == torch.float32 and not sums[1].any()
    for g, rows in enumerate(slices(sizes)):
        assert torch.equal(sums[g], ops.token_sum(x[rows]))
        assert torch.allclose(sums[g].double(), x[rows].double().sum(0), rtol=1e-5, atol=1e-4)


def test_opcheck():
    some = {"test_utils": ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")}
    opcheck(torch.ops.halfbyte.grouped_token_sum, (torch.randn(9, 6), ends((3, 0, 4)), ""), **some)


def test_compiled_equals_eager():
    x, w, bias, dy = inputs((5, 0, 20), 3)
    w, bias = w.requires_grad_(), bias.requires_grad_()
    recipe, place = hb.recipes.nvfp4(), hb.RunState(2).philox(0)

    def layer(x, offsets):
        return hb.grouped_linear(x, w, offsets, recipe, bias_EN=bias, rng=place)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for sizes in ((5, 0, 20), (20, 5, 0)):
        expected, got = (f(x, ends(sizes)) for f in (layer, compiled))
        assert torch.equal(got, expected)
        gradients = (torch.autograd.grad(y, (w, bias), dy) for y in (expected, got))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_autocast_casts_it_and_out_dtype_rounds_it():
    tensors = inputs((5, 7), 0)
    with torch.autocast("cpu", torch.bfloat16):
        x, w, bias, dy = (t.clone().requires_grad_() for t in tensors)
        y = hb.grouped_linear(x, w, ends((5, 7)), hb.recipes.nvfp4(), bias_EN=bias, rng=hb.Philox(0))
        y.backward(dy.bfloat16().detach())
    halves = [t.bfloat16() for t in tensors]
    expected = grouped(halves, ends((5, 7)), hb.recipes.nvfp4(), rng=hb.Philox(0))
    assert torch.equal(y, expected[0]) and bias.grad.dtype == torch.float32
    assert torch.equal(bias.grad, expected[3].float())
    wide = grouped(
        [*halves[:3], tensors[3]], ends((5, 7)), hb.recipes.nvfp4(), rng=hb.Philox(0), out_dtype=torch.float32
    )
    assert wide[0].dtype == torch.float32 and torch.equal(wide[0].bfloat16(), expected[0])


@pytest.mark.parametrize("needed", [(False, False, True), (True, False, False), (False, False, False)])
def test_only_what_is_asked_for_is_computed(needed):
    x, w, bias, dy = inputs(RAGGED, 2)
    whole = grouped((x, w, bias, dy), ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(1))
    leaves = [t.clone().requires_grad_(need) for t, need in zip((x, w, bias), needed, strict=True)]
    y = hb.grouped_linear(*leaves[:2], ends(RAGGED), hb.recipes.nvfp4(), bias_EN=leaves[2], rng=hb.Philox(1))
    assert torch.equal(y, whole[0]) and y.requires_grad is any(needed)
    if any(needed):
        y.backward(dy)
    for leaf, need, gradient in zip(leaves, needed, whole[1:], strict=True):
        assert torch.equal(leaf.grad, gradient) if need else leaf.grad is None


@pytest.mark.parametrize(
    "bias, error, message",
    [
        (torch.zeros(2, 5), ValueError, r"bias_EN.shape=\(2, 5\): w_ENK needs \(2, 4\)"),
        (torch.zeros(4), ValueError, r"bias_EN.shape=\(4,\)"),
        (torch.zeros(2, 4, dtype=torch.int32), TypeError, "bias_EN.dtype=torch.int32: give a float dtype"),
        (torch.zeros(2, 4, device="meta"), ValueError, "bias_EN.device=meta, w_ENK.device=cpu: move one"),
    ],
)
def test_refusals(bias, error, message):
    with pytest.raises(error, match=message):
        hb.grouped_linear(torch.zeros(8, 16), torch.zeros(2, 4, 16), ends((3, 5)), "mxfp8", bias_EN=bias)
