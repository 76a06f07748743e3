"""hb.collect_stats from outside: when it samples, where statistics go, what it refuses, what it warns of."""

from __future__ import annotations

import io
import json
import math
import warnings

import pytest
import torch
from torch import nn

import halfbyte as hb


def converted(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0))
    return model


def step(model, optimizer=None):
    model(torch.randn(24, 32, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def watched(model) -> bool:
    return model[0].instead is not None


def test_an_optimizer_that_is_followed_ends_steps():
    model, seen = converted("mxfp8"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hb.collect_stats(model, every=3).follow(optimizer) as statistics:
        for _ in range(7):
            seen.append(watched(model))
            step(model, optimizer)
        assert statistics.last.step == 6
    assert seen == [True, False, True, False, False, True, False]
    statistics.advance()
    statistics.advance()
    assert not watched(model)  # removed
    step(model, optimizer)
    assert statistics.step == 9


def test_a_resumed_run_samples_the_steps_of_the_whole_one():
    model = converted("mxfp8")
    statistics = hb.collect_stats(model, every=4).start_at(6)
    seen = []
    for _ in range(3):
        seen.append(watched(model))
        step(model)
        statistics.advance()
    assert seen == [False, True, False]
    assert statistics.last.step == 8


def test_a_model_that_was_moved_is_measured_where_it_is():
    model = converted("mxfp8")
    statistics = hb.collect_stats(model, every=1)
    first = model[0].ledger
    assert first.device.type == "cpu"
    model.to("meta")
    statistics.start_at(3)
    assert model[0].ledger.device.type == "meta" and model[0].ledger.shape == first.shape


def test_evaluation_and_layers_that_did_not_run_are_not_measured():
    model = converted("mxfp8")
    statistics = hb.collect_stats(model)
    with torch.no_grad():
        step_input = torch.randn(24, 32)
        model(step_input)
    model[0](step_input).sum().backward()
    found = statistics.advance()
    assert [row.name for row in found.layers] == ["0"]
    assert found.unobserved == {"2": "nothing ran forward and backward"}
    assert found["0"].tensors["x"].elements == 24 * 32  # once
    with pytest.raises(KeyError, match="measured were 0"):
        found["2"]


def test_json_lines_hold_every_figure(tmp_path):
    model = converted()
    path = tmp_path / "stats.jsonl"
    statistics = hb.collect_stats(model, every=1, to=[hb.stats.JSONL(path)])
    for _ in range(2):
        step(model)
        statistics.advance()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    operand = next(
        line for line in lines if line["step"] == 2 and line["layer"] == "2" and line.get("operand") == "dy.col"
    )
    one = statistics.last["2"].operands["dy.col"]
    assert operand["snr_db"] == one.snr_db and operand["rht_gain_db"] == one.rht_gain_db
    assert operand["spec"] == hb.recipes.nvfp4().wgrad.a.key and operand["four_over_six"] is None
    product = next(line for line in lines if line["layer"] == "0" and line.get("product") == "dw")
    assert product.keys() == {"step", "layer", "recipe", "product", "cosine", "noise_ratio"}
    with path.open("a") as file:
        file.write('{"step": 3, "lay')  # a kill
    hb.stats.JSONL(path, after=1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [line for line in lines if line["step"] == 1]


GOOD = '{"step": 1, "layer": "0"}'


def test_only_the_last_line_may_be_cut_in_half(tmp_path):
    path = tmp_path / "stats.jsonl"
    path.write_text(f'{GOOD}\n\n{{"step": 2, "lay')
    assert hb.stats.read_records(path) == [json.loads(GOOD)]
    for lines, message in (
        (f'{{"step": 2, "lay\n{GOOD}\n', "line 1: not JSON .*; delete the line"),
        (f'{GOOD}\n{{"step": 2, "lay\n', "line 2: not JSON .*; delete the line"),  # a whole line, with its end
        (f"{GOOD}\n[]\n", "line 2: not a line of statistics; delete the line"),
        ('{"step": 1.0, "layer": "0"}', "line 1: not a line of statistics"),
        ('{"step": 1}', "line 1: not a line of statistics"),
    ):
        path.write_text(lines)
        with pytest.raises(ValueError, match=rf"stats\.jsonl {message}"):
            hb.stats.read_records(path)


class Writer:
    def __init__(self):
        self.points = {}

    def add_scalar(self, name, value, step):
        self.points[name, step] = value

    def log(self, values, step):
        self.points |= {(name, step): value for name, value in values.items()}


@pytest.mark.parametrize("sink", [hb.stats.TensorBoard, hb.stats.WandB])
def test_curves(sink):
    model, writer = converted(), Writer()
    statistics = hb.collect_stats(model, to=[sink(writer)])
    step(model)
    found = statistics.advance()
    assert writer.points["stats/2/x.row/snr_db", 1] == found["2"].operands["x.row"].snr_db
    assert writer.points["stats/0/dw/noise_ratio", 1] == found["0"].products["dw"].noise_ratio
    assert writer.points["stats/noise_ratio", 1] == found.noise_ratio
    assert all(math.isfinite(value) for value in writer.points.values())


def test_a_table_says_all_of_it():
    from rich.console import Console

    console = Console(record=True, width=160, force_terminal=False, file=io.StringIO())
    model = converted()
    statistics = hb.collect_stats(model, to=[hb.stats.Table(console)])
    step(model)
    found = statistics.advance()
    drawn, text, page = console.export_text(), str(found), found._repr_html_()
    for cell in (
        "x.row",
        "dy.col",
        f"{found['2'].operands['w.row'].snr_db:.1f}",
        f"{found['0'].products['y'].cosine:.5f}",
    ):
        assert cell in drawn and cell in text and cell in page
    assert "within 1/√3" in text


def test_noise_beyond_the_gradient_is_warned_of_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hb.quantize_(model, "naive_fp4", keep=hb.Keep(names=(), last_fraction=0))
    statistics = hb.collect_stats(model, every=1)
    dy = torch.randn(64, 32)  # gradients that cancel over tokens, whose noise does not
    dy[1::2] = -dy[::2]
    x = torch.randn(32, 32).repeat_interleave(2, 0)
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x).backward(dy + 1e-3)
            found = statistics.advance()
        assert found.is_noisy and found.noise_ratio > 3**-0.5
        said = f"{found.noise_ratio:.2f} of the weight gradients"
        assert [said in str(one.message) for one in caught] == [True] * expected


def test_the_noisiest_layers_are_named_first():
    """Six layers with gradients that cancel over tokens, as in the test above, with the same mean: four are named."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))
    hb.quantize_(model, "naive_fp4", keep=hb.Keep(names=(), last_fraction=0))
    statistics = hb.collect_stats(model, every=1)
    x = torch.randn(32, 32).repeat_interleave(2, 0)
    for layer, rest in zip(model, (0.01, 0.1, 0.03, 0.003, 0.05, 0.02), strict=True):
        dy = torch.randn(64, 32)
        dy[1::2] = -dy[::2]
        layer(x).backward(dy / rest + 1)
    with pytest.warns(UserWarning, match="of the weight gradients") as caught:
        found = statistics.advance()
    ratios = {row.name: row.products["dw"].noise_ratio for row in found.layers}
    assert len({f"{ratio:.2f}" for ratio in ratios.values()}) == 6
    wanted = sorted(ratios, key=lambda name: -ratios[name])[:4]
    assert f"most in {', '.join(f'{name} {ratios[name]:.2f}' for name in wanted)};" in str(caught[0].message)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: hb.collect_stats(m, every=0), ValueError, "every=0"),
        (lambda m: hb.collect_stats(m, every=2.0), TypeError, "every=2.0"),
        (lambda m: hb.collect_stats(m, names="*"), TypeError, "names='\\*'"),
        (lambda m: hb.collect_stats(m, names=("nothing",)), ValueError, "globs that match"),
        (lambda m: hb.collect_stats(nn.Sequential(nn.Linear(2, 2))), ValueError, "hb.quantize_ first"),
        (lambda m: hb.collect_stats(m, to="here"), TypeError, "hb.stats.JSONL"),
        (lambda m: hb.collect_stats(m, to=hb.stats.Table()), TypeError, "to=<.*Table.*give a list of sinks"),
        (lambda m: hb.collect_stats(7), TypeError, "model=int"),
        (lambda m: hb.collect_stats(m).follow(m), TypeError, "optimizer=Sequential"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(converted("mxfp8"))


def test_frozen_codes_are_named_not_measured():
    model = converted("rl")
    hb.freeze_(model)
    with pytest.raises(ValueError, match="QuantTensor: no values to compare"):
        hb.collect_stats(model)


def test_layers_that_ranks_share_are_left_out_with_the_reason():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    hb.quantize_(model, "nvfp4", keep=hb.Keep(last_fraction=0.0), state=hb.RunState(0))
    model[0].entry = object()
    collector = hb.collect_stats(model, every=1)
    assert list(collector._layers) == ["1"] and "ranks share it" in collector.unobserved["0"]
