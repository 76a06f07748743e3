"""The residual stream in two parts, summed by the norm that reads it: bits of a decoder whose blocks sum as written."""

from dataclasses import replace

import norm_calls
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import halfbyte as hb
from halfbyte.train import model as models

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
RECIPES = ("bf16", "nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "mxfp8", "nvfp4_forward")


def plain(model: models.Decoder, tokens: Tensor, balance: bool = True) -> tuple[Tensor, Tensor]:
    """Run the decoder's parts with every residual sum written out."""
    assert balance
    angles, x, losses = model.rotary(tokens.shape[-1]), model.embed_tokens(tokens), []
    for block in model.layers:
        x = x + block.self_attn(block.input_layernorm(x), *angles)
        y = block.mlp(block.post_attention_layernorm(x))
        if isinstance(y, tuple):
            losses.append(y[1])
            y = y[0]
        x = x + y
    return model.lm_head(model.norm(x)), torch.stack(losses).mean() if losses else torch.zeros(())


def decoder(recipe: str, *, preset: str = "tiny", fused: bool = True, dtype: torch.dtype = BF16) -> models.Decoder:
    made = models.Decoder(replace(models.model_preset(preset), layers=3))
    models.initialise_(made, 0)
    made.to(dtype)
    if recipe != "bf16":
        hb.quantize_(made, recipe, keep=hb.Keep(names=("lm_head",), last_fraction=0), state=hb.RunState(1))
    if fused:
        hb.nn.fuse_(made)
    return made


def results(model: nn.Module, forward) -> list[Tensor]:
    """Return the loss, the logits and every gradient."""
    model.zero_grad()
    logits, balance = forward(TOKENS[:, :-1], balance=True)
    loss = F.cross_entropy(logits.float().flatten(0, 1), TOKENS[:, 1:].flatten()) + balance
    loss.backward()
    return [loss.detach(), logits.detach(), *(p.grad.clone() for p in model.parameters())]


def check(model: models.Decoder, forward=None) -> None:
    wanted = results(model, lambda tokens, balance: plain(model, tokens, balance))
    for given, expected in zip(results(model, forward or model), wanted, strict=True):
        assert given.dtype == expected.dtype and torch.equal(given, expected)


@pytest.mark.parametrize("fused", [False, True], ids=["torch's norms", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe, fused):
    check(decoder(recipe, fused=fused))


@pytest.mark.parametrize("fused", [False, True], ids=["torch's norms", "fused"])
def test_a_mixture_of_experts(fused):
    check(decoder("nvfp4", preset="moe-tiny", fused=fused))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_an_fp32_stream_under_autocast(recipe):
    model = decoder(recipe, dtype=FP32)
    with torch.autocast("cpu", BF16):
        check(model)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_recomputed_blocks(recipe, recompute):
    model = decoder(recipe)
    model.recompute = recompute
    check(model)


@pytest.mark.parametrize("recipe,recompute", [("nvfp4", "nothing"), ("bf16", "full")])
def test_compiled_blocks(recipe, recompute):
    """Two graphs, as only the first block is given no residual; one where blocks are recomputed, which get the sum."""
    torch._dynamo.reset()
    model = decoder(recipe)
    wanted = results(model, lambda tokens, balance: plain(model, tokens, balance))
    model.recompute = recompute
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    for given, expected in zip(results(model, model), wanted, strict=True):
        assert torch.equal(given, expected)
    assert counter.frame_count == (2 if recompute == "nothing" else 1)


def test_sums_are_in_the_norms(monkeypatch):
    """Of three blocks: all but the first norm read two tensors; the last one, torch's, reads a sum."""
    model, seen = decoder("nvfp4"), norm_calls.noted(monkeypatch)
    results(model, model)
    assert seen == ["norm", *["add_norm"] * 5, *["norm_backward of a sum"] * 5, "norm_backward"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_checkpoint_keeps_one_tensor_of_the_stream(recompute):
    model = decoder("nvfp4")
    model.recompute = recompute
    given = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda block, inputs: given.append(inputs[1]))
    with torch.no_grad():
        model(TOKENS)
    model(TOKENS)
    assert given == [None] * 6
