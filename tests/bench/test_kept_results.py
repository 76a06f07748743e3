"""bench/results holds the newest record of each case and what is quoted, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench import loss_tables, results, tables

QUOTING = [*tables.PAGES, tables.ROOT / "bench" / "README.md", tables.ROOT / "halfbyte" / "plan" / "calibration.py"]
QUOTED = "\n".join(path.read_text(encoding="utf-8") for path in QUOTING)
STAMP = re.compile(r"\d{8}T\d{6}-[0-9a-z]+")


def cases(path: Path) -> tuple[str, list[str]]:
    """Return when a file was measured and its cases: all of a line that is no figure of time."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    names = ("case", "shape", "model", "world", "weights", "tied", "tokens", "vocabulary")
    names += ("way", "blocks", "recipe", "has_capacity")
    return head["run"]["time"], [json.dumps([line.get(name) for name in names]) for line in lines]


def stale(folder: Path, quoted: str) -> list[str]:
    """Return the files of records that hold no newest one and are named nowhere."""
    files = {path: cases(path) for path in sorted(folder.glob("*.jsonl"))}
    newest: dict[str, tuple[str, Path]] = {}
    for path, (time, found) in files.items():
        for case in found:
            newest[case] = max(newest.get(case, (time, path)), (time, path))
    kept = {path for _, path in newest.values()}
    stamps = {path: STAMP.search(path.name) for path in files}
    return [p.name for p in files if p not in kept and not (stamps[p] and stamps[p].group() in quoted)]


def test_every_file_of_records_is_newest_or_quoted():
    assert stale(results.FOLDER, QUOTED) == []


def test_every_listing_is_named_where_a_reader_finds_it():
    listings = {path.name for path in (results.FOLDER / "profiles").iterdir()}
    page = (tables.ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert listings == set(re.findall(r"^\| `([\w.-]+\.txt)` \|", page, re.MULTILINE))


def test_training_logs_are_printed_and_the_rest_is_read():
    logs = {path.stem for path in (results.FOLDER / "training").iterdir()}
    wanted = {"make-train", "moe"} | {name for name in logs if name.startswith("ablation-")}
    assert logs == wanted and {"make-train-losses", "moe-losses", "ablation"} <= set(loss_tables.RENDERERS)
    others = {path.name for path in results.FOLDER.iterdir() if path.suffix != ".jsonl"}
    assert others == {"instructions.json", "keep.json", "machines", "profiles", "qat.json", "training"}


def test_a_stale_file_is_seen(tmp_path):
    def write(stamp: str, *shapes: int) -> None:
        lines = [{"run": {"time": stamp}}, *({"case": "a", "shape": [n, n]} for n in shapes)]
        (tmp_path / f"gpu-{stamp}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    write("20260101T000000-aaaaaaa", 1, 2)
    write("20260102T000000-bbbbbbb", 1, 2)
    assert stale(tmp_path, "") == ["gpu-20260101T000000-aaaaaaa.jsonl"]
    assert stale(tmp_path, "as 20260101T000000-aaaaaaa says") == []
    write("20260101T000000-aaaaaaa", 1, 2, 3)  # the only one of a shape
    assert stale(tmp_path, "") == []
