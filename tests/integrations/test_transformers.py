"""Mixtures of experts of transformers: high precision equals its own implementation, recipes equal grouped_linear."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from halfbyte.integrations import transformers as integration  # noqa: E402

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def mixtral():
    config = transformers.MixtralConfig(num_local_experts=4, **SMALL)
    return transformers.MixtralForCausalLM(config)


def qwen():
    config = transformers.Qwen3MoeConfig(num_experts=6, moe_intermediate_size=24, **SMALL)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(num_local_experts=4, **SMALL)
    return transformers.GptOssForCausalLM(config)


MODELS = {"mixtral": mixtral, "qwen": qwen, "gpt_oss": gpt_oss}
TOKENS = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.set_experts_implementation("eager")
    return model


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_high_precision_is_the_eager_model(name):
    model = build(name)
    keys = list(model.state_dict())
    loss, expected = gradients(model)
    found = integration.prepare_experts_(model)
    assert len(found) == 2 and list(model.state_dict()) == keys
    mine, got = gradients(model)
    assert torch.allclose(mine, loss, rtol=1e-5)
    assert got.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.allclose(got[key], gradient, rtol=1e-3, atol=1e-6), key


@pytest.mark.parametrize("name", MODELS)
def test_experts_follow_the_recipe(name):
    model = build(name)
    reference, _ = gradients(model)
    integration.prepare_experts_(model)
    report = hb.quantize_(model, "nvfp4")
    up, down = (name for name in report.converted if name.endswith("_recipe"))
    assert up.startswith("model.layers.0.mlp.experts") and down.endswith("down_recipe"), "the last block is kept"
    loss, grads = gradients(model)
    assert not torch.equal(loss, reference) and loss == pytest.approx(reference.item(), rel=0.05)
    assert all(g.isfinite().all() for g in grads.values())
    with hb.high_precision(model):
        assert torch.allclose(gradients(model)[0], reference, rtol=1e-5)
    hb.set_recipe_(model, "mxfp8")
    assert model.get_submodule(up).recipe == hb.recipes.mxfp8()


def test_the_experts_compute_what_grouped_linear_does():
    model = build("mixtral")
    integration.prepare_experts_(model)
    state = hb.quantize_(model, "nvfp4").state
    experts, recipe = model.model.layers[0].mlp.experts, hb.recipes.nvfp4()
    x = torch.randn(7, 48)
    index = torch.tensor([[0, 1], [1, 3], [0, 3], [3, 1], [1, 0], [0, 1], [3, 0]])  # nobody asks for expert 2
    weights = torch.rand(7, 2)
    rows = [[(t, s) for t in range(7) for s in range(2) if index[t, s] == e] for e in range(4)]
    offsets = torch.tensor([len(r) for r in rows]).cumsum(0).int()
    order = [pair for group in rows for pair in group]
    up, down = (state.philox(experts.get_submodule(f"{side}_recipe").stream) for side in ("up", "down"))
    h = hb.grouped_linear(x[[t for t, _ in order]], experts.gate_up_proj, offsets, recipe, rng=up)
    gate, value = h.chunk(2, -1)
    y = hb.grouped_linear(F.silu(gate) * value, experts.down_proj, offsets, recipe, rng=down)
    expected = torch.zeros(7, 48)
    for i, (t, s) in enumerate(order):
        expected[t] += weights[t, s] * y[i]
    assert torch.allclose(experts(x, index, weights), expected, atol=1e-6)


def test_training_lowers_the_loss():
    model = build("qwen")
    integration.prepare_experts_(model)
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(last_fraction=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(gradients(model)[0].item())
        optimizer.step()
        report.state.advance()
    assert losses[-1] < losses[0] - 0.5


@use_experts_implementation(has_gate=False, has_post_expert_norm=True)
class PlainExperts(nn.Module):
    """Experts without a gate and with a norm behind them."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 3
        self.up_proj = nn.Parameter(torch.randn(3, 20, 16))
        self.down_proj = nn.Parameter(torch.randn(3, 16, 20))
        self.act_fn, self.post_expert_norm = nn.ReLU(), nn.RMSNorm(16)


class OnlyExperts(nn.Module):
    """The least that prepare_experts_ needs of a model."""

    def __init__(self):
        super().__init__()
        self.config = transformers.MixtralConfig(**SMALL)
        self.experts = PlainExperts(self.config)

    def set_experts_implementation(self, name):
        self.config._experts_implementation = name


def test_experts_without_a_gate_and_of_other_ranks():
    model = OnlyExperts()
    integration.prepare_experts_(model)
    experts, x, index, weights = (
        model.experts,
        torch.randn(4, 16),
        torch.tensor([[0, 2], [3, 1], [3, 3], [1, 0]]),
        torch.rand(4, 2),
    )
    y = experts(x, index, weights)
    expected = torch.zeros(4, 16)
    for t in range(4):
        for e, weight in zip(index[t].tolist(), weights[t], strict=True):
            if e < 3:
                h = experts.down_proj[e] @ (experts.up_proj[e] @ x[t]).relu()
                expected[t] += weight * experts.post_expert_norm(h)
    assert torch.allclose(y, expected, atol=1e-4) and not y[2].any()
    y.sum().backward()
    assert experts.up_proj.grad.isfinite().all()


