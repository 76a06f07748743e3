"""quantize_, set_recipe_ and high_precision: what is converted and why, what stays as it was, what is refused."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte import recipes
from halfbyte.convert import SHARE_AMAX

NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        scores = self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.mlp = Attention(dim), Mlp(dim)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, blocks=10, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.lm_head = nn.Linear(dim, 11, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def decoder(blocks: int = 10) -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks)


TOKENS = torch.arange(10).view(2, 5) % 11


def linears(model) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def snapshot(model) -> dict:
    return {name: (type(m), id(m)) for name, m in model.named_modules()}


# What stays


@pytest.mark.parametrize("name", ["nvfp4", "bf16", "mxfp8"])
def test_parameters_and_state_dict_are_untouched(name):
    model = decoder()
    before = dict(model.named_parameters())
    keys, values = list(model.state_dict()), copy.deepcopy(model.state_dict())
    buffers = dict(model.named_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hb.quantize_(model, name)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[n] is p for n, p in before.items())
    assert list(model.state_dict()) == keys and dict(model.named_buffers()) == buffers
    assert all(torch.equal(model.state_dict()[key], values[key]) for key in keys)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_checkpoints_load_into_each_other():
    plain, converted = decoder(), decoder()
    hb.quantize_(converted, "nvfp4")
    for parameter in converted.parameters():
        parameter.data.add_(1)
    plain.load_state_dict(converted.state_dict(), strict=True)
    other = decoder()
    hb.quantize_(other, "mxfp8").state.advance()
    other.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), converted.parameters(), strict=True))


def test_hooks_modes_and_attributes_survive():
    model = decoder(4)
    layer = model.layers[0].mlp.down_proj
    layer.weight.requires_grad_(False)
    layer.note = "kept"
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    model.layers[1].eval()
    hb.quantize_(model, "nvfp4")
    new = model.layers[0].mlp.down_proj
    assert type(new) is hb.nn.Linear and new is not layer and new.note == "kept" and not new.weight.requires_grad
    assert model.layers[0].training and not model.layers[1].mlp.up_proj.training
    model(TOKENS)
    assert seen == ["hook"]


def test_converted_to_bf16_the_model_computes_the_same():
    plain, converted = decoder(), decoder()
    hb.quantize_(converted, "bf16", keep=NOTHING_KEPT)
    for model in (plain, converted):
        model(TOKENS).square().sum().backward()
    assert torch.equal(plain(TOKENS), converted(TOKENS))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), converted.parameters(), strict=True))


# What is converted


def test_the_default_policy():
    """lm_head, and the last 15 % of blocks rounded up, stay in high precision, as in the NVFP4 paper."""
    model = decoder(10)
    report = hb.quantize_(model, "nvfp4")
    kept = {name for name in linears(model) if name.startswith(("layers.8.", "layers.9.", "lm_head"))}
    assert set(report.kept) == kept
    assert report.kept["lm_head"] == "kept: name matches '*lm_head'"
    assert report.kept["layers.9.mlp.up_proj"] == "kept: last 2 of 10 blocks of layers"
    for name, module in linears(model).items():
        assert type(module) is (nn.Linear if name in kept else hb.nn.Linear)
        if name not in kept:
            assert module.recipe == recipes.nvfp4() and module.run_state is report.state


@pytest.mark.parametrize("blocks, last", [(1, 0), (2, 1), (3, 1), (6, 1), (7, 2), (20, 3), (21, 4)])
def test_how_many_blocks_fifteen_percent_are(blocks, last):
    assert hb.Keep().last_blocks(blocks) == last


def test_first_blocks_and_names_and_fractions():
    report = hb.quantize_(decoder(10), "nvfp4", keep=hb.Keep(names=("*down_proj",), first_blocks=1, last_fraction=0.3))
    for name in report.converted:
        assert not name.endswith("down_proj") and not name.startswith(
            ("layers.0.", "layers.7.", "layers.8.", "layers.9.")
        )
    assert "lm_head" in report.converted and len(report.converted) == 6 * 6 + 1


def test_nothing_kept():
    model = decoder(3)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert set(report.converted) == set(linears(model)) and report.kept == {}
    model(TOKENS).sum().backward()


def test_the_last_matching_rule_wins_and_beats_keep():
    rules = {
        "*.mlp.*": "mxfp8",
        "*.down_proj": recipes.bf16(),
        "layers.0.*": None,
        "layers.0.mlp.up_proj": "four_over_six",
        "layers.9.attn.o_proj": "nvfp4_forward",
        "lm_head": "nvfp4",
    }
    model = decoder(10)
    report = hb.quantize_(model, "nvfp4", rules=rules)
    found = {row.name: row for row in report.rows}
    assert found["layers.3.mlp.up_proj"].recipe == recipes.mxfp8()
    assert found["layers.3.mlp.down_proj"].recipe == recipes.bf16()
    assert found["layers.0.mlp.down_proj"].recipe is None
    assert found["layers.0.mlp.up_proj"].recipe == recipes.four_over_six()
    assert found["layers.9.attn.o_proj"].recipe == recipes.nvfp4_forward()
    assert found["layers.9.attn.q_proj"].recipe is None
    assert found["layers.9.mlp.up_proj"].recipe == recipes.mxfp8()
    assert found["lm_head"].recipe == recipes.nvfp4()
    assert found["layers.3.attn.q_proj"].recipe == recipes.nvfp4()
    assert found["layers.0.mlp.down_proj"].reason == "rule 'layers.0.*'"
    assert type(model.layers[0].mlp.down_proj) is nn.Linear
    assert model.layers[3].mlp.up_proj.recipe == recipes.mxfp8()


def test_filter_fn_comes_first():
    def filter_fn(module, name):
        assert isinstance(module, nn.Linear)
        return module.out_features == 32

    report = hb.quantize_(decoder(10), "nvfp4", filter_fn=filter_fn, rules={"*down_proj": "mxfp8"})
    assert all(name.endswith(("gate_proj", "up_proj")) for name in report.converted)
    assert report.kept["layers.0.mlp.down_proj"] == "filter_fn"
    assert len(report.converted) == 2 * 8


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_subclasses_keep_their_forward():
    model = nn.Sequential(nn.Linear(16, 16), Scaled(16, 16), nn.MultiheadAttention(16, 2))
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert report.converted == ("0",)
    assert type(model[1]) is Scaled and "Scaled is a subclass" in report.kept["1"]
    assert type(model[2].out_proj) is not hb.nn.Linear


def test_converting_twice_changes_nothing_and_says_so():
    model = decoder(3)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    before = snapshot(model)
    report = hb.quantize_(model, "mxfp8", keep=NOTHING_KEPT)
    assert report.converted == () and snapshot(model) == before
    assert all("already" in reason for reason in report.kept.values())
    assert model.lm_head.recipe == recipes.nvfp4()


def test_a_module_used_twice_stays_one_module():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(16, 16)})
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert type(model["a"]) is hb.nn.Linear and model["b"] is model["a"]


def test_a_tied_weight_stays_tied():
    model = decoder(2)
    model.lm_head.weight = model.embed_tokens.weight
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert model.lm_head.weight is model.embed_tokens.weight
    model(TOKENS).sum().backward()


# What is refused


@pytest.mark.parametrize(
    "options, names",
    [
        ({"rules": {"*mlp*": "mxfp8", "*expert*": "mxfp8"}}, ["rules", "*expert*", "layers.0"]),
        ({"rules": {"*mlp*": "nvfp5"}}, ["nvfp5", "nvfp4_forward"]),
        ({"rules": {"*mlp*": 4}}, ["recipe=4"]),
        ({"recipe": "nvfp5"}, ["nvfp5"]),
        ({"recipe": None}, ["recipe=None"]),
        ({"keep": hb.Keep(names=("*router",))}, ["keep", "*router"]),
        ({"share_amax": (("*wq", "*wk"),)}, ["share_amax", "*wq"]),
    ],
)
def test_mistakes_are_named_and_leave_the_model_alone(options, names):
    model = decoder(3)
    before, state = snapshot(model), hb.RunState(0)
    options = {"recipe": "nvfp4", "state": state, **options}
    with pytest.raises((ValueError, TypeError)) as caught:
        hb.quantize_(model, **options)
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert snapshot(model) == before and state.state_dict()["streams"] == 0


def test_a_filter_that_raises_leaves_the_model_alone():
    model = decoder(3)
    before = snapshot(model)

    def filter_fn(module, name):
        if name == "layers.1.mlp.up_proj":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        hb.quantize_(model, "nvfp4", filter_fn=filter_fn)
    assert snapshot(model) == before


def test_models_with_nothing_to_convert():
    with pytest.raises(ValueError, match="itself a Linear"):
        hb.quantize_(nn.Linear(16, 16), "nvfp4")
    with pytest.raises(ValueError, match="no torch.nn.Linear"):
        hb.quantize_(nn.Sequential(nn.ReLU()), "nvfp4")


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"names": "*lm_head"}, TypeError),
        ({"first_blocks": -1}, ValueError),
        ({"first_blocks": 1.5}, ValueError),
        ({"last_fraction": 1.5}, ValueError),
        ({"last_fraction": float("nan")}, ValueError),
    ],
)
def test_keep_refuses(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        hb.Keep(**fields)


# The report


def test_the_report_prints_as_a_table():
    text = str(hb.quantize_(decoder(2), "nvfp4", rules={"*mlp.up_proj": "mxfp8", "*o_proj": None}))
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "out", "x", "in", "recipe", "why"]
    assert lines[2].split() == ["layers.0.attn.q_proj", "16", "x", "16", "nvfp4", "recipe"]
    assert any(
        line.split() == ["layers.0.mlp.up_proj", "32", "x", "16", "mxfp8", "rule", "'*mlp.up_proj'"] for line in lines
    )
    assert any("high precision" in line and "rule '*o_proj'" in line for line in lines)
    assert any(line.startswith("lm_head") and "'*lm_head'" in line for line in lines)
    weights = (3 * 256 + 3 * 512) + 512
    total = 2 * (4 * 256 + 3 * 512) + 11 * 16
    assert lines[-1] == f"7 of 15 linear layers converted, {100 * weights / total:.1f} % of their weights"


def test_layers_say_their_recipe():
    model = decoder(2)
    hb.quantize_(model, "nvfp4")
    assert "recipe=nvfp4" in repr(model.layers[0].mlp.up_proj)
    odd = dataclasses.replace(recipes.nvfp4(), dgrad=None)
    hb.set_recipe_(model, odd)
    assert odd.key in repr(model.layers[0].mlp.up_proj)


# A shared amax


def weight_operand(layer, amax=None) -> hb.QuantTensor:
    return hb.quantize(layer.weight.detach(), hb.NVFP4(block=(16, 16)), amax=amax)


def test_siblings_share_one_amax():
    """The layer computes with the bytes of its weight under the group's amax."""
    model = decoder(2)
    attn = model.layers[0].attn
    attn.k_proj.weight.data *= 5
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    group = torch.stack([m.weight.detach().abs().max() for m in (attn.q_proj, attn.k_proj, attn.v_proj)]).max()
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attn, name)
        a = hb.quantize(x, hb.NVFP4())
        shared = hb.gemm_nt(a, weight_operand(layer, group), torch.float32)
        assert torch.equal(layer(x), shared)
        alone = hb.gemm_nt(a, weight_operand(layer), torch.float32)
        assert torch.equal(shared, alone) == (name == "k_proj")
    assert torch.equal(attn.o_proj(x), hb.gemm_nt(a, weight_operand(attn.o_proj), torch.float32))
    other = model.layers[1].attn
    assert attn.q_proj.amax_group == (attn.q_proj, attn.k_proj, attn.v_proj)
    assert other.q_proj.amax_group == (other.q_proj, other.k_proj, other.v_proj)
    mlp = model.layers[0].mlp
    assert mlp.up_proj.amax_group == (mlp.gate_proj, mlp.up_proj) and mlp.down_proj.amax_group == ()


