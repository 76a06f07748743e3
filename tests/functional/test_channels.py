"""Recipes that multiply few channels of x in more bits: which channels, what it gains, where it is refused.

That output and gradients are those of the definition is in test_linear_gradients.py, under every recipe.
"""

import dataclasses
import pickle

import linear_cases as cases
import pytest
import torch
from repeating import kernels
from strategies import make

import halfbyte as hb
from halfbyte import ops
from halfbyte.channels import Channels
from halfbyte.functional.channels import outliers_apart
from halfbyte.functional.operands import Place
from halfbyte.nn.shared_input import input_specs
from halfbyte.sides import both_sides
from halfbyte.spec import parse_recipe

__all__ = ["kernels"]
OUTLIERS, HOT = hb.recipes.outlier_channels(), hb.recipes.hot_channels()
BOTH = pytest.mark.parametrize("recipe", [OUTLIERS, HOT], ids=["outliers", "hot"])
RNG = hb.Philox(5, 3 << 32)
NOWHERE = Place(None, None, 0, (0, 0), (False, False))


def loud(rows: int = 64, cols: int = 256, channels: tuple = (3, 77, 200), dtype=torch.float32) -> torch.Tensor:
    """Return normal data with loud channels, of whose blocks little is left in four bits."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    x[:, list(channels)] *= 40
    return x.to(dtype)


def run(recipe, x, n: int = 48, w_seed: int = 1, **options):
    g = torch.Generator().manual_seed(w_seed)
    w, dy = torch.randn(n, x.shape[1], generator=g).to(x.dtype), torch.randn(len(x), n, generator=g).to(x.dtype)
    leaves = x.clone().requires_grad_(), w.requires_grad_()
    y = hb.linear(*leaves, None, recipe, rng=RNG, **options)
    y.backward(dy)
    exact = x.double() @ w.detach().double().T, dy.double().T @ x.double()
    return y.detach(), leaves[0].grad, leaves[1].grad, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["outliers", "hot", "outliers_no_tiles", "hot_four_over_six"])
def test_a_few_of_many_channels(name, dtype):
    """Wide enough that most channels stay in four bits; the loudest are not the first ones."""
    recipe = cases.VARIANTS[name]
    x, w, bias, dy = cases.tensors(40, 200, 24, dtype)
    x[:, 150:170] *= 7
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = hb.linear(*leaves, recipe, rng=RNG)
    y.backward(dy)
    want = cases.expected(x, w, bias, dy, recipe, RNG)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    for got, product in ((y, want.y), (leaves[0].grad, want.dx), (leaves[1].grad, want.dw)):
        allowed = 2e-6 * product.bound + rounding * product.value.abs() + 1e-30
        assert ((got.double() - product.value).abs() <= allowed).all()


def test_which_channels_are_outliers():
    x = loud(channels=(3, 77, 200))
    x[:, 10:39] += 5  # the next loudest: 32 in all
    _, _, apart = outliers_apart(x, Channels(kind="mxfp8", share=0.05), (hb.NVFP4(), None), NOWHERE)
    assert apart.index.tolist() == sorted([3, *range(10, 39), 77, 200])


def test_of_equal_channels_the_first_are_taken():
    """topk leaves that open, and another choice is other bytes."""
    _, _, apart = outliers_apart(torch.ones(4, 96), Channels(kind="mxfp8", share=0.3), (hb.NVFP4(), None), NOWHERE)
    assert apart.index.tolist() == list(range(32))


@pytest.mark.parametrize(
    "share, channels, count", [(0.05, 768, 64), (0.05, 640, 32), (1 / 16, 512, 32), (0.99, 40, 40), (0.01, 16, 16)]
)
def test_their_number(share, channels, count):
    assert Channels(kind="patch", share=share).count(channels) == count


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_what_it_gains():
    """Loud channels cost the plain recipe its small values; 8 bits, or the errors, give most of it back."""
    x = loud()
    plain, outliers, hot = (run(recipe, x) for recipe in ("nvfp4", OUTLIERS, HOT))
    errors = {name: relative(got[0], got[3][0]) for name, got in (("plain", plain), ("out", outliers), ("hot", hot))}
    assert errors["out"] < 0.5 * errors["plain"] and errors["hot"] < 0.7 * errors["plain"]
    assert relative(outliers[2], outliers[3][1]) < 0.75 * relative(plain[2], plain[3][1])
    assert torch.equal(hot[1], plain[1]) and torch.equal(hot[2], plain[2]), "a patch is the forward's"
    assert torch.equal(outliers[1], plain[1]), "dgrad reads no x"


@BOTH
def test_what_is_not_finite_poisons_its_token_alone(recipe):
    x = loud(20)
    x[3, 5] = float("nan")
    y = run(recipe, x)[0]
    assert y[3].isnan().all() and y[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_a_buffer(dtype):
    x, alone = loud(dtype=dtype), torch.zeros(48, 256)
    run(OUTLIERS, x, main_grad=alone)
    assert torch.equal(alone.to(dtype), run(OUTLIERS, x)[2])
    buffer = torch.full((48, 256), 100.0)
    run(OUTLIERS, x, main_grad=buffer)
    assert torch.allclose(buffer - 100, alone, atol=2e-3)


@BOTH
def test_kernels_and_their_repetition_give_the_same(recipe, kernels, monkeypatch):
    """The second call repeats the launches of the first with other data, other channels among them."""
    recipe = dataclasses.replace(recipe, channels=Channels(kind=recipe.channels.kind, share=0.4))

    def results(seed):
        shapes = (16, 64), (16, 64), (16, 16)
        x, w, dy = (make("heavy", shape, torch.bfloat16, 10 * seed + i) for i, shape in enumerate(shapes))
        leaves = x.requires_grad_(), w.requires_grad_()
        y = hb.linear(*leaves, None, recipe, rng=RNG)
        y.backward(dy)
        return y.detach(), leaves[0].grad, leaves[1].grad

    made = [results(1), results(2)]
    monkeypatch.undo()
    for seed, given in enumerate(made, 1):
        for one, wanted in zip(given, results(seed), strict=True):  # bytes are equal, sums of products are not ordered
            assert torch.allclose(one, wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().amax()))


@BOTH
def test_compiled_code_gives_the_same(recipe):
    x, w = loud(32), torch.randn(16, 256, generator=torch.Generator().manual_seed(1))

    def step(x, w):
        return hb.linear(x, w, None, recipe, rng=RNG)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given = [(t.clone().requires_grad_(), w.clone().requires_grad_()) for t in (x, x)]
    for function, leaves in zip((step, compiled), given, strict=True):
        function(*leaves).sum().backward()
    assert torch.equal(step(x, w), compiled(x, w))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*given, strict=True))


@BOTH
def test_cached_weights_give_the_same(recipe):
    torch.manual_seed(0)
    layer, x = hb.nn.Linear(64, 16, recipe=recipe, state=hb.RunState(1)), loud(12, 64, (3, 7))
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        cache = hb.cache_weights(torch.nn.Sequential(layer), dtype=torch.bfloat16)
        assert layer.cached_weight() is not None
        assert torch.equal(layer(x), before)
    cache.release()


@BOTH
def test_siblings_choose_for_themselves(recipe):
    """q, k and v in one call are three calls; which channels a patch takes depends on the weight."""
    x = loud(20)
    weights = [torch.randn(16, 256, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    weights[1][:, 40:80] *= 30
    places = [RNG.at(16 * i) for i in range(3)]
    together = hb.linear_shared(x, weights, None, recipe, rng=places)
    for w, y, place in zip(weights, together, places, strict=True):
        assert torch.equal(y, hb.linear(x, w, None, recipe, rng=place))


@BOTH
def test_a_frozen_weight_stands_for_itself(recipe):
    x, w = loud(20), make("normal", (32, 256), torch.float32, 3)
    codes = hb.quantize(w, recipe.fprop.b)
    y = hb.linear(x, codes, None, recipe, rng=RNG)
    assert relative(y, x.double() @ codes.dequantize(torch.float32).double().T) < 0.08


def test_a_norm_hands_no_amax_of_x_on():
    assert input_specs(OUTLIERS, True) == input_specs(HOT, True) == (None, None)


@BOTH
def test_the_key_says_it_and_those_of_before_are_unchanged(recipe):
    assert recipe.key == f"{hb.recipes.nvfp4().key};channels={recipe.channels.key}" and recipe != hb.recipes.nvfp4()
    assert parse_recipe(recipe.key) == recipe and pickle.loads(pickle.dumps(recipe)) == recipe
    older = dict(recipe.__dict__)
    del older["channels"]
    without = object.__new__(hb.Recipe)
    without.__setstate__(older)
    assert without == hb.recipes.nvfp4() and without.channels is None
    with pytest.raises(ValueError, match="not a recipe's key"):
        parse_recipe(f"{hb.recipes.nvfp4().key};channels=mxfp4,0.1")


def test_a_late_forward_keeps_what_the_backward_has():
    assert hb.recipes.mixed("bf16", OUTLIERS).channels == OUTLIERS.channels
    assert hb.recipes.mixed("bf16", HOT).channels is None
    assert hb.recipes.mixed(HOT, "nvfp4_mxfp8_bwd").channels == HOT.channels


@pytest.mark.parametrize(
    "base, kind, words",
    [
        (hb.recipes.nvfp4(activation_mean="split"), "mxfp8", "takes x apart already"),
        (hb.recipes.rl(batch_invariant=False), "mxfp8", "a dequantized backward would lack these channels"),
        (hb.Recipe(dgrad=hb.recipes.nvfp4().dgrad), "mxfp8", "no GEMM quantizes x"),
        (hb.Recipe(wgrad=hb.recipes.nvfp4().wgrad), "patch", "kind='mxfp8'"),
        (hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4())), "patch", "quantizes x and w"),
        (cases.ROTATED_EVERYWHERE, "patch", "drop rotation in fprop"),
    ],
)
def test_refused_together(base, kind, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(base, channels=Channels(kind=kind, share=0.1))


@pytest.mark.parametrize("share", [0, 1, -0.1, "0.1", True, float("nan")])
def test_no_share(share):
    with pytest.raises(ValueError, match=r"share=.*0 < share < 1"):
        Channels(kind="mxfp8", share=share)


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="kind='mxfp4'"):
        Channels(kind="mxfp4", share=0.1)
    with pytest.raises(ValueError, match=r"channels=0.1: use None"):
        dataclasses.replace(hb.recipes.nvfp4(), channels=0.1)


@BOTH
def test_experts_refuse_it(recipe):
    x, w, offsets = torch.ones(4, 32), torch.ones(2, 16, 32), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"channels=.*experts do not take channels apart.*channels=None"):
        hb.grouped_linear(x, w, offsets, recipe, rng=RNG)


def test_statistics_measure_what_is_quantized():
    """Without the loud channels small values are no longer flushed to zero, which is what the recipe is for."""
    x, flushed = loud(32), {}
    for name, recipe in (("plain", hb.recipes.nvfp4()), ("outliers", OUTLIERS), ("hot", HOT)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 32, bias=False))
        hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(1))
        statistics = hb.collect_stats(model)
        model(x).square().sum().backward()
        flushed[name] = statistics.advance()["0"].operands["x.row"]
    assert flushed["outliers"].underflow < 0.5 * flushed["plain"].underflow
    assert flushed["hot"].noise == flushed["plain"].noise


def test_operands_of_such_layers_are_not_told_apart():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    hb.quantize_(model, OUTLIERS, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(1))
    with pytest.raises(ValueError, match=r"channels=.*not told from each other.*channels=None"):
        hb.stats.sensitivity(model, lambda: model(torch.ones(4, 64)).sum())


def test_mxfp8_scales_of_a_transposed_tensor_lie_in_rows():
    """As the op's shape function says, which Inductor holds it to."""
    made = ops.quantize_row_col(torch.randn(128, 32), *both_sides(None, hb.MXFP8()))[1]
    assert made.block_scale.shape == (32, 4) and made.block_scale.is_contiguous() and made.qdata.is_contiguous()


def test_ops_are_those_that_others_use():
    """Nothing here is an op of its own: what is added is made of casts and products that have bytes already."""
    assert not [name for name in dir(ops) if "channel" in name]
