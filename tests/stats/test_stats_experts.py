"""Statistics of experts: sums over groups in numpy's fp64, and not a bit of a step is another for them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from grouped_cases import ends, slices
from linear_cases import expected
from operand_figures import figures_of, inputs, sums_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import halfbyte as hb

SEED, K, N = 2**64 - 5, 40, 24  # the seeds of later groups wrap
SIZES, PADDING = (17, 0, 1, 20), 3
RECIPES = {
    "nvfp4": hb.recipes.nvfp4(),
    "fresh": hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"), weight_block=(1, 16)),
    "four_over_six": hb.recipes.four_over_six(error="mse"),
    "requantized": dataclasses.replace(hb.recipes.nvfp4_mxfp8_bwd(element="e5m2"), backward="dequantized"),
    "forward": hb.recipes.nvfp4_forward(),
}
pytestmark = pytest.mark.filterwarnings("ignore:step 1. quantization noise")


def tensors():
    g = torch.Generator().manual_seed(3)
    M = sum(SIZES) + PADDING
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((M, K), (len(SIZES), N, K), (M, N)))
    x[:, 5] *= 200
    x[20:30] *= 1e-3
    w[3] *= 50
    x[-PADDING:] = torch.nan  # nobody reads it
    dy[-PADDING:] = torch.inf
    return x, w / 8, dy / 1000


def layer_of(recipe):
    x, w, dy = tensors()
    layer = hb.nn.GroupedLinear(len(SIZES), K, N, recipe=recipe, state=hb.RunState(SEED))
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer, (x, w, dy)


@pytest.mark.parametrize("name", RECIPES)
def test_every_figure_is_that_of_all_groups_together(name):
    recipe = RECIPES[name]
    layer, (x, w, dy) = layer_of(recipe)
    statistics = hb.collect_stats(nn.ModuleDict({"experts": layer}))
    layer(x.clone().requires_grad_(), ends(SIZES)).backward(dy)
    found = statistics.advance()["experts"]
    total, specs, products = {}, {}, {"y": np.zeros(3), "dx": np.zeros(3), "dw": np.zeros(3)}
    for g, rows in enumerate(slices(SIZES)):
        if not SIZES[g]:
            continue
        place = hb.Philox(SEED).group(g)
        for side, (t, spec) in inputs(recipe, (x[rows].numpy(), w[g].numpy(), dy[rows].numpy()), place.seed).items():
            sums, specs[side] = sums_of(t, spec, side, place.seed), spec
            before = total.setdefault(side, dict.fromkeys(sums, 0.0))
            for key, value in sums.items():
                before[key] = max(before[key], value) if key == "amax" else before[key] + value
            for figure, value in figures_of(sums, spec).items():
                got = getattr(found.experts[g].operands[side], figure)
                assert got == pytest.approx(value, rel=2e-5, abs=1e-9, nan_ok=True), f"expert {g} {side} {figure}"
        quantized = expected(x[rows], w[g], None, dy[rows], recipe, place)
        exact = (
            x[rows].double() @ w[g].double().T,
            dy[rows].double() @ w[g].double(),
            dy[rows].double().T @ x[rows].double(),
        )
        for product, reference in zip(products, exact, strict=True):
            got = getattr(quantized, product).value
            own = [t.square().sum().item() for t in (reference, got, got - reference)]
            products[product] += own
            one = found.experts[g].products[product]
            assert one.noise_ratio == pytest.approx(math.sqrt(own[2] / own[0]), rel=1e-3, abs=1e-6), (g, product)
    assert set(found.operands) == set(total) and list(found.experts) == [g for g, size in enumerate(SIZES) if size]
    for side, sums in total.items():
        for figure, value in figures_of(sums, specs[side]).items():
            got = getattr(found.operands[side], figure)
            assert got == pytest.approx(value, rel=2e-5, abs=1e-9, nan_ok=True), f"{side} {figure}"
    for product, (wanted, got, noise) in products.items():
        one = found.products[product]
        assert one.noise_ratio == pytest.approx(math.sqrt(noise / wanted), rel=1e-3, abs=1e-6), product
        assert one.cosine == pytest.approx((wanted + got - noise) / 2 / math.sqrt(wanted * got), abs=1e-5), product


def test_outliers_are_those_of_each_group():
    layer, given = layer_of("nvfp4")
    statistics = hb.collect_stats(nn.ModuleDict({"experts": layer}))
    layer(given[0].clone().requires_grad_(), ends(SIZES)).backward(given[2])
    found = statistics.advance()["experts"].tensors
    for name, t in zip(("x", "w", "dy"), given, strict=True):
        counts, elements = 0, 0
        for g, rows in enumerate(slices(SIZES)):
            part = (t[g] if name == "w" else t[rows]).double().numpy()
            if SIZES[g]:
                counts = counts + (np.abs(part) > 6 * np.sqrt((part**2).mean())).sum(0)
                elements += part.size
        assert np.array_equal(found[name].channels, counts) and found[name].elements == elements, name
    assert found["x"].top_channel == 5


@pytest.mark.parametrize("expert", [0, 3])
def test_what_is_not_finite_is_the_noisiest_and_within_no_limit(expert):
    layer, (x, _, dy) = layer_of("nvfp4")
    statistics = hb.collect_stats(nn.ModuleDict({"experts": layer}))
    x[0 if expert == 0 else sum(SIZES) - 1, 2] = torch.nan
    layer(x.requires_grad_(), ends(SIZES)).backward(dy)
    step = statistics.advance()
    _, _, _, _, y, dx, dw = step.expert_rows()[0]
    assert y == dw == f"{expert}: nan" and "nan" not in dx
    assert step.closing_lines()[0].endswith("nan of their norm, for none was measured, or one is not finite")


def test_the_table_says_who_got_tokens_and_is_noisiest():
    layer, (x, _, dy) = layer_of("nvfp4")
    statistics = hb.collect_stats(nn.ModuleDict({"experts": layer}))
    layer(x.clone().requires_grad_(), ends(SIZES)).backward(dy)
    step = statistics.advance()
    experts = step["experts"].experts
    noisiest = [max(experts, key=lambda g, p=p: experts[g].products[p].noise_ratio) for p in ("y", "dx", "dw")]
    (row,) = step.expert_rows()
    assert row[:4] == ("experts", "3", "3: 52.6%", "2: 2.6%")  # 20 and 1 of 38 tokens
    assert [int(cell.partition(":")[0]) for cell in row[4:]] == noisiest
    assert "experts with tokens" in str(step) and "experts with tokens" in step._repr_html_()
    assert {record["layer"] for record in step.records()} == {"experts"}  # files have a row a layer


def test_ranks_with_some_of_the_experts_each_have_no_rows_of_them():
    """Their groups are fewer than the layer's experts, and have other numbers."""
    layer, (x, w, dy) = layer_of("nvfp4")
    with torch.no_grad():
        layer.weight = nn.Parameter(w[:2].clone())
    statistics = hb.collect_stats(nn.ModuleDict({"experts": layer}))
    layer(x[:18].clone().requires_grad_(), ends((17, 1))).backward(dy[:18])
    step = statistics.advance()
    assert step["experts"].tensors["x"].elements == 18 * K and not step["experts"].experts and not step.expert_rows()


