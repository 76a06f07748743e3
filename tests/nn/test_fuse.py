"""fuse_ on our decoder and on transformers' models: what is replaced, what is left, that nothing else changes."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.train import model as models

NOTHING_KEPT = hb.Keep(names=("*lm_head",), last_fraction=0)
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def decoder() -> nn.Module:
    model = models.Decoder(models.model_preset("tiny"))
    models.initialise_(model, 0)
    return model


def loss(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def gradients(model: nn.Module, function=loss) -> list[torch.Tensor]:
    model.zero_grad()
    value = function(model)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]


def distance(a, b) -> float:
    return max(((p - q).norm() / q.norm().clamp_min(1e-12)).item() for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("quantized_first", [True, False])
def test_our_decoder(quantized_first):
    model = decoder()
    keys, plain = list(model.state_dict()), gradients(model)
    steps = [lambda m: hb.quantize_(m, "nvfp4", keep=NOTHING_KEPT), hb.nn.fuse_]
    results = [step(model) for step in (steps if quantized_first else steps[::-1])]
    report = next(r for r in results if isinstance(r, hb.nn.FuseReport))
    assert len(report.fused) == 6 and list(report.left) == ["norm"]
    assert "layers.1.mlp" in report.fused and "swiglu" in str(report) and "6 of 7" in str(report)
    assert list(model.state_dict()) == keys
    fused = gradients(model)
    assert 0.01 < distance(fused, plain) < 1  # quantized
    if quantized_first:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, lambda _: loss(compiled)), fused, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(copy.deepcopy(model)), fused, strict=True))
    assert len(hb.nn.unfuse_(model)) == 6 and list(model.state_dict()) == keys
    again = decoder()
    hb.quantize_(again, "nvfp4", keep=NOTHING_KEPT)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(again), strict=True))
    assert hb.nn.unfuse_(model) == ()


def test_high_precision_changes_only_roundings():
    model = decoder()
    plain = gradients(model)
    hb.nn.fuse_(model)
    assert distance(gradients(model), plain) < 1e-5
    with torch.no_grad():
        assert model.layers[0].mlp.gate_proj.weight.grad is not None


def test_amaxes_and_the_quantization_are_shared(monkeypatch):
    """One quantization of the attention's input for q, k and v, with the amaxes of the norm."""
    model = decoder()
    hb.quantize_(model, hb.recipes.nvfp4(hadamard=hb.Hadamard(signs="fresh")), keep=NOTHING_KEPT)
    expected = gradients(model)
    hb.nn.fuse_(model)
    seen = []
    original = ops.quantize_row_col

    def spy(t, *sides, **options):
        seen.append((tuple(t.shape), *(side is not None and side.amax is not None for side in sides)))
        return original(t, *sides, **options)

    monkeypatch.setattr(ops, "quantize_row_col", spy)
    with torch.no_grad():
        model.layers[0](torch.randn(2, 9, 64), None, *model.rotary(9))
    tokens = [entry for entry in seen if entry[0][0] == 18]
    # The input of q, k and v, that of o_proj, of gate and up, of down_proj: only o_proj's comes from elsewhere.
    assert [row for _, row, _ in tokens] == [True, False, True, True]
    monkeypatch.undo()
    assert distance(gradients(model), expected) < 1


def transformers_models():
    import transformers as T

    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**shape)),
        "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**shape)),
        "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**shape)),
        "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**shape, head_dim=16)),
        "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**shape, head_dim=16)),
    }


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_transformers(name):
    torch.manual_seed(0)
    model = transformers_models()[name]()
    keys = sorted(model.state_dict())
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    expected = gradients(model, lambda m: m(input_ids=TOKENS, labels=TOKENS).loss)
    report = hb.nn.fuse_(model)
    assert sorted(model.state_dict()) == keys
    fused = gradients(model, lambda m: m(input_ids=TOKENS, labels=TOKENS).loss)
    assert abs(fused[0] - expected[0]) < 1e-3 * expected[0]
    if name == "gemma2":  # its norms multiply by 1 + weight
        assert set(report.fused) == {f"model.layers.{i}.mlp" for i in range(2)}
        assert "computes something else" in report.left["model.layers.0.input_layernorm"]
        assert all(row.reason.endswith("geglu_tanh") for row in report.rows if row.fused)
    else:
        assert len(report.fused) == 6 and "model.norm" in report.left


