"""Siblings of a fused model: outputs that the first computed for all, and what happened before they were asked for."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.nn import linear


class Attention(nn.Module):
    """q, k and v; `between` is called when q is there."""

    between = staticmethod(lambda: None)

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        q = self.q_proj(x)
        self.between()
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(32), Attention()

    def forward(self, x):
        return self.self_attn(self.input_layernorm(x))


def fused(recipe="nvfp4"):
    torch.manual_seed(0)
    model = Block()
    hb.quantize_(model, recipe, state=hb.RunState(2), keep=None)
    hb.nn.fuse_(model)
    return model


def add_to_bias(layer):
    with torch.no_grad():
        layer.bias.add_(1)


def write_to_bias(layer):
    layer.bias.data = layer.bias.data + 1


def another_bias(layer):
    layer.bias = nn.Parameter(layer.bias.detach() + 1)


def no_bias(layer):
    layer.bias = None


def train_it(layer):
    layer.requires_grad_(True)


def freeze_it(layer):
    layer.requires_grad_(False)


@pytest.mark.parametrize("change", [add_to_bias, write_to_bias, another_bias, no_bias, train_it, freeze_it])
def test_what_changes_on_a_sibling_before_it_is_asked_is_seen(change):
    model = fused()
    attention, k = model.self_attn, model.self_attn.k_proj
    if change is train_it:
        k.requires_grad_(False)
    x = model.input_layernorm(torch.randn(16, 32))
    attention.q_proj(x)
    change(k)
    found = k(x)
    hb.nn.unfuse_(model)
    assert torch.equal(found, k(x))
    found.sum().backward()
    given = [p.grad is not None for p in (k.weight, k.bias) if p is not None]
    assert given == [change is not freeze_it] * len(given)


@pytest.mark.parametrize("signs", ["fixed", "fresh"])
def test_threads_that_run_one_model_know_what_they_computed_themselves(signs):
    model = fused(hb.recipes.nvfp4(hadamard=hb.Hadamard(size=16, signs=signs)))
    generator = torch.Generator().manual_seed(1)
    inputs, dy = [torch.randn(16, 32, generator=generator) for _ in range(2)], torch.randn(16, 96, generator=generator)

    def step(x):
        x = x.clone().requires_grad_()
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, model.self_attn.k_proj.weight], dy)]

    wanted = [step(x) for x in inputs]
    model.self_attn.between = threading.Barrier(2, timeout=30).wait
    found = [None, None]

    def run(index):
        found[index] = step(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, alone in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))


def test_the_first_sibling_computes_for_all_and_keeps_nothing():
    """One pass a call of three layers, of each x anew; of the outputs nothing stays, nor of an x that all have read."""
    model, passes = fused(), []
    outputs_of = linear.outputs_of

    def counted(x, layers, *rest):
        passes.append(len(layers.weights))
        return outputs_of(x, layers, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "outputs_of", counted)
        for _ in range(2):
            x = torch.randn(16, 32)
            ys = [layer(x) for layer in (model.self_attn.q_proj, model.self_attn.k_proj, model.self_attn.v_proj)]
    assert passes == [3, 3]
    alive = [weakref.ref(tensor) for tensor in (x, *ys)]
    del x, ys
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.timeout(120)
def test_what_a_compiled_sibling_computed_does_not_outlive_eager_ones():
    attention = fused().self_attn
    compiled = torch.compile(attention.q_proj, backend="eager")
    x = torch.randn(16, 32)
    with torch.no_grad():
        ys = compiled(x), attention.k_proj(x), attention.v_proj(x)
    alive = [weakref.ref(tensor) for tensor in (x, *ys)]
    del x, ys
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.parametrize("signs", ["fixed", "fresh"])
def test_a_sibling_that_runs_without_the_first_has_the_amax_of_its_own_signs(signs):
    """What the norm handed over was rotated with those of the first, which draws for all where it runs."""
    model = fused(hb.recipes.nvfp4(hadamard=hb.Hadamard(size=16, signs=signs)))
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(16, 32, generator=generator), torch.randn(16, 32, generator=generator)
    k, y = model.self_attn.k_proj, model.input_layernorm(x)
    found = torch.autograd.grad(k(y), k.weight, dy)[0]
    hb.nn.unfuse_(model)
    assert torch.equal(found, torch.autograd.grad(k(y.detach()), k.weight, dy)[0])
