"""Norms and activations: against fp64 autograd of their formulas and against torch's own, within rounding."""

import math

import pytest
import torch
import torch.nn.functional as F
from fused_checks import random

from halfbyte import functional as HF
from halfbyte import reference
from halfbyte.arithmetic import ACTIVATIONS, FUNCTIONS, LANES
from halfbyte.reference.activation import BOTH, FORWARD, exponential
from halfbyte.reference.norm import column_sum, row_sum

TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
EXACT = TORCH | {  # torch's forms cancel in the left tail, in fp64 too
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x / 2**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
}
EPS = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_norm_and_its_gradients(dtype, centered):
    x, dy = random((37, 700), dtype, 0, 3), random((37, 700), dtype, 1)
    weight, bias = random((700,), dtype, 2), random((700,), dtype, 3)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = HF.layer_norm(*leaves, eps=1e-5) if centered else HF.rms_norm(*leaves[:2], eps=1e-5)
    y.backward(dy)
    xd, wd, bd = (t.double().requires_grad_() for t in (x, weight, bias))
    d = xd - xd.mean(-1, keepdim=True) if centered else xd
    expected = d / (d.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wd + (bd if centered else 0)
    expected.backward(dy.double())
    tolerance = max(EPS[dtype], 2e-7)
    assert relative(y, expected) <= tolerance
    for leaf, exact in zip(leaves[: 2 + centered], (xd, wd, bd), strict=False):
        assert relative(leaf.grad, exact.grad) <= tolerance


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_torch_s_norms_are_near(dtype):
    """torch rounds once too, but sums in another order: a last bit may differ."""
    x, weight, bias = (random(s, dtype, i, 2) for i, s in enumerate(((37, 700), (700,), (700,))))
    assert relative(HF.rms_norm(x, weight, 1e-5), F.rms_norm(x, (700,), weight, 1e-5)) <= 2 * EPS[dtype]
    ours = HF.layer_norm(x, weight, bias, 1e-5)
    assert relative(ours, F.layer_norm(x, (700,), weight, bias, 1e-5)) <= 2 * EPS[dtype]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_and_slopes(function):
    x = torch.cat((torch.linspace(-12, 12, 20_001), random((1000,), torch.float32, 0, 5).clamp(-12, 12)))
    exact = x.double().requires_grad_()
    value = EXACT[function](exact)
    assert torch.allclose(value, TORCH[function](exact), rtol=1e-9, atol=1e-9)
    value.sum().backward()
    ours, slope = BOTH[function](x)
    assert torch.equal(ours, FORWARD[function](x))
    # Relative to what rounding x itself changes: |x f'(x)| is large in the tails, where f is tiny.
    scale = value.abs() + (x * exact.grad).abs()
    assert ((ours - value).abs() <= 3e-6 * scale + 1e-30).all()
    assert ((slope - exact.grad).abs() <= 3e-6 * (exact.grad.abs() + 0.1)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations(name):
    function, gated = ACTIVATIONS[name]
    x, up, dh = (random((7, 50), torch.float32, i, 2) for i in range(3))
    leaves = [t.clone().requires_grad_() for t in ((x, up) if gated else (x,))]
    h = HF.activation(name, *leaves)
    h.backward(dh)
    exact = [t.double().requires_grad_() for t in ((x, up) if gated else (x,))]
    expected = TORCH[function](exact[0]) * (exact[1] if gated else 1)
    expected.backward(dh.double())
    assert relative(h, expected) <= 1e-6
    for mine, theirs in zip(leaves, exact, strict=True):
        assert relative(mine.grad, theirs.grad) <= 1e-6


def test_exponential():
    x = torch.linspace(-20, 20, 10_001)
    exact = x.double().exp()
    assert ((exponential(x) - exact).abs() <= 2e-6 * exact).all()
    assert exponential(torch.zeros(1)) == 1


def test_nan_is_never_swallowed():
    for function in FUNCTIONS:
        value, slope = BOTH[function](torch.tensor([float("nan")]))
        assert value.isnan().all() and slope.isnan().all()


def test_sums_have_the_order_that_is_written_down():
    """Values whose sum depends on the order: recomputed one by one."""
    x = random((18, LANES + 3), torch.float32, 0) * 10 ** random((18, LANES + 3), torch.float32, 1).clamp(-5, 5)
    for row in (0, 17):
        lanes = [0.0] * LANES
        for start in range(0, x.shape[1], LANES):
            for lane, value in enumerate(x[row, start : start + LANES].tolist()):
                lanes[lane] = torch.tensor(lanes[lane]).add(value).item()
        while len(lanes) > 1:
            lanes = [torch.tensor(a).add(b).item() for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        assert row_sum(x)[row].item() == lanes[0]
    first, second = torch.zeros(x.shape[1]), torch.zeros(x.shape[1])
    for i in range(18):
        first, second = (first + x[i], second) if i < 16 else (first, second + x[i])
    assert torch.equal(column_sum(x), first + second)


def test_layer_norm_of_a_constant_row_is_its_bias():
    y, statistics = reference.norm(torch.full((1, 8), 3.0), torch.ones(8), torch.arange(8.0), 1e-5, True, torch.float32)
    assert torch.equal(y, torch.arange(8.0)[None]) and math.isclose(statistics.rstd.item(), 1e-5**-0.5, rel_tol=1e-6)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: HF.rms_norm(torch.ones(2, 3), torch.ones(2)), "weight.shape"),
        (lambda: HF.rms_norm(torch.ones(2, 3, dtype=torch.int32), torch.ones(3)), "x.dtype"),
        (lambda: HF.activation("swish", torch.ones(2, 3)), "activation='swish'"),
        (lambda: HF.activation("swiglu", torch.ones(2, 3)), "takes 2 tensors"),
        (lambda: HF.activation("gelu", torch.ones(2, 3), torch.ones(2, 3)), "takes 1 tensors"),
        (lambda: HF.activation("swiglu", torch.ones(2, 3), torch.ones(2, 4)), "give torch.float32"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
