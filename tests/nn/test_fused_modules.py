"""LayerNormLinear, MLP and LayerNormMLP: the bits of their parts, conversion both ways, compilation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import halfbyte as hb
from halfbyte import functional as HF
from halfbyte.nn import MLP, LayerNormLinear, LayerNormMLP, RMSNorm, forward_shared
from halfbyte.nn.norm import from_norm

NAMES = ("nvfp4", "nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward", "bf16")


def gradients(module: nn.Module, function, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y * (i + 1)).square().mean() for i, y in enumerate(outputs)).backward()
    return [*(y.detach() for y in outputs), x.grad, *(p.grad for p in module.parameters())]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def inputs(width: int = 48) -> torch.Tensor:
    return torch.randn(2, 19, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recipe", NAMES)
def test_layernormlinear_is_its_parts(recipe):
    widths = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    m = LayerNormLinear(48, widths, norm="layer", recipe=recipe, state=hb.RunState(1))

    def parts(x):
        y = HF.layer_norm(x, m.norm.weight, m.norm.bias)
        return forward_shared(y, [getattr(m, name) for name in widths])

    assert same(gradients(m, m, inputs()), gradients(m, parts, inputs()))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("recipe", NAMES)
def test_layernormmlp_is_its_parts(recipe, activation):
    m = LayerNormMLP(48, 40, activation=activation, recipe=recipe, bias=True, state=hb.RunState(1))
    first = [getattr(m, name) for name in m.names[:-1]]

    def parts(x):
        h = HF.activation(activation, *forward_shared(HF.rms_norm(x, m.norm.weight), first))
        return m.down_proj(h)

    assert same(gradients(m, m, inputs()), gradients(m, parts, inputs()))


def test_layers_draw_as_two_unfused_layers_would():
    fused, apart = hb.RunState(4), hb.RunState(4)
    m = LayerNormMLP(48, 40, state=fused)
    layers = [hb.nn.Linear(48, 40, state=apart), hb.nn.Linear(48, 40, state=apart), hb.nn.Linear(40, 48, state=apart)]
    assert [getattr(m, name).stream for name in m.names] == [layer.stream for layer in layers]


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_compiled_is_eager(recipe):
    state = hb.RunState(2)
    m = nn.Sequential(
        LayerNormMLP(48, 40, recipe=recipe, state=state), LayerNormLinear(48, 16, recipe=recipe, state=state)
    )
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert same(gradients(m, compiled, inputs()), gradients(m, m, inputs()))
    fresh = hb.recipes.nvfp4(hadamard=hb.Hadamard(signs="fresh"))
    hb.set_recipe_(m, fresh, state=state)
    assert same(gradients(m, compiled, inputs()), gradients(m, m, inputs()))


def test_many_token_counts_make_two_graphs():
    m = LayerNormMLP(48, 40, recipe="nvfp4", state=hb.RunState(2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for tokens in range(20, 80, 6):
        x = torch.randn(tokens, 48, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(y, m(x))
    assert counter.frame_count == 2


def test_under_autocast_the_norm_rounds_to_its_dtype():
    m = LayerNormLinear(48, 16, recipe="nvfp4", state=hb.RunState(2))
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
        expected = m.linear(HF.rms_norm(x, m.norm.weight))
        assert HF.rms_norm(x, m.norm.weight).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


def test_conversion_there_and_back():
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(48, eps=1e-6), nn.Linear(48, 16)
    fused = LayerNormLinear.from_modules(norm, linear)
    assert list(fused.state_dict()) == ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    assert fused.norm.weight is norm.weight and fused.linear is linear and fused.norm.eps == 1e-6
    assert torch.allclose(fused(inputs()), linear(norm(inputs())), atol=1e-5)
    back, layers = fused.to_modules()
    assert type(back) is nn.LayerNorm and type(layers["linear"]) is nn.Linear
    assert torch.equal(layers["linear"](back(inputs())), linear(norm(inputs())))
    x = inputs()
    gate, up, down = nn.Linear(48, 40, bias=False), nn.Linear(48, 40, bias=False), nn.Linear(40, 48, bias=False)
    rms = nn.RMSNorm(48, eps=1e-6)
    mlp = LayerNormMLP.from_modules(rms, {"w1": gate, "w3": up, "w2": down}, "swiglu")
    assert list(mlp.state_dict()) == ["w1.weight", "w3.weight", "w2.weight", "norm.weight"]
    expected = down(F.silu(gate(rms(x))) * up(rms(x)))
    assert torch.allclose(mlp(x), expected, atol=1e-5)
    back, layers = mlp.to_modules()
    assert torch.equal(layers["w2"](F.silu(layers["w1"](back(x))) * layers["w3"](back(x))), expected)
    report = hb.quantize_(mlp, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    assert set(report.converted) == {"w1", "w3", "w2"} and not torch.equal(mlp(x), expected)
    assert type(mlp.to_modules()[1]["w1"]) is nn.Linear


def test_a_recipe_for_one_layer_alone():
    """gate in high precision, up quantized: nothing is shared, the activation still runs as one."""
    state = hb.RunState(3)
    m = MLP(48, 40, recipe="nvfp4", state=state)
    m.gate_proj.recipe = hb.recipes.bf16()
    x = inputs()
    expected = m.down_proj(HF.activation("swiglu", F.linear(x, m.gate_proj.weight), m.up_proj(x)))
    assert torch.equal(m(x), expected)


@pytest.mark.parametrize("make", [lambda: LayerNormLinear(16, 16), lambda: MLP(16, 16), lambda: LayerNormMLP(16, 16)])
def test_a_recipe_assigned_to_the_module_is_refused_for_it_has_none(make):
    module = make()
    assert not hasattr(module, "recipe")
    with pytest.raises(ValueError, match=rf"recipe='mxfp8': hb\.nn\.{type(module).__name__} .*hb\.set_recipe_\(module"):
        module.recipe = "mxfp8"
    hb.set_recipe_(module, "mxfp8")
    assert {layer.recipe for layer in module.modules() if isinstance(layer, hb.nn.Linear)} == {hb.recipes.mxfp8()}


def test_calls_draw_bits_of_their_own():
    m = LayerNormMLP(48, 40, recipe="nvfp4", state=hb.RunState(3))
    first, second = (gradients(m, lambda x, c=c: m(x, call=c), inputs()) for c in (0, 1))
    assert torch.equal(first[0], second[0]) and not same(first, second)


def test_cached_weights_and_checkpointing():
    m = LayerNormMLP(48, 40, recipe="nvfp4", state=hb.RunState(3))
    plain = gradients(m, m, inputs())
    recomputed = gradients(m, lambda x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False), inputs())
    assert same(plain, recomputed)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    hb.cache_weights(m, optimizer)
    assert same(gradients(m, m, inputs()), plain)


def test_deepcopy_and_repr():
    m = LayerNormMLP(48, 40, recipe="nvfp4", state=hb.RunState(3))
    assert torch.equal(copy.deepcopy(m)(inputs()), m(inputs()))
    assert "activation=swiglu" in repr(m) and "RMSNorm" in repr(m)


def linears(*shapes):
    """Return plain layers by name, given their shapes (out, in)."""
    return {name: nn.Linear(k, n) for name, (n, k) in zip("abc", shapes, strict=False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_rms_norm_without_an_eps_has_that_of_torch(dtype):
    norm, x = nn.RMSNorm(48).to(dtype), (torch.randn(5, 48) * 3e-4).to(dtype)
    assert torch.allclose(from_norm(norm)(x), norm(x), rtol=2e-2 if dtype != torch.float32 else 1e-5)


def test_built_on_meta_and_filled_elsewhere():
    with torch.device("meta"):
        layers = nn.Sequential(LayerNormMLP(16, 32), hb.nn.Linear(16, 16, state=hb.RunState(3)))
    layers.to_empty(device="cpu")
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    layers(torch.randn(4, 16)).sum().backward()
    assert layers[1].run_state.position == 0


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: LayerNormLinear(16, 16, norm="batch"), "norm='batch'"),
        (lambda: LayerNormLinear(16, 16, norm=RMSNorm(8)), "width 16"),
        (lambda: LayerNormLinear(16, {"norm": 16}), "names="),
        (lambda: LayerNormLinear(16, {"q": 16, "forward": 16}), "names=.*'forward' among them"),
        (lambda: MLP.from_linears({"training": nn.Linear(16, 16), "b": nn.Linear(16, 16)}, "gelu"), "names=.*training"),
        (lambda: MLP(16, 16, activation="swish"), "activation='swish'"),
        (lambda: MLP.from_linears({"fc1": nn.Linear(4, 4), "fc2": nn.Linear(4, 4)}, "swiglu"), "takes 3"),
        (lambda: LayerNormLinear.from_modules(nn.BatchNorm1d(4), nn.Linear(4, 4)), "BatchNorm1d"),
        (lambda: MLP.from_linears(linears((8, 4), (9, 4), (4, 8)), "swiglu"), "a 8x4, b 9x4, c 4x8 .*alike"),
        (lambda: MLP.from_linears(linears((8, 4), (4, 9)), "gelu"), "a 8x4, b 4x9 .*down"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Adapted(hb.nn.Linear):
    """A layer that adds something to its output, as adapters do."""

    def forward(self, input):
        return super().forward(input) + 100


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_hooks_and_subclasses_are_called_wherever_they_sit(activation):
    """Down alone, up alone and a norm ran without being called."""
    torch.manual_seed(0)
    model, x = LayerNormMLP(32, 48, activation=activation, norm="rms"), torch.randn(6, 32)
    expected, seen = model(x), []
    for name in ("norm", *model.names):
        getattr(model, name).register_forward_hook(lambda *a, name=name: seen.append(name))
    assert torch.equal(model(x), expected) or activation == "swiglu"  # gate and up no longer share
    assert seen == ["norm", *model.names]
    block = hb.nn.LayerNormLinear(32, 16)
    y = block(x)
    for layer in (block.norm, block.linear):
        layer.register_forward_hook(lambda *a: seen.append("block"))
    assert torch.equal(block(x), y) and seen.count("block") == 2
    hb.nn.forward_shared(x, [block.linear])
    assert seen.count("block") == 3
    adapted = Adapted.from_linear(torch.nn.Linear(48, 32), "nvfp4")
    plain = hb.nn.MLP.from_linears({**{n: getattr(model, n) for n in model.names[:-1]}, "down": adapted}, activation)
    assert plain(x).min() > 50


def test_parts_of_other_widths_are_refused():
    linear = torch.nn.Linear
    with pytest.raises(ValueError, match="give one of width 64"):
        LayerNormLinear.from_modules(torch.nn.RMSNorm(32, eps=1e-6), linear(64, 4))
    with pytest.raises(ValueError, match="q 32, k 64: they read one tensor"):
        LayerNormLinear.from_modules(torch.nn.RMSNorm(32, eps=1e-6), {"q": linear(32, 4), "k": linear(64, 4)})
    with pytest.raises(ValueError, match="give one of width 16"):
        LayerNormMLP.from_modules(torch.nn.LayerNorm(32), {"up": linear(16, 24), "down": linear(24, 16)}, "gelu")


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_siblings_with_backward_hooks_are_called(register):
    """One product for all would pass by the hooks of each."""
    layers = [hb.nn.Linear(48, 32, recipe="nvfp4_forward") for _ in range(2)]
    seen = []
    getattr(layers[1], register)(lambda module, *gradients: seen.append(module))
    x = inputs().requires_grad_()
    torch.autograd.backward(forward_shared(x, layers), [torch.ones(2, 19, 32)] * 2)
    assert seen == [layers[1]]


def test_hooks_of_all_modules_see_those_that_share_an_input():
    """What counts or traces modules by torch's global hooks would miss norm and siblings."""
    mlp = hb.nn.LayerNormMLP(64, 128, recipe="nvfp4_forward")
    seen = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(module))
    try:
        hooked = mlp(torch.ones(3, 64))
        layers = [hb.nn.Linear(48, 32, recipe="nvfp4_forward") for _ in range(2)]
        forward_shared(torch.ones(3, 48), layers)
    finally:
        handle.remove()
    assert len(seen) == 1 + len(list(mlp.children())) + 2 and set(seen) == {mlp, *mlp.children(), *layers}
    assert torch.equal(hooked, mlp(torch.ones(3, 64))), "the same bits"


def test_a_norm_of_torch_is_refused_with_what_takes_it():
    with pytest.raises(ValueError, match=r"norm=LayerNorm.*: give hb.nn.RMSNorm or hb.nn.LayerNorm; from_modules"):
        LayerNormMLP(64, 128, norm=torch.nn.LayerNorm(64))