def test_one_group_is_a_linear_layer():
    torch.manual_seed(0)
    x, dy = torch.randn(20, K), torch.randn(20, N)
    state = hb.RunState(SEED)
    grouped = hb.nn.GroupedLinear(1, K, N, state=state)
    linear = hb.nn.Linear(K, N, bias=False, state=hb.RunState(SEED))
    with torch.no_grad():
        linear.weight.copy_(grouped.weight[0])
    rows = []
    for layer, more in ((grouped, (ends((20,)),)), (linear, ())):
        statistics = hb.collect_stats(nn.ModuleDict({"one": layer}))
        layer(x.clone().requires_grad_(), *more).backward(dy)
        rows.append(statistics.advance())
    assert rows[0].records() == rows[1].records() and rows[0]["one"].tensors == rows[1]["one"].tensors
    assert str(rows[0]["one"].experts[0].operands) == str(rows[1]["one"].operands)  # of which some figures are NaN
    assert not rows[1]["one"].experts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(K, 4)
        self.up, self.down = (hb.nn.GroupedLinear(4, *shape, recipe="bf16") for shape in ((K, 32), (32, K)))

    def forward(self, x, offsets):
        h = self.up(x, offsets)
        h.mul_(0.5)  # in place: a copy of the output may be changed
        y = self.down(torch.relu(h), offsets)
        x.mul_(2)  # and so may the input, of which the statistics hold a copy
        return y * self.gate(x).softmax(-1).amax(-1, keepdim=True)


def train(*, every=0, recompute=False, backend="", dtype=torch.float32):
    torch.manual_seed(0)
    model = Block()
    report = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("gate",), last_fraction=0))
    counter = CompileCounterWithBackend(backend)
    if backend:
        torch._dynamo.reset()
        model.compile(fullgraph=True, backend=counter)
    statistics = hb.collect_stats(model, every=every) if every else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found, losses, generator = [], [], torch.Generator().manual_seed(1)
    for _ in range(4):
        for sizes in ((3, 0, 20, 5), (10, 10, 0, 10)):
            x = (1 * torch.randn(30, K, generator=generator).requires_grad_()).clone()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = checkpoint(model, x, ends(sizes), use_reentrant=False) if recompute else model(x, ends(sizes))
            loss = y.float().square().mean()
            loss.backward()
            losses.append(loss.item())
            report.state.advance()
        optimizer.step()
        optimizer.zero_grad()
        found.append(statistics and statistics.advance())
    weights = [p.detach().clone() for p in model.parameters()]
    return (weights, losses, report.state.next_position), found, counter.frame_count


@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"backend": "aot_eager"}], ids=str)
def test_no_bit_of_a_step_is_another(how):
    (weights, losses, position), _, graphs = train(**how)
    (others, other_losses, other_position), found, more = train(every=3, **how)
    assert losses == other_losses and position == other_position
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert [one is not None for one in found] == [True, False, True, False]
    assert [row.name for row in found[0].layers] == ["up", "down"] and not found[0].unobserved
    assert found[0]["up"].tensors["x"].elements == (28 + 30) * K  # padding is none of it
    if how.get("backend"):
        assert (graphs, more) == (1, 2)
        assert found[0].records() == train(every=3)[1][0].records()


def test_checkpointed_experts_count_once():
    class Pure(Block):
        def forward(self, x, offsets):
            return self.down(torch.relu(self.up(x, offsets)), offsets)

    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Pure()
        hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("gate",), last_fraction=0), state=hb.RunState(1))
        statistics = hb.collect_stats(model)
        x = torch.randn(41, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = checkpoint(model, x, ends(SIZES), use_reentrant=False) if recompute else model(x, ends(SIZES))
        y[:38].square().mean().backward()
        found.append(statistics.advance().records())
    assert found[0] == found[1]