def test_models_without_experts_are_refused():
    with pytest.raises(ValueError, match="no experts"):
        integration.prepare_experts_(nn.Linear(2, 2))
    integration.ALL_EXPERTS_FUNCTIONS.register("halfbyte", integration.experts_forward)
    model = build("mixtral")
    model.set_experts_implementation("halfbyte")
    with pytest.raises(ValueError, match="prepare_experts_"):
        model(input_ids=TOKENS)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_cached_experts_are_experts(name):
    """Their weights belong to the experts module, of gpt-oss transposed."""
    results = []
    for cached in (False, True):
        model = build(name)
        integration.prepare_experts_(model)
        state = hb.RunState(0)
        hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if cached:
            hb.cache_weights(model, optimizer)
            experts = [m for m in model.modules() if isinstance(m, hb.nn.GroupedRecipe)]
            assert len(experts) == 4 and all(m.cached_weight() is not None for m in experts)
        for _ in range(2):
            loss, _ = gradients(model)
            state.advance()
            optimizer.step()
            results.append(loss)
    assert results[:2] == results[2:]


@pytest.mark.parametrize("name", MODELS)
def test_quantize_prepares_experts_itself(name):
    """With the bits of experts that were prepared before."""
    results = []
    for by_hand in (True, False):
        model = build(name)
        keys, reference = list(model.state_dict()), gradients(model)[0]
        if by_hand:
            integration.prepare_experts_(model)
        report = hb.quantize_(model, "nvfp4")
        assert [n for n in report.converted if "experts" in n] == [
            f"model.layers.0.mlp.experts.{side}_recipe" for side in ("up", "down")
        ]
        loss, grads = gradients(model)
        assert list(model.state_dict()) == keys and not torch.equal(loss, reference)
        results.append((loss, grads, str(report), report.weights))
    (loss, grads, text, weights), (mine, got, printed, counted) = results
    assert torch.equal(loss, mine) and all(torch.equal(grads[key], got[key]) for key in grads)
    assert text == printed and weights == counted


@pytest.mark.parametrize("name", MODELS)
def test_statistics_know_experts_of_a_model(name):
    model = build(name)
    found = hb.inspect(model, {"input_ids": TOKENS, "labels": TOKENS}, recipes=["nvfp4"])
    experts = [f"model.layers.0.mlp.experts.{side}_recipe" for side in ("up", "down")]
    measured = {row.name: row for row in found.step.layers}
    assert {loss.layer for loss in found.weights} >= {*experts} <= {*measured} & {*found.ranking.targets}
    inner = found.spreads[experts[1]]
    assert inner.elements == model.get_parameter("model.layers.0.mlp.experts.down_proj").numel()
    assert measured[experts[0]].tensors["x"].elements == TOKENS.numel() * 2 * SMALL["hidden_size"]
    assert not hasattr(model.model.layers[0].mlp.experts, "up_recipe")  # the copy has it


def test_experts_that_no_recipe_reaches_stay_as_they_are_and_count():
    model = build("mixtral")
    torch.manual_seed(0)
    other = type(model)(model.config)
    reference = gradients(model)[0]
    everything = hb.Keep(names=(), last_fraction=0)
    report = hb.quantize_(model, "bf16", rules={"*experts*": None}, keep=everything)
    assert torch.equal(gradients(model)[0], reference), "still transformers' own"
    experts = 2 * 4 * 3 * 48 * 40
    attention, head, routers = 2 * (2 * 64 * 48 + 2 * 32 * 48), 97 * 48, 2 * 4 * 48
    assert report.weights == (attention + head, attention + head + experts + routers)
    assert f"{100 * report.share:.1f} % of all weights" in str(report) and report.share < 0.5
    assert hb.quantize_(model, "nvfp4", keep=everything).converted == tuple(
        f"model.layers.{i}.mlp.experts.{side}_recipe" for i in range(2) for side in ("up", "down")
    )
    assert not torch.equal(gradients(model)[0], reference)
    assert torch.equal(gradients(other)[0], reference), "built from the same config"


def test_a_conversion_that_fails_prepares_no_experts():
    model = build("mixtral")
    with pytest.raises(ValueError, match="filter_fn"):
        hb.quantize_(model, "nvfp4", filter_fn=lambda module, name: False)
    with pytest.raises(ValueError, match="w9"):
        hb.quantize_(model, "nvfp4", rules={"*w9": None})
    assert all(m.config._experts_implementation == "eager" for m in model.modules() if hasattr(m, "has_gate"))
    assert not any(isinstance(m, hb.nn.GroupedRecipe) for m in model.modules())


def test_experts_inside_of_other_modules_copies_and_pickles():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("mixtral")

        def forward(self, input_ids, labels):
            return self.inner(input_ids=input_ids, labels=labels)

    model = Wrapper()
    report = hb.quantize_(model, "nvfp4")
    assert "inner.model.layers.0.mlp.experts.down_recipe" in report.converted
    loss = gradients(model)[0]
    assert torch.equal(gradients(copy.deepcopy(model))[0], loss)
    file = io.BytesIO()
    torch.save(model.inner, file)
    file.seek(0)
    registered = integration.ALL_EXPERTS_FUNCTIONS
    registered._global_mapping.pop("halfbyte")  # as in another process
    again = torch.load(file, weights_only=False)
    assert torch.equal(gradients(again)[0], loss)
    alone = nn.ModuleDict({"block": build("mixtral").model.layers[0].mlp})  # no PreTrainedModel above
    tokens = torch.randn(2, 5, 48)
    expected = alone["block"](tokens)
    assert "block.experts.up_recipe" in hb.quantize_(alone, "nvfp4").converted
    assert not torch.equal(alone["block"](tokens), expected)


@pytest.mark.parametrize("name", MODELS)
def test_unquantized_experts_run_as_before(name):
    model = build(name)
    keys = [n for n, _ in model.named_modules()]
    expected = model(input_ids=TOKENS).logits
    for _ in range(2):
        integration.prepare_experts_(model)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    assert not torch.equal(model(input_ids=TOKENS).logits, expected)
    hb.unquantize_(model)
    assert [n for n, _ in model.named_modules()] == keys and model.config._experts_implementation == "eager"
    assert torch.equal(model(input_ids=TOKENS).logits, expected)