def test_the_shared_amax_follows_the_weights_and_reaches_the_backward():
    model = decoder(1)
    recipe = recipes.nvfp4(stochastic_rounding=False, hadamard=None)
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    mlp = model.layers[0].mlp
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for factor in (1.0, 8.0):
        mlp.gate_proj.weight.data *= factor
        amax = torch.maximum(*(m.weight.detach().abs().max() for m in (mlp.gate_proj, mlp.up_proj)))
        x.grad = None
        y = mlp.up_proj(x)
        y.backward(torch.ones_like(y))
        w = weight_operand(mlp.up_proj, amax)
        dy = hb.quantize(torch.ones(7, 32), hb.NVFP4())
        assert torch.equal(x.grad, hb.gemm_nt(dy, w.transpose(), torch.float32))


def test_share_amax_can_be_chosen_and_left_out():
    model = decoder(2)
    hb.quantize_(model, "nvfp4", share_amax=())
    assert all(m.amax_group == () for m in model.modules() if isinstance(m, hb.nn.Linear))
    model = decoder(2)
    hb.quantize_(model, "nvfp4", share_amax=(("*q_proj", "*o_proj"),), keep=NOTHING_KEPT)
    attn = model.layers[1].attn
    assert attn.o_proj.amax_group == (attn.q_proj, attn.o_proj) and attn.k_proj.amax_group == ()
    assert SHARE_AMAX[0] == ("*q_proj", "*k_proj", "*v_proj")


