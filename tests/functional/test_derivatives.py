"""What has no derivative says so and names the remedy."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import RAGGED, ends
from torch.autograd import forward_ad

import halfbyte as hb

X, W = torch.randn(sum(RAGGED), 32), torch.randn(16, 32)


def linear(x, w=W):
    return hb.linear(x, w, None, hb.recipes.nvfp4(), rng=hb.Philox(0))


def grouped(x, w=W):
    return hb.grouped_linear(x, w.expand(len(RAGGED), *W.shape), ends(RAGGED), hb.recipes.nvfp4(), rng=hb.Philox(0))


def norm(x, w=W):
    return hb.functional.layer_norm(x, w[0].detach() + 2, w[1].detach())


def activation(x, w=W):
    return hb.functional.activation("swiglu", x, x.flip(0))


def mlp(x, w=W):
    return MLPS(x)


MLPS = hb.nn.LayerNormMLP(32, 48)
REMEDIES = {
    linear: r"hb\.high_precision",
    grouped: r"one by one: torch\.nn\.functional\.linear",
    norm: r"hb\.nn\.unfuse_\(model\)",
    activation: r"hb\.nn\.unfuse_\(model\)",
    mlp: r"hb\.nn\.unfuse_\(model\).*hb\.high_precision",
}


@pytest.mark.parametrize("function", [norm, activation, mlp])
def test_a_second_derivative_of_what_is_fused_names_the_remedy(function):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(function(x).square().sum(), x)
    assert torch.equal(first, plain)
    with pytest.raises(RuntimeError, match=f"differentiated twice.*{REMEDIES[function]}"):
        first.square().sum().backward()


@pytest.mark.parametrize("function", [linear, grouped])
@pytest.mark.parametrize("through", ["gradient", "saved"])
def test_a_second_derivative_names_the_remedy(function, through):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = function(x, w)
    dy = torch.randn_like(y).requires_grad_() if through == "gradient" else torch.randn_like(y)
    first = torch.autograd.grad(y, (x, w), dy, create_graph=True)
    plain = torch.autograd.grad(function(x, w), (x, w), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
    with pytest.raises(RuntimeError, match=f"differentiated twice.*{REMEDIES[function]}"):
        first[0].square().sum().backward()


@pytest.mark.parametrize("function", REMEDIES)
def test_a_second_derivative_with_respect_to_an_input_is_refused_beside_paths_that_have_one(function):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(x.square().sum() + function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"differentiated twice.*{REMEDIES[function]}"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize(
    ("function", "wanted"), [*((function, "x") for function in REMEDIES), (linear, "w"), (grouped, "w"), (mlp, "w")]
)
def test_a_second_derivative_is_refused_where_the_gradient_of_the_output_is_constant(function, wanted):
    leaves = {"x": X.clone().requires_grad_(), "w": W.clone().requires_grad_()}
    y = function(2 * leaves["x"], leaves["w"])
    if function is mlp:
        leaves["w"] = dict(MLPS.named_parameters())["down_proj.weight"]
    first = torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)
    if wanted == "x" and function in (linear, grouped):  # that of the weight depends on x
        first = torch.autograd.grad(function(2 * leaves["x"], leaves["w"]).sum(), leaves["w"], create_graph=True)
    beside = leaves[wanted].square().sum()  # a penalty on gradients is added to a loss
    with pytest.raises(RuntimeError, match=f"differentiated twice.*{REMEDIES[function]}"):
        torch.autograd.grad(first[0].square().sum() + beside, leaves[wanted])


@pytest.mark.parametrize("function", REMEDIES)
def test_torch_func_names_the_remedy(function):
    with pytest.raises(RuntimeError, match=rf"torch\.func.*{REMEDIES[function]}"):
        torch.func.grad(lambda x: function(x).sum())(X)
    with pytest.raises(RuntimeError, match=rf"torch\.func.*{REMEDIES[function]}"):
        torch.func.vmap(function)(X.expand(2, *X.shape))
    with pytest.raises(RuntimeError, match=rf"forward-mode.*{REMEDIES[function]}"), forward_ad.dual_level():
        function(forward_ad.make_dual(X, X))


def test_the_remedy_works():
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    with hb.high_precision(model):
        gradient = torch.func.grad(lambda x: model(x).square().sum())(X)
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
    assert torch.equal(gradient, first.detach()) and x.grad is not None


def test_the_remedy_of_a_fused_model_works():
    mlp = hb.nn.LayerNormMLP(32, 48)
    norm, linears = mlp.to_modules()
    gate, up, down = (linears[name] for name in mlp.names)
    x = X.clone().requires_grad_()
    y = norm(x)
    (first,) = torch.autograd.grad(down(torch.nn.functional.silu(gate(y)) * up(y)).sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


TWO = hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4())
STILL = hb.Recipe(fprop=TWO, dgrad=TWO, wgrad=TWO)
FORWARD_MODE = {
    "linear": (lambda w: hb.linear(X, w, None, STILL), (16, 32)),
    "bias": (lambda b: hb.linear(X, W, b, STILL), (16,)),
    "experts": (lambda w: hb.grouped_linear(X, w, ends(RAGGED), STILL), (len(RAGGED), 16, 32)),
    "norm": (lambda w: hb.functional.rms_norm(X, w), (32,)),
    "up": (lambda up: hb.functional.activation("swiglu", X, up), tuple(X.shape)),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_of_weights_names_the_remedy(name):
    function, shape = FORWARD_MODE[name]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(shape), torch.ones(shape))
        with pytest.raises(RuntimeError, match="halfbyte: .* no forward-mode derivative; "):
            function(dual)


def test_batched_gradients_are_a_loop_over_them_or_name_the_remedy():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    dys = torch.randn(3, len(X), 16)
    batched = torch.autograd.grad(linear(x, w), (x, w), dys, is_grads_batched=True)
    loop = [torch.autograd.grad(linear(x, w), (x, w), dy) for dy in dys]
    assert all(torch.equal(a, torch.stack(b)) for a, b in zip(batched, zip(*loop, strict=True), strict=True))
    with pytest.raises(RuntimeError, match=r"torch\.func.*hb\.nn\.unfuse_"):
        torch.autograd.grad(mlp(x), x, torch.randn(3, *X.shape), is_grads_batched=True)


def test_a_second_derivative_is_refused_where_one_of_several_outputs_was_not_used():
    x = X.clone().requires_grad_()
    y = hb.linear_shared(x, [W, W], None, hb.recipes.nvfp4(), rng=hb.Philox(0))[1]
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"differentiated twice.*{REMEDIES[linear]}"):
        first.square().sum().backward()
