"""Counterfactuals of single operands against fp64 products, and what is made of them."""

from __future__ import annotations

import csv
import dataclasses
import warnings

import linear_cases
import oracle
import pytest
import torch
from linear_cases import DGRAD_SIGNS, DY, FPROP_SIGNS, RECIPES, VARIANTS, WGRAD_SIGNS, W, X
from torch import nn
from torch.nn.functional import pad

import halfbyte as hb
from halfbyte.nn.streams import STALE_FORWARDS
from halfbyte.stats import counterfactual
from halfbyte.stats.figures import SIDES
from halfbyte.stats.sensitivity import ALL, SensitivityReport, Trial, _kinds

SEED = 5
STREAMS = {"x.row": X, "x.col": X + 1, "w.row": W, "w.col": W + 1, "dy.row": DY, "dy.col": DY + 1}
SIGNS = {
    "x.row": FPROP_SIGNS,
    "w.row": FPROP_SIGNS,
    "dy.row": DGRAD_SIGNS,
    "w.col": DGRAD_SIGNS,
    "dy.col": WGRAD_SIGNS,
    "x.col": WGRAD_SIGNS,
}
CASES = ["nvfp4", "fresh32", "mxfp8", "rotated_everywhere", "half_of_each", "stochastic_tiles"]


def layer_of(recipe, exact=()):
    x, w, bias, dy = linear_cases.tensors()
    layer = hb.nn.Linear(w.shape[1], w.shape[0], recipe=recipe, state=hb.RunState(SEED))
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(bias)
    if exact is not None:
        layer.instead = counterfactual.Counterfactual({id(layer): frozenset(exact)})
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize(
    "name",
    [
        *("nvfp4", "quartet2", "rl", "mean_split", "mean_split_forward", "mean_split_wgrad", "requantized"),
        *("half_of_each", "mxfp8", "rl_mxfp8"),
    ],
)
def test_with_nothing_in_high_precision_the_bits_are_those_of_the_layer(name):
    recipe = (RECIPES | VARIANTS)[name]
    for ours, plain in zip(layer_of(recipe), layer_of(recipe, None), strict=True):
        assert torch.equal(ours, plain)


def values(t, spec, side, exact):
    """Return an operand in fp64: quantized, or as it is; rotated where its spec rotates."""
    if spec is None:
        return t.double()
    place, signs = hb.Philox(SEED, STREAMS[side]), hb.Philox(SEED, SIGNS[side])
    t = pad(t, (0, -t.shape[1] % spec.alignment))
    if side in exact:
        rows = oracle.rotated(t.numpy(), spec.rotation, oracle.Place(SEED, SIGNS[side]))
        return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)
    return hb.quantize(t, spec, rng=place, sign_rng=signs).dequantize(torch.float32).double()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CASES)
