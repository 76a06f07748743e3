"""quantize_, set_recipe_ and high_precision: what is converted and why, what stays as it was, what is refused."""

import copy
import dataclasses

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn

import halfbyte as hb
from halfbyte import recipes


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


def test_routers_are_kept_however_models_name_them():
    names = ("mlp.gate", "mlp.gate.wg", "mlp.router", "router.layer", "ffn.router.classifier", "mlp.shared_expert_gate")
    others = ("gate_proj", "experts.0.gate_proj", "self_attn.output_gate")
    for name in (*names, *others):
        model = nn.Linear(16, 16)
        for part in reversed(name.split(".")):
            model = nn.ModuleDict({part: model})
        report = hb.quantize_(nn.ModuleDict({"a": model, "b": nn.Linear(16, 16)}), "nvfp4")
        assert (f"a.{name}" in report.converted) == (name in others), name


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
    plain = type("Named", (nn.Linear,), {})(16, 16)
    model = nn.Sequential(nn.Linear(16, 16), Scaled(16, 16), nn.MultiheadAttention(16, 2), plain)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert report.converted == ("0",)
    assert type(model[1]) is Scaled and report.kept["1"] == "Scaled is a subclass of Linear with a forward of its own"
    assert type(model[2].out_proj) is not hb.nn.Linear and "attention reads itself" in report.kept["2.out_proj"]
    assert report.kept["3"] == "Named is a subclass of Linear"


def test_converting_twice_changes_nothing_and_says_so():
    model = decoder(3)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    before = snapshot(model)
    report = hb.quantize_(model, "mxfp8", keep=NOTHING_KEPT)
    assert report.converted == () and snapshot(model) == before
    assert all("already" in reason for reason in report.kept.values())
    assert model.lm_head.recipe == recipes.nvfp4()


def test_a_second_conversion_draws_from_the_same_run_state():
    model = decoder()
    first = hb.quantize_(model, "nvfp4", rules={"*": None, "*.q_proj": "nvfp4"})
    second = hb.quantize_(model, "nvfp4")
    assert second.converted and second.state is first.state
    streams = [layer.stream for layer in linears(model).values() if isinstance(layer, hb.nn.Linear)]
    assert len(set(streams)) == len(streams)


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


def test_the_report_names_matrices_that_no_recipe_reaches():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4, 5))

    model = nn.ModuleDict(
        {
            "convolution": nn.Conv1d(4, 8, 3),
            "table": nn.Embedding(8, 4),
            "norm": nn.LayerNorm(4),
            "linear": nn.Linear(32, 32),
            "attention": nn.MultiheadAttention(32, 4),
            "owners": nn.ModuleList([Owner(), Owner(), Owner()]),
        }
    )
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert report.others == {
        "Conv1d": ("convolution",),
        "MultiheadAttention": ("attention",),
        "Owner": ("owners.0", "owners.1", "owners.2"),
    }
    assert report.converted == ("linear",)
    lines = str(report).splitlines()
    assert "3 x Owner (owners.0, owners.1, …): no torch.nn.Linear, stays as it is" in lines
    assert lines[-1].startswith("1 of 2 linear layers converted")
    assert hb.quantize_(nn.Sequential(nn.Linear(16, 16)), "nvfp4").others == {}


def test_layers_say_their_recipe():
    model = decoder(2)
    hb.quantize_(model, "nvfp4")
    assert "recipe=nvfp4" in repr(model.layers[0].mlp.up_proj)
    odd = dataclasses.replace(recipes.nvfp4(), dgrad=None)
    hb.set_recipe_(model, odd)
    assert odd.key in repr(model.layers[0].mlp.up_proj)


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
    own = hb.RunState(4)
    model = nn.Sequential(hb.nn.Linear(16, 16, recipe="mxfp8"), hb.nn.Linear(16, 16, recipe="nvfp4", state=own))
    with pytest.raises(ValueError, match="state"):
        hb.set_recipe_(model, recipes.four_over_six())
    assert [m.recipe for m in model] == [recipes.mxfp8(), recipes.nvfp4()]
    state = hb.RunState(3)
    hb.set_recipe_(model, recipes.four_over_six(), state=state)
    assert model[0].run_state is state and model[1].run_state is own
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


def test_torch_encoder_layers_take_no_fast_path_around_the_recipe():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 7, 32), torch.arange(7) >= torch.tensor([[7], [4]])
    plain = model(x), model(x, src_key_padding_mask=padding)[~padding]
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    trained = model(x), model(x, src_key_padding_mask=padding)[~padding]  # with gradients: the slow path
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = model(x), model(x, src_key_padding_mask=padding)[~padding]
        for y, quantized, high in zip(found, trained, plain, strict=True):
            assert (y - quantized).norm() < 0.2 * (y - high).norm()  # torch's attention has a fast path of its own


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_converted_under_inference_mode_trains(compiled):
    model = decoder(1)
    with torch.inference_mode():
        state = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT).state
        model(TOKENS)
        state.load_state_dict({**state.state_dict(), "position": 3})
    function = torch.compile(model, backend="aot_eager") if compiled else model
    function(TOKENS).sum().backward()
    state.advance()
    function(TOKENS).sum().backward()
    assert state.position == 4


def test_wrong_kinds_of_options_are_refused_before_anything_changes():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(TypeError, match=r"share_amax=.*groups of globs"):
        hb.quantize_(model, "nvfp4", share_amax=("*q_proj", "*k_proj"))
    with pytest.raises(TypeError, match=r"rules=.*dict"):
        hb.quantize_(model, "nvfp4", rules=["*"])
    with pytest.raises(TypeError, match=r"model=list: .*Module"):
        hb.quantize_([model], "nvfp4")
    assert type(model[0]) is torch.nn.Linear


def test_the_report_says_which_recipe_a_layer_has_that_was_converted_before():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), hb.nn.Linear(16, 16, recipe="mxfp8"), hb.nn.MLP(16, 32))
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    lines = [line.split()[:5] for line in str(report).splitlines()[2:-1]]
    assert [line[4] for line in lines] == ["nvfp4", "mxfp8", "nvfp4", "nvfp4", "nvfp4"]
    assert report.converted == ("0",) and "use hb.set_recipe_" in report.kept["1"]


def test_a_forward_replaced_on_the_instance_is_reported():
    """What accelerate's hooks do: the old forward, bound to the old module, had gone on running unquantized."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 1
    report = hb.quantize_(model, "nvfp4_forward", keep=hb.Keep(names=(), last_fraction=0))
    assert report.converted == ("1",) and "replaced on the instance" in report.kept["0"]
    with pytest.raises(ValueError, match="replaced on the instance"):
        hb.nn.Linear.from_linear(model[0], "nvfp4")
    calls, forward = [], model[1].forward
    model[1].forward = lambda x: calls.append(1) or forward(x)  # one set later is called
    hb.nn.forward_shared(x, [model[1]])
    assert calls == [1]


def test_a_layer_compiled_in_place_before_runs_quantized():
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32)
    expected = hb.nn.Linear.from_linear(model[0], "nvfp4_forward")(x)
    model[0].compile(backend="eager")
    plain = model(x)
    hb.quantize_(model, "nvfp4_forward")
    assert torch.equal(model(x), expected) and not torch.equal(expected, plain)
