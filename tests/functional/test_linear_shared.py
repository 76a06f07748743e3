"""linear_shared against products of operands quantized one by one: whose bits, signs and amaxes each of them takes."""

import pytest
import torch
from grouped_cases import ends
from linear_cases import DGRAD_SIGNS, DY, FPROP_SIGNS, WGRAD_SIGNS, W, X
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte import ops

TILE = hb.NVFP4(block=(16, 16))


def rotated(size: int, rounding: str) -> hb.NVFP4:
    return hb.NVFP4(rounding=rounding, rotation=hb.Hadamard(size=size, signs="fresh"))


FRESH_EVERYWHERE = hb.Recipe(
    fprop=hb.GemmSpec(a=rotated(16, "stochastic"), b=rotated(16, "stochastic")),
    dgrad=hb.GemmSpec(a=rotated(32, "stochastic"), b=rotated(32, "stochastic")),
    wgrad=hb.GemmSpec(a=rotated(16, "stochastic"), b=rotated(16, "stochastic")),
)
FEATURES = (32, 64, 32)


def tensors():
    g = torch.Generator().manual_seed(4)
    x, weights = torch.randn(32, 32, generator=g), [torch.randn(n, 32, generator=g) for n in FEATURES]
    return x, weights, [torch.randn(32, n, generator=g) for n in FEATURES]


def assert_sum(dx, products):
    total, bound = sum(p.double() for p in products), sum(p.abs().double() for p in products)
    assert ((dx.double() - total).abs() <= 1e-5 * bound + 1e-6).all()


@pytest.mark.parametrize("apart", [True, False])
def test_each_weight_draws_for_itself_and_the_first_draws_the_signs_of_all(apart):
    x, weights, dys = tensors()
    places = [hb.Philox(7, 1000 - 300 * i) for i in range(3)] if apart else [hb.Philox(7, 16 * i) for i in range(3)]
    first, leaf, leaves = places[0], x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    ys = hb.linear_shared(leaf, leaves, None, FRESH_EVERYWHERE, rng=places if apart else first)
    torch.autograd.backward(ys, dys)

    def operand(t, spec, own, signs):
        return hb.quantize(t, spec, rng=own, sign_rng=first.at(signs))

    fprop, dgrad, wgrad = FRESH_EVERYWHERE.fprop, FRESH_EVERYWHERE.dgrad, FRESH_EVERYWHERE.wgrad
    x_row = operand(x, fprop.a, first.at(X), FPROP_SIGNS)
    x_col = operand(x.T.contiguous(), wgrad.b, first.at(X + 1), WGRAD_SIGNS)
    products = []
    for y, leaf_w, w, dy, place in zip(ys, leaves, weights, dys, places, strict=True):
        w_row = operand(w, fprop.b, place.at(W), FPROP_SIGNS)
        w_col = operand(w.T.contiguous(), dgrad.b, place.at(W + 1), DGRAD_SIGNS)
        dy_row = operand(dy, dgrad.a, place.at(DY), DGRAD_SIGNS)
        dy_col = operand(dy.T.contiguous(), wgrad.a, place.at(DY + 1), WGRAD_SIGNS)
        assert torch.equal(y, hb.gemm_nt(x_row, w_row, torch.float32))
        assert torch.equal(leaf_w.grad, hb.gemm_nt(dy_col, x_col, torch.float32))
        products.append(hb.gemm_nt(dy_row, w_col, torch.float32))
    assert_sum(leaf.grad, products)


def test_every_weight_takes_the_amax_that_it_is_given():
    """Two share one, the third has its own; forward and backward read the same bytes."""
    x, weights, dys = tensors()
    recipe = hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4(), b=TILE), dgrad=hb.GemmSpec(a=hb.NVFP4(), b=TILE))
    shared = torch.tensor(11.0)
    leaf = x.clone().requires_grad_()
    ys = hb.linear_shared(leaf, weights, None, recipe, weight_amaxes=[shared, shared, None])
    torch.autograd.backward(ys, dys)
    products = []
    for y, w, dy, amax in zip(ys, weights, dys, (shared, shared, None), strict=True):
        bytes_of_w = hb.quantize(w, TILE, amax=amax)
        assert torch.equal(y, hb.gemm_nt(hb.quantize(x, hb.NVFP4()), bytes_of_w, torch.float32))
        assert amax is None or not torch.equal(bytes_of_w.qdata, hb.quantize(w, TILE).qdata)
        products.append(hb.gemm_nt(hb.quantize(dy, hb.NVFP4()), bytes_of_w.transpose(), torch.float32))
    assert_sum(leaf.grad, products)


