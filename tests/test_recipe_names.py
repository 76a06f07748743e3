"""A preset's name is enough wherever a recipe is taken; what no layer can follow is refused where it is assigned."""

from __future__ import annotations

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn

import halfbyte as hb
from halfbyte.functional.activation import linear_activation
from halfbyte.functional.linear import Layers

OPERAND, GRADIENT = hb.NVFP4(), hb.NVFP4(rounding="toward_zero")
CONTROL = hb.Recipe(  # naive_fp4, spelled out
    fprop=hb.GemmSpec(a=OPERAND, b=OPERAND),
    dgrad=hb.GemmSpec(a=GRADIENT, b=OPERAND),
    wgrad=hb.GemmSpec(a=GRADIENT, b=OPERAND),
)


def layers() -> list[nn.Module]:
    """Return one of every layer that follows a recipe."""
    fused = hb.nn.LayerNormMLP(16, 16, recipe="bf16")
    return [
        hb.nn.Linear(16, 16, recipe="bf16"),
        hb.nn.GroupedLinear(2, 16, 16, recipe="bf16"),
        hb.nn.GroupedRecipe(2, 16, 16),
        fused.down_proj,
        hb.nn.LayerNormLinear(16, 16, recipe="bf16").linear,
    ]


@pytest.mark.parametrize("index", range(5))
def test_assignment_takes_names_and_refuses_at_once(index):
    layer = layers()[index]
    layer.recipe = "naive_fp4"
    assert layer.recipe == CONTROL and "recipe=naive_fp4" in repr(layer)
    layer.recipe = "bf16/naive_fp4"
    assert layer.recipe == hb.Recipe(dgrad=CONTROL.dgrad, wgrad=CONTROL.wgrad)
    before = layer.recipe
    with pytest.raises(ValueError, match=r"recipe='nvfp5' is not a preset.*naive_fp4"):
        layer.recipe = "nvfp5"
    for wrong in (None, 4, hb.NVFP4(), hb.recipes.nvfp4):
        with pytest.raises(TypeError, match=r"recipe=.*give a Recipe.*or the name of a preset"):
            layer.recipe = wrong
    assert layer.recipe == before


def test_a_layer_whose_recipe_was_assigned_by_name_runs_under_it():
    x, layer = torch.randn(4, 32, requires_grad=True), hb.nn.Linear(32, 16, recipe="bf16")
    layer.recipe = "naive_fp4"
    cache = hb.cache_weights(nn.Sequential(layer))
    layer.recipe = "mxfp8"
    layer.recipe = "naive_fp4"  # the cache follows names too
    y = layer(x)
    y.sum().backward()
    a, w = hb.quantize(x.detach(), OPERAND), hb.quantize(layer.weight.detach(), OPERAND)
    assert torch.equal(y, hb.gemm_nt(a, w, torch.float32, bias=layer.bias.detach()))
    dy = hb.quantize(torch.ones(4, 16), GRADIENT)
    w_col = hb.quantize(layer.weight.detach().T.contiguous(), OPERAND)
    assert torch.equal(x.grad, hb.gemm_nt(dy, w_col, torch.float32))
    cache.release()


