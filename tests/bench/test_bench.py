"""The benchmark on a CPU: cases check themselves, wrong bytes get no figure, results can be read and drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from bench import plot, results, run
from bench.cases import quantize, steps, training
from bench.registry import Bar, Case, Outcome, Setting, Unequal, all_cases, select
from bench.results import Result
from halfbyte import cli, ops
from halfbyte.ops import gemm, quantization
from halfbyte.spec import NVFP4
from halfbyte.verify.timing import Ceilings

CPU = torch.device("cpu")
SETTING = Setting(device=CPU, backend="reference", ceilings=Ceilings(1e9, 1e9), plain=False, budget=0.0)
ONE_OF_EACH = ["amax/*", "quantize/1x16-sr", "row_col/16x16", "dequantize/swizzled", "transpose/*", "gemm/*"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def outcome(value: float, metric="of copy", **facts: float) -> Outcome:
    return Outcome(seconds=1e-4, spread=0.01, metric=metric, value=value, work=1e8, unit="TB/s", facts=facts)


def test_names_are_unique_and_bars_are_in_order():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        for bar in filter(None, case.shapes.values()):
            better = (
                bar.aim <= bar.least
                if case.name.startswith(("linear", "grouped/linear", "fused/mlp", "train", "host", "steps"))
                else bar.aim >= bar.least
            )
            assert better, case.name


@pytest.mark.parametrize("name", ["quantize/4over6", "quantize/mxfp8", "row_col/sr+sr-rht", "dequantize/linear"])
def test_case_checks_and_measures(name):
    (case,) = select(all_cases(), [name])
    result = case.run(SETTING, case.small)
    assert result.seconds > 0 and result.rate > 0
    assert any("with the reference on the CPU" in text for text in result.checked)


def test_layer_reports_its_errors():
    (case,) = select(all_cases(), ["linear/nvfp4_mxfp8_bwd"])
    result = case.run(SETTING, case.small)
    assert len(result.checked) == 3 and result.metric == "x bf16" and result.facts["bf16_us"] > 0


def test_training_step_runs_under_both_recipes():
    (case,) = select(all_cases(), ["train/300m"])
    result = case.run(SETTING, (2, 16))
    assert result.value > 0 and result.facts["tokens_per_second"] > 0
    assert "2 steps each, in turn" in result.checked


class Steps:
    """Stands in for a captured step that takes a known time."""

    log: ClassVar[list[str]] = []

    def __init__(self, setting, shape, config, recipe):
        self.recipe, self.seconds, self.fall, self.peak, self.reserved = recipe, [], 1.0, 0, 60 << 30
        self.log.append(f"built {recipe}")

    def once(self):
        self.log.append(self.recipe)
        self.seconds.append(2.0 if self.recipe == "bf16" else 2.5)

    def release(self):
        self.log.append(f"released {self.recipe}")


@pytest.mark.parametrize("free", [61, 59])
def test_steps_are_timed_in_turn_where_there_is_room_for_both(free, monkeypatch):
    """Where there is none the record says so; the pairs begin with one model and with the other."""
    monkeypatch.setattr(Steps, "log", [])
    monkeypatch.setattr(training, "_Stepped", Steps)
    monkeypatch.setattr(training, "_kept", lambda *_: (0.25, []))
    monkeypatch.setattr(training.models, "model_preset", lambda name: SimpleNamespace(parameters=1))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free << 30, 140 << 30))
    result = training.training(SimpleNamespace(on_gpu=True), (8, 2048), model="1b")
    log, steps = Steps.log, training.STEPS
    assert result.value == 1.25 and log.count("bf16") == log.count("nvfp4") == steps
    assert set(log[-2:]) == {"released bf16", "released nvfp4"}
    if free > 60:
        assert log[:6] == ["built bf16", "built nvfp4", "bf16", "nvfp4", "nvfp4", "bf16"]
        assert result.checked[1] == f"{steps} steps each, in turn"
    else:
        assert log[1 : steps + 3] == ["bf16"] * steps + ["released bf16", "built nvfp4"]
        assert result.checked[1] == "one after the other: 59.0 GiB are free, and bf16 took 60.0"


@pytest.mark.parametrize(
    ("fall", "kept", "says"),
    [
        (0.5, 0.2, "the loss fell by 0.5000, in bf16 by 1.0000"),
        (float("nan"), 0.2, "the loss fell by nan, in bf16 by 1.0000"),
        (0.7, 0.31, "linear layers keep 0.310 of what bf16's keep, at most 0.3"),
        (0.7, 0.3, ""),
    ],
)
def test_a_step_that_hardly_trains_or_keeps_too_much_has_no_figure(fall, kept, says, monkeypatch):
    class Falling(Steps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.fall = 1.0 if self.recipe == "bf16" else fall

    monkeypatch.setattr(training, "_Stepped", Falling)
    monkeypatch.setattr(training, "_kept", lambda *_: (kept, []))
    monkeypatch.setattr(training.models, "model_preset", lambda name: SimpleNamespace(parameters=1))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (61 << 30, 140 << 30))
    setting = SimpleNamespace(on_gpu=True)
    if says:
        with pytest.raises(Unequal, match=says):
            training.training(setting, (8, 2048), model="1b")
    else:
        result = training.training(setting, (8, 2048), model="1b")
        assert "the loss falls by 70% of bf16's fall" in result.checked
        assert result.facts["tokens_per_second"] == pytest.approx(8 * 2048 / 2.5)


def test_a_baseline_whose_loss_rises_gives_no_figure(monkeypatch):
    """Ours rises as far: all of bf16's fall, as a ratio."""

    class Rising(Steps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.fall = -1.0

    monkeypatch.setattr(training, "_Stepped", Rising)
    with pytest.raises(Unequal, match=r"bf16's loss did not fall: -1\.0000"):
        training.training(SETTING, (4, 32), model="300m")
    rising = {"fall": -1.0, "seconds": 1.0, "spread": 0.0, "busy": 0.0, "first": 1.0}
    monkeypatch.setattr(steps, "_measure", lambda setting, shape, model, recipes: [rising for _ in recipes])
    for model in ("60m", "moe-60m"):
        with pytest.raises(Unequal, match=r"bf16's loss did not fall: -1\.0000"):
            steps.steps(SETTING, (4, 32), model=model)


def test_a_fall_is_from_the_first_loss_to_the_last():
    assert training._Stepped.fall.fget(SimpleNamespace(losses=[3.0, 4.0, 1.0])) == 2.0


def wrong_at(monkeypatch, row: int, only_rows: int) -> None:
    """Make every backend but the reference wrong in one nibble of matrices with `only_rows` rows."""
    right = quantization.quantize

    def wrong(x, spec, **options):
        blocks = right(x, spec, **(options | {"backend": "reference"}))
        if options["backend"] is None and len(x) == only_rows:
            blocks.qdata[row, 3] ^= 1
        return blocks

    monkeypatch.setattr(quantize.ops, "quantize", wrong)


@pytest.mark.parametrize("row, rows, says", [(300, 333, "ragged"), (5, 512, "slice of orientation 0")])
def test_wrong_bytes_get_no_figure(monkeypatch, row, rows, says):
    wrong_at(monkeypatch, row, rows)
    (case,) = select(all_cases(), ["quantize/1x16"])
    setting = replace(SETTING, backend=None)
    with pytest.raises(Unequal, match=f"{says}.*1 of"):
        case.run(setting, (512, 64))
    result = run._one(case, (512, 64), setting)
    assert result.outcome is None and "differs from the reference" in result.problem
    assert "NO FIGURE" in results.line(result) and "us" not in result.as_json()


def test_a_product_that_is_off_gets_no_figure(monkeypatch):
    right = gemm.gemm_nt
    monkeypatch.setattr(ops, "gemm_nt", lambda *a, **k: right(*a, **k) * 1.01)
    (case,) = select(all_cases(), ["gemm/from-codes"])
    with pytest.raises(Unequal, match="relative error 1.0"):
        case.run(SETTING, case.small)


def test_slices_of_every_orientation_are_prefixes():
    operation = quantize.Quantization(row=NVFP4(outer="row"), col=NVFP4(rounding="stochastic"))
    x = torch.randn(400, 520).bfloat16()
    given = operation.given(x)
    actual = operation.run(x, given, "reference")
    operation._check_slice(x, given, actual)
    actual[2][quantize.SLICE - 1, 0] ^= 1
    with pytest.raises(Unequal, match="slice of orientation 1"):
        operation._check_slice(x, given, actual)


def test_command_needs_a_gpu_and_says_so(capsys):
    assert cli.main(["bench"]) == 2
    assert "need a GPU" in capsys.readouterr().err


def test_command_runs_the_reference_and_records(capsys, tmp_path):
    arguments = ["--backend", "reference", "--quick", "--out", str(tmp_path), "--only", *ONE_OF_EACH]
    assert cli.main(["bench", *arguments]) == 0
    said = capsys.readouterr().out
    (file,) = tmp_path.glob("*.jsonl")
    assert str(file) in said and "ceilings: device copy" in said
    facts, lines = results.read(file)
    assert {"device", "torch", "commit", "copy_TB_s"} <= facts.keys()
    assert {line["case"] for line in lines} == {case.name for case in select(all_cases(), ONE_OF_EACH)}
    assert all(line["us"] > 0 and line["checked"] for line in lines)


def test_a_case_that_fails_is_the_exit_status(capsys, monkeypatch, tmp_path):
    def broken(setting, shape):
        raise RuntimeError("misaligned address\nmore")

    case = Case(name="broken/case", about="", shapes={(8, 8): None}, small=(8, 8), run=broken)
    monkeypatch.setattr(run, "all_cases", lambda: [case])
    assert run.main(["--backend", "reference", "--out", str(tmp_path)]) == 1
    assert "RuntimeError: misaligned address" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--only", "nothing/*"], ["plot", "missing.jsonl"]])
def test_wrong_arguments_are_named(capsys, arguments):
    assert cli.main(["bench", *arguments, *([] if "plot" in arguments else ["--backend", "reference"])]) == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_wrong_shape_is_named(capsys):
    assert cli.main(["bench", "--backend", "reference", "--shape", "8192x"]) == 2
    assert "'8192x': give sizes such as 8192x8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, metric, facts, verdict",
    [
        (0.93, "of copy", {}, "aim"),
        (0.85, "of copy", {}, "least"),
        (0.79, "of copy", {}, "missed"),
        (0.85, "x bf16", {}, "least"),
        (0.79, "x bf16", {}, "aim"),
        (0.79, "x bf16", {"peak_GiB": 20.0, "bf16_peak_GiB": 19.0}, "missed"),
        (0.79, "x bf16", {"peak_GiB": 18.0, "bf16_peak_GiB": 19.0}, "aim"),
    ],
)
def test_verdict(value, metric, facts, verdict):
    bar = Bar(least=0.90, aim=0.80) if metric == "x bf16" else Bar(least=0.80, aim=0.92)
    assert Result(case="a/b", shape=(1, 1), bar=bar, outcome=outcome(value, metric, **facts)).verdict == verdict


def test_distance_to_80_percent_is_reported():
    bar = Bar(least=0.45, aim=0.75)
    result = Result(case="quantize/rht128", shape=(8, 8), bar=bar, outcome=outcome(0.55))
    assert result.as_json()["to_80_percent"] == pytest.approx(0.25)
    said = results.summary([result], on_gpu=True)
    assert "1 of 1 bars met, 0 at their aim" in said and "quantize/rht128 8x8 by 25.0%" in said


def test_plot_draws_every_panel(tmp_path):
    facts = {
        "device": "GPU",
        "torch": "2",
        "commit": "abc",
        "time": "2026-01-01T00:00:00",
        "copy_TB_s": 4.0,
        "bf16_TFLOP_s": 700.0,
    }
    bar = Bar(least=0.8, aim=0.9)
    lines = [
        Result(case=f"a/{m}", shape=(8, 8), bar=bar, outcome=outcome(0.85, m)).as_json() for m in ("of copy", "x bf16")
    ]
    file = tmp_path / "one.jsonl"
    results.write(file, facts, lines)
    assert plot.main([str(file), "--out", str(tmp_path / "one.png")]) == 0
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    file.write_text(json.dumps({"case": "no header"}))
    with pytest.raises(ValueError, match="not a result"):
        results.read(file)


def test_processes_that_begin_in_one_second_write_a_file_each(tmp_path):
    facts = {"device": "NVIDIA H200", "commit": "abc+", "time": "2026-12-31T23:59:59+00:00"}
    paths = [results.claim(facts, tmp_path / "new", kind) for kind in ("", "", "zero", "")]
    names = [path.name for path in paths]
    assert names == [
        "nvidia-h200-20261231T235959-abc.jsonl",
        "nvidia-h200-20270101T000000-abc.jsonl",
        "zero-nvidia-h200-20261231T235959-abc.jsonl",
        "nvidia-h200-20270101T000001-abc.jsonl",
    ]
    assert all(path.exists() for path in paths)


def test_a_run_that_is_ended_before_its_first_figure_has_said_what_it_is(tmp_path):
    file = tmp_path / "one.jsonl"

    def lines():
        assert results.read(file) == ({"device": "GPU"}, [])
        yield {"case": "a"}
        assert results.read(file) == ({"device": "GPU"}, [{"case": "a"}])

    results.write(file, {"device": "GPU"}, lines())
