"""The docs say what bench/results says, by the rule of bench/records.py."""

import dataclasses
import json
import re

import pytest

from bench import losses, plan_tables, results, several_tables, tables
from bench.records import Record, counting, failed, load

RECORDS = load()
FILE = re.compile(r"T\d{6}[-`…]|bench/results/[\w.-]*\.jsonl")


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(tables.ROOT).as_posix())
def test_pages_hold_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert text == tables.renew(text, RECORDS), "run `python -m bench.tables --write`"
    assert text.count("<!-- results:") == len(tables.BLOCK.findall(text)) == text.count("<!-- /results -->")


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(tables.ROOT).as_posix())
def test_no_other_text_quotes_a_file_of_results(page):
    """What names a file is printed from it; a figure that is copied by hand stays when the record changes."""
    assert not FILE.findall(plan_tables.BLOCK.sub("", tables.BLOCK.sub("", page.read_text(encoding="utf-8"))))


def test_every_table_is_on_a_page():
    named = {name for page in tables.PAGES for _, name, _, _ in tables.BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert named == set(tables.RENDERERS)


def test_a_changed_figure_is_seen():
    (page,) = (page for page in tables.PAGES if page.name == "kernels.md")
    text = page.read_text(encoding="utf-8")
    wrong = re.sub(r"(\| 1×16 nearest \| )\d+", r"\g<1>12", text, count=1)
    assert wrong != text and tables.renew(wrong, RECORDS) == text
    with pytest.raises(ValueError, match="'kernel' is no table; they are kernels"):
        tables.renew("<!-- results: kernel -->1<!-- /results -->", RECORDS)


def record(time: str, commit: str, **values) -> Record:
    values = {"us": 50.0, "value": 0.5, "metric": "of copy"} | values
    return Record(
        key=("a/b", (8, 8)),
        run={"commit": commit, "time": time},
        values=values,
        file=f"gpu-20260101T{time}-{commit.rstrip('+')}.jsonl",
    )


CLEAN, DIRTY = record("000001", "aaaaaaa", us=1.0), record("000002", "bbbbbbb+", us=2.0)
BROKEN = record("000003", "ccccccc", problem="CompilationError: at 93:12:")


@pytest.mark.parametrize(
    "records, expected",
    [
        ([CLEAN, DIRTY], CLEAN),  # newer, but of local changes
        ([CLEAN, BROKEN], CLEAN),  # newer, but without a figure
        ([CLEAN, DIRTY, BROKEN, record("000004", "ddddddd")], record("000004", "ddddddd")),
        ([DIRTY], DIRTY),
        ([DIRTY, CLEAN], CLEAN),
        (
            [DIRTY, dataclasses.replace(DIRTY, file="gpu-20260101T000005-eeeeeee.jsonl")],
            "gpu-20260101T000005-eeeeeee.jsonl",
        ),
        ([BROKEN], None),
    ],
)
def test_the_record_that_counts(records, expected):
    chosen = counting(records).get(("a/b", (8, 8)))
    assert (chosen.file if isinstance(expected, str) else chosen) == expected


def test_runs_on_several_gpus_are_told_apart(tmp_path):
    step = {"case": "zero/step", "model": "1b", "weights": "nvfp4", "world": 2}
    others = [{"world": 4}, {"weights": "plain"}, {"model": "3b"}, {"vocabulary": 8192}, {"tokens": [8, 2048]}]
    lines = [step, step | {"vocabulary": 32_000}, *(step | other for other in others)]  # 32,000 is what goes unsaid
    run = {"commit": "abcdef0", "time": "2026-01-01"}
    text = "\n".join(map(json.dumps, [{"run": run}, *lines]))
    (tmp_path / "zero-gpu-20260101T000000-abcdef0.jsonl").write_text(text)
    records = load(tmp_path)
    assert len(counting(records)) == 6 and records[0].key == records[1].key
    assert counting(records)[records[0].key] == records[1]


def test_local_changes_and_failures_are_visible():
    assert tables.value(DIRTY) == "2.0 µs, 50.0 %+" and DIRTY.stamp == "20260101T000002-bbbbbbb+"
    assert tables.value(CLEAN) == "1.0 µs, 50.0 %"
    assert failed([CLEAN, BROKEN]) == [(BROKEN, CLEAN)] and failed([BROKEN, CLEAN]) == []
    said = tables.failures([DIRTY, BROKEN])
    assert "CompilationError: at 93:12 (20260101T000003-ccccccc)" in said and "2.0 µs, 50.0 %+" in said
    assert tables.failures([CLEAN]) == "None."


def test_committed_failures_are_those_of_the_files():
    """Read without the code above: the last line of each case and shape that has a problem."""
    last = {}
    for path in sorted(
        results.FOLDER.glob("nvidia*.jsonl"), key=lambda p: json.loads(p.open().readline())["run"]["time"]
    ):
        for line in path.read_text().splitlines()[1:]:
            values = json.loads(line)
            last[values["case"], "x".join(map(str, values["shape"]))] = "problem" in values
    (page,) = (page for page in tables.PAGES if page.name == "kernels.md")
    text = page.read_text(encoding="utf-8").partition("<!-- results: failures -->")[2].partition("<!-- /results -->")[0]
    failures = {key for key, has_problem in last.items() if has_problem}
    assert {
        re.match(r"\| `(.*)` (\S+) \|", line).groups() for line in text.splitlines() if line.startswith("| `")
    } == failures


def test_training_files_hold_configuration_and_log():
    for name, (run, lines) in losses.load().items():
        assert run["config"]["optim"]["steps"] and run["threads"] and run["torch"] and run["commit"], name
        for line in lines:
            assert line["key"] and line["evaluations"][-1] == [line["steps"], line["held_out_loss"]], name
            assert [step for step, _ in line["training"]] == [step for step, _ in line["evaluations"]], name


def test_a_comparison_is_collected(tmp_path):
    identity = {"optim": {"steps": 2}, "seed": 3, "recipe": "bf16", "recipe_key": "k"}
    result = {"recipe": "bf16", "identity": identity, "steps": 2, "held_out_loss": 1.5, "is_diverged": False}
    content = {"heading": "h", "environment": {"torch": "2"}, "data": {"corpus": "c"}, "results": [result]}
    (tmp_path / "bf16").mkdir()
    (tmp_path / "results.json").write_text(json.dumps(content))
    log = [{"kind": "step", "step": n, "loss": 3.0 - n} for n in (1, 2)] + [{"kind": "eval", "step": 2, "loss": 1.5}]
    (tmp_path / "bf16" / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    run, (line,) = losses.collect(tmp_path)
    assert run == {"heading": "h", "torch": "2", "data": {"corpus": "c"}, "config": {"optim": {"steps": 2}, "seed": 3}}
    assert line["evaluations"] == [[2, 1.5]] and line["training"] == [[2, 1.0]] and line["key"] == "k"
    with pytest.raises(ValueError, match=r"no results\.json; give the --out folder"):
        losses.collect(tmp_path / "bf16")


def test_steps_of_several_gpus_stand_beside_those_of_as_many_tokens():
    """A head that ranks share is another way, and a run of twice the tokens another run."""
    run = {"commit": "abcdef0", "time": "2026", "device": "NVIDIA H200"}
    line = {"case": "gather/step", "model": "1b", "layers": 16, "world": 2, "tokens": [4, 2048], "peak_GiB": 1.0}
    ways = {"bf16": 100.0, "codes": 90.0, "shared": 1.0}
    lines = [line | {"way": way, "step_ms": ms, "gathered_bytes": 1e6} for way, ms in ways.items()]
    lines += [values | {"tokens": [8, 2048], "step_ms": 2 * values["step_ms"]} for values in lines]
    zero = {"case": "zero/step", "model": "1b", "world": 2, "peak_GiB": 1.0, "gathered_bytes": 1e6}
    lines += [zero | {"weights": "plain", "step_ms": 50.0}]
    lines += [zero | {"weights": "nvfp4", "step_ms": 49.0, "tokens": [8, 2048]}]
    file = "gather-gpu-20260101T000000-abcdef0.jsonl"
    records = [Record(key=(values["case"], ()), run=run, values=values, file=file) for values in lines]
    found = [row.split(" | ")[:4] for row in several_tables.several(records).splitlines()[2:5]]
    assert found == [
        ["| ZeRO-1, 1b", "2", "16,384", "50 → 49, 0.98×"],
        ["| FSDP2, 16 blocks of 1b", "2", "8,192", "100 → 90, 0.90×"],
        ["| FSDP2, 16 blocks of 1b", "2", "16,384", "200 → 180, 0.90×"],
    ]