def test_functions_take_names():
    x, w = torch.randn(6, 32), torch.randn(16, 32)
    expected = hb.gemm_nt(hb.quantize(x, OPERAND), hb.quantize(w, OPERAND), torch.float32)
    assert torch.equal(hb.linear(x, w, None, "naive_fp4"), expected)
    assert all(torch.equal(y, expected) for y in hb.linear_shared(x, [w, w], None, "naive_fp4"))
    offsets = torch.tensor([6], dtype=torch.int32)
    assert torch.equal(hb.grouped_linear(x, w[None], offsets, "naive_fp4"), expected)
    held = Layers([w], [None], [None], [None], [None], None)
    silu = linear_activation(x, held, "silu", "naive_fp4")[0]
    assert torch.allclose(silu, nn.functional.silu(expected), rtol=1e-5, atol=1e-6)
    compiled = torch.compile(lambda x: hb.linear(x, w, None, "naive_fp4"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert hb.recipes.mixed("bf16", "naive_fp4") == hb.Recipe(dgrad=CONTROL.dgrad, wgrad=CONTROL.wgrad)


@pytest.mark.parametrize(
    "put",
    [
        lambda recipe: hb.quantize_(decoder(1), recipe),
        lambda recipe: hb.quantize_(decoder(1), "bf16", rules={"*": recipe}),
        lambda recipe: hb.nn.Linear(16, 16, recipe=recipe),
        lambda recipe: hb.nn.Linear.from_linear(nn.Linear(16, 16), recipe),
        lambda recipe: hb.nn.GroupedLinear(2, 16, 16, recipe=recipe),
        lambda recipe: hb.nn.MLP(16, 16, recipe=recipe),
        lambda recipe: hb.nn.LayerNormLinear(16, 16, recipe=recipe),
        lambda recipe: hb.Schedule([(3, recipe)]),
        lambda recipe: hb.memory_report(nn.Sequential(hb.nn.Linear(16, 16)), torch.ones(2, 16), recipes=[recipe]),
    ],
)
def test_what_is_no_recipe_never_enters_a_model(put):
    with pytest.raises(ValueError, match=r"'nvfp5' is not a preset"):
        put("nvfp5")
    with pytest.raises(TypeError, match="the name of a preset"):
        put(4)


def test_set_recipe_refuses_before_anything_changes():
    model = decoder(1)
    hb.quantize_(model, "mxfp8", keep=NOTHING_KEPT)
    for wrong, error in (("nvfp5", ValueError), (4, TypeError)):
        with pytest.raises(error):
            hb.set_recipe_(model, wrong)
    followers = [m for m in model.modules() if isinstance(m, hb.nn.Linear)]
    assert followers and all(m.recipe == hb.recipes.mxfp8() for m in followers)
    model(TOKENS).sum().backward()


def test_set_recipe_inside_of_high_precision_is_refused():
    """The context would put the recipes back that it found."""
    model = decoder(2)
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT)
    before = [m.recipe for m in model.modules() if isinstance(m, hb.nn.Linear)]
    with hb.high_precision(model.layers[0]), pytest.raises(ValueError, match=r"hb\.high_precision.*before or after"):
        hb.set_recipe_(model, "mxfp8")
    assert [m.recipe for m in model.modules() if isinstance(m, hb.nn.Linear)] == before
    hb.set_recipe_(model, "mxfp8")
    assert model.layers[0].mlp.up_proj.recipe == hb.recipes.mxfp8()


def test_names_that_would_lose_a_part_are_refused():
    for name in ("bf16/nvfp4/mxfp8", "nvfp4/nvfp4/nvfp4"):
        with pytest.raises(ValueError, match=rf"^recipe='{name}': name one forward and one backward"):
            hb.recipes.get(name)
    with pytest.raises(
        ValueError, match=r"^recipe='nvfp4\(sr=off\)' is not a preset.*options are arguments of functions"
    ):
        hb.quantize_(decoder(1), "nvfp4(sr=off)")
    with pytest.raises(ValueError, match=r"^recipe='nvfp4\(sr=off\)' is not a preset"):  # nor is it taken for a key
        hb.recipes.read_recipe("nvfp4(sr=off)")
    assert hb.recipes.read_recipe(hb.recipes.hot_channels().key) == hb.recipes.hot_channels()


def test_words_are_no_switches():
    """Any word is true, "off" too."""
    for value in ("off", "false", 1, None):
        with pytest.raises(TypeError, match=f"^stochastic_rounding={value!r}: give True or False$"):
            hb.recipes.nvfp4(stochastic_rounding=value)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("rules", {0: None}, "^rules: 0 is no glob"),
        ("rules", {("0", "1"): "mxfp8"}, r"^rules: \('0', '1'\) is no glob"),
        ("share_amax", None, "^share_amax=None: give groups of globs"),
        ("share_amax", (3,), r"^share_amax=\(3,\): give groups of globs"),
    ],
)
def test_kinds_of_arguments(argument, value, words):
    with pytest.raises(TypeError, match=words):
        hb.quantize_(decoder(1), "nvfp4", **{argument: value})


def test_candidates_are_no_text():
    with pytest.raises(ValueError, match="^candidates='ab': give a tuple of multiples"):
        hb.FourOverSix(candidates="ab")


@pytest.mark.parametrize(
    "change, base",
    [
        (hb.recipes.four_over_six, "mxfp8"),
        (hb.recipes.four_over_six, hb.Recipe()),
        (lambda base: hb.recipes.four_over_six(base=base, scope="activations"), hb.Recipe(dgrad=CONTROL.dgrad)),
        (hb.recipes.row_scaled, "bf16"),
        (lambda base: hb.recipes.row_scaled(base=base, scope="weights"), hb.Recipe(wgrad=CONTROL.wgrad)),
        (hb.recipes.weight_only, "bf16"),
    ],
)
def test_a_change_that_changes_nothing_is_refused(change, base):
    with pytest.raises(ValueError, match="^base=.*give a base that"):
        change(base=base)
