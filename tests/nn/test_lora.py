"""hb.freeze_, hb.lora_, hb.merge_lora_: what is stored, what the layers compute, what merging changes. Bit for bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, Decoder, decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte import recipes

TILE = hb.NVFP4(block=(16, 16))
HEAD_KEPT = hb.Keep(names=("lm_head",), last_fraction=0)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def converted(recipe="nvfp4", dtype=torch.bfloat16, dim=32):
    torch.manual_seed(0)
    model = Decoder(2, dim).to(dtype)
    report = hb.quantize_(model, recipe, keep=HEAD_KEPT, state=hb.RunState(7))
    return model, report.state


def adapted(recipe="nvfp4", *, dtype=torch.bfloat16, **options):
    """Return a model with adapters that are not zero."""
    model, state = converted(recipe, dtype)
    hb.lora_(model, **({"rank": 4, "alpha": 8.0} | options))
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            p.data.copy_(0.05 * torch.randn(p.shape, generator=g))
    return model, state


def codes_of(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p, hb.QuantTensor)}


def same_bytes(a, b):
    return (
        torch.equal(a.qdata, b.qdata) and torch.equal(a.blocks.block_scale, b.blocks.block_scale) and a.amax == b.amax
    )


def one_layer(*, merge_aware, recipe="nvfp4", dtype=torch.bfloat16, bias=True, n=48, k=64):
    torch.manual_seed(0)
    layer = hb.nn.Linear(k, n, bias, dtype=dtype, recipe=recipe, state=hb.RunState(3))
    hb.freeze_(layer)
    lora = hb.nn.LoRALinear.from_linear(layer, rank=4, alpha=8, merge_aware=merge_aware)
    nn.init.normal_(lora.lora_B, std=0.1)
    return lora


def step(module, x, function=None, **autocast):
    """Return the output and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = (module if function is None else function)(x)
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


# What is stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_layers_hold_the_bytes_of_their_forward_and_nothing_else(dtype):
    model, _ = converted(dtype=dtype, dim=128)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    before, keys = model(TOKENS), list(model.state_dict())
    frozen = hb.freeze_(model)
    assert list(model.state_dict()) == keys and len(frozen.layers) == len(codes_of(model)) == 14
    assert torch.equal(model(TOKENS), before)
    linear = [m for name, m in model.named_modules() if name in frozen.layers]
    held = sum(t.nbytes for m in linear for t in (m.weight.qdata, m.weight.block_scale, m.weight.amax))
    assert held == frozen.nbytes and 8 * held / sum(m.weight.numel() for m in linear) <= 4.6 and frozen.bits <= 4.6
    biases = sum(m.bias.nbytes for m in linear if m.bias is not None)
    assert held + biases == sum(
        p.nbytes for name, m in model.named_modules() if name in frozen.layers for p in m.parameters()
    ) and not [b for m in linear for b in m.buffers()]
    for name, q in codes_of(model).items():  # independent: the amax of the family, the quantizer
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        families = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        family = next((f for f in families if own in f), (own,))
        amax = max(masters[f"{parent}.{member}.weight"].abs().max() for member in family).float()
        assert same_bytes(q, hb.quantize(masters[name], TILE, amax=amax)) and not q.requires_grad


def test_freezing_frees_the_master():
    import gc
    import weakref

    model, _ = converted()
    masters = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, hb.nn.Linear)]
    hb.freeze_(model)
    gc.collect()
    assert len(masters) == 14 and not [ref for ref in masters if ref() is not None]


def test_the_dtype_of_forwards_enters_the_bytes():
    model, other = converted(dtype=torch.float32)[0], converted(dtype=torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(TOKENS)
        hb.freeze_(model)
        assert torch.equal(model(TOKENS), expected)
    hb.freeze_(other, dtype=torch.bfloat16)
    assert all(same_bytes(q, codes_of(other)[name]) for name, q in codes_of(model).items())


def test_tied_weights_stay_tied_and_those_of_an_embedding_stay():
    model = decoder(2)
    model.layers[0].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight
    model.lm_head.weight = model.embed_tokens.weight
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, share_amax=())
    frozen = hb.freeze_(model)
    assert model.layers[0].mlp.up_proj.weight is model.layers[1].mlp.up_proj.weight
    assert frozen.kept == {"lm_head": "its weight is that of embed_tokens too"} and "lm_head" in str(frozen)
    assert model.lm_head.weight is model.embed_tokens.weight and len(frozen.layers) == 14
    assert frozen.weights == sum(w.numel() for w in {id(p): p for p in codes_of(model).values()}.values())


