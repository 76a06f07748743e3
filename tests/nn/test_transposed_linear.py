"""transformers' Conv1D under a recipe: the bytes of a linear layer that holds the transposed weight."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.pytorch_utils import Conv1D  # noqa: E402

NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)
TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))


def conv1d(out_features: int = 48, in_features: int = 40) -> Conv1D:
    torch.manual_seed(1)
    layer = Conv1D(out_features, in_features)
    nn.init.normal_(layer.bias)
    return layer


def gpt2(layers: int = 2) -> nn.Module:
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=layers, n_head=2, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Return a copy in which every Conv1D is a torch.nn.Linear with the transposed weight."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if type(child) is Conv1D:
                linear = nn.Linear(child.nx, child.nf)
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous())
                linear.bias = nn.Parameter(child.bias.detach().clone())
                setattr(module, name, linear)
    return twin


ATTENTION = ("attn.c_attn", "attn.c_proj")


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_mxfp8_bwd", "bf16"])
def test_it_is_a_linear_layer_of_the_transposed_weight(name):
    layer, state = conv1d(), hb.RunState(3)
    w, b = layer.weight.detach().T.contiguous().requires_grad_(), layer.bias.detach().clone().requires_grad_()
    model = nn.Sequential(nn.ReLU(), layer)
    report = hb.quantize_(model, name, state=state)
    assert report.rows[0].shape == (48, 40) and report.converted == ("1",)
    new = model[1]
    assert isinstance(new, hb.nn.TransposedLinear) and isinstance(new, Conv1D) and new.weight is layer.weight
    assert f"recipe={name}" in repr(model)
    xs = [torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(4), requires_grad=True) for _ in range(2)]
    y, expected = new(xs[0]), hb.linear(xs[1], w, b, hb.recipes.get(name), rng=state.philox(new.stream))
    dy = torch.randn(3, 5, 48)
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(y, expected) and torch.equal(xs[0].grad, xs[1].grad)
    assert torch.equal(new.weight.grad.T, w.grad) and torch.equal(new.bias.grad, b.grad)
    assert new.weight.grad.shape == (40, 48)
    new.weight.main_grad, main_grad = torch.ones(40, 48), torch.ones(48, 40)
    new.weight.grad = None
    new(xs[0]).backward(dy)
    hb.linear(xs[1], w, b, name, rng=state.philox(new.stream), main_grad=main_grad).backward(dy)
    assert torch.equal(new.weight.main_grad.T, main_grad) and new.weight.grad is None


def test_gpt2_is_converted_and_equals_its_twin_of_linear_layers():
    model = gpt2()
    twin = with_linear_layers(model)
    before = {key: (value.shape, value.data_ptr()) for key, value in model.state_dict().items()}
    reports = [hb.quantize_(m, "nvfp4") for m in (model, twin)]
    assert [row.shape for row in reports[0].rows] == [row.shape for row in reports[1].rows]
    assert reports[0].converted == reports[1].converted
    assert set(reports[0].converted) == {
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {key: (value.shape, value.data_ptr()) for key, value in model.state_dict().items()} == before
    assert model.lm_head.weight is model.transformer.wte.weight and type(model.lm_head) is nn.Linear
    (loss, grads), (expected, wanted) = step(model), step(twin)
    assert torch.equal(loss, expected) and not torch.equal(loss, step(gpt2())[0])
    converted = [f"{name}.weight" for name in reports[0].converted]
    assert all(torch.equal(grads[name].T, wanted[name]) for name in converted)
    other = gpt2()
    other.load_state_dict(model.state_dict(), strict=True)


def test_recipes_change_and_come_back():
    model, plain = gpt2(), gpt2()
    hb.quantize_(model, "mxfp8", keep=NOTHING_KEPT)
    quantized, original = step(model)[0], step(plain)[0]
    with hb.high_precision(model):
        assert torch.allclose(step(model)[0], original, rtol=1e-6)
    assert torch.equal(step(model)[0], quantized) and not torch.equal(quantized, original)
    hb.set_recipe_(model, "nvfp4_forward")
    layer = model.transformer.h[0].attn.c_attn
    assert layer.recipe == hb.recipes.nvfp4_forward() and not torch.equal(step(model)[0], quantized)
    assert type(layer.to_conv1d()) is Conv1D and layer.to_conv1d().weight is layer.weight


def test_copies_pickles_and_compiled_code_compute_the_same():
    model = nn.Sequential(conv1d())
    hb.quantize_(model, "nvfp4", state=hb.RunState(3))
    x = torch.randn(6, 40)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False), compiled):
        twin(x).sum().backward()
        assert torch.equal(twin(x), expected)
    model(x).sum().backward()
    assert torch.equal(other[0].weight.grad, model[0].weight.grad)
    assert type(copy.deepcopy(model)[0]) is type(model[0])


def test_cached_weights_are_refilled_and_the_same():
    losses = []
    for cached in (False, True):
        model = gpt2(1)
        state = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("lm_head",), last_fraction=0)).state
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if cached:
            hb.cache_weights(model, optimizer)
            followers = [m for m in model.modules() if isinstance(m, hb.nn.TransposedLinear)]
            assert len(followers) == 4 and all(m.cached_weight() is not None for m in followers)
        for _ in range(3):
            losses.append(step(model)[0])
            state.advance()
            optimizer.step()
    assert losses[:3] == losses[3:] and len(set(map(float, losses))) == 3


def test_siblings_share_an_amax_with_linear_layers():
    model = nn.ModuleDict({"q_proj": conv1d(), "k_proj": conv1d(), "v_proj": nn.Linear(40, 48)})
    model["k_proj"].weight.data *= 7
    hb.quantize_(model, "nvfp4_forward")
    amax = model["k_proj"].weight.detach().abs().max()
    x = torch.randn(5, 40)
    for layer, w in ((model["q_proj"], model["q_proj"].weight.T), (model["v_proj"], model["v_proj"].weight)):
        operand = hb.quantize(w.detach().contiguous(), hb.NVFP4(), amax=amax)
        expected = hb.gemm_nt(hb.quantize(x, hb.NVFP4()), operand, torch.float32, bias=layer.bias.detach())
        assert torch.equal(layer(x), expected)


def test_memory_is_reported_as_that_of_linear_layers():
    models = [gpt2(1)]
    models.append(with_linear_layers(models[0]))
    reports = []
    for model in models:
        hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("lm_head",), last_fraction=0))
        reports.append(hb.memory_report(model, TOKENS, recipes=["nvfp4"]))
    assert reports[0].weights == reports[1].weights == 32 * 32 * (3 + 1 + 4 + 4)
    for name in ("bf16", "nvfp4"):
        assert reports[0][name].linear_per_token == reports[1][name].linear_per_token > 0
        assert reports[0][name].linear_fixed == reports[1][name].linear_fixed > 0


def test_what_cannot_be_done_is_refused_or_left():
    model = gpt2(1)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("lm_head",), last_fraction=0))
    assert not hb.nn.fuse_(model).fused
    loss = step(model)[0]
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn is \[in, out\].*ZeroConfig\(weights='plain'\)"):
        hb.distributed.ZeroOptimizer(model)
    assert torch.equal(step(model)[0], loss)
    optimizer = hb.distributed.ZeroOptimizer(model, config=hb.distributed.ZeroConfig(weights="plain"))
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, before)
    with pytest.raises(TypeError, match="module=Conv1D: give a torch.nn.Linear"):
        hb.nn.Linear.from_linear(conv1d(), "nvfp4")
    with pytest.raises(ValueError, match=r"itself a Conv1D.*TransposedLinear\.from_conv1d"):
        hb.quantize_(conv1d(), "nvfp4")
    with pytest.raises(TypeError, match="module=Linear: give a transformers"):
        hb.nn.TransposedLinear.from_conv1d(nn.Linear(16, 16), "nvfp4")


def test_classes_derived_from_it_keep_their_forward():
    class Scaled(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(conv1d(), Scaled(16, 48))
    report = hb.quantize_(model, "nvfp4")
    assert report.converted == ("0",) and "Scaled is a subclass of Conv1D" in report.kept["1"]
    plain = conv1d()
    plain.forward = lambda x: x
    with pytest.raises(ValueError, match="replaced on the instance"):
        hb.nn.TransposedLinear.from_conv1d(plain, "nvfp4")


@pytest.mark.parametrize("merge_aware", [False, True])
def test_adapters_of_gpt2_equal_those_of_its_twin(merge_aware):
    model = gpt2()
    twin = with_linear_layers(model)
    outputs = []
    for m in (model, twin):
        state = hb.quantize_(m, "nvfp4").state
        before, asked = step(m)[0], []
        m.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_, asked=asked: asked.append(1))
        torch.manual_seed(3)
        adapted = hb.lora_(m, rank=2, merge_aware=merge_aware)
        assert adapted.layers == tuple(f"transformer.h.0.{n}" for n in (*ATTENTION, "mlp.c_fc", "mlp.c_proj"))
        first, grads = step(m)
        assert torch.equal(first, before) and asked == [1] and state.seed == 0
        assert all((grad is not None) == (".lora_" in name) for name, grad in grads.items())
        for name, p in m.named_parameters():
            if name.endswith("lora_B"):
                p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        with torch.no_grad():
            loss = m(input_ids=TOKENS, labels=TOKENS).loss
            outputs.append((loss, str(hb.merge_lora_(m)), m(input_ids=TOKENS, labels=TOKENS).loss))
        assert type(m.transformer.h[0].mlp.c_fc) is hb.nn.Linear
    (y, table, merged), (same_y, same_table, same_merged) = outputs
    assert torch.equal(y, same_y) and table == same_table and torch.equal(merged, same_merged)
    assert not torch.equal(y, before) and torch.equal(y, merged) == merge_aware


def test_what_cannot_be_frozen_stays_a_conv1d():
    model = gpt2()
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    layers = [m for m in model.modules() if isinstance(m, hb.nn.TransposedLinear)]
    held = dict(model.named_parameters())
    with torch.no_grad():
        layers[-1].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        hb.lora_(model)
    assert [m for m in model.modules() if isinstance(m, hb.nn.TransposedLinear)] == layers
    assert all(p is held[name] for name, p in model.named_parameters())
    with torch.no_grad():
        layers[-1].weight[0, 0] = 1.0
    layers[0].recipe = "bf16"
    layers[1].weight = layers[3].weight = nn.Parameter(torch.randn(32, 32))
    frozen = hb.freeze_(model)
    kept = [m for m in model.modules() if isinstance(m, hb.nn.TransposedLinear)]
    assert kept == [layers[0]] and len(frozen.layers) == 7
    one, other = model.transformer.h[0].attn.c_proj, model.transformer.h[0].mlp.c_proj
    expected = hb.quantize(layers[1].weight.detach().T.contiguous(), one.weight.spec)
    assert one.weight is other.weight and torch.equal(one.weight.qdata, expected.qdata)
    with pytest.raises(ValueError, match="itself a Conv1D"):
        hb.freeze_(layers[0])