def test_one_operand_in_high_precision(name, side):
    recipe = RECIPES[name]
    x, w, bias, dy = linear_cases.tensors()
    gemms = [gemm or hb.GemmSpec() for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
    specs = dict(zip(SIDES, (spec for gemm in gemms for spec in (gemm.a, gemm.b)), strict=True))
    given = {"x.row": x, "x.col": x.T, "w.row": w, "w.col": w.T, "dy.row": dy, "dy.col": dy.T}
    if name == "stochastic_tiles":  # whose columns are rows turned
        given["w.col"] = given["w.row"]
    at = {
        key: values(t, specs[key], key if key != "w.col" or name != "stochastic_tiles" else "w.row", ())
        for key, t in given.items()
    }
    at[side] = values(given[side], specs[side], side, (side,))
    if name == "stochastic_tiles":
        at["w.col"] = at["w.col"].T
    wanted = [
        linear_cases.product(at[a], at[b]).value
        for a, b in (("x.row", "w.row"), ("dy.row", "w.col"), ("dy.col", "x.col"))
    ]
    shapes = (dy.shape, x.shape, w.shape)
    wanted = [t[: shape[0], : shape[1]] for t, shape in zip(wanted, shapes, strict=True)]
    wanted[0] = wanted[0] + bias.double()
    for ours, exact in zip(layer_of(recipe, (side,)), wanted, strict=False):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-6 * float(exact.abs().max()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model_and_step():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    report.state.follow(model)
    x = torch.randn(40, 32)
    with torch.no_grad():  # a channel that nobody needs, for which the others of its block pay
        model[1].up.bias[3] = 300
        model[1].down.weight[:, 3] = 0
    return model, report.state, lambda: model(x).square().mean()


def test_the_layer_with_the_outlier_is_first_and_the_model_is_left_alone():
    model, state, step = model_and_step()
    step().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hb.stats.sensitivity(model, step, by="layer")
    assert found.targets[0] == "1.down"
    assert len(found.candidates) == 6 * 7 and found.cosine < 1
    assert found.gain("1.down") > found.gain("1.down", "x.row") > 0
    assert state.next_position == 1 and all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True)
    )
    assert all(layer.instead is None for layer in model.modules() if isinstance(layer, hb.nn.Linear))
    again = hb.stats.sensitivity(model, step, by="layer", operands=False)
    assert again.targets == found.targets and again.cosine == found.cosine


def test_a_layer_in_high_precision_is_what_a_rule_of_none_makes():
    model, _, step = model_and_step()
    found = hb.stats.sensitivity(model, step, by="layer", operands=False)
    gradients = []
    for recipe in ("bf16", "nvfp4"):
        one, _, own_step = model_and_step()
        one[1].down.recipe = "bf16"
        for module in one.modules():
            if isinstance(module, hb.nn.Linear) and recipe == "bf16":
                module.recipe = "bf16"
        loss = own_step()
        gradients.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(one.parameters()))]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0).item()
    whole = next(c for c in found.candidates if (c.target, c.operand) == ("1.down", ALL))
    assert whole.cosine == pytest.approx(cosine, abs=1e-6) and whole.loss == pytest.approx(loss.item(), rel=1e-6)


def test_kinds_and_a_proposal_within_its_budget(tmp_path):
    model, _, step = model_and_step()
    found = hb.stats.sensitivity(model, step, operands=False)
    assert set(found.targets) == {"*.up", "*.down"} and {c.share for c in found.candidates} == {0.5}
    each = hb.stats.sensitivity(model, step, by="layer", operands=False)
    proposal = each.propose(0.2)
    assert proposal.targets == ("1.down",) and proposal.share == pytest.approx(1 / 6)
    assert each.propose(0.1).targets == () and "no layer within" in str(each.propose(0.1))
    namespace = {"hb": hb}
    exec(str(proposal), namespace)  # ready to paste
    fresh = nn.Sequential(*(Block() for _ in range(3)))
    report = hb.quantize_(fresh, "nvfp4", rules=namespace["rules"], keep=hb.Keep(last_fraction=0))
    assert set(report.kept) == {"1.down"} and namespace["keep"] == proposal.keep
    rows = list(csv.DictReader(each.csv().splitlines()))
    assert [row["target"] for row in rows] == list(each.targets)
    assert all(text in str(each) and text in each._repr_html_() for text in ("1.down", "gradient cosine"))
    with pytest.raises(ValueError, match="budget=0"):
        each.propose(0)


def trial(target, gain, share, operand=ALL):
    return Trial(target=target, operand=operand, cosine=0.9, gain=gain, loss=1.0, share=share)


def test_what_gains_most_for_its_share_comes_first_and_may_fill_the_budget():
    trials = [trial("a", 0.24, 0.3), trial("b", 0.2, 0.1), trial("c", 0.1, 0.1), trial("d", -0.1, 0.01)]
    trials += [trial("a", 0.3, 0.01, "x.row"), trial("e", 0.001, 0.1)]
    report = SensitivityReport(candidates=tuple(trials), cosine=0.5, losses=(1.0, 1.0))
    for budget, chosen in ((0.1, "b"), (0.2, "bc"), (0.3, "bce"), (0.5, "bca"), (1.0, "bcae")):  # 2, 1, 0.8 and 0.01
        assert report.propose(budget).targets == tuple(chosen)