def round_trips(model):
    """Yield copies of a model with codes, of every kind."""
    yield "deepcopy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.zero_() if isinstance(p, hb.QuantTensor) else p.data.zero_()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    yield "state_dict", other
    yield "dtype and back", copy.deepcopy(model).half().to(torch.bfloat16).cpu()


@pytest.mark.parametrize("merge_aware", [False, True])
def test_copies_files_and_moves_keep_every_byte(merge_aware):
    model, _ = adapted(merge_aware=merge_aware, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.bfloat16()  # so that a move to fp16 and back, of normal numbers, is exact
    expected = model(TOKENS)
    codes = codes_of(model)
    for kind, other in round_trips(model):
        again = codes_of(other)
        assert again.keys() == codes.keys(), kind
        assert all(same_bytes(again[name], q) and again[name].qdata is not q.qdata for name, q in codes.items()), kind
        assert all(again[name].qdata.data_ptr() != q.qdata.data_ptr() for name, q in codes.items()), kind
        assert kind == "dtype and back" or torch.equal(other(TOKENS), expected), kind
        lora = other.layers[0].attn.q_proj
        assert lora.amax_group[0] is lora, kind  # the copy's own family
    assert copy.deepcopy(model).to("meta").layers[0].attn.q_proj.weight.is_meta


def test_adapters_alone_travel():
    model, _ = adapted()
    adapters = {name: t for name, t in model.state_dict().items() if ".lora_" in name}
    assert len(adapters) == 28 and not [t for t in adapters.values() if isinstance(t, hb.QuantTensor)]
    other, _ = adapted()
    for p in other.parameters():
        if p.requires_grad:
            p.data.zero_()
    assert not torch.equal(other(TOKENS), model(TOKENS))
    assert not other.load_state_dict(adapters, strict=False).unexpected_keys
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_values_that_are_loaded_are_quantized():
    model, _ = converted()
    plain = {name: t.clone() for name, t in model.state_dict().items()}
    hb.freeze_(model)
    codes = copy.deepcopy(codes_of(model))
    for q in codes_of(model).values():
        q.zero_()
    model.load_state_dict(plain)
    down = "layers.0.mlp.down_proj.weight"  # of no family; others were quantized with the amax of theirs
    assert same_bytes(codes_of(model)[down], codes[down])


# What it computes


@pytest.mark.parametrize("merge_aware", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_forward", "quartet2", recipes.weight_only()])
def test_it_begins_as_the_frozen_layer(recipe, merge_aware):
    torch.manual_seed(0)
    layer = hb.nn.Linear(64, 48, dtype=torch.bfloat16, recipe=recipe, state=hb.RunState(3))
    hb.freeze_(layer)
    x = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    expected = step(layer, x)
    lora = hb.nn.LoRALinear.from_linear(layer, merge_aware=merge_aware)
    y, dx, *rest = step(lora, x)
    assert torch.equal(y, expected[0]) and torch.equal(dx, expected[1]) and len(rest) == 3  # bias, A and B


@pytest.mark.parametrize("recipe", ["nvfp4_forward", "four_over_six", recipes.row_scaled(scope="weights")])
def test_it_begins_as_the_frozen_layer_in_fp32(recipe):
    """Of half of all amaxes the decoded maximum is a neighbour in fp32, and every output would be another."""
    for seed in range(8):
        torch.manual_seed(seed)
        layer = hb.nn.Linear(64, 48, recipe=recipe, state=hb.RunState(3))
        hb.freeze_(layer)
        x = torch.randn(9, 64)
        expected = layer(x)
        lora = hb.nn.LoRALinear.from_linear(layer, merge_aware=True)
        assert torch.equal(lora(x), expected) and torch.equal(lora.merged_codes().amax, layer.weight.amax)


def test_dx_and_y_of_the_base_are_those_of_the_trained_layer():
    """With the adapter at zero the trained layer's own dgrad, random bits included, is dx."""
    torch.manual_seed(0)
    layer = hb.nn.Linear(64, 48, dtype=torch.bfloat16, recipe="nvfp4", state=hb.RunState(3))
    x = torch.randn(18, 64, dtype=torch.bfloat16)
    expected = step(layer, x)[:2]
    hb.freeze_(layer)
    got = step(hb.nn.LoRALinear.from_linear(layer), x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_a_merge_aware_layer_multiplies_by_the_merged_codes():
    lora = one_layer(merge_aware=True)
    x = torch.randn(18, 64, dtype=torch.bfloat16)
    y, dx, *_ = step(lora, x)
    values = lora.weight.dequantize(torch.float32).double() + 2.0 * lora.lora_B.double() @ lora.lora_A.double()
    codes = hb.quantize(values.float().bfloat16(), TILE)  # rounded as masters are; the amax of the merged weight
    assert same_bytes(codes, lora.merged_codes()) and codes.amax != lora.weight.amax
    merged = hb.nn.Linear(64, 48, dtype=torch.bfloat16, recipe="nvfp4", state=hb.RunState(3))
    merged.weight, merged.bias = nn.Parameter(codes, requires_grad=False), lora.bias
    same = step(merged, x)
    assert torch.equal(y, same[0]) and torch.equal(dx, same[1])


@pytest.mark.parametrize("merge_aware", [False, True])
def test_checkpointing_compiling_and_autocast_change_no_bit(merge_aware):
    lora = one_layer(merge_aware=merge_aware)
    x = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    expected = step(lora, x)
    assert len(expected) == 5
    for reentrant in (False, True):
        again = step(lora, x, lambda t, r=reentrant: checkpoint(lora, t, use_reentrant=r))
        assert all(map(torch.equal, again, expected))
    compiled = torch.compile(lora, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, step(lora, x, compiled), expected))
    lora.lora_B.data.mul_(2)
    assert not torch.equal(step(lora, x, compiled)[0], expected[0])  # nothing of the adapter is baked in
    lora.lora_B.data.div_(2)

    def mixed(t):
        with torch.autocast("cpu", torch.bfloat16):
            return lora(t)

    y, dx, *others = step(lora, x.float(), mixed)
    assert torch.equal(y, expected[0]) and all(map(torch.equal, others[1:], expected[3:]))
    assert torch.equal(others[0], expected[2].to(others[0].dtype))  # of the bias
    assert not merge_aware or torch.equal(dx, expected[1].float())  # beside, two parts add up, in fp32 here


def test_micro_batches_and_calls_draw_bits_of_their_own():
    for merge_aware in (False, True):
        lora = one_layer(merge_aware=merge_aware)
        x = torch.randn(18, 64, dtype=torch.bfloat16)
        first = step(lora, x)[1]
        assert torch.equal(step(lora, x)[1], first)
        assert not torch.equal(step(lora, x, lambda t, m=lora: m(t, call=1))[1], first)
        lora.run_state.advance()
        assert not torch.equal(step(lora, x)[1], first)


# Merging


def trained(merge_aware):
    model, state = adapted(merge_aware=merge_aware)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(TOKENS).float().flatten(0, 1), TOKENS.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
    return model


def test_merged_bytes_are_the_trained_bytes():
    model = trained(merge_aware=True)
    forward = {n: m.merged_codes() for n, m in model.named_modules() if isinstance(m, hb.nn.LoRALinear)}
    attention = model.layers[0].attn
    amaxes = {float(forward[f"layers.0.attn.{n}"].amax) for n in ("q_proj", "k_proj", "v_proj")}
    with torch.no_grad():
        alone = {
            float((m.weight.dequantize(torch.float32) + 2 * m.lora_B @ m.lora_A).abs().max().bfloat16())
            for m in (attention.q_proj, attention.k_proj, attention.v_proj)
        }
    assert amaxes == {max(alone)} and len(alone) == 3  # what engines fuse shares the amax of the merged weights
    expected = model(TOKENS)
    merged = hb.merge_lora_(model)
    assert torch.equal(model(TOKENS), expected)
    assert merged.error == 0 and all(row.error == row.update_error == 0 < row.changed for row in merged.rows)
    for name, codes in forward.items():
        layer = model.get_submodule(name)
        assert type(layer) is hb.nn.Linear and same_bytes(layer.weight, codes)
    assert model.layers[0].attn.k_proj.amax_group[1] is model.layers[0].attn.k_proj
    assert list(model.state_dict()) == list(converted()[0].state_dict())


def test_merging_afterwards_requantizes_and_says_what_that_costs():
    model = trained(merge_aware=False)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, hb.nn.LoRALinear)}
    with torch.no_grad():
        before = {
            n: (m.weight.dequantize(torch.float32).double(), 2.0 * (m.lora_B.double() @ m.lora_A.double()))
            for n, m in layers.items()
        }
        elements = {n: elements_of(m.weight) for n, m in layers.items()}
    expected = model(TOKENS)
    merged = hb.merge_lora_(model)
    assert not torch.equal(model(TOKENS), expected)
    assert [row.name for row in merged.rows] == list(before) and "codes changed" in str(merged)
    for row in merged.rows:
        base, update = before[row.name]
        weight = model.get_submodule(row.name).weight
        lost = (weight.dequantize(torch.float32).double() - base - update).norm()
        assert row.error == pytest.approx(float(lost / (base + update).norm()), rel=1e-4)
        assert row.update_error == pytest.approx(float(lost / update.norm()), rel=1e-4)
        assert 0.02 < row.error < 0.2 and row.error < row.update_error
        assert row.changed == float((elements_of(weight) != elements[row.name]).double().mean()) > 0
    assert merged.error == max(row.error for row in merged.rows)