def test_a_deepcopied_model_shares_within_itself():
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    twin = copy.deepcopy(model)
    attn = twin.layers[0].attn
    assert attn.q_proj.amax_group == (attn.q_proj, attn.k_proj, attn.v_proj)
    assert torch.equal(twin(TOKENS), model(TOKENS))


# Recipes at run time


def test_set_recipe_takes_effect_in_the_next_forward():
    model = decoder(2)
    plain = copy.deepcopy(model)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    quantized = model(TOKENS)
    hb.set_recipe_(model, "bf16")
    assert torch.equal(model(TOKENS), plain(TOKENS)) and not torch.equal(quantized, plain(TOKENS))
    hb.set_recipe_(model, recipes.nvfp4())
    assert torch.equal(model(TOKENS), quantized)


def test_set_recipe_between_forward_and_backward_changes_nothing():
    grads = []
    for change in (False, True):
        model = decoder(1)
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
        loss = model(TOKENS).square().sum()
        if change:
            hb.set_recipe_(model, "bf16")
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_set_recipe_needs_a_state_for_randomness_and_changes_all_or_nothing():
    model = nn.Sequential(hb.nn.Linear(16, 16, recipe="mxfp8"), hb.nn.Linear(16, 16, recipe="nvfp4"))
    with pytest.raises(ValueError, match="state"):
        hb.set_recipe_(model, recipes.four_over_six())
    assert [m.recipe for m in model] == [recipes.mxfp8(), recipes.nvfp4()]
    state = hb.RunState(3)
    hb.set_recipe_(model, recipes.four_over_six(), state=state)
    assert model[0].run_state is state and model[1].run_state is not state
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(ValueError, match="hb.quantize_"):
        hb.set_recipe_(decoder(1), "nvfp4")
    with pytest.raises(ValueError, match="nvfp5"):
        hb.set_recipe_(model, "nvfp5")