class Pooled(nn.Module):
    """A layer of every token, and one of a sequence: [B, L, 32] and [B, 32] reach them."""

    def __init__(self):
        super().__init__()
        self.each, self.pooled = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.pooled(self.each(x).amax(1))


def test_shares_count_every_token_of_a_batch_of_sequences():
    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(4, 10, 32)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    found = hb.stats.sensitivity(model, lambda: model(x).square().mean(), operands=False)
    total = 4 * 10 * 32 * 64 + 4 * 64 * 16
    shares = {one.target: one.share for one in found.candidates}
    assert shares == {"each": pytest.approx(40 * 32 * 64 / total), "pooled": pytest.approx(4 * 64 * 16 / total)}


def test_of_equal_gains_the_smaller_loss_comes_first():
    """The gradient of a sum of outputs does not depend on them, so that no operand of the forward gains anything."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32, bias=False)), torch.randn(24, 32)
    hb.quantize_(model, "nvfp4_forward", keep=hb.Keep(names=(), last_fraction=0))
    found = hb.stats.sensitivity(model, lambda: model(x).sum())
    losses = [one.loss for one in found.candidates]
    assert {one.gain for one in found.candidates} == {0} and len(set(losses)) == 3 and losses == sorted(losses)


class Counted(nn.Module):
    """A layer behind dropout, which counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.dropout = nn.Linear(32, 32), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        x = self.dropout(x)
        self.seen.append((self.calls.item(), x.sum().item()))
        self.calls += 1
        return self.one(x)


def test_every_trial_begins_as_the_first_and_generators_buffers_and_observers_are_left_alone():
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(24, 32)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    model(x)
    generator, statistics = torch.get_rng_state(), hb.collect_stats(model)
    hb.stats.sensitivity(model, lambda: model(x).square().mean())
    assert len(model.seen) == 1 + 2 + 7 and set(model.seen[1:]) == {(1.0, model.seen[1][1])}
    assert model.calls == 1 and torch.equal(torch.get_rng_state(), generator)
    model(x).square().mean().backward()
    assert statistics.advance()["one"].tensors["x"].elements == 24 * 32  # of no trial


def test_forwards_that_drew_the_same_bits_are_counted_on():
    """Trials are meant to draw alike; the forwards around them are not, and the 64th is warned of."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(24, 32)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    for _ in range(STALE_FORWARDS - 1):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hb.stats.sensitivity(model, lambda: model(x).square().mean())
    with pytest.warns(UserWarning, match=f"{STALE_FORWARDS} training forwards drew the same random bits"):
        model(x)


def test_refusals():
    model, _, step = model_and_step()
    with pytest.raises(ValueError, match="by='block'"):
        hb.stats.sensitivity(model, step, by="block")
    with pytest.raises(ValueError, match="return the loss"):
        hb.stats.sensitivity(model, lambda: torch.ones(2))
    with pytest.raises(ValueError, match="hb.quantize_ first"):
        hb.stats.sensitivity(nn.Sequential(nn.Linear(2, 2)), step)
    assert dataclasses.is_dataclass(hb.stats.sensitivity(model, step, operands=False))


def test_layers_of_two_recipes_are_two_kinds():
    """Of another recipe the operands that are tried are others."""
    names = {"blocks.0.up": "nvfp4", "blocks.1.up": "mxfp8", "blocks.2.up": "nvfp4", "head": "nvfp4"}
    layers = {name: hb.nn.Linear(32, 32, recipe=recipe) for name, recipe in names.items()}
    kinds = {"blocks.*.up": ["blocks.0.up", "blocks.2.up"], "blocks.1.up": ["blocks.1.up"], "head": ["head"]}
    assert _kinds(layers) == kinds
