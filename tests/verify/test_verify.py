"""`halfbyte verify` on a CPU: what it checks, that a wrong kernel is noticed, and the report's forms."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from halfbyte import cli
from halfbyte.ops import gemm, quantization
from halfbyte.verify import command, kernels, plan, record
from halfbyte.verify.compare import difference, relative_error
from halfbyte.verify.fingerprint import EXPECTED, fingerprint
from halfbyte.verify.invariants import invariants
from halfbyte.verify.matrix import ALL_SPECS, PAIRS, inputs
from halfbyte.verify.timing import measure_alternately

CPU = torch.device("cpu")


def failures(findings) -> list[str]:
    return [f"{c.group}: {c.name}: {c.detail}" for c in record.run_checks(findings) if c.outcome == record.FAILED]


def test_the_reference_holds_its_invariants():
    assert not failures(invariants())


def test_fingerprint_is_that_of_the_golden_reference():
    assert fingerprint(CPU, "reference") == EXPECTED


def test_matrix_covers_every_field_of_a_spec():
    specs = list(ALL_SPECS.values())
    nvfp4 = [s for s in specs if hasattr(s, "block")]
    assert {s.rounding for s in nvfp4} == {"nearest", "stochastic", "toward_zero"}
    assert {s.block for s in nvfp4} == {(1, 16), (16, 16)}
    assert {s.outer for s in nvfp4} == {"tensor", "row"}
    assert {s.rotation.size for s in nvfp4 if s.rotation} == {16, 32, 64, 128}
    assert {s.element for s in specs if hasattr(s, "element")} == {"e4m3", "e5m2"}
    assert len(set(specs)) == len(specs)
    assert any(None in pair for pair in PAIRS.values())


@pytest.mark.parametrize("name", ["no rows", "no columns", "4-D", "1-D", "transposed view", "non-finite"])
def test_inputs_are_what_their_names_say(name):
    x = inputs()[name]
    facts = {
        "no rows": x.numel() == 0,
        "no columns": x.shape[-1] == 0,
        "4-D": x.dim() == 4,
        "1-D": x.dim() == 1,
        "transposed view": x.stride(0) == 1,
        "non-finite": not bool(x.isfinite().all()) and bool(x.isnan().any()),
    }
    assert facts[name]


def test_copies_to_a_device_keep_their_strides():
    x = inputs()["every second column"]
    assert kernels.to_device(x, CPU).stride() == x.stride()
    assert torch.equal(kernels.to_device(x, CPU), x)


def one_wrong_nibble(x, side, backend):
    blocks = quantization.quantize(x, side, backend)
    if backend != "reference" and blocks.qdata.numel():
        blocks.qdata[0, 0] ^= 1
    return blocks


def test_one_wrong_nibble_is_noticed(monkeypatch):
    monkeypatch.setattr(kernels.ops, "quantize", one_wrong_nibble)
    (finding,) = islice(kernels.quantization(CPU, None, False), 1)
    (message,) = failures([finding])
    assert "qdata: 1 of" in message and "[0, 0]" in message


def doubled(*arguments, **options):
    return gemm.gemm_nt(*arguments, **options) * 1.01


def test_a_product_off_by_one_percent_is_noticed(monkeypatch):
    monkeypatch.setattr(kernels.ops, "gemm_nt", doubled)
    (finding,) = islice(kernels.products(CPU, "reference"), 1)
    (message,) = failures([finding])
    assert "relative error 1.0" in message


def test_an_exception_is_a_failure_of_its_check():
    def broken():
        raise RuntimeError("no such instruction")

    checks = record.run_checks([("group", "a", broken), ("group", "b", lambda: None)])
    assert [c.outcome for c in checks] == [record.FAILED, record.PASSED]
    assert checks[0].detail == "RuntimeError: no such instruction"


@pytest.mark.parametrize(
    "actual, expected, says",
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, -float("nan")]), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 differ"),
        (torch.zeros(2), torch.zeros(3), "shape (2,), expected (3,)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "dtype torch.float32"),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8), "at [1]: 2, expected 3"),
    ],
)
def test_difference(actual, expected, says):
    found = difference(actual, expected)
    assert found is None if says is None else says in found


def test_relative_error_wants_nan_where_it_belongs():
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert relative_error(torch.tensor([1.0, float("nan")]), exact) == 0
    assert relative_error(torch.tensor([1.0, 2.0]), exact) == float("inf")
    assert relative_error(torch.tensor([2.0, float("nan")]), exact) == 1
    assert relative_error(torch.empty(0), torch.empty(0, dtype=torch.float64)) == 0


def test_command_says_that_no_gpu_is_visible(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["verify"]) == 0
    said = capsys.readouterr().out
    assert "No GPU is visible" in said and "PASSED" in said and EXPECTED in said
    assert cli.main(["verify", "--device", "cuda"]) == cli.USER_ERROR


def test_json_report(capsys):
    assert cli.main(["verify", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["passed_checks"]["reference"] > 15
    assert [check["group"] for check in report["checks"]] == [record.HARDWARE_CAST, record.NATIVE_GEMM]
    assert all(check["outcome"] == record.NOT_RUN and check["detail"] for check in report["checks"])
    assert report["row"].count("|") == record.ROW_HEAD.splitlines()[0].count("|")


def test_a_report_in_a_file_is_what_json_prints(capsys, tmp_path):
    path = tmp_path / "machine.json"
    assert cli.main(["verify", "--device", "cpu", "--json", "--report", str(path)]) == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(path.read_text())
    assert written.pop("time")[:2] == "20" and written == printed and written["row"].startswith("| ")
    for options in (["--report", str(tmp_path / "none" / "a.json")], ["--report", str(path), "--against", "torchao"]):
        assert cli.main(["verify", *options]) == cli.USER_ERROR
        assert "--report" in capsys.readouterr().err


def test_a_report_is_whole_or_as_it_was_where_a_link_leads_to(capsys, monkeypatch, tmp_path):
    (tmp_path / "kept").mkdir()
    path, link, pipe = tmp_path / "kept" / "machine.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    here = {"device": "CPU", "versions": "torch 2"}
    found = record.Verification(machine=here, checks=[], fingerprint="0123456789ab")
    monkeypatch.setattr(command, "verify", lambda *_, **__: found)
    assert cli.main(["verify", "--device", "cpu", "--report", str(link)]) == 0
    before = path.read_text()
    assert link.is_symlink() and json.loads(before)["checks"] == []
    assert cli.main(["verify", "--device", "cpu", "--report", str(pipe)]) == cli.USER_ERROR, "nobody reads it"
    assert "--json prints the report" in capsys.readouterr().err

    def on_a_full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", on_a_full_disk)
    assert cli.main(["verify", "--device", "cpu", "--report", str(path)]) == cli.USER_ERROR
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["machine.json"]


def test_a_failure_is_the_exit_status_and_in_every_form(capsys, monkeypatch):
    monkeypatch.setattr("halfbyte.verify.invariants.EXPECTED", "000000000000")
    assert cli.main(["verify", "--device", "cpu"]) == 1
    assert "1 FAILED" in capsys.readouterr().out
    assert cli.main(["verify", "--device", "cpu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and report["checks"][0]["name"] == "fingerprint"


def test_processes_share_the_same_checks(monkeypatch):
    # Threads stand in for processes, which would take seconds to import torch.
    monkeypatch.setattr(plan, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    scope = plan.Scope(device=CPU, backend=None)
    alone, shared = plan.run_all(scope, jobs=1), plan.run_all(scope, jobs=3)
    assert alone == shared and len(alone) > 15


def test_tasks_of_a_full_verification_are_disjoint_and_complete():
    scope = plan.Scope(device=CPU, backend="reference")
    found, tasks = plan.findings(scope), plan._tasks(scope)
    assert sorted(place for task in tasks.values() for place, _ in task) == list(range(len(found)))
    assert len(tasks) > 300
    for task in tasks.values():
        places = {f"{found[place][0]}: {found[place][1]}" for place, _ in task}
        assert places == {f"{group}: {name}" for _, (group, name, _) in task}
    (maxima,) = [task for task in tasks.values() if any(finding[:2] == ("amax", "regular") for _, finding in task)]
    assert {finding[1] for _, finding in maxima} == {"regular", "non-finite", "zeros"}, "one kernel, compiled once"


def test_timing_tells_slow_from_fast():
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    times = measure_alternately({"small": [lambda: small @ small], "large": [lambda: large @ large]}, CPU, budget=0.05)
    assert 0 < times["small"].seconds < times["large"].seconds


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--device", "tpu"], "--device tpu: use cuda, cuda:1 or cpu"),
        (["--device", "meta"], "--device meta: use cuda, cuda:1 or cpu"),
        (["--device", "cuda:99"], "--device cuda:99: torch sees "),
        (["--jobs", "0"], "--jobs 0: give a number of processes, 1 or more"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(capsys, options, reason):
    assert cli.main(["verify", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"halfbyte verify: {reason}") and error.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_equal_to_nan_alone(dtype):
    nan, number = torch.tensor([1.0, float("nan")], dtype=dtype), torch.tensor([1.0, 2.0], dtype=dtype)
    assert difference(nan, nan.clone()) is None
    for actual, expected in ((nan, number), (number, nan)):
        assert difference(actual, expected).startswith("1 of 2 differ, the first at [1]: ")


def test_what_should_be_zero_and_is_not_is_infinitely_off():
    zeros = torch.zeros(3, dtype=torch.float64)
    assert relative_error(torch.zeros(3), zeros) == 0
    assert relative_error(torch.tensor([0.0, 1e-30, 0.0]), zeros) == float("inf")


def test_a_machine_of_which_one_check_failed_fails_in_its_row():
    def row_of(*outcomes):
        checks = [record.Check(group="maxima", name=str(i), outcome=outcome) for i, outcome in enumerate(outcomes)]
        checks.append(record.Check(group=record.GEMM, name="a", outcome=record.PASSED))
        machine = {"device": "a GPU", "backend": "triton", "versions": "halfbyte 1"}
        return record.row(record.Verification(machine=machine, checks=checks, fingerprint="abc")).split(" | ")

    assert row_of(record.PASSED, record.PASSED)[2] == "2 equal"
    assert row_of(record.PASSED, record.FAILED, record.NOT_RUN)[2] == "**fails**"
    assert row_of(record.NOT_RUN)[2] == "not run" and row_of(record.FAILED)[4] == "1 within tolerance"