def elements_of(q):
    """Return the numbers that codes stand for, without scales, by their table."""
    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    return halves[hb.layout.unpack(q.qdata).long()]


def test_an_adapter_of_zeros_changes_nothing():
    model, _ = converted()
    hb.lora_(model, rank=4)
    codes, expected = copy.deepcopy(codes_of(model)), model(TOKENS)
    merged = hb.merge_lora_(model)
    assert all(row == hb.lora.MergedLayer(name=row.name, error=0, update_error=0, changed=0) for row in merged.rows)
    assert torch.equal(model(TOKENS), expected)
    for name, q in codes_of(model).items():  # a sum makes +0 of -0
        assert torch.equal(q.blocks.block_scale, codes[name].blocks.block_scale) and q.amax == codes[name].amax
        assert torch.equal(q.dequantize(), codes[name].dequantize())


def test_only_adapters_are_trained_and_targets_choose_them():
    model, _ = converted()
    made = hb.lora_(model, rank=4, targets=("*q_proj", "*.1.mlp.*"))
    assert made.layers == (
        "layers.0.attn.q_proj",
        "layers.1.attn.q_proj",
        *(f"layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")),
    )
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained_names == {f"{name}.{side}" for name in made.layers for side in ("lora_A", "lora_B")}
    assert made.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "5 adapters" in str(made) and len(made.frozen.layers) == 14
    assert made.frozen.kept == {"lm_head": "in high precision"}


