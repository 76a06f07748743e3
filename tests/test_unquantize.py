"""hb.unquantize_: the model of before, with the same Parameters, names and hooks; tensors of other libraries."""

import copy
import pickle

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils import _pytree as pytree

import halfbyte as hb
from halfbyte.tensor.primary import PrimaryWeight


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


def names(model):
    return {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def no_attribute_is_left(model):
    plain = vars(nn.Linear(1, 1)).keys()
    return all(vars(m).keys() == plain for m in model.modules() if type(m) is nn.Linear)


@pytest.mark.parametrize("fused", [False, True])
def test_the_model_of_before(fused):
    model = decoder(2)
    kinds_before, names_before, expected = kinds(model), names(model), model(TOKENS)
    report = hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    if fused:
        assert hb.nn.fuse_(model).fused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache = hb.cache_weights(model, optimizer)
    report.state.follow(model)
    assert not torch.equal(model(TOKENS), expected)
    assert set(hb.unquantize_(model)) == set(report.converted)
    assert kinds(model) == kinds_before and names(model) == names_before and no_attribute_is_left(model)
    assert torch.equal(model(TOKENS), expected)
    assert cache.bytes == 0 and not optimizer._optimizer_step_post_hooks and not model._forward_pre_hooks
    model(TOKENS).sum().backward()
    optimizer.step()
    assert not torch.equal(model(TOKENS), expected), "the optimizer's Parameters are the model's"


def test_converting_again_draws_the_same_bits():
    losses = []
    for again in (False, True):
        model = decoder(1)
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
        if again:
            model(TOKENS).sum().backward()
            hb.unquantize_(model)
            model.zero_grad()
            hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
        model(TOKENS).sum().backward()
        losses.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_tied_weights_shared_layers_and_hooks_stay():
    model = decoder(1)
    model.lm_head.weight = model.embed_tokens.weight
    model.again = model.layers[0].mlp
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    seen = []
    model.again.up_proj.register_forward_hook(lambda module, arguments, output: seen.append(module))
    model.again.up_proj.eval()
    model.again.up_proj.note = "mine"
    hb.unquantize_(model)
    up = model.layers[0].mlp.up_proj
    assert up is model.again.up_proj and model.lm_head.weight is model.embed_tokens.weight
    assert type(up) is nn.Linear and not up.training and up.note == "mine"
    model(TOKENS)
    assert seen == [up]


def dressed(model):
    """Put a parametrization, torch's weight norm and a pruning on three layers."""
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    nn.utils.parametrizations.weight_norm(model[1])
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    return model


@pytest.mark.parametrize("converted_first", [False, True])
def test_parametrized_and_pruned_layers(converted_first):
    """What torch itself puts on its layers, on layers of quantize_ and of from_linear."""
    sizes = ((16, 32), (32, 16), (16, 16))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(*size) for size in sizes)))
    plain, model, x = dressed(models[0]), models[1], torch.randn(4, 16)
    if converted_first:
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
        assert not torch.equal(dressed(model)(x), plain(x))
    else:
        model = nn.Sequential(*(hb.nn.Linear.from_linear(layer, "nvfp4") for layer in model))
        dressed(model)
    hb.unquantize_(model)
    assert torch.equal(model(x), plain(x)) and model.state_dict().keys() == plain.state_dict().keys()
    assert [parametrize.type_before_parametrizations(layer) for layer in model] == [nn.Linear] * 3
    if converted_first:
        assert torch.equal(copy.deepcopy(model[:2])(x), plain[:2](x))
    parametrize.remove_parametrizations(model[0], "weight")
    prune.remove(model[2], "weight")
    assert type(model[0]) is type(model[2]) is nn.Linear and torch.equal(model(x), plain(x))