def test_high_precision_and_back():
    model = decoder(2)
    plain = copy.deepcopy(model)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, rules={"*o_proj": "mxfp8"})
    before = {name: m.recipe for name, m in model.named_modules() if isinstance(m, hb.nn.Linear)}
    quantized = model(TOKENS)
    with hb.high_precision(model) as inside:
        assert inside is model and torch.equal(model(TOKENS), plain(TOKENS))
        with hb.high_precision(model):
            assert torch.equal(model(TOKENS), plain(TOKENS))
        assert torch.equal(model(TOKENS), plain(TOKENS))
    assert torch.equal(model(TOKENS), quantized)

    def fails():
        with hb.high_precision(model):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fails()
    assert {name: m.recipe for name, m in model.named_modules() if isinstance(m, hb.nn.Linear)} == before
    with hb.high_precision(plain):  # nothing converted: nothing to do
        plain(TOKENS)


# The module itself


def test_the_module_built_directly():
    torch.manual_seed(0)
    plain = nn.Linear(16, 24, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(0)
    ours = hb.nn.Linear(16, 24, bias=False, dtype=torch.bfloat16, recipe=recipes.nvfp4_forward())
    assert torch.equal(plain.weight, ours.weight) and ours.bias is None
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(ours(x), hb.linear(x, ours.weight, None, recipes.nvfp4_forward()))
    with pytest.raises(ValueError, match="nvfp5"):
        hb.nn.Linear(16, 16, recipe="nvfp5")


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_main_grad_of_a_parameter_is_used(recipe):
    layer = hb.nn.Linear(16, 24, dtype=torch.bfloat16, recipe=recipe, state=hb.RunState(1))
    layer.weight.main_grad = torch.zeros(24, 16)
    layer(torch.ones(4, 16, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None and layer.weight.main_grad.any() and layer.bias.grad is not None


def test_empty_initialisation_on_meta_and_to_empty():
    with torch.device("meta"):
        model = decoder(2)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    model = model.to_empty(device="cpu")
    model.load_state_dict(decoder(2).state_dict())
    reference = decoder(2)
    hb.quantize_(reference, "nvfp4", keep=NOTHING_KEPT)
    assert torch.equal(model(TOKENS), reference(TOKENS))
