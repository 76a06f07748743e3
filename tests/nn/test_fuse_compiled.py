"""What a norm and siblings share in compiled code: the bits of eager code, also where grad modes change or a checkpoint
begins, and no more graphs."""

from __future__ import annotations

import pytest
import torch
from small_models import NOTHING_KEPT
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.train import model as models

FRESH = hb.recipes.nvfp4(hadamard=hb.Hadamard(signs="fresh"))
X = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self, detached: bool):
        super().__init__()
        self.detached = detached
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        q = self.q_proj(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
            k = self.k_proj(x)
        return scaled_dot_product_attention(q, k, self.v_proj(x))


class Block(nn.Module):
    def __init__(self, detached: bool):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(32, eps=1e-6), Attention(detached)

    def forward(self, x):
        return self.self_attn(self.input_layernorm(x))


def block(recipe, detached: bool, *, fused: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(detached))
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    if fused:
        hb.nn.fuse_(model)
    return model


def step(model, function):
    """Return the output and all gradients; None where all are zero, as compiled code cannot leave them out."""
    model.zero_grad()
    x = X.clone().requires_grad_()
    y = function(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return [y.detach(), x.grad, *(None if p.grad is None or not p.grad.any() else p.grad for p in model.parameters())]


def same(a, b) -> bool:
    return all(p is q if p is None or q is None else torch.equal(p, q) for p, q in zip(a, b, strict=True))


PARTS = ("block", "attention", "norm and attention")
# Of `make test` each recipe and each part, with a detached sibling and without.
COMPILED = [
    pytest.param(
        recipe,
        detached,
        part,
        marks=() if (i + j) % len(PARTS) == detached else pytest.mark.full,
        id=f"{part}-{detached}-{name}",
    )
    for i, (name, recipe) in enumerate({"bf16": "bf16", "mxfp8": "mxfp8", "fresh": FRESH}.items())
    for detached in (False, True)
    for j, part in enumerate(PARTS)
]


@pytest.mark.parametrize("recipe, detached, part", COMPILED)
def test_compiled_is_eager_whatever_the_grad_mode_of_a_sibling(recipe, detached, part):
    model = block(recipe, detached)
    expected = step(model, model)
    assert all((p.grad is None) == (detached and "k_proj" in name) for name, p in model.named_parameters())
    norm, attention = model[0].input_layernorm, model[0].self_attn
    modules = dict(zip(PARTS, ([model], [attention], [norm, attention]), strict=True))[part]
    counter = CompileCounterWithBackend("aot_eager")
    for module in modules:
        module.compile(backend=counter, fullgraph=True)
    for _ in range(3):
        assert same(step(model, model), expected)
    assert counter.frame_count == len(modules)
    for tokens in range(41, 141, 20):
        model(torch.randn(2, tokens, 32)).sum().backward()
    assert counter.frame_count == 2 * len(modules)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_checkpoints_inside_a_compiled_model(recompute):
    torch.manual_seed(0)
    model, tokens = models.Decoder(models.model_preset("tiny")), torch.randint(256, (2, 24))
    hb.quantize_(model, FRESH, keep=NOTHING_KEPT)
    hb.nn.fuse_(model)
    results = []
    for kind, is_compiled in (("nothing", False), (recompute, True)):
        model.recompute = kind
        model.zero_grad()
        function = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        logits = function(tokens)
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    assert same(*results)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_sibling_that_runs_before_the_first_takes_no_amax_of_signs_that_are_not_its_own(is_compiled):
    """q would draw the signs with which the norm took the amax of rotated columns."""
    model = block(FRESH, False)
    norm, layer = model[0].input_layernorm, model[0].self_attn.k_proj

    def handed_over(x):
        return layer(norm(x))

    def apart(x):
        return layer(norm(x) * 1)

    options = {"backend": "aot_eager", "fullgraph": True}
    functions = [torch.compile(f, **options) if is_compiled else f for f in (handed_over, apart)]
    assert same(*(step(model, function) for function in functions))


def test_checkpoints_around_the_attention_alone_say_what_torch_cannot():
    """docs/fused.md: a norm inside the same checkpoint is the remedy."""
    model = block("nvfp4", False)
    norm, attention = model[0].input_layernorm, model[0].self_attn

    def outside(x):
        return checkpoint(attention, norm(x), use_reentrant=False)

    def inside(x):
        return checkpoint(model, x, use_reentrant=False)

    expected = step(model, model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Unsafe side effect"):
        step(model, torch.compile(outside, backend="aot_eager", fullgraph=True))
    assert same(step(model, torch.compile(inside, backend="aot_eager", fullgraph=True)), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_siblings_of_compiled_code_find_their_amax_by_one_op(autocast):
    """Ops cost the host most: q, k and v make one for their amax, one forward, and their backward none for it."""
    ours, model = [], block("nvfp4", False)

    def note(graph, inputs):
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "halfbyte" in str(node.target)]
        ours.append(sorted(names))
        return graph

    function = torch.compile(model, backend=aot_autograd(fw_compiler=note, bw_compiler=note), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert same(step(model, function), step(model, model))
    assert ours[0] == ["amax_of_all", "linear_forward", "norm"] and ours[1].count("linear_backward") == 1
    assert "amax" not in ours[1] and "amax_of_all" not in ours[1]