class Odd(nn.Module):
    """An MLP by its names, not by what it does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate_proj, self.up_proj = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        self.scale = nn.Parameter(torch.ones(1)) if kind == "parameter" else 1.0

    def forward(self, x, *more):
        if self.kind == "arguments":
            raise TypeError("forward() misses one argument: mask")
        gate = torch.sigmoid(self.gate_proj(x)) if self.kind == "sigmoid" else F.silu(self.gate_proj(x))
        return self.down_proj(self.drop(gate * self.up_proj(x)))


@pytest.mark.parametrize(
    "kind,reason",
    [
        ("sigmoid", "computes something else"),
        ("arguments", "other arguments"),
        ("parameter", "parameters of its own"),
        ("dropout", "at random"),
        ("hooks", "hooks"),
        ("meta", "meta device"),
        ("double", "float64"),
    ],
)
def test_what_does_something_else_is_left(kind, reason):
    odd = Odd(kind)
    if kind == "hooks":
        odd.register_forward_hook(lambda *a: None)
    if kind in ("meta", "double"):
        odd = odd.to("meta" if kind == "meta" else torch.float64)
    model = nn.ModuleDict({"mlp": odd})
    report = hb.nn.fuse_(model)
    assert model["mlp"] is odd and reason in report.left["mlp"]


class Gated(nn.Module):
    """down(activation(gate) * up) with dropout that is no module, in any dtype, from any weights."""

    def __init__(self, activation, p: float = 0.0, dtype=torch.float32) -> None:
        super().__init__()
        self.activation, self.p = activation, p
        self.gate_proj, self.up_proj = (nn.Linear(16, 32, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(32, 16, dtype=dtype)

    def forward(self, x):
        return F.dropout(self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)), self.p, self.training)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    "activation,reason",
    [
        (F.silu, "swiglu"),
        (F.gelu, "geglu"),
        (tanh_gelu, "geglu_tanh"),
        (F.relu, "computes something else"),
        (lambda x: F.silu(x).clamp(max=20), "computes something else"),
    ],
)
@pytest.mark.parametrize("weights", ["zero", "small", "bfloat16"])
def test_the_activation_is_told_from_others_whatever_the_weights(activation, reason, weights):
    """A down projection that starts at zero hides the activation, small weights make all alike, bf16 both GeLUs."""
    mlp = Gated(activation, dtype=torch.bfloat16 if weights == "bfloat16" else torch.float32)
    for p in mlp.parameters():
        nn.init.normal_(p, std=1e-4 if weights == "small" else 0.1)
    if weights == "zero":
        nn.init.zeros_(mlp.down_proj.weight)
    report = hb.nn.fuse_(nn.ModuleDict({"mlp": mlp}))
    assert report.rows[0].reason.endswith(reason) or reason in report.left["mlp"]


def test_functional_dropout_is_seen_in_training_mode():
    for training in (True, False):
        mlp = Gated(F.silu, p=0.1).train(training)
        state = torch.get_rng_state()
        assert "in training mode" in hb.nn.fuse_(nn.ModuleDict({"mlp": mlp})).left["mlp"]
        assert mlp.training is training and torch.equal(torch.get_rng_state(), state)


class Scaled(torch.autograd.Function):
    """Nothing forward, twice the gradient backward: what sums gradients over tensor-parallel ranks looks so."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


class ScaledMLP(Gated):
    def forward(self, x):
        return super().forward(Scaled.apply(x))


