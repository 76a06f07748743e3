"""hb.cache_weights while weights are replaced: every output and gradient is that of a copy, which has no cache."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from linear_cases import RECIPES
from small_models import NOTHING_KEPT
from torch import nn
from torch.nn.utils import parametrize, vector_to_parameters

import halfbyte as hb
from halfbyte.nn.whereabouts import Written

D, E = 16, 2
OFFSETS = torch.tensor([5, 8], dtype=torch.int32)
X = torch.randn(8, D, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Siblings that share an amax, two layers that can be tied, and experts whose parent holds them as [E, K, N]."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.experts = nn.Parameter(torch.randn(E, D, D) / 4)
        self.recipe_of_experts = hb.nn.GroupedRecipe(E, D, D)
        self.recipe_of_experts.held_as = "experts", True

    def forward(self, x):
        q, k, v = hb.nn.forward_shared(x, (self.q_proj, self.k_proj, self.v_proj))
        y = self.second(self.first(q * k + v))
        return self.recipe_of_experts(y, self.experts.mT, OFFSETS)


def model_of(recipe="nvfp4"):
    torch.manual_seed(0)
    model = Model()
    hb.quantize_(model, recipe, keep=NOTHING_KEPT, state=hb.RunState(3))
    assert len(model.q_proj.amax_group) == 3
    return model


def results(model, run=lambda model, x: model(x)):
    x = X.clone().requires_grad_()
    y = run(model, x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    return [y.detach(), *(torch.zeros(()) if g is None else g for g in found)]


def assert_as_uncached(model, run=lambda model, x: model(x)):
    twin = copy.deepcopy(model)
    assert all(getattr(module, "weight_cache", None) is None for module in twin.modules())
    for got, expected in zip(results(model, run), results(twin, run), strict=True):
        assert torch.equal(got, expected)


def holder(model, name):
    return model if name == "experts" else model.get_submodule(name)


def own_name(name):
    return "experts" if name == "experts" else "weight"


NAMES = ("q_proj", "k_proj", "v_proj", "first", "second", "experts")
SQUARE = NAMES[:-1]


def weight_of(model, name):
    return getattr(holder(model, name), own_name(name))


def scale(model, pick, kept):
    """The new data often lies where the old lay."""
    for _ in range(pick.randrange(1, 4)):
        p = weight_of(model, pick.choice(NAMES))
        p.data = p.data * 0.9


def other_part(model, pick, kept):
    name = pick.choice(SQUARE)
    flat = kept.setdefault(name, torch.randn(3, D, D, generator=torch.Generator().manual_seed(pick.randrange(99))))
    weight_of(model, name).data = flat[pick.randrange(3)]


def transpose(model, pick, kept):
    p = weight_of(model, pick.choice(NAMES))
    p.data = p.data.mT


def negate(model, pick, kept):
    p = weight_of(model, pick.choice(NAMES))
    p.data = torch._neg_view(p.data)


def assign(model, pick, kept):
    name = pick.choice(NAMES)
    setattr(holder(model, name), own_name(name), nn.Parameter(weight_of(model, name).detach() * -1.5))


def swap_average(model, pick, kept):
    average = kept.setdefault("average", [p.detach() * 0.5 for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        p.data, average[i] = average[i], p.data


def swap_two(model, pick, kept):
    a, b = (weight_of(model, name) for name in pick.sample(SQUARE, 2))
    if a is not b:
        torch.utils.swap_tensors(a, b)


def from_vector(model, pick, kept):
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    vector_to_parameters(vector * 0.8, model.parameters())


def load(model, pick, kept):
    other = {name: t * 1.1 for name, t in model.state_dict().items()}
    model.load_state_dict(other, assign=pick.random() < 0.5)


def load_one(model, pick, kept):
    layer = model.get_submodule(pick.choice(SQUARE))
    layer.load_state_dict({name: t * 2 for name, t in layer.state_dict().items()})


def step(model, pick, kept):
    """The optimizer knows the parameters that the model began with."""
    for p in kept["optimizer"].param_groups[0]["params"]:
        p.data = p.data.resolve_neg()  # as fused optimizers want it
        p.grad = torch.full_like(p, 0.01)
    kept["optimizer"].step()


def tie(model, pick, kept):
    model.second.weight = model.first.weight


def untie(model, pick, kept):
    model.second.weight = nn.Parameter(model.first.weight.detach() * 0.7)


def refill(model, pick, kept):
    weight_of(model, pick.choice(NAMES)).data.mul_(1.25)
    kept["cache"].refill()


def switch(model, pick, kept):
    hb.set_recipe_(model, RECIPES[pick.choice(("nvfp4", "mxfp8", "no_tiles", "dequantized", "bf16"))])


def switch_one(model, pick, kept):
    model.second.recipe = RECIPES[pick.choice(("nvfp4", "no_tiles"))]


ACTIONS = [
    *(scale, other_part, transpose, negate, assign, swap_average, swap_two, from_vector, load, load_one),
    *(step, tie, untie, refill, switch, switch_one),
]


@pytest.mark.parametrize("seed", range(3))
def test_every_forward_is_that_of_the_weights_at_hand(seed):
    model, pick = model_of(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    kept = {"optimizer": optimizer, "cache": hb.cache_weights(model, optimizer)}
    actions = [action for _ in range(2) for action in pick.sample(ACTIONS, len(ACTIONS))]
    with torch.no_grad():  # as code that replaces weights runs
        model(X)
    for action in actions:
        with torch.no_grad():
            action(model, pick, kept)
        try:
            assert_as_uncached(model)
        except AssertionError as error:
            raise AssertionError(f"after {action.__name__}") from error
        lone = pick.choice(("q_proj", "k_proj", "v_proj"))
        assert torch.equal(model.get_submodule(lone)(X), copy.deepcopy(model).get_submodule(lone)(X)), action


def test_new_data_at_the_address_of_the_old():
    """The allocator decides; over so many forwards it gives addresses again."""
    model = model_of("nvfp4_forward")
    hb.cache_weights(model)
    for i in range(60):
        p = weight_of(model, NAMES[i % 6])
        p.data = p.data * 0.95
        with torch.no_grad():
            assert torch.equal(model(X), copy.deepcopy(model)(X)), i


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_siblings_of_a_replaced_weight_take_the_new_amax(name):
    model = model_of("nvfp4_forward")
    hb.cache_weights(model)
    layers = [model.q_proj, model.k_proj, model.v_proj]
    before = [layer(X) for layer in layers]
    weight_of(model, name).data = weight_of(model, name).data * 37
    for layer, old in zip(layers, before, strict=True):
        assert layer.cached_weight() is None
        twin = copy.deepcopy(model).get_submodule(next(n for n, m in model.named_modules() if m is layer))
        assert torch.equal(layer(X), twin(X)) and not torch.equal(layer(X), old)
    assert model.first.cached_weight() is not None


def test_siblings_that_share_no_amax_keep_theirs():
    model = model_of("mxfp8")
    hb.cache_weights(model)
    model.q_proj.weight.data = model.q_proj.weight.data * 2
    assert model.q_proj.cached_weight() is None and model.k_proj.cached_weight() is not None
    assert_as_uncached(model)


@pytest.mark.parametrize("recipes", [("mxfp8",) * 3, ("nvfp4", "nvfp4", "mxfp8"), ("mxfp8", "nvfp4", "nvfp4_forward")])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_loading_any_sibling_refills_it_whatever_the_others_follow(name, recipes):
    model = model_of("nvfp4")
    layers = [model.q_proj, model.k_proj, model.v_proj]
    for layer, recipe in zip(layers, recipes, strict=True):
        layer.recipe = recipe
    hb.cache_weights(model)
    loaded = model.get_submodule(name)
    loaded.load_state_dict({"weight": loaded.weight.detach() * 1.7})
    assert all(layer.cached_weight() is not None for layer in layers)
    assert_as_uncached(model)


def test_a_sibling_outside_of_the_cache_is_loaded():
    model = model_of("nvfp4_forward")
    hb.cache_weights(model.q_proj)
    model.k_proj.load_state_dict({"weight": model.k_proj.weight.detach() * 5})
    assert model.q_proj.cached_weight() is not None
    assert_as_uncached(model)


def test_the_old_memory_is_given_back():
    model = model_of()
    hb.cache_weights(model)
    old, storage = model.first.weight, weakref.ref(model.first.weight.untyped_storage())
    gone = weakref.ref(old)
    model.first.weight = nn.Parameter(old.detach().clone())
    del old
    gc.collect()
    assert gone() is None and storage() is None


def test_nothing_hinders_swapping_the_tensors_of_weights():
    """torch.utils.swap_tensors refuses tensors with weak references."""
    model = model_of()
    hb.cache_weights(model, dtype=torch.bfloat16)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.first.cached_weight() is not None
    assert torch.equal(model(X.bfloat16()), copy.deepcopy(model)(X.bfloat16()))


def test_tied_weights_that_part_are_refilled_each_in_its_own_buffers():
    model = model_of("nvfp4_forward")
    model.second.weight = model.first.weight
    cache = hb.cache_weights(model)
    assert model.first.cached_weight() is model.second.cached_weight()
    untie(model, None, {})
    cache.refill([model.second.weight])
    assert model.first.cached_weight() is not model.second.cached_weight()
    assert_as_uncached(model)
    cache.refill()
    assert None not in (model.first.cached_weight(), model.second.cached_weight())
    assert_as_uncached(model)
    tie(model, None, {})
    cache.refill()
    assert model.first.cached_weight() is model.second.cached_weight()
    assert_as_uncached(model)


class Noise(nn.Module):
    """Draws anew whenever it is asked."""

    def forward(self, w):
        return w + torch.randn_like(w)


@pytest.mark.parametrize("name", ["q_proj", "first", "experts"])
def test_parametrizations_run_as_often_as_without_a_cache(name):
    model = model_of()
    cache = hb.cache_weights(model)
    parametrize.register_parametrization(holder(model, name), own_name(name), Noise())
    for _ in range(2):
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        y, position = model(X), torch.get_rng_state()
        torch.manual_seed(1)
        assert torch.equal(y, twin(X)) and torch.equal(position, torch.get_rng_state())
        cache.refill()


def test_copies_have_no_cache():
    model = model_of()
    cache = hb.cache_weights(model)
    parametrize.register_parametrization(model.first, "weight", nn.Identity())
    twin, others = copy.deepcopy(model), copy.deepcopy(cache)
    assert twin.first.weight_cache is None and model.first.weight_cache is not None
    assert others.bytes == 0 and cache.bytes > 0
    others.release()
    del twin, others
    gc.collect()
    assert_as_uncached(model)


def test_another_weight_given_to_experts():
    """GroupedRecipe multiplies by what it is given, whatever its parent holds."""
    model = model_of()
    hb.cache_weights(model)
    given = model.experts.detach().mT * 3
    twin = copy.deepcopy(model)
    assert torch.equal(model.recipe_of_experts(X, given, OFFSETS), twin.recipe_of_experts(X, given, OFFSETS))


def test_functional_call_with_another_sibling():
    model = model_of("nvfp4_forward")
    hb.cache_weights(model)
    other = {"k_proj.weight": model.k_proj.weight.detach() * 9}
    assert_as_uncached(model, lambda model, x: torch.func.functional_call(model, other, (x,)))
    assert_as_uncached(model)


@pytest.mark.parametrize("holds_all", [True, False])
def test_an_optimizer_of_the_flat_buffer_refills_its_views(holds_all):
    model = model_of("nvfp4_forward")
    layers = [model.q_proj, model.first] if holds_all else [model.first]
    flat = nn.Parameter(torch.cat([layer.weight.detach().flatten() for layer in layers]))
    for i, layer in enumerate(layers):
        layer.weight.data = flat.data[i * D * D : (i + 1) * D * D].view(D, D)
    optimizer = torch.optim.SGD([flat], lr=1.0)
    for param in model.parameters():  # those that no optimizer steps
        param.requires_grad_(any(param is layer.weight for layer in layers))
    hb.cache_weights(model, optimizer)
    before = model(X)
    flat.grad = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert all(layer.cached_weight() is not None for layer in layers)
    assert_as_uncached(model)
    assert not torch.equal(before, model(X))


def test_compiled_code_reads_replaced_weights_after_a_refill():
    """It cannot tell before: docs/training.md says so."""
    torch._dynamo.reset()
    model = model_of("nvfp4_forward")
    cache = hb.cache_weights(model)
    compiled = torch.compile(model.first, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(X)
        model.first.weight.data = model.first.weight.data * -2
        assert torch.equal(compiled(X), before) and not torch.equal(model.first(X), before)
        cache.refill()
        assert torch.equal(compiled(X), copy.deepcopy(model).first(X))


def test_parts_of_one_buffer_were_written_to_where_they_overlap():
    """Element by element: neighbours are not reached, the last one is."""
    buffer = torch.arange(5.0)
    parts = [(start, end) for start in range(5) for end in range(start + 1, 6)]
    for start, end in parts:
        written = Written([buffer[start:end]])
        for first, last in parts:
            overlap = bool({*range(start, end)} & {*range(first, last)})
            assert written.reaches(buffer[first:last]) == overlap, (start, end, first, last)
    assert not Written([buffer]).reaches(buffer.clone()) and Written([buffer]).reaches(buffer.view(5, 1)[4])
