"""Passes of linear layers as one op each: what compiled code calls, with the bits of eager code."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck

import halfbyte as hb

# The package has functions of these names.
linear, activation = (import_module(f"halfbyte.functional.{name}") for name in ("linear", "activation"))
quantization, gemm, grouped = (import_module(f"halfbyte.ops.{name}") for name in ("quantization", "gemm", "grouped"))

K, SIZES = 48, (32, 16, 32)
PRESETS = ("nvfp4", "four_over_six", "nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward")
FRESH = hb.Recipe(
    fprop=hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4()),
    wgrad=hb.GemmSpec(
        a=hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(signs="fresh")),
        b=hb.NVFP4(rotation=hb.Hadamard(signs="fresh")),
    ),
    dgrad=hb.GemmSpec(a=hb.NVFP4(rounding="stochastic"), b=hb.NVFP4()),
)


def pass_of(recipe, *, w_amax=None, frozen=()):
    """Return a function of (x, weights, bias) that runs both kinds of passes."""
    place = hb.Philox(3, 7) if recipe.needs_rng else None

    def run(x, weights, bias):
        weights = [w.detach() if i in frozen else w for i, w in enumerate(weights)]
        given = None if w_amax is None else [w_amax] * 3
        ys = linear.linear_shared(x, weights, [bias, None, None], recipe, rng=place, weight_amaxes=given)
        layers = linear.Layers([weights[0], weights[2]], [bias, None], [None] * 2, [None] * 2, [None] * 2, place)
        h, _ = activation.linear_activation(x, layers, "swiglu", recipe)
        return torch.cat([*ys, h], dim=-1)

    return run


def results(run, needs_x=True):
    torch.manual_seed(0)
    x = torch.randn(2, 18, K, requires_grad=needs_x)
    weights = [torch.randn(n, K, requires_grad=True) for n in SIZES]
    bias = torch.randn(SIZES[0], requires_grad=True)
    y = run(x, weights, bias)
    y.backward(torch.randn(y.shape))
    return [y.detach(), *(t.grad for t in (x, *weights, bias) if t.grad is not None)]


def counted(graphs):
    """Return a backend of torch.compile that notes which of our ops a graph calls."""

    def note(graph, inputs):
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "halfbyte" in str(node.target)]
        graphs.append(names)
        return graph

    return aot_autograd(fw_compiler=note, bw_compiler=note)


@pytest.mark.parametrize("recipe", [*map(hb.recipes.get, PRESETS), FRESH], ids=[*PRESETS, "fresh signs"])
def test_compiled_passes_have_the_bits_of_eager_ones(recipe):
    torch._dynamo.reset()
    graphs = []
    options = {"w_amax": torch.tensor(3.5)} if recipe == hb.recipes.get("nvfp4") else {}
    run = pass_of(recipe, **options)
    expected = results(run)
    actual = results(torch.compile(run, fullgraph=True, backend=counted(graphs)))
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
    if recipe != hb.recipes.get("nvfp4_forward"):  # whose backward reads plain operands
        forward = ["linear_activation_forward", "linear_forward"]
        assert [sorted(names) for names in graphs] == [forward, [n.replace("for", "back") for n in forward]]


@pytest.mark.parametrize(("frozen", "needs_x"), (((0, 1, 2), True), ((), False), ((1,), True)))
def test_what_needs_no_gradient_gets_none(frozen, needs_x):
    torch._dynamo.reset()
    run = pass_of(hb.recipes.get("nvfp4"), frozen=frozen)
    expected = results(run, needs_x)
    actual = results(torch.compile(run, fullgraph=True, backend="aot_eager"), needs_x)
    assert len(expected) == len(actual) == 2 + needs_x + 3 - len(frozen)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)


def recorded(monkeypatch, recipe):
    """Return the arguments of the four ops in one compiled step."""
    calls = {}
    for module in (linear, activation):
        for name in ("_FORWARD", "_BACKWARD"):
            op = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *given, op=op: calls.setdefault(op, given) and op(*given))
    monkeypatch.setattr(linear.whole, "fits", lambda *_: True)
    results(pass_of(recipe))
    assert len(calls) == 4
    return calls


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_opcheck(recipe, monkeypatch):
    calls = recorded(monkeypatch, hb.recipes.get(recipe))
    monkeypatch.undo()
    for op, given in calls.items():
        detached = [None if t is None else t.detach() for t in given[1]]
        opcheck(op, (given[0], detached, *given[2:]))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_traced_code_does_not_ask_which_backend_runs(recipe, monkeypatch):
    """Where a pass is not one op, here with cached weights; on a GPU a tracer cannot follow the answer."""
    torch._dynamo.reset()
    asked = quantization.choose

    def choose(*given):
        torch._dynamo.graph_break()  # an error where it is traced, nothing where it runs
        return asked(*given)

    for module in (quantization, gemm, grouped):
        monkeypatch.setattr(module, "choose", choose, raising=False)
    model = torch.nn.ModuleList(torch.nn.Linear(K, n) for n in SIZES)
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0))
    hb.cache_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.float32)

    def run(x):
        return torch.cat(hb.nn.forward_shared(x, tuple(model)), dim=-1)

    found = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        model.zero_grad()
        x = torch.randn(18, K, requires_grad=True)
        y = function(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_nor_does_traced_code_of_experts(monkeypatch):
    torch._dynamo.reset()
    asked = grouped.choose

    def choose(*given):
        torch._dynamo.graph_break()
        return asked(*given)

    monkeypatch.setattr(grouped, "choose", choose)
    layer = hb.nn.GroupedLinear(2, K, 48, recipe="nvfp4", state=hb.RunState(0))
    x, ends = torch.randn(18, K, requires_grad=True), torch.tensor([7, 18], dtype=torch.int32)
    expected = layer(x, ends)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ends), expected)


def test_selective_checkpointing_keeps_what_a_pass_made():
    assert {op.default for op in (linear._FORWARD, activation._FORWARD)} <= set(hb.selective_checkpoint_ops())