class StillRMSNorm(nn.Module):
    """An RMSNorm whose backward takes the mean of squares for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True).detach() + self.eps))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modules_with_other_gradients_are_left(mode):
    mlps = {"detached": Gated(lambda x: F.silu(x).detach()), "scaled": ScaledMLP(F.silu), "plain": Gated(F.silu)}
    attention = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("q_proj", "k_proj", "v_proj")})
    block = nn.ModuleDict({"input_layernorm": StillRMSNorm(), "self_attn": attention})
    model = nn.ModuleDict(mlps | {"block": block})
    with mode():
        report = hb.nn.fuse_(model)
    assert report.fused == ("plain",) and len(report.left) == 3
    assert all("gradients are not those of" in reason for reason in report.left.values())


class Picky(Gated):
    """Takes sequences only."""

    def forward(self, x):
        batch, sequence, width = x.shape
        return super().forward(x.reshape(-1, width)).reshape(batch, sequence, width)


class Optional(Gated):
    def forward(self, x, repeat=1):
        return super().forward(x) * repeat


class Packed(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


def test_forwards_that_refuse_the_tokens_or_take_more():
    assert hb.nn.fuse_(nn.ModuleDict({"mlp": Picky(F.silu)})).fused == ("mlp",)
    refused = hb.nn.fuse_(nn.ModuleDict({"mlp": Optional(F.silu)}))
    assert "other arguments" in refused.left["mlp"]
    assert "must be alike" in hb.nn.fuse_(nn.ModuleDict({"mlp": Packed()})).left["mlp"]
    wrapped = Gated(F.silu)
    wrapped.forward = functools.partial(Gated.forward, wrapped)
    assert "replaced on the instance" in hb.nn.fuse_(nn.ModuleDict({"mlp": wrapped})).left["mlp"]


def test_hooks_are_not_lost():
    mlp = Gated(F.silu)
    handle = mlp.register_state_dict_post_hook(lambda *a: None)
    model = nn.ModuleDict({"mlp": mlp})
    assert hb.nn.fuse_(model).left == {"mlp": "it has hooks"}
    handle.remove()
    hb.nn.fuse_(model)
    seen = []
    handle = model["mlp"].register_forward_hook(lambda *a: seen.append(1))
    hb.nn.unfuse_(model)
    model["mlp"](torch.randn(2, 16))
    handle.remove()
    model["mlp"](torch.randn(2, 16))
    assert model["mlp"] is mlp and seen == [1]


def test_a_norm_that_feeds_others_still_serves_them():
    """What is handed over belongs to one tensor: a second reader gets the norm's output as ever."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.self_attn, self.other = nn.RMSNorm(16), nn.Module(), nn.Linear(16, 16)
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self.self_attn, name, nn.Linear(16, 16))

        def forward(self, x):
            y = self.input_layernorm(x)
            a = self.self_attn
            return self.other(y) + a.q_proj(y) + a.q_proj(2 * y) + a.v_proj(y) + a.k_proj(y) + a.k_proj(y)

    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, 16)
    hb.quantize_(block, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    expected = block(x)
    assert hb.nn.fuse_(block).fused == ("input_layernorm",)
    assert torch.allclose(block(x), expected, atol=1e-5) and torch.equal(block(x), block(x))


class Impatient(nn.Module):
    """A block that changes what its norm returned, before q or between q and k."""

    def __init__(self, when):
        super().__init__()
        self.input_layernorm, self.self_attn, self.when = nn.RMSNorm(32), nn.Module(), when
        for name in ("q_proj", "k_proj", "v_proj"):
            self.self_attn.add_module(name, nn.Linear(32, 16))

    def forward(self, x):
        y = self.input_layernorm(x)
        y = y.mul_(4) if self.when == "before" else y
        q = self.self_attn.q_proj(y)
        y = y.mul_(4) if self.when == "between" else y
        return torch.cat((q, self.self_attn.k_proj(y), self.self_attn.v_proj(y)), -1)


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_changed_in_place_is_another_tensor(when, mode):
    model = nn.Sequential(Impatient(when))
    hb.nn.fuse_(model)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    attn, norm, x = model[0].self_attn, model[0].input_layernorm, torch.randn(10, 32)
    with mode():
        y = norm(x).clone()
        inputs = {"q_proj": y * 4 if when == "before" else y, "k_proj": y * 4, "v_proj": y * 4}
        expected = [hb.nn.forward_shared(value, [getattr(attn, name)])[0] for name, value in inputs.items()]
        assert torch.equal(model(x), torch.cat(expected, -1))


class TwoNorms(nn.Module):
    """A block as Gemma 2's: one norm behind the attention, one before the MLP, both by names that precede an MLP."""

    def __init__(self, names) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.RMSNorm(16))
        self.mlp = Gated(F.silu)

    def forward(self, x):
        x = x + self.post_attention_layernorm(x)
        return x + self.mlp(self.pre_feedforward_layernorm(x))


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_norms_before_one_mlp_the_one_that_it_reads_is_fused(order, monkeypatch):
    names = ("post_attention_layernorm", "pre_feedforward_layernorm")
    block, x = TwoNorms(names[::order]), torch.randn(20, 16)
    hb.quantize_(block, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    expected = block(x)
    report = hb.nn.fuse_(block)
    assert sorted(report.fused) == ["mlp", "pre_feedforward_layernorm"]
    assert report.left == {"post_attention_layernorm": "no q/k/v projection or MLP behind it"}
    assert type(block.post_attention_layernorm) is nn.RMSNorm
    seen, original = [], ops.quantize_row_col

    def spy(t, row, col, **options):
        seen.append((t.shape[0], row is not None and row.amax is not None))
        return original(t, row, col, **options)

    monkeypatch.setattr(ops, "quantize_row_col", spy)
    assert torch.allclose(block(x), expected, atol=1e-5)
    tokens = [with_amax for rows, with_amax in seen if rows == 20]
    assert tokens == [True, True], "the input of gate and up has the norm's amax, that of down the activation's"


def test_a_model_without_known_names_is_refused():
    with pytest.raises(ValueError, match="no norm and no MLP"):
        hb.nn.fuse_(nn.Sequential(nn.Linear(4, 4)))


def change_mode(model, layer):
    return torch.no_grad()


def change_weight(model, layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def change_data(model, layer):
    layer.weight.data = layer.weight.data * 2


def change_part(model, layer):
    """Other data of the same storage."""
    both = torch.cat((layer.weight.data, -layer.weight.data))
    layer.weight.data = both[:16]
    layer(model[0].x)
    model[0].self_attn.q_proj(model[0].x)
    layer.weight.data = both[16:]


def change_recipe(model, layer):
    hb.set_recipe_(model, "mxfp8")


def change_position(model, layer):
    layer.run_state.advance()


def change_autocast(model, layer):
    return torch.autocast("cpu", torch.bfloat16)


CHANGES = [change_mode, change_weight, change_data, change_part, change_recipe, change_position, change_autocast]


@pytest.mark.parametrize("change", CHANGES)
def test_siblings_compute_again_what_was_computed_under_other_circumstances(change):
    """q computes k and v too; they take that only where they would compute the same."""
    model = nn.Sequential(Impatient("never"))
    hb.nn.fuse_(model)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    attn, x = model[0].self_attn, torch.randn(10, 32)
    model[0].x = x
    if change is change_mode:
        with torch.no_grad():
            attn.q_proj(x)
        assert attn.k_proj(x).requires_grad
        with torch.inference_mode():
            attn.q_proj(x)
        with torch.no_grad():
            assert not attn.k_proj(x).is_inference()
        return
    attn.q_proj(x)
    with change(model, attn.k_proj) or contextlib.nullcontext():
        k, again = attn.k_proj(x), attn.k_proj(x.clone())
        assert k.dtype == again.dtype and torch.equal(k, again)
        dw, expected = (torch.autograd.grad(y.float().square().sum(), attn.k_proj.weight)[0] for y in (k, again))
        assert torch.equal(dw, expected)


@pytest.mark.parametrize("call", [0, 1])
def test_a_later_run_takes_no_amax_of_the_signs_of_the_first(call):
    """Fresh signs are those of the run, and so is the amax of what they rotate; a copy has nothing handed over."""
    model = nn.Sequential(Impatient("never"))
    hb.nn.fuse_(model)
    recipe = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=16, signs="fresh"))
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(5))
    y, layer = model[0].input_layernorm(torch.randn(19, 32)), model[0].self_attn.q_proj
    dw, expected = (
        torch.autograd.grad(layer(x, call=call).square().sum(), layer.weight)[0] for x in (y, y.detach().clone())
    )
    assert torch.equal(dw, expected)
