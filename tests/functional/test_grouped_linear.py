"""grouped_linear and grouped_gemm_nt equal a loop over the groups, bit for bit."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import GROUPS, RAGGED, RECIPES, ends, slices
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import RECIPES as OF_LAYERS
from linear_cases import expected as expected_in_fp64

import halfbyte as hb

N, K = 24, 40  # neither a multiple of 16

EXPERTS = {name: recipe for name, recipe in OF_LAYERS.items() if not recipe.splits_mean}


def inputs(sizes, padding, dtype=torch.float32, out_features=N, in_features=K):
    generator = torch.Generator().manual_seed(5)
    tokens = sum(sizes) + padding
    x = torch.randn(tokens, in_features, generator=generator).to(dtype)
    w = torch.randn(len(sizes), out_features, in_features, generator=generator).to(dtype)
    dy = torch.randn(tokens, out_features, generator=generator).to(dtype)
    if padding:  # whatever lies behind the last group must not matter
        x[-padding:] = torch.nan
        dy[-padding:] = torch.inf
    return x, w, dy


def grouped(x, w, dy, offsets, recipe, rng, **options):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = hb.grouped_linear(x, w, offsets, recipe, rng=rng, **options)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def loop(x, w, dy, sizes, recipe, rng):
    """hb.linear on every group: outputs, dx and dw, zeros where there is no group."""
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    for g, rows in enumerate(slices(sizes)):
        x_g, w_g = x[rows].clone().requires_grad_(), w[g].clone().requires_grad_()
        y_g = hb.linear(x_g, w_g, None, recipe, rng=rng.group(g))
        y_g.backward(dy[rows])
        y[rows], dx[rows], dw[g] = y_g.detach(), x_g.grad, w_g.grad
    return y, dx, dw


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("groups", GROUPS)
def test_equals_a_loop_over_experts(recipe, groups):
    sizes, padding = GROUPS[groups]
    x, w, dy = inputs(sizes, padding)
    rng = hb.Philox(2**64 - 5, 48)  # the seeds of the later groups wrap
    mine = grouped(x, w, dy, ends(sizes), recipe, rng)
    for name, got, expected in zip(("y", "dx", "dw"), mine, loop(x, w, dy, sizes, recipe, rng), strict=True):
        assert torch.equal(got, expected), name


def test_what_is_not_quantized_may_be_fp64():
    x, w, dy = inputs((5, 3), 0, torch.float64)
    y, dx, dw = grouped(x, w, dy, torch.tensor([5, 8], dtype=torch.int32), "bf16", None)
    assert y.dtype == dx.dtype == dw.dtype == torch.float64
    for i, rows in enumerate((slice(0, 5), slice(5, 8))):
        assert torch.allclose(y[rows], x[rows] @ w[i].T, rtol=1e-5, atol=1e-5), "sums are in fp32"


@pytest.mark.parametrize("recipe", EXPERTS.values(), ids=EXPERTS)
def test_gradients_against_fp64_of_the_dequantized_operands(recipe):
    sizes, padding = (17, 0, 1, 33), 4
    x, w, dy = inputs(sizes, padding)
    rng = hb.Philox(12, 16)
    mine = grouped(x, w, dy, ends(sizes), recipe, rng)
    for g, rows in enumerate(slices(sizes)):
        want = expected_in_fp64(x[rows], w[g], None, dy[rows], recipe, rng.group(g))
        for got, product in zip((mine[0][rows], mine[1][rows], mine[2][g]), want[:3], strict=True):
            assert ((got - product.value).abs() <= 2.0**-20 * product.bound).all(), "fp32 sums of some forty products"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "mxfp8", "nvfp4_forward"])
def test_equals_a_loop_in_half_precision(recipe, dtype):
    x, w, dy = inputs(RAGGED, 6, dtype)
    recipe, rng = RECIPES[recipe], hb.Philox(3)
    mine = grouped(x, w, dy, ends(RAGGED, torch.int64), recipe, rng)
    for got, expected in zip(mine, loop(x, w, dy, RAGGED, recipe, rng), strict=True):
        assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (5, 100), (130, 7)], ids=str)
def test_every_width(shape):
    x, w, dy = inputs((3, 0, 20), 2, torch.float32, *shape)
    recipe, rng = hb.recipes.nvfp4(), hb.Philox(4)
    mine = grouped(x, w, dy, ends((3, 0, 20)), recipe, rng)
    for got, expected in zip(mine, loop(x, w, dy, (3, 0, 20), recipe, rng), strict=True):
        assert torch.equal(got, expected)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 36), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 50), st.integers(1, 50))
def test_any_sizes(sizes, padding, out_features, in_features):
    x, w, dy = inputs(sizes, padding, torch.float32, out_features, in_features)
    recipe, rng = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh")), hb.Philox(8, 80)
    mine = grouped(x, w, dy, ends(sizes), recipe, rng)
    for got, expected in zip(mine, loop(x, w, dy, sizes, recipe, rng), strict=True):
        assert torch.equal(got, expected)


def test_experts_without_tokens_get_zero_gradients_and_draw_nothing_from_others():
    x, w, dy = inputs(RAGGED, 0)
    y, _, dw = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), hb.Philox(1))
    assert not dw[2].any() and dw[3].any()
    w[2] = torch.nan  # an expert that no token sees
    again, dx, dw = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), hb.Philox(1))
    assert torch.equal(y, again) and not dw[2].any() and dx.isfinite().all()


def test_non_finite_values_stay_in_their_group():
    x, w, dy = inputs(RAGGED, 0)
    clean = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), hb.Philox(1))
    x[3, 5] = torch.inf
    y, _, dw = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), hb.Philox(1))
    assert y[3].isnan().all() and torch.equal(y[17:], clean[0][17:])
    assert dw[0].isnan().any() and torch.equal(dw[1:], clean[2][1:])


def test_main_grad_accumulates_in_fp32():
    x, w, dy = inputs(RAGGED, 6)
    recipe, rng = hb.recipes.nvfp4(), hb.Philox(1)
    main_grad = torch.ones(w.shape)
    dw = grouped(x, w, dy, ends(RAGGED), recipe, rng)[2]
    none = grouped(x, w, dy, ends(RAGGED), recipe, rng, main_grad=main_grad)[2]
    assert none is None
    assert torch.allclose(main_grad, 1 + dw, rtol=1e-6, atol=1e-6) and torch.equal(main_grad[2], torch.ones(N, K))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_out_dtype_is_that_of_the_one_rounding(out_dtype):
    """Tokens and gradients stay bf16; the products of operands quantized apart say what y is."""
    x, w, dy = inputs(RAGGED, 6, torch.bfloat16)
    leaf = x.clone().requires_grad_()
    y = hb.grouped_linear(leaf, w, ends(RAGGED), hb.recipes.nvfp4_forward(), out_dtype=out_dtype)
    dy = (dy.nan_to_num(0, 0, 0) * 4096).to(out_dtype)
    y.backward(dy)
    assert y.dtype == out_dtype and leaf.grad.dtype == torch.bfloat16
    assert leaf.grad.abs().max() > torch.finfo(torch.float16).max and leaf.grad.isfinite().all()
    for g, rows in enumerate(slices(RAGGED)):
        a, b = hb.quantize(x[rows], hb.NVFP4()), hb.quantize(w[g], hb.recipes.nvfp4_forward().fprop.b)
        wide = hb.gemm_nt(a, b, torch.float32)
        assert torch.equal(y[rows], wide.to(out_dtype))
        assert not wide.numel() or not torch.equal(wide.bfloat16().to(out_dtype), y[rows])


def test_the_backward_draws_where_the_forward_did():
    """A pipeline advances before the backward; the position of the forward is that of all its gradients."""
    x, w, dy = inputs(RAGGED, 6)
    state = hb.RunState(9)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = hb.grouped_linear(*leaves, ends(RAGGED), hb.recipes.nvfp4(), rng=state.philox(32))
    state.advance()
    y.backward(dy)
    here, there = (loop(x, w, dy, RAGGED, hb.recipes.nvfp4(), hb.Philox(9, (step << 32) + 32)) for step in (0, 1))
    for leaf, expected, wrong in zip(leaves, here[1:], there[1:], strict=True):
        assert torch.equal(leaf.grad, expected) and not torch.equal(leaf.grad, wrong)


def test_main_grad_is_added_to_over_micro_batches():
    x, w, dy = inputs(RAGGED, 6)
    main_grad, total = torch.full(w.shape, 0.5), torch.full(w.shape, 0.5, dtype=torch.float64)
    for position in range(3):
        rng = hb.Philox(1, position << 32)
        assert grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), rng, main_grad=main_grad)[2] is None
        total += loop(x, w, dy, RAGGED, hb.recipes.nvfp4(), rng)[2].double()
    assert torch.allclose(main_grad.double(), total, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("need_dx,need_dw", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed_is_kept(need_dx, need_dw):
    x, w, dy = inputs(RAGGED, 6)
    both = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), hb.Philox(1))
    saved = []
    x.requires_grad_(need_dx)
    w.requires_grad_(need_dw)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = hb.grouped_linear(x, w, ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(1))
    assert all(type(t) is torch.Tensor for t in saved)
    codes = [t.numel() for t in saved if t.dtype == torch.uint8]
    assert len(codes) == 2 * (need_dx + need_dw), "codes and scales of the operands of the GEMMs that will run"
    if need_dx or need_dw:
        y.backward(dy)
    for leaf, needed, expected in ((x, need_dx, both[1]), (w, need_dw, both[2])):
        assert (leaf.grad is None) if not needed else torch.equal(leaf.grad, expected)


def test_a_step_draws_new_bits_and_a_repeat_the_same():
    x, w, dy = inputs(RAGGED, 0)
    state = hb.RunState(9)
    place = state.philox(32)
    first = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), place)
    again = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), place)
    state.advance()
    other = grouped(x, w, dy, ends(RAGGED), hb.recipes.nvfp4(), place)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_32_4_4"])
@pytest.mark.parametrize("name", ["nvfp4", "headroom", "nvfp4_mxfp8_bwd", "by_row"])
def test_gemms_of_quantized_operands(name, scale_layout):
    sizes, padding = GROUPS["ragged"]
    x, w, dy = (t.nan_to_num(0, 0, 0) for t in inputs(sizes, padding))
    recipe, offsets, rng = RECIPES[name], ends(sizes), hb.Philox(6)
    options = {"rng": rng, "sign_rng": hb.Philox(7), "scale_layout": scale_layout}
    x_row, x_col = hb.grouped_quantize_row_col(x, offsets, recipe.fprop.a, recipe.wgrad.b, **options)
    w_row, w_col = hb.grouped_quantize_row_col(w, None, recipe.fprop.b, recipe.dgrad.b, **options)
    dy_row, dy_col = hb.grouped_quantize_row_col(dy, offsets, recipe.dgrad.a, recipe.wgrad.a, **options)
    y = hb.grouped_gemm_nt(x_row, w_row, offsets, torch.float32)
    dx = hb.grouped_gemm_nt(dy_row, w_col, offsets, torch.float32)
    dw = hb.grouped_gemm_nt(dy_col, x_col, offsets, torch.float32)
    total = hb.grouped_gemm_nt(dy_col, x_col, offsets, out=torch.ones_like(dw), accumulate=True)
    for g, rows in enumerate(slices(sizes)):
        options = {"rng": rng.group(g), "sign_rng": hb.Philox(7).group(g)}
        x_g, xt_g = hb.quantize_row_col(x[rows], recipe.fprop.a, recipe.wgrad.b, **options)
        w_g, wt_g = hb.quantize_row_col(w[g], recipe.fprop.b, recipe.dgrad.b, **options)
        dy_g, dyt_g = hb.quantize_row_col(dy[rows], recipe.dgrad.a, recipe.wgrad.a, **options)
        assert torch.equal(y[rows], hb.gemm_nt(x_g, w_g, torch.float32))
        assert torch.equal(dx[rows], hb.gemm_nt(dy_g, wt_g, torch.float32))
        assert torch.equal(dw[g], hb.gemm_nt(dyt_g, xt_g, torch.float32))
        assert torch.equal(total[g], hb.gemm_nt(dyt_g, xt_g, out=torch.ones(N, K), accumulate=True))
    assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any()


def test_autocast_casts_tokens_and_weights():
    x, w, _ = inputs((5, 7), 0)
    with torch.autocast("cpu", torch.bfloat16):
        y = hb.grouped_linear(x, w, ends((5, 7)), hb.recipes.nvfp4(), rng=hb.Philox(0))
    expected = hb.grouped_linear(x.bfloat16(), w.bfloat16(), ends((5, 7)), hb.recipes.nvfp4(), rng=hb.Philox(0))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_compiled_equals_eager(recipe):
    x, w, dy = inputs((5, 0, 20), 3)
    w.requires_grad_()
    recipe, place = RECIPES[recipe], hb.RunState(2).philox(0)

    def step(x, offsets):
        y = hb.grouped_linear(x, w, offsets, recipe, rng=place)
        return y, torch.autograd.grad(y, w, dy[: len(x)])[0]

    compiled = torch.compile(
        lambda x, o: hb.grouped_linear(x, w, o, recipe, rng=place), fullgraph=True, backend="aot_eager"
    )
    for sizes in ((5, 0, 20), (20, 5, 0)):
        y, dw = step(x, ends(sizes))
        got = compiled(x, ends(sizes))
        assert torch.equal(got, y) and torch.equal(torch.autograd.grad(got, w, dy)[0], dw)


class TestRefusals:
    x, w = torch.zeros(8, 16), torch.zeros(2, 4, 16)
    offsets = ends((3, 5))

    @pytest.mark.parametrize(
        "change,error,message",
        [
            ({"offsets": [3, 8]}, TypeError, "offsets=.*int32"),
            ({"offsets": torch.tensor([3.0, 8.0])}, TypeError, "offsets.dtype=torch.float32"),
            ({"offsets": ends((3, 5, 0))}, ValueError, "w_ENK.shape=.*3 offsets"),
            ({"offsets": torch.zeros(0, dtype=torch.int32)}, ValueError, "E >= 1"),
            ({"offsets": ends((3, 6))}, ValueError, "at most 8"),
            ({"offsets": torch.tensor([5, 3])}, ValueError, "not decreasing"),
            ({"x": torch.zeros(2, 4, 16)}, ValueError, "sorted by expert"),
            ({"w_ENK": torch.zeros(4, 16)}, ValueError, "out_features"),
            ({"w_ENK": torch.zeros(2, 4, 16).half()}, TypeError, "w_ENK.dtype"),
            ({"rng": None}, ValueError, "rng=None"),
            ({"rng": hb.Philox(0, 0, first_block=3)}, ValueError, "first_block=3"),
            ({"main_grad": torch.zeros(2, 4, 15)}, ValueError, "main_grad"),
            ({"recipe": "nvfp5"}, ValueError, "recipe='nvfp5'.*nvfp4_forward"),
            ({"recipe": 4}, TypeError, "recipe=4"),
            ({"out_dtype": torch.int8}, TypeError, "out_dtype=torch.int8"),
            ({"x": hb.quantize(x, hb.NVFP4())}, TypeError, "x is a QuantTensor"),
            ({"w_ENK": hb.grouped_quantize_row_col(w, None, hb.NVFP4(), None)[0]}, TypeError, "w_ENK is a QuantTensor"),
        ],
    )
    def test_linear(self, change, error, message):
        arguments = {
            "x": self.x,
            "w_ENK": self.w,
            "offsets": self.offsets,
            "recipe": hb.recipes.nvfp4(),
            "rng": hb.Philox(0),
        }
        with pytest.raises(error, match=message):
            hb.grouped_linear(**(arguments | change))

    def test_gemm(self):
        with pytest.raises(ValueError, match="last dimensions"):
            hb.grouped_gemm_nt(torch.zeros(8, 15), self.w, self.offsets)
        with pytest.raises(ValueError, match="one matrix per group"):
            hb.grouped_gemm_nt(self.x, self.w, ends((8,)))
        with pytest.raises(ValueError, match="pass out"):
            hb.grouped_gemm_nt(self.x, self.w, self.offsets, accumulate=True)
        with pytest.raises(ValueError, match="shape"):
            hb.grouped_gemm_nt(self.x, self.w, self.offsets, out=torch.zeros(8, 5))
        for change in ({"out_dtype": torch.int8}, {"out": torch.zeros(8, 4, dtype=torch.int32)}, {"out": 1}):
            with pytest.raises(TypeError, match=f"{next(iter(change))}"):
                hb.grouped_gemm_nt(self.x, self.w, self.offsets, **change)
        with pytest.raises(TypeError, match=r"a\.dtype=torch.int64"):
            hb.grouped_gemm_nt(self.x.long(), self.w, self.offsets)
        ungrouped = hb.quantize(self.x, hb.NVFP4())
        with pytest.raises(ValueError, match="a has no groups.*grouped_quantize_row_col"):
            hb.grouped_gemm_nt(ungrouped, self.w, self.offsets)
        row, col = hb.grouped_quantize_row_col(self.x, self.offsets, hb.NVFP4(), hb.NVFP4())
        with pytest.raises(ValueError, match="a has 2 groups along dimension 0"):
            hb.grouped_gemm_nt(row, torch.zeros(4, 16), self.offsets)
        with pytest.raises(ValueError, match="block lengths"):
            hb.grouped_gemm_nt(
                col, hb.grouped_quantize_row_col(self.x, self.offsets, None, hb.MXFP8())[1], self.offsets
            )

    def test_backend_without_kernel(self):
        with pytest.raises(ValueError, match="backend='cuda'"):
            hb.grouped_gemm_nt(self.x, self.w, self.offsets, backend="cuda")


@pytest.mark.parametrize(("name", "given"), [("x", (None, torch.zeros(2, 4, 4))), ("w_ENK", (torch.zeros(4, 4), [1]))])
def test_what_is_no_tensor_is_named(name, given):
    with pytest.raises(TypeError, match=rf"{name}=.*: give a tensor"):
        hb.grouped_linear(*given, torch.tensor([2, 4], dtype=torch.int32), "bf16")
