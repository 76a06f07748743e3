"""The mixture of experts: routing, the load-balancing loss, equality with experts one by one, training, resuming."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from runs import stop_after
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.train import expert_parallel, loop, model, moe, treatment

CONFIG = moe.MoEConfig()


@pytest.fixture
def x():
    return torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def block():
    torch.manual_seed(1)
    return moe.MoE(32, 48, CONFIG)


def one_by_one(block, x):
    """The same mixture, token by token and expert by expert."""
    y = torch.zeros_like(x)
    probabilities = F.linear(x, block.gate.weight).softmax(-1)
    for token in range(len(x)):
        weights, chosen = probabilities[token].topk(2)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (block.gate_up_proj.weight[expert] @ x[token]).chunk(2)
            y[token] += weight * (block.down_proj.weight[expert] @ (F.silu(gate) * up))
    return y


def test_output_and_gradients_are_those_of_experts_one_by_one(block, x):
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, _ = block(mine)
    expected = one_by_one(block, other.flatten(0, 1)).view_as(x)
    assert torch.allclose(y, expected, atol=1e-5)
    parameters = list(block.parameters())
    for got, want in zip(
        torch.autograd.grad(y.square().sum(), (mine, *parameters)),
        torch.autograd.grad(expected.square().sum(), (other, *parameters)),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-4)


class Exchange:
    """Experts that are all here, of whose tokens one more goes beyond a capacity in every forward."""

    dropped = None

    def __init__(self):
        self.counts = []

    def send(self, x, offsets):
        self.dropped = torch.tensor(len(self.counts) + 1)
        self.counts.append(self.dropped)
        return SimpleNamespace(x=x, offsets=offsets)

    def back(self, y, arrived):
        return y


def test_dropped_copies_of_training_forwards_add_up_and_a_repeated_or_evaluated_one_counts_nothing(block, x):
    block.exchange = exchange = Exchange()
    for _ in range(2):
        block(x)
    assert block.dropped == 1 + 2
    checkpoint(block, x, use_reentrant=False)[0].sum().backward()
    assert block.dropped == 1 + 2 + 3 and len(exchange.counts) == 4, "the fourth was of the backward"
    with torch.no_grad():
        block(x)
    assert block.dropped == 1 + 2 + 3 and [int(count) for count in exchange.counts] == [1, 2, 3, 4, 5]


def test_the_log_has_the_copies_of_all_ranks_once_and_begins_anew(block):
    """Layers with 3 and 4 on this rank, 5 on the mean of four ranks, of which pairs have the same tokens: 4 · 5 / 2."""
    layers = torch.nn.ModuleList([block, moe.MoE(32, 48, CONFIG), moe.MoE(32, 48, CONFIG)])
    layers[0].dropped, layers[1].dropped = torch.tensor(3), torch.tensor(4)
    summed, written = [], []
    ranks = SimpleNamespace(size=4, mean=lambda own: (summed.append(own.item()), own * 5 / 7)[1])
    log = SimpleNamespace(write=lambda *line: written.append(line))
    for step in (10, 20):
        expert_parallel.log_dropped(layers, log, step, ranks, tp=2)
    assert summed == [7, 0] and layers[2].dropped is None
    assert written == [("dropped", 10, {"copies": 10}), ("dropped", 20, {"copies": 0})]


def test_routes_sort_copies_by_expert(block, x):
    routes = block.gate(x.flatten(0, 1))
    chosen = F.linear(x.flatten(0, 1), block.gate.weight).topk(2).indices.flatten()
    assert chosen[routes.order].tolist() == sorted(chosen.tolist())
    assert routes.offsets.tolist() == [int((chosen <= expert).sum()) for expert in range(8)]
    assert routes.offsets.dtype == torch.int32 and torch.allclose(routes.weights.sum(-1), torch.ones(21))


def test_balance_is_one_for_equal_use_and_grows_with_preference():
    router = moe.Router(8, moe.MoEConfig(per_token=1))
    with torch.no_grad():
        router.weight.copy_(20 * torch.eye(8))
    assert router(torch.eye(8)).balance.item() == pytest.approx(1.0, abs=1e-3)
    assert router(torch.eye(8)[:1].expand(8, 8)).balance.item() == pytest.approx(8.0, abs=1e-3)


def test_the_router_stays_in_high_precision_under_every_recipe(block, x):
    routes = block.gate(x.flatten(0, 1))
    report = hb.quantize_(block, "nvfp4", keep=hb.Keep(names=(), last_fraction=0.0))
    assert report.converted == ("gate_up_proj", "down_proj")
    with torch.autocast("cpu", torch.bfloat16):
        again = block.gate(x.flatten(0, 1))
    assert torch.equal(again.weights, routes.weights) and again.weights.dtype == torch.float32


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_router_computes_in_fp32_what_comes_in_bf16(x, weight, autocast):
    """Blocks hand it bf16 under autocast, and a model in bf16 has its weight so: products in bf16 are 1 % off."""
    router = moe.Router(32, CONFIG).to(weight)
    x_SC = x.flatten(0, 1).bfloat16()
    exact = router.weight.detach().double().requires_grad_()
    probability = (x_SC.double() @ exact.T).softmax(-1)
    best = probability.sort(-1, descending=True).values[:, :2]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routes = router(x_SC)
    weights = best / best.sum(-1, keepdim=True)
    assert routes.weights.dtype == torch.float32
    torch.testing.assert_close(routes.weights.double(), weights, rtol=1e-5, atol=0)
    routes.weights[:, 0].square().sum().backward()
    (gradient,) = torch.autograd.grad(weights[:, 0].square().sum(), exact)
    tolerance = 1e-4 if weight == torch.float32 else 2**-7  # the gradient of a bf16 weight is rounded to it, once
    torch.testing.assert_close(router.weight.grad.double(), gradient, rtol=tolerance, atol=1e-4)


def test_decoder_returns_the_weighted_balance():
    decoder = model.Decoder(model.model_preset("moe-tiny"))
    model.initialise_(decoder, 0)
    tokens = torch.arange(24).view(2, 12)
    logits, balance = decoder(tokens, balance=True)
    assert torch.equal(decoder(tokens), logits)
    assert CONFIG.balance * 0.9 < balance < CONFIG.balance * 8
    balance.backward()
    assert all(block.mlp.gate.weight.grad.abs().sum() > 0 for block in decoder.layers)
    dense = model.Decoder(model.model_preset("tiny"))
    assert dense(tokens, balance=True)[1] == 0


def test_experts_of_the_kept_blocks_stay_in_high_precision():
    decoder = model.Decoder(model.model_preset("moe-2m"))
    report = hb.quantize_(decoder, "nvfp4")
    assert "layers.2.mlp.down_proj" in report.converted and "layers.3.mlp.down_proj" in report.kept


def test_compiled_equals_eager_for_any_number_of_tokens(block):
    hb.quantize_(block, "nvfp4")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for tokens in range(10, 30, 2):
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(compiled(x)[0], block(x)[0])
    assert len(graphs) <= 2


@pytest.mark.parametrize("wrong", [{"experts": 0}, {"per_token": 0}, {"per_token": 9}, {"balance": -1.0}])
def test_configs_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        moe.MoEConfig(**wrong)


def learn(recipe: str, steps: int = 16) -> float:
    """Train a mixture on sequences that count by ones to threes; return the loss of the last steps."""
    decoder = model.Decoder(replace(model.model_preset("moe-tiny"), layers=1, moe=moe.MoEConfig(experts=4)))
    model.initialise_(decoder, 0)
    chosen = treatment.treatment_of(recipe)
    report = hb.quantize_(decoder, chosen.recipe, keep=chosen.keep)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        start, stride = (torch.randint(n, (4, 1), generator=generator) for n in (64, 3))
        tokens = (start + (1 + stride) * torch.arange(25)) % 128
        logits, balance = decoder(tokens[:, :-1], balance=True)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + balance).backward()
        optimizer.step()
        report.state.advance()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5


def test_it_learns_in_four_bits_as_in_high_precision():
    base = learn("bf16")
    assert base < 4.8, "it starts at log(256) = 5.5"
    for recipe in ("nvfp4@all", "nvfp4_mxfp8_bwd@all"):
        assert learn(recipe) == pytest.approx(base, rel=0.05), recipe


def test_a_mixture_goes_on_from_its_checkpoint(run, folder):
    """Experts that got no token have state too, so that its absence is a damage."""
    config, data = run(model="moe-tiny", steps=2, checkpoint_every=1, batch=1, sequence=8, eval_every=2)
    whole = replace(config, run=replace(config.run, out=folder / "whole"))
    stop_after(loop.Trainer(config, "bf16", data), 1)
    assert loop.train(config, "bf16", data)["held_out_loss"] == loop.train(whole, "bf16", data)["held_out_loss"]