def test_biases_out_dtype_and_main_grads_belong_to_their_weights():
    x, weights, dys = (t if isinstance(t, list) else t.bfloat16() for t in tensors())
    weights, biases = [w.bfloat16().requires_grad_() for w in weights], [torch.randn(n) for n in FEATURES]
    biases[1], main_grads = None, [None, torch.full((64, 32), 0.25), None]
    recipe = hb.recipes.nvfp4_forward()
    ys = hb.linear_shared(x, weights, biases, recipe, out_dtype=torch.float32, main_grads=main_grads)
    torch.autograd.backward(ys, dys)
    for i, (y, w, dy, bias) in enumerate(zip(ys, weights, dys, biases, strict=True)):
        a, b = hb.quantize(x, recipe.fprop.a), hb.quantize(w.detach(), recipe.fprop.b)
        assert torch.equal(y, hb.gemm_nt(a, b, torch.float32, bias=bias))
        exact = dy.double().T @ x.double()
        if i == 1:
            assert w.grad is None and torch.allclose(main_grads[1].double(), exact + 0.25, rtol=1e-2, atol=1e-1)
            assert not torch.equal(main_grads[1], main_grads[1].bfloat16().float())
        else:
            assert w.grad.dtype == torch.bfloat16 and torch.allclose(w.grad.double(), exact, rtol=1e-2, atol=1e-1)


def test_amaxes_of_the_input_are_taken_as_given():
    x, weights, _ = tensors()
    row = torch.tensor(9.0)
    (y,) = hb.linear_shared(x, weights[:1], None, hb.recipes.nvfp4_forward(), x_amaxes=ops.Amaxes(row, None))
    w_row = hb.quantize(weights[0], hb.recipes.nvfp4_forward().fprop.b)
    assert torch.equal(y, hb.gemm_nt(hb.quantize(x, hb.NVFP4(), amax=row), w_row, torch.float32))


def test_rows_of_a_shard_draw_the_bits_of_the_whole():
    spec = hb.NVFP4(outer="row", rounding="stochastic")
    x, weights, _ = tensors()
    recipe = hb.Recipe(fprop=hb.GemmSpec(a=spec, b=TILE))
    whole = hb.gemm_nt(hb.quantize(x, spec, rng=hb.Philox(5, 32)), hb.quantize(weights[0], TILE), torch.float32)
    place = hb.Philox(5, 32, first_block=10 * 2, blocks_per_row=2)
    assert torch.equal(hb.linear(x[10:], weights[0], None, recipe, rng=place), whole[10:])


class Quantized(TorchDispatchMode):
    """Counts the elements and block scales that quantizations return, as codes or as values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "quantize_row_col" in str(func):
            for data, scale in (out[:2], out[3:5]):
                elements = data.numel() * (1 if data.is_floating_point() else 2)
                self.count += elements + elements // 16
                assert scale.numel() == (0 if data.is_floating_point() else elements // 16)
        return out


@pytest.mark.parametrize("grouped", [False, True])
def test_without_gradients_only_the_operands_of_the_forward_are_quantized(grouped):
    x, weights, _ = tensors()
    recipe, w = hb.recipes.nvfp4(weight_block=(1, 16)), weights[0].requires_grad_()
    x.requires_grad_()

    def run():
        with Quantized() as quantized:
            if grouped:
                hb.grouped_linear(x, w[None], ends((32,)), recipe, rng=hb.Philox(0))
            else:
                hb.linear(x, w, None, recipe, rng=hb.Philox(0))
        return quantized.count

    both = run()
    with torch.no_grad():
        alone = run()
    assert alone == 2 * 32 * (32 + 32 // 16) < both
