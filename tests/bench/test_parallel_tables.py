"""bench.parallel on one process, and the tables that its records make."""

import json
import socket

import pytest

from bench import parallel, parallel_tables
from bench.records import load

LINE = {
    "case": "parallel/dense",
    "has_capacity": False,
    "model": "8b",
    "layers": 2,
    "world": 2,
    "tokens": 8192,
    "host_ms": 9.0,
    "peak_GiB": 3.0,
    "of_bf16": 1.0,
    "arriving_bytes": {},
}
LINES = [
    LINE | {"way": "codes", "recipe": "nvfp4", "step_ms": 21.0, "of_bf16": 1.05, "alone_of_bf16": 1.1}
    | {"arriving_bytes": {"backward reduce_scatter_tensor bfloat16": 2_000_000, "forward all_reduce float32": 40}},
    LINE | {"way": "one GPU", "recipe": "bf16", "step_ms": 30.0},
    LINE | {"way": "values", "recipe": "bf16", "step_ms": 20.0, "arriving_bytes": {"forward all_reduce float32": 8e6}},
]  # fmt: skip


def test_one_process_times_what_needs_no_other(tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(parallel, "WARM_UP", 1)
    monkeypatch.setattr(parallel, "TIMED", 2)
    options = ["--only", "mixture", "--mixture-layers", "1", "--tokens", "32", "--commit", "abcdef0"]
    assert parallel.main([*options, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("parallel-*-abcdef0.jsonl")
    run, *lines = map(json.loads, path.read_text().splitlines())
    assert run["run"]["world"] == 1 and [line["recipe"] for line in lines] == ["bf16", "nvfp4"]
    assert all(line["way"] == "one GPU" and line["layers"] == 1 and line["step_ms"] > 0 for line in lines)
    assert [len(line["steps_ms"]) for line in lines] == [6, 6]  # three rounds by default
    assert capsys.readouterr().out.count("moe-tiny, 1 ranks, one GPU") == 2


def test_ways_are_timed_in_turn(monkeypatch):
    """What a machine does meanwhile meets all ways alike."""
    order = []

    def step_times(work, device, count):
        order.append(work)
        return [float(len(order))] * count

    monkeypatch.setattr(parallel, "_built", lambda config, how, tokens, device: (how, {"host_ms": 1.0}))
    monkeypatch.setattr(parallel, "step_times", step_times)
    monkeypatch.setattr(parallel, "_slowest", lambda figures, device: figures)
    lines = parallel.measure(None, ["a", "b"], 8, "cpu", rounds=3)
    assert order == ["a", "b"] * 3
    assert [line["rounds_ms"] for line in lines] == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert [(line["step_ms"], line["host_ms"]) for line in lines] == [(3.0, 1.0), (4.0, 1.0)]


def written(folder, device: str, lines: list) -> list:
    run = {"run": {"commit": "abcdef0", "time": "2026-01-01", "device": device}}
    text = "\n".join(map(json.dumps, [run, *lines]))
    (folder / "parallel-gpu-20260101T000000-abcdef0.jsonl").write_text(text)
    return load(folder)


def test_the_table(tmp_path):
    table = parallel_tables.RENDERERS["parallel-dense"](written(tmp_path, "NVIDIA H200", LINES)).splitlines()
    rows = [line for line in table if line.startswith("| ") and "GPUs" not in line]
    assert table[0].startswith("Forward and backward of 2 blocks of `8b`, bf16 parameters, 8,192 tokens of one")
    assert table[0].endswith("each step awaited, medians:")
    assert [row.split(" | ")[0] for row in rows] == [
        "| one GPU",
        "| torch's styles, sequence parallel",
        "| `NVFP4Colwise`, `NVFP4Rowwise`",
        "| torch's styles, sequence parallel",
        "| `NVFP4Colwise`, `NVFP4Rowwise`",
    ]
    assert rows[2].endswith("| 2 | nvfp4 | 21.0 | 1.050× | 1.100× | 9.0 | 3.0 | a |")
    assert rows[3].endswith("| 2 | bf16 | 8.00 |  |") and rows[4].endswith("| 2 | nvfp4 | 0.00 | 2.00 |")
    assert "| forward all_reduce float32 | backward reduce_scatter_tensor bfloat16 |" in "\n".join(table)


@pytest.mark.parametrize("device, lines", [("x86_64 CPU", LINES), ("NVIDIA H200", LINES[:0])])
def test_without_a_record_of_gpus_it_says_so(tmp_path, device, lines):
    for render in parallel_tables.RENDERERS.values():
        assert render(written(tmp_path, device, lines)) == parallel_tables.NOTHING


def test_multiples_of_bf16_are_those_of_shared_steps_in_4_bits(tmp_path):
    head = {"run": {"device": "NVIDIA H200", "commit": "abcdef0", "time": "2026-01-02T03:04:05+00:00"}}
    more = [
        LINE | {"way": "values", "recipe": "nvfp4", "step_ms": 24.0, "of_bf16": 1.2},
        LINE | {"way": "one GPU", "recipe": "nvfp4", "step_ms": 33.0, "of_bf16": 1.9},
        LINE | {"way": "codes", "recipe": "nvfp4", "step_ms": 11.0, "of_bf16": 1.54, "world": 4},
    ]
    path = tmp_path / "parallel-nvidia-h200-20260102T030405-abcdef0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *LINES, *more)))
    records = load(tmp_path)
    assert parallel_tables.ratios("parallel/dense", records) == "1.05 to 1.20× on 2 GPUs and 1.54× on 4 GPUs"
    assert parallel_tables.ratios("parallel/mixture", records) == parallel_tables.NOTHING
