"""bench.counters: what a log of ncu says, a line for each kernel, and what has no figure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench import counters, counters_tables
from bench.records import Record
from bench.registry import all_cases

# As ncu writes a raw page: what the program prints between, a line of names, a line of units, a line a kernel.
NAMES = ["ID", "Process ID", "Kernel Name", *counters.METRICS.values(), *map(counters.STALL.format, counters.STALLS)]
UNITS = ["", "", "", "ns", "inst", "%", "%", "%", "%", "warp", "register/thread", *[""] * len(counters.STALLS)]
KERNEL = ["0", "77", "quantize_row_col_kernel", "96,000", "71,303,168", "75", "65", "79", "41", "19.5", "96"]
STALLED = ["2.10", "0.5", "0.25", "1.20", "n/a", "0", "0"]


def line(cells: list[str]) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def log(path: Path, *kernels: list[str]) -> Path:
    head = ["==PROF== Connected to process 77", "==PROF== Disconnected", line(NAMES), line(UNITS)]
    path.write_text("\n".join([*head, *map(line, kernels)]) + "\n")
    return path


def test_figures_of_a_kernel_are_what_was_counted(tmp_path):
    (kernel,) = counters.kernels(log(tmp_path / "log", KERNEL + STALLED))
    values = counters._line(kernel, 8192 * 8192, 209_715_200.0, 4.26e12)
    assert values["kernel"] == "quantize_row_col_kernel" and values["us"] == 96.0 and values["registers"] == 96
    assert values["instructions"] == 34.0, "71,303,168 of warps, of 32 threads each, for 67,108,864 elements"
    shares = [values[name] for name in ("issue", "alu", "l2", "dram", "warps")]
    assert shares == [0.75, 0.65, 0.79, 0.41, 19.5]
    assert values["of_copy"] == pytest.approx(0.512801, abs=1e-6), "209.7 MB in 96 µs are 2.1845 TB/s"
    assert values["all_slots"] == pytest.approx(0.683735, abs=1e-6)
    printed = counters.text(values | {"case": "counters/row_col/sr+sr-rht", "shape": [8192, 8192]})
    expected = "row_col/sr+sr-rht 8192x8192 96.0 34.0 75% 65% 79% 41% 51% 68% 19.5 long_scoreboard 2.10,"
    assert printed.split() == [*expected.split(), "math_pipe_throttle", "1.20,", "short_scoreboard", "0.50"]


def test_a_counter_that_a_gpu_lacks_is_no_zero(tmp_path):
    (kernel,) = counters.kernels(log(tmp_path / "log", [*KERNEL[:5], "n/a", *KERNEL[6:], *STALLED]))
    assert kernel["issue"] is None and kernel["stalled_lg_throttle"] is None and kernel["stalled_barrier"] == 0.0
    values = counters._line(kernel, 8192 * 8192, 209_715_200.0, 4.26e12)
    assert values["issue"] is None and values["all_slots"] is None
    assert "?" in counters.text(values | {"case": "counters/a", "shape": [1]})


def test_a_log_without_a_kernel_says_why(tmp_path):
    path = tmp_path / "log"
    path.write_text("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        counters.kernels(path)
    with pytest.raises(ValueError, match="ncu saw no kernel"):
        counters.kernels(log(path))


def ncu(folder: Path, *kernels: list[str], status: int = 0) -> None:
    """Put a program of that name there, which writes a log, runs nothing and prints what a worker prints."""
    log(folder / "made", *kernels)
    (folder / "ncu").write_text(
        f"#!{sys.executable}\nimport os, shutil, sys\nat = sys.argv.index('--log-file')\n"
        f"shutil.copy({str(folder / 'made')!r}, sys.argv[at + 1])\n"
        f"open({str(folder / 'asked')!r}, 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', '') + '|'.join(sys.argv))\n"
        f"print('checking'); print('{{\"moved\": 209715200.0}}')\n"
        f"print('no counters here', file=sys.stderr); sys.exit({status})\n"
    )
    (folder / "ncu").chmod(0o755)


def test_a_case_is_called_by_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ncu(tmp_path, KERNEL + STALLED)
    (values,) = counters.counted("row_col/sr+sr-rht", (8192, 8192), "3", 4.26e12)
    assert values["case"] == "counters/row_col/sr+sr-rht" and values["of_copy"] == pytest.approx(0.512801, abs=1e-6)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("3") and asked.endswith("bench.counters|--worker|row_col/sr+sr-rht|8192|8192")
    assert "--clock-control|none" in asked, "the machine's clocks are left as they are"
    ncu(tmp_path, KERNEL + STALLED, ["1", *KERNEL[1:], *STALLED])
    several = counters.counted("row_col/sr+sr-rht", (8192, 8192), None, 4.26e12)
    assert len(several) == 2 and not any("of_copy" in values for values in several), "bytes of which kernel?"
    ncu(tmp_path, status=9)
    (failed,) = counters.counted("row_col/sr+sr-rht", (8192, 8192), None, 4.26e12)
    assert failed["problem"] == "status 9: no counters here" and "NO FIGURE" in counters.text(failed)
    ncu(tmp_path)
    (empty,) = counters.counted("row_col/sr+sr-rht", (8192, 8192), None, 4.26e12)
    assert empty["problem"] == "ValueError: ncu saw no kernel"


def test_elements_are_those_that_a_case_reads():
    """By the tensors that the cases themselves make, at their small shapes."""
    shape = (4, 96, 64, 128)  # experts, tokens, K, N
    assert counters.elements("grouped/quantize-tokens", shape) == 96 * 64
    assert counters.elements("grouped/quantize-gradient", shape) == 96 * 128
    assert counters.elements("grouped/quantize-experts", shape) == 4 * 128 * 64
    assert counters.elements("row_col/16x16", (48, 32)) == 48 * 32
    cases = [case for case in all_cases() if case.name.startswith("grouped/quantize-")]
    assert len(cases) >= 4
    for case in cases:
        x = case.run._inputs(case.small, torch.device("cpu")).x
        assert x.numel() == counters.elements(case.name, case.small), case.name


def test_a_worker_calls_a_checked_case_once(monkeypatch, capsys):
    """On a CPU, where nothing counts: 2 bytes of x, 1/2 of a code and 1/16 of a scale, of 512 × 64 values and 32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(counters.measuring, "measure", counters.measuring.measure)
    assert counters.main(["--worker", "quantize/1x16", "512", "64"]) == 0
    assert json.loads(capsys.readouterr().out) == {"moved": 512 * 64 * (2 + 1 / 2 + 1 / 16)}


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(counters.machine, "visible_gpus", list)
    assert counters.main([]) == 1 and "torch sees no GPU" in capsys.readouterr().out
    monkeypatch.setattr(counters.machine, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert counters.main([]) == 1 and "ncu is not on the PATH" in capsys.readouterr().out


def test_every_case_has_a_line_of_the_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(counters.machine, "visible_gpus", lambda: ["3", "5"])
    monkeypatch.setattr(counters.machine, "facts", lambda device: {"device": "GPU", "time": "2026-01-01T00:00:00"})
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters.timing, "ceilings", lambda device: counters.timing.Ceilings(4e12, 8e14))
    seen = []

    def counted(case, shape, gpu, copy):
        seen.append((case, gpu, copy))
        return [{"case": f"counters/{case}", "shape": list(shape), "problem": "none"}]

    monkeypatch.setattr(counters, "counted", counted)
    assert counters.main(["row_col/*", "--commit", "abc", "--out", str(tmp_path)]) == 1, "cases without a figure"
    names = {case.name for case in all_cases() if case.name.startswith("row_col/")}
    assert {case for case, _, _ in seen} == names and len(seen) == len(names), "the first shape of each"
    assert {gpu for _, gpu, _ in seen} <= {"3", "5"} and {copy for *_, copy in seen} == {4e12}
    (path,) = tmp_path.glob("counters-gpu-*-abc.jsonl")
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["run"]["copy_TB_s"] == 4.0 and len(lines) == len(names)
    assert capsys.readouterr().out.count("NO FIGURE: none") == len(names)


