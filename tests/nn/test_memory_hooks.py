"""Activation checkpointing and offloading: bitwise the same step, each quantization once, 4-bit bytes on the way."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import halfbyte as hb
from halfbyte import reference
from halfbyte.train import model as models

SELECTIVE = partial(create_selective_checkpoint_contexts, hb.selective_checkpoint_ops())


def quantizations(function, monkeypatch) -> int:
    """Return how many quantizations the backend ran, in compiled code too."""
    calls, run = [], reference.quantize_row_col
    with monkeypatch.context() as patch:
        patch.setattr(reference, "quantize_row_col", lambda *a, **k: calls.append(1) or run(*a, **k))
        function()
    return len(calls)


class Checkpointed(nn.Module):
    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False, **self.options)


def mlp(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    return model


def gradients(model, function, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointed_is_bitwise_not_checkpointed(kind, is_compiled, monkeypatch):
    model, x = mlp(), torch.randn(40, 32)
    torch._dynamo.reset()
    function = Checkpointed(model, **({} if kind == "full" else {"context_fn": SELECTIVE}))
    plain = gradients(model, model, x)
    if is_compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    for a, b in zip(plain, gradients(model, function, x), strict=True):
        assert torch.equal(a, b)
    once = quantizations(lambda: gradients(model, model, x), monkeypatch)
    assert once == 6  # x, w and dy of two layers
    again = quantizations(lambda: gradients(model, function, x), monkeypatch)
    assert again == once + (4 if kind == "full" else 0)


def test_what_selective_checkpointing_keeps_are_codes(monkeypatch):
    """It keeps every output of an op: an operand that one GEMM reads would else be kept as decoded values."""
    model, x, run, asked = mlp(), torch.randn(40, 32), reference.quantize_row_col, []

    def spy(t, row, col):
        asked.extend(side.transient for side in (row, col) if side is not None)
        return run(t, row, col)

    monkeypatch.setattr(reference, "quantize_row_col", spy)
    model(x)
    assert any(asked)
    asked.clear()
    Checkpointed(model, context_fn=SELECTIVE)(x)
    assert asked and not any(asked)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_the_trainers_model_recomputes_to_the_same_bits(name, recompute):
    torch.manual_seed(0)
    model = models.Decoder(models.model_preset(name))
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    tokens, results = torch.randint(256, (2, 24)), []
    for kind in ("nothing", recompute):
        model.recompute = kind
        model.zero_grad()
        logits, balance = model(tokens, balance=True)
        (logits.square().mean() + balance).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Count(TorchDispatchMode):
    """Counts the calls of our ops that really run."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "halfbyte":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_selective_recomputation_repeats_no_gemm_and_no_quantization(name, recipe):
    """Experts' too: their GEMMs are other ops than those of a linear layer."""
    model = models.Decoder(models.model_preset(name))
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    tokens, counts = torch.arange(48).view(2, 24), {}
    for kind in ("nothing", "selective", "full"):
        model.recompute = kind
        with Count() as count:
            logits, balance = model(tokens, balance=True)
            (logits.square().mean() + balance).backward()
        dear = {op: n for op, n in count.calls.items() if "gemm" in op or "quantize" in op or "amax" in op}
        counts[kind] = dear
    assert counts["selective"] == counts["nothing"]
    gemms = {"tiny": ("gemm_nt",), "moe-tiny": ("gemm_nt", "grouped_gemm_nt")}[name]
    assert all(counts["full"][op] > counts["nothing"][op] > 0 for op in gemms), "there is something to repeat"


def test_four_bit_bytes_travel_when_saved_tensors_are_offloaded():
    model, x = mlp(), torch.randn(64, 32).requires_grad_()
    moved = []

    def pack(tensor):
        moved.append(tensor)
        return tensor.to("cpu", copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    y.square().sum().backward()
    # x and w of two layers, 0.5 bytes a code and one scale of 16; the input of SiLU stays in fp32
    elements = 64 * 32 + 64 * 64 + 2 * 32 * 64
    codes = sum(t.nbytes for t in moved if t.dtype == torch.uint8)
    assert codes == elements * 9 // 16
    rest = sum(t.nbytes for t in moved if t.dtype != torch.uint8)
    assert rest == 4 * 64 * 64 + 4 * 4 + 2 * 16  # four amaxes, two positions


def test_save_on_cpu_changes_no_bit():
    model, x = mlp(), torch.randn(40, 32)
    plain = gradients(model, model, x)
    with torch.autograd.graph.save_on_cpu():
        for a, b in zip(plain, gradients(model, model, x), strict=True):
            assert torch.equal(a, b)


def scaled_gradients(model, optimizer, scale, dtype):
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with torch.autocast("cpu", dtype):
        loss = model(TOKENS).float().logsumexp(-1).mean()
    scaler.scale(loss).backward()
    return scaler


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.0), (torch.float16, 1e-3)])
def test_autocast_and_a_gradient_scaler(dtype, tolerance):
    """Scaling by a power of two moves amaxes and nothing else; fp16 gradients are subnormal without it."""
    model = decoder(1)
    hb.quantize_(model, "nvfp4_mxfp8_bwd", keep=NOTHING_KEPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    results = []
    for scale in (2.0**10, 2.0**14):
        scaled_gradients(model, optimizer, scale, dtype).unscale_(optimizer)
        results.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(a.abs().max()))


def test_a_step_that_the_scaler_skips_leaves_cached_weights_alone():
    model = decoder(1)
    hb.quantize_(model, "nvfp4_mxfp8_bwd", keep=NOTHING_KEPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    with hb.cache_weights(model, optimizer, dtype=torch.bfloat16):
        scaler = scaled_gradients(model, optimizer, 4.0, torch.bfloat16)
        model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        with torch.autocast("cpu", torch.bfloat16):
            cached = model(TOKENS)
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cached, model(TOKENS))