def test_modules_built_of_ours():
    """Containers stay around torch's layers; experts, which torch has none of, compute in high precision."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "qkv": hb.nn.LayerNormLinear(16, {"q": 16, "k": 16}),
            "mlp": hb.nn.LayerNormMLP(16, 32),
            "experts": hb.nn.GroupedLinear(2, 16, 16),
        }
    )
    x, offsets = torch.randn(6, 16), torch.tensor([2, 6], dtype=torch.int32)

    def outputs():
        return [*model["qkv"](x), model["mlp"](x), model["experts"](x, offsets)]

    with hb.high_precision(model):
        expected = outputs()
    done = hb.unquantize_(model)
    assert set(done) == {"qkv.q", "qkv.k", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "experts"}
    assert type(model["qkv"].q) is nn.Linear and type(model["mlp"].down_proj) is nn.Linear
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outputs(), expected, strict=True))
    assert model["experts"].run_state is None and not model["experts"].recipe.specs


def test_the_fast_path_of_torchs_encoder_opens_again():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    before = model.use_nested_tensor, model.layers[0].activation_relu_or_gelu
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    assert (model.use_nested_tensor, model.layers[0].activation_relu_or_gelu) == (False, 0)
    hb.unquantize_(model)
    assert (model.use_nested_tensor, model.layers[0].activation_relu_or_gelu) == before == (True, 2)


class Own(hb.nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class OwnWithAWayBack(Own):
    def to_module(self):
        return nn.Sequential(super().to_module())


def test_layers_of_ones_own_say_the_way_back():
    model = nn.Sequential(OwnWithAWayBack(16, 16))
    hb.unquantize_(model)
    assert type(model[0]) is nn.Sequential and type(model[0][0]) is nn.Linear


def primary():
    model = nn.Sequential(nn.Linear(16, 16), hb.nn.Linear(16, 16, False))
    model[1].weight = PrimaryWeight.empty((16, 16)).as_parameter()
    return model


def replaced_forward():
    model = nn.Sequential(hb.nn.Linear(16, 16))
    model[0].forward = model[0].forward
    return model


def held_by_an_optimizer():
    model = nn.Sequential(hb.nn.Linear(16, 16))
    model[0].before_use = lambda: None
    return model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Sequential(nn.Linear(16, 16)), "model=Sequential: no layer of it is halfbyte's"),
        (lambda: hb.nn.Linear(16, 16), r"model is itself a layer.*model\.to_module\(\)"),
        (primary, "1: its weight is a primary weight.*dequantize"),
        (replaced_forward, "0: its forward was replaced on the instance.*remove_hook_from_module"),
        (held_by_an_optimizer, "0: an optimizer of hb.distributed gathers its weight"),
        (lambda: nn.Sequential(hb.nn.Linear(16, 16), Own(16, 16)), r"1: Own is a subclass.*to_module\(\)"),
    ],
)
def test_what_cannot_be_put_back_is_refused_and_nothing_changes(make, message):
    model = make()
    before = kinds(model)
    with pytest.raises(ValueError, match=message):
        hb.unquantize_(model)
    assert kinds(model) == before
    with pytest.raises(TypeError, match="model=str"):
        hb.unquantize_("model")


def test_who_gives_a_weight_stays_with_the_layer():
    """As FSDP2's gather of codes does: copies, and the layer of before, have plain weights that nobody promised."""

    def refuse(layer, weight):
        raise ValueError(f"{layer.title}: not as promised")

    model = nn.Sequential(nn.Linear(32, 32))
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    model[0].weight_to_read = refuse
    x = torch.zeros(16, 32)
    with pytest.raises(ValueError, match="not as promised"):
        model(x)
    assert copy.deepcopy(model)(x).shape == (16, 32)
    hb.unquantize_(model)
    assert no_attribute_is_left(model) and model(x).shape == (16, 32)


def test_one_layer_goes_back_by_itself():
    torch.manual_seed(0)
    layer = hb.nn.Linear(16, 32)
    plain = layer.to_module()
    assert type(plain) is nn.Linear and plain.weight is layer.weight and plain.bias is layer.bias
    x = torch.randn(4, 16)
    assert torch.equal(plain(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(pickle.loads(pickle.dumps(plain))(x), plain(x))


class Int8(torch.Tensor):
    """The least of a quantized weight as other libraries make them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        def plain(t):
            return t.codes * t.scale if isinstance(t, Int8) else t

        if function is torch.ops.aten.detach.default:
            return Int8(arguments[0].codes, arguments[0].scale)
        if function.namespace == "halfbyte":
            raise NotImplementedError(f"Int8 knows no {function}")
        return function(*pytree.tree_map(plain, arguments), **(options or {}))


def put_codes_in(layer):
    codes = (layer.weight.detach() * 100).round().to(torch.int8)
    layer.weight = nn.Parameter(Int8(codes, torch.tensor(0.01)), requires_grad=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sibling", ["q_proj", "v_proj", "o_proj"])
def test_weights_that_another_library_quantized_are_refused_by_name(sibling, compiled):
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    put_codes_in(getattr(model.layers[0].attn, sibling))
    run = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match=rf"layers.0.attn.{sibling} \(.*its weight is a Int8.*hb.unquantize_\(model\)"):
        run(TOKENS)
    with hb.high_precision(model):
        assert model(TOKENS).isfinite().all(), "the other library's layer runs"
    hb.unquantize_(model)
    assert model(TOKENS).isfinite().all() and type(getattr(model.layers[0].attn, sibling).weight) is Int8


def test_experts_and_functions_refuse_them_too():
    w = Int8(torch.ones(2, 16, 16, dtype=torch.int8), torch.tensor(0.5))
    layer = hb.nn.GroupedLinear(2, 16, 16)
    layer.weight = nn.Parameter(w, requires_grad=False)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"hb.nn.GroupedLinear\(16 -> 16\): its weight is a Int8"):
        layer(torch.ones(4, 16), offsets)
    with pytest.raises(ValueError, match="w_ENK is a Int8"):
        hb.grouped_linear(torch.ones(4, 16), w, offsets)
    with pytest.raises(ValueError, match="w is a Int8"):
        hb.linear(
            torch.ones(4, 16), Int8(torch.ones(16, 16, dtype=torch.int8), torch.tensor(0.5)), None, hb.recipes.mxfp8()
        )


def test_a_run_state_waits_no_longer_for_amaxes_of_layers_that_went_back():
    model = decoder(1)
    state = hb.quantize_(model, hb.recipes.delayed_amax(), keep=NOTHING_KEPT).state
    hb.unquantize_(model)
    state.advance()
    assert state.position == 1
