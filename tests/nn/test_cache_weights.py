"""hb.cache_weights: the bits of a run are those without a cache, and the quantizations are counted."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from grouped_cases import RAGGED, ends
from linear_cases import RECIPES
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn
from torch.nn.utils import parametrize as parametrizing
from torch.nn.utils import prune as pruning
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.nn import cache as cache_module

OFFSETS = ends(RAGGED)


class Calls(TorchDispatchMode):
    """Counts the calls of halfbyte's ops."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name.removeprefix("halfbyte::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def quantized(self) -> int:
        return self.counts["quantize_row_col"] + self.counts["grouped_quantize_row_col"] + self.counts["quantize"]


class Both(nn.Module):
    """A dense layer, siblings that share an amax, and experts."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, n, bias=False) for n in (24, 8, 8))
        self.up = hb.nn.GroupedLinear(len(OFFSETS), 40, 24, recipe="bf16")
        self.out = nn.Linear(24, 40)

    def forward(self, x):
        x = self.up(x, OFFSETS)
        q, k, v = hb.nn.forward_shared(x, (self.q_proj, self.k_proj, self.v_proj))
        return self.out(q * k.repeat(1, 3) + v.repeat(1, 3))


X = torch.randn(2, sum(RAGGED), 40, generator=torch.Generator().manual_seed(0))


def train(recipe, *, cached: bool, autocast: bool = False, steps: int = 2, fused: bool = True):
    """Return the losses, gradients and weights of a few steps of two micro-batches each, and the model."""
    torch.manual_seed(1)
    model = Both()
    state = hb.RunState(5)
    hb.quantize_(model, recipe, state=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    seen = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        handle = hb.cache_weights(model, optimizer) if cached else None
    for _ in range(steps):
        for x in X:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            state.advance()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())], model, handle


@pytest.mark.parametrize(
    "recipe",
    ["nvfp4", "nvfp4_mxfp8_bwd", "mxfp8", "dequantized", "half_of_each", "stochastic_tiles", "rotated_everywhere"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_cached_is_bitwise_not_cached(recipe, autocast):
    plain, _, _ = train(RECIPES[recipe], cached=False, autocast=autocast)
    cached, _, handle = train(RECIPES[recipe], cached=True, autocast=autocast)
    for a, b in zip(plain, cached, strict=True):
        assert torch.equal(a, b)
    drawing = recipe in ("stochastic_tiles", "rotated_everywhere")
    assert (handle.bytes == 0) == drawing


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_of_which_one_operand_is_cached(autocast):
    """The other draws random bits: forward and backward read the buffer and the weight."""
    tile, drawn = hb.NVFP4(block=(16, 16)), hb.NVFP4(block=(16, 16), rounding="stochastic")
    recipe = hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4(), b=tile), dgrad=hb.GemmSpec(a=hb.NVFP4(), b=drawn))
    plain, _, _ = train(recipe, cached=False, autocast=autocast)
    cached, model, _ = train(recipe, cached=True, autocast=autocast)
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
    kept = model.out.cached_weight()
    assert kept.row is not None and kept.col is None


def test_fused_adamw_leaves_the_version_alone_and_the_cache_follows():
    _, model, _ = train(hb.recipes.nvfp4(), cached=True, steps=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model.out.weight_cache.owner.watch(optimizer)
    before = model.out.weight.detach().clone()
    model(X[0]).sum().backward()
    version = model.out.weight._version
    buffers = [t.data_ptr() for t in model.out.cached_weight().tensors]
    optimizer.step()
    assert model.out.weight._version == version and not torch.equal(before, model.out.weight)
    row = model.out.cached_weight().row
    expected = hb.quantize(model.out.weight, row.spec)
    assert torch.equal(row.blocks.qdata, expected.qdata)
    assert torch.equal(row.blocks.block_scale, expected.block_scale.view(torch.uint8))
    assert buffers == [t.data_ptr() for t in model.out.cached_weight().tensors]


def test_forward_and_backward_quantize_no_weight():
    _, model, handle = train(hb.recipes.nvfp4(), cached=True, steps=0)
    with Calls() as calls:
        model(X[0]).sum().backward()
    # per input x once forward, each dy once backward: experts 1 + 1, the three siblings 1 + 3, out 1 + 1
    assert calls.quantized == 8 and not calls.counts.keys() & {"amax", "amax_of_all"}
    with Calls() as calls, torch.no_grad():
        model(X[0])
    assert calls.quantized == 3
    with Calls() as calls:
        checkpoint(model, X[0].requires_grad_(), use_reentrant=False).sum().backward()
    assert calls.quantized == 3 + 8
    with Calls() as calls:
        handle.refill()
    assert calls.quantized == 5 and calls.counts["amax_of_all"] == 1 and not calls.counts["amax"]


def test_loading_switching_and_releasing():
    (_, one, handle), (_, two, _) = train("nvfp4", cached=True), train("nvfp4", cached=False, steps=0)
    assert one.state_dict().keys() == two.state_dict().keys()
    one.load_state_dict(two.state_dict())
    one.out.run_state.load_state_dict(two.out.run_state.state_dict())
    assert torch.equal(one(X[0]), two(X[0]))
    for recipe in ("nvfp4_mxfp8_bwd", "bf16", "four_over_six", hb.Recipe(dgrad=hb.recipes.mxfp8().dgrad)):
        for model in (one, two):
            hb.set_recipe_(model, recipe)
        assert torch.equal(one(X[0]), two(X[0]))
    hb.set_recipe_(one, "nvfp4")
    with hb.high_precision(one), Calls() as calls:
        one(X[0])
    assert not calls.quantized and one.out.cached_weight() is not None
    twin = copy.deepcopy(one)
    assert twin.out.weight_cache is None and one.out.weight_cache is not None
    with pytest.raises(ValueError, match="release"):
        hb.cache_weights(one)
    assert handle.bytes
    handle.release()
    assert not handle.bytes and one.out.cached_weight() is None
    assert torch.equal(one(X[0]), twin(X[0]))


def test_a_change_of_recipe_fills_the_cache_with_the_operands_of_the_new_one():
    model = decoder_of("nvfp4")
    layers = [module for module in model.modules() if isinstance(module, hb.nn.Linear)]
    specs = {
        "mxfp8": (hb.MXFP8(), hb.MXFP8()),
        "bf16": (None, None),
        "nvfp4_forward": (hb.recipes.nvfp4_forward().fprop.b, None),
        "nvfp4": (hb.NVFP4(block=(16, 16)), hb.NVFP4(block=(16, 16))),
    }
    with hb.cache_weights(model):
        for name, (row, col) in specs.items():
            hb.set_recipe_(model, name)
            if name == "bf16":
                assert all(layer.cached_weight() is None for layer in layers)
                continue
            assert all(layer.cached_weight().specs == (row, col) for layer in layers)
            w, cached = model.lm_head.weight.detach(), model.lm_head.cached_weight()
            assert torch.equal(cached.row.blocks.qdata, hb.quantize(w, row).blocks.qdata)
            if col is not None:
                assert torch.equal(cached.col.blocks.qdata, hb.quantize(w.T.contiguous(), col).blocks.qdata)
            with Calls() as calls, torch.no_grad():
                model(TOKENS)
            assert calls.quantized == len(layers), "of inputs alone"


def test_moving_the_model_quantizes_again():
    model = decoder_of("nvfp4")
    with hb.cache_weights(model, dtype=torch.bfloat16):
        model.to(torch.bfloat16)
        cached = model(TOKENS)
    assert torch.equal(cached, model(TOKENS))


def test_siblings_that_share_an_amax_move_to_another_device_one_after_the_other():
    model = decoder_of("nvfp4")
    attn = model.layers[0].attn
    with hb.cache_weights(model), Calls() as calls:
        held = attn.q_proj.cached_weight().row.blocks.qdata
        attn.q_proj.to("meta")
        assert [layer.cached_weight() for layer in (attn.q_proj, attn.k_proj)] == [None, None]
        model.to("meta")
        assert {p.device.type for p in model.parameters()} == {"meta"}
        for layer in (attn.q_proj, attn.k_proj, attn.o_proj):
            assert {t.device.type for t in layer.cached_weight().tensors} == {"meta"}
        before = calls.quantized
        model(TOKENS.to("meta"))
        layers = sum(isinstance(module, hb.nn.Linear) for module in model.modules())
        assert calls.quantized - before == layers  # of activations alone
        model.to_empty(device="cpu")
        assert attn.q_proj.cached_weight().row.blocks.qdata.shape == held.shape


def decoder_of(recipe):
    model = decoder(1)
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    return model


def test_tied_weights_are_quantized_once():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    hb.quantize_(model, "nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hb.cache_weights(model, optimizer):
        assert model[0].cached_weight() is model[1].cached_weight()
        model(torch.randn(4, 16)).sum().backward()
        with Calls() as calls:
            optimizer.step()
        assert calls.quantized == 1
    with Calls() as calls:
        optimizer.step()
    assert not calls.quantized


def test_a_backward_after_the_step_is_refused():
    """The buffers have moved on: gradients would be those of other weights."""
    model = decoder_of("nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hb.cache_weights(model, optimizer):
        loss = model(TOKENS).sum()
        model(TOKENS).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("recipe", ["nvfp4", "dequantized"])
def test_decoded_weights_are_the_same_weights(recipe):
    model = decoder_of(RECIPES[recipe])
    plain = model(TOKENS)
    with hb.cache_weights(model, decoded=True):
        assert torch.equal(model(TOKENS), plain)


def assign(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def new_data(layer):
    layer.weight.data = layer.weight.detach() * 2


def prune(layer):
    pruning.l1_unstructured(layer, "weight", 0.5)


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def parametrize(layer):
    parametrizing.register_parametrization(layer, "weight", Twice())


@pytest.mark.parametrize("change", [assign, new_data, prune, parametrize])
def test_another_weight_is_not_the_one_that_was_cached(change):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), torch.randn(6, 32)
    hb.quantize_(model, "nvfp4_forward", keep=NOTHING_KEPT)
    before = model(x)
    cache = hb.cache_weights(model, torch.optim.AdamW(model.parameters()))
    change(model[0])
    y = model(x)
    cache.release()
    assert torch.equal(y, model(x)) and not torch.equal(y, before)


def test_functional_call_reads_the_weights_it_is_given():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), torch.randn(6, 32)
    hb.quantize_(model, "nvfp4_forward", keep=NOTHING_KEPT)
    before, average = model(x), {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, average, (x,))
    with hb.cache_weights(model, torch.optim.AdamW(model.parameters())):
        assert torch.equal(torch.func.functional_call(model, average, (x,)), expected)
        assert torch.equal(model(x), before)


def test_experts_that_move_with_the_module_that_owns_them():
    """Their parent's weight moves after the recipe's own submodule was told."""

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(len(OFFSETS), 16, 40))
            self.recipe = hb.nn.GroupedRecipe(len(OFFSETS), 40, 16)
            self.recipe.held_as = "w", False

        def forward(self, x):
            return self.recipe(x, self.w, OFFSETS)

    model = Owner()
    hb.quantize_(model, "nvfp4")
    cache = hb.cache_weights(model, torch.optim.AdamW(model.parameters()))
    model._apply(lambda t: t * 2)
    y = model(X[0])
    cache.release()
    assert torch.equal(y, model(X[0]))


def test_what_fails_half_way_leaves_no_cache(monkeypatch):
    model, calls = decoder_of("nvfp4"), Counter()
    quantize = cache_module.quantize_weight

    def out_of_memory(*arguments):
        calls["quantize"] += 1
        if calls["quantize"] == 3:
            raise MemoryError
        return quantize(*arguments)

    monkeypatch.setattr(cache_module, "quantize_weight", out_of_memory)
    with pytest.raises(MemoryError):
        hb.cache_weights(model)
    assert all(m.weight_cache is None for m in model.modules() if isinstance(m, hb.nn.Linear))
    with hb.cache_weights(model) as cache:
        assert cache.bytes > 0


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_optimizers_that_step_inside_the_backward(shares, is_cached):
    """A step of q refills k, whose backward is to come: refused; docs/training.md names the two remedies."""
    model = decoder(1)
    options = {} if shares else {"share_amax": ()}
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, **options)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    if is_cached:
        hb.cache_weights(model, *(optimizers[layer.weight] for layer in model.modules() if hasattr(layer, "recipe")))
    if shares and is_cached:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(TOKENS).square().mean().backward()
        return
    model(TOKENS).square().mean().backward()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_weights_that_another_optimizer_steps_are_not_left_behind():
    def trained(cached):
        model = decoder_of("nvfp4")
        matrices = [p for name, p in model.named_parameters() if "down_proj" in name]
        rest = [p for name, p in model.named_parameters() if "down_proj" not in name]
        two = torch.optim.SGD(matrices, lr=0.5, momentum=0.5), torch.optim.AdamW(rest, lr=0.1)
        for given in two if cached else ():
            with pytest.raises(ValueError, match=r"none of them holds the weight of .*_proj.*Pass the optimizer"):
                hb.cache_weights(model, given)
        if cached:
            hb.cache_weights(model, *two)
        for _ in range(2):
            model(TOKENS).square().mean().backward()
            for optimizer in two:
                optimizer.step()
                optimizer.zero_grad()
        return model(TOKENS)

    assert torch.equal(trained(True), trained(False))
    model = decoder_of("nvfp4")
    part = [p for name, p in model.named_parameters() if "down_proj" in name]
    for name, p in model.named_parameters():
        p.requires_grad_("down_proj" in name)
    hb.cache_weights(model, torch.optim.SGD(part)).release()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="quantize_ first"):
        hb.cache_weights(nn.Linear(4, 4))
    model = decoder_of("nvfp4")
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    with pytest.raises(ValueError, match="hold none of the trained weights"):
        hb.cache_weights(model, torch.optim.SGD(masters))
    hb.cache_weights(decoder_of("nvfp4").requires_grad_(False), torch.optim.SGD(masters)).release()  # as with adapters
    with pytest.raises(ValueError, match="weights are cached"), hb.cache_weights(cached := decoder_of("nvfp4")):
        hb.distributed.ZeroOptimizer(cached)
    hb.distributed.ZeroOptimizer(primary := decoder_of("nvfp4"))
    with pytest.raises(ValueError, match="primary weights.*leave the cache out"):
        hb.cache_weights(primary)
    hb.cache_weights(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"dtype=torch.bfloat16"):
        model(TOKENS)
    with pytest.raises(TypeError, match="optimizer"):
        hb.cache_weights(decoder_of("nvfp4"), [1])
    with pytest.raises(ValueError, match="LBFGS.*several weights"):
        hb.cache_weights(other := decoder_of("nvfp4"), torch.optim.LBFGS(other.parameters()))
    with pytest.raises(TypeError, match="^dtype=torch.float64: .*float32.*name the dtype"):
        hb.cache_weights(other, dtype=torch.float64)
    with pytest.raises(TypeError, match="^dtype=bf16: "):
        hb.cache_weights(other, dtype="bf16")
    w = torch.randn(8, 16)
    cached = hb.functional.weights.quantize_weight(w, (hb.NVFP4(), None), torch.float32)
    with pytest.raises(ValueError, match="another recipe"):
        hb.linear(torch.randn(4, 16), w, None, hb.recipes.nvfp4(), rng=hb.Philox(0), cached_weight=cached)


def test_buffers_are_each_others_no_part_and_stay_through_high_precision():
    """Orientations and siblings that share an amax each have it; code that was compiled or captured reads addresses."""
    model = decoder(1)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    cache = hb.cache_weights(model)
    places = [t.data_ptr() for t in cache.tensors()]
    assert len(set(places)) == len(places) > 0
    with hb.high_precision(model):
        assert [t.data_ptr() for t in cache.tensors()] == places
    assert [t.data_ptr() for t in cache.tensors()] == places