def test_a_run_that_forgets_to_advance_is_told():
    model, _ = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def two_steps():
        for _ in range(2):
            model(TOKENS).float().square().mean().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="two optimizer steps drew the same random bits"):
        two_steps()


# Refusals


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"targets": "*q_proj"}, TypeError, r"targets='\*q_proj'.*tuple of globs"),
        ({"targets": ("*query",)}, ValueError, r"'\*query' matches no layer.*layers.0.attn.q_proj"),
        ({"targets": ()}, ValueError, r"targets=\(\): name at least one"),
        ({"rank": 0}, ValueError, "rank=0.*at least 1"),
        ({"rank": True}, ValueError, "rank=True"),
        ({"alpha": float("nan")}, ValueError, "alpha=nan.*finite number above 0"),
        ({"alpha": "8"}, TypeError, "alpha='8'.*number"),
        ({"dtype": torch.float64}, TypeError, "dtype=torch.float64"),
        ({"targets": ("*q_proj",), "merge_aware": True}, ValueError, "shares its weight amax with.*k_proj.*share_amax"),
    ],
)
def test_refused_arguments_leave_the_model_as_it_is(options, error, words):
    model, _ = converted()
    with pytest.raises(error, match=words):
        hb.lora_(model, **options)
    assert not codes_of(model) and all(p.requires_grad for p in model.parameters())


