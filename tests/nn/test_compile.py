"""torch.compile: every layer and recipe without a graph break, equal to eager, few graphs.

Through `aot_eager`, which traces forward and backward as inductor does but runs the ops one by one, so that results are
bitwise those of eager; what inductor itself makes of the surroundings is in test_compile_inductor.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_cases import RAGGED, ends
from linear_cases import RECIPES
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import halfbyte as hb
from halfbyte.train import model as models
from halfbyte.train.moe import MoE, MoEConfig

EVERY_KIND = ("nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "mxfp8", "row_scaled", "dequantized", "rotated_everywhere")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    """Return the compiled function and the counter of its graphs; a graph break raises."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def step(module, function, *inputs):
    """Return outputs and all gradients of one forward and backward."""
    module.zero_grad()
    x = inputs[0].clone().requires_grad_()
    y = function(x, *inputs[1:])
    outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator) for t in outputs])
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*(t.detach() for t in outputs), x.grad, *gradients]


def check(module, function, *inputs):
    for eager, graph in zip(step(module, module, *inputs), step(module, function, *inputs), strict=True):
        assert torch.equal(eager, graph)


def test_a_linear_layer_follows_every_recipe_without_a_break():
    layer = hb.nn.Linear(32, 48, state=hb.RunState(0))
    function, counter = compiled(layer, dynamic=False)
    x = torch.randn(40, 32)
    for number, name in enumerate(EVERY_KIND, 1):
        layer.recipe = RECIPES[name]
        check(layer, function, x)
        layer.run_state.advance()
        check(layer, function, x)  # other random bits, the same graph
        assert counter.frame_count == number


@pytest.mark.filterwarnings("error:.*lru_cache")
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_experts_follow_every_recipe_without_a_break(recipe):
    layer = hb.nn.GroupedLinear(len(RAGGED), 40, 24, recipe=recipe, state=hb.RunState(0))
    function, counter = compiled(layer)
    check(layer, function, torch.randn(sum(RAGGED), 40), ends(RAGGED))
    check(layer, function, torch.randn(sum(RAGGED), 40), ends(RAGGED[::-1]))  # other sizes of groups, no other graph
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["linear", "norm and mlp", "experts"])
def test_evaluation_is_compiled_without_a_break(kind):
    module = KINDS[kind](hb.RunState(0))
    function, _ = compiled(module)
    x = torch.randn(1, 40, 32)
    with torch.no_grad():
        eager, graph = module(x), function(x)
    module.requires_grad_(False)  # frozen, with gradients of nothing: the same
    for other in (graph, function(x)):
        for a, b in zip(eager, other, strict=True):
            assert torch.equal(a, b)


def experts(state):
    model = MoE(32, 48, MoEConfig(experts=4))
    hb.quantize_(model, "nvfp4_mxfp8_bwd", keep=hb.Keep(names=(), last_fraction=0), state=state)
    return model


KINDS = {
    "linear": lambda state: hb.nn.Linear(32, 48, recipe="nvfp4_mxfp8_bwd", state=state),
    "norm and linear": lambda state: hb.nn.LayerNormLinear(32, 48, state=state),
    "norm and mlp": lambda state: hb.nn.LayerNormMLP(32, 48, recipe="nvfp4_mxfp8_bwd", state=state),
    "experts": experts,
}


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_token_counts_make_two_graphs(kind):
    module = KINDS[kind](hb.RunState(0))
    function, counter = compiled(module)
    for tokens in range(41, 141, 5):
        y = function(torch.randn(1, tokens, 32, requires_grad=True))
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    check(module, function, torch.randn(1, 140, 32))
    assert counter.frame_count == 2


def test_blocks_compiled_one_by_one_share_a_graph():
    """The streams that they draw from differ, and are no constants of the graph; the first has no residual."""
    torch.manual_seed(0)
    model = models.Decoder(replace(models.model_preset("tiny"), layers=4))
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    tokens, results = torch.randint(256, (2, 40)), []
    for backend in (None, CompileCounterWithBackend("aot_eager")):
        for block in model.layers if backend else ():
            block.compile(backend=backend, fullgraph=True)
        model.zero_grad()
        logits, balance = model(tokens, balance=True)
        (logits.square().mean() + balance).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert backend.frame_count == 2


def test_switching_back_compiles_nothing_new():
    layer = hb.nn.Linear(32, 48, recipe="nvfp4", state=hb.RunState(0))
    function, counter = compiled(layer)
    x, seen = torch.randn(40, 32), []
    for recipe in ("nvfp4", "bf16", "nvfp4", "bf16"):
        hb.set_recipe_(layer, recipe)
        check(layer, function, x)
        seen.append(counter.frame_count)
    assert seen == [1, 2, 2, 2]


@pytest.mark.parametrize("kind", ["siblings", "norm and mlp", "experts"])
@pytest.mark.parametrize("names", [("nvfp4", "four_over_six"), ("four_over_six", "nvfp4")])
def test_recipes_that_differ_in_a_float_follow_each_other(kind, names):
    """The second time, compiled code takes the floats that changed for variables."""
    if kind == "siblings":
        module = hb.nn.LayerNormLinear(32, {"q": 32, "k": 16}, state=hb.RunState(0))
    else:
        module = KINDS[kind](hb.RunState(0))
    function, counter = compiled(module)
    for number, name in enumerate((*names, "mxfp8", *names), 1):
        hb.set_recipe_(module, name)
        check(module, function, torch.randn(1, 40, 32))
        assert counter.frame_count == min(number, 3)


class Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 16)
        self.experts = hb.nn.GroupedLinear(2, 16, 16, recipe="bf16")

    def forward(self, x):
        q, k = hb.nn.forward_shared(x, (self.q_proj, self.k_proj))
        k = self.experts(k, torch.tensor([20, 40], dtype=torch.int32))
        return q + torch.cat((k, k), dim=-1)


def test_compiled_code_reads_cached_weights_as_they_change():
    torch.manual_seed(0)
    model = Siblings()
    hb.quantize_(model, "nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    function, counter = compiled(model)
    x = torch.randn(40, 32)
    with hb.cache_weights(model, optimizer):
        for _ in range(3):
            check(model, function, x)
            optimizer.step()
        cached = step(model, function, x)
        assert counter.frame_count == 1
        hb.set_recipe_(model, "mxfp8")
        check(model, function, x)
        hb.set_recipe_(model, "nvfp4")
        for a, b in zip(cached, step(model, function, x), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(cached, step(model, model, x), strict=True):
        assert torch.equal(a, b)


def test_a_compiled_optimizer_step_refills_the_cache():
    torch.manual_seed(0)
    model = Siblings()
    hb.quantize_(model, "nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hb.cache_weights(model, optimizer):
        model(torch.randn(40, 32)).sum().backward()
        before = model.q_proj.cached_weight().row.blocks.qdata.clone()

        def step():
            optimizer.step()

        torch.compile(step, backend="aot_eager")()
        row = model.q_proj.cached_weight().row
        amax = max(m.weight.detach().abs().max() for m in (model.q_proj, model.k_proj))
        assert not torch.equal(before, row.blocks.qdata)
        assert torch.equal(row.blocks.qdata, hb.quantize(model.q_proj.weight, row.spec, amax=amax).qdata)