def test_the_table_has_the_newest_count_of_each_kernel_that_quantizes():
    def record(stamp: str, case: str, shape: list[int], **values: float) -> Record:
        plain = {"us": 100.0, "instructions": 34.0, "issue": 0.7, "alu": 0.6, "l2": 0.8, "dram": 0.4, "warps": 19.2}
        line = {"case": f"counters/{case}", "shape": shape} | plain | values
        return Record(
            key=(line["case"], tuple(shape)), run={"commit": "abc"}, values=line, file=f"counters-gpu-{stamp}-abc.jsonl"
        )

    text = counters_tables.counters(
        [
            record("20260101T000000", "row_col/sr+sr-rht", [8192, 8192], of_copy=0.4),
            record("20260102T000000", "row_col/sr+sr-rht", [8192, 8192], of_copy=0.5),
            record("20260102T000000", "grouped/quantize-eden", [64, 32768, 7168, 2048], us=3.0),
            record("20260102T000000", "grouped/quantize-eden", [64, 32768, 7168, 2048], us=212.0),
        ]
    )
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "| row_col/sr+sr-rht | 100 | 34.0 | 70 % | 60 % | 80 % | 40 % | 19 | 50 % | 55 % | 77 % | a |",
        "| quantize-eden, 64 | 212 | 34.0 | 70 % | 60 % | 80 % | 40 % | 19 |  | 40 % |  | a |",
    ]