def test_refused_models():
    with pytest.raises(ValueError, match=r"no hb.nn.Linear of it reads its weight as codes.*hb.quantize_"):
        hb.freeze_(decoder(1))
    with pytest.raises(ValueError, match=r"model=Decoder: no layer of it has an adapter.*hb.lora_"):
        hb.merge_lora_(decoder(1))
    with pytest.raises(TypeError, match="model=int"):
        hb.freeze_(3)
    layer = hb.nn.Linear(32, 32, recipe="nvfp4", state=hb.RunState(0))
    with pytest.raises(ValueError, match=r"weight is trained; freeze it first, hb.freeze_"):
        hb.nn.LoRALinear.from_linear(layer)
    with pytest.raises(TypeError, match=r"an adapter needs a frozen layer.*from_linear"):
        hb.nn.LoRALinear(32, 32)
    with pytest.raises(ValueError, match=r"itself a layer.*LoRALinear.from_linear"):
        hb.lora_(layer)
    drawn = recipes.nvfp4()
    spec = hb.NVFP4(block=(16, 16), rounding="stochastic")
    layer.recipe = hb.Recipe(fprop=hb.GemmSpec(a=drawn.fprop.a, b=spec))
    with pytest.raises(ValueError, match=r"drawn anew in every forward.*hb.set_recipe_"):
        hb.freeze_(layer)
    layer.recipe = "nvfp4"
    layer.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"NaN or Inf.*before the run diverged"):
        hb.freeze_(layer)


def test_a_second_adapter_and_what_trains_weights_are_refused():
    model, _ = adapted()
    with pytest.raises(ValueError, match=r"q_proj: it has an adapter already; merge that first"):
        hb.lora_(model)
    with pytest.raises(ValueError, match=r"its weight is frozen, which exists in codes only.*dequantize"):
        hb.unquantize_(model)
    model.layers[0].attn.q_proj.lora_B.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers.0.attn.q_proj: its merged weight holds NaN or Inf"):
        hb.merge_lora_(model)
    assert isinstance(model.layers[0].attn.q_proj, hb.nn.LoRALinear)
    model, _ = converted()
    with hb.cache_weights(model), pytest.raises(ValueError, match=r"hb.cache_weights holds its operands"):
        hb.freeze_(model)
    with hb.high_precision(model), pytest.raises(ValueError, match=r"no hb.nn.Linear of it reads"):
        hb.freeze_(model)
    model, _ = adapted(merge_aware=True)
    hb.set_recipe_(model, "nvfp4_forward")
    with pytest.raises(ValueError, match=r"this weight exists only as nvfp4 16x16"):
        model(TOKENS)


def test_dropout_hides_inputs_from_the_adapter_alone():
    layer = one_layer(merge_aware=False, dtype=torch.float32)
    x = torch.randn(6, 64)
    without, base = layer(x), layer.to_linear()(x)
    dropped = hb.nn.LoRALinear.from_linear(layer.to_linear(), rank=4, alpha=8, dropout=0.25)
    dropped.lora_A, dropped.lora_B = layer.lora_A, layer.lora_B
    assert "dropout=0.25" in repr(dropped) and "dropout" not in repr(layer)
    assert torch.equal(dropped.eval()(x), without)
    torch.manual_seed(11)
    y = dropped.train()(x)
    torch.manual_seed(11)
    seen = x * torch.empty_like(x).bernoulli_(0.75) / 0.75
    expected = base + 2.0 * (seen @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(y, expected)
    assert not torch.equal(y, without)
    assert torch.equal(dropped.to_linear()(x), base) and "dropout" not in vars(dropped.to_linear())
    model, _ = converted()
    hb.lora_(model, rank=2, dropout=0.5)
    assert {m.dropout for m in model.modules() if isinstance(m, hb.nn.LoRALinear)} == {0.5}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 1.0}, ValueError, "dropout=1.0: give 0 <= dropout < 1"),
        ({"dropout": -0.1}, ValueError, "dropout=-0.1"),
        ({"dropout": float("nan")}, ValueError, "dropout=nan"),
        ({"dropout": "0.1"}, TypeError, "dropout='0.1': give a number"),
        ({"dropout": 0.1, "merge_aware": True}, ValueError, "dropout=0.1 with merge_aware=True"),
    ],
)
def test_dropout_out_of_range(options, error, message):
    model, _ = converted()
    with pytest.raises(error, match=message):
        hb.lora_(model, **options)
    assert not codes_of(model)
