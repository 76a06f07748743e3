"""experiments/: every study can be read, every recipe of it takes a step, texts are split as they say."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.train import data, league, loop, study
from halfbyte.train.treatment import applied, treatment_of

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
FILES = sorted(FOLDER.glob("*.toml"))
SCREEN = [name for piece in tomllib.loads((FOLDER / "screen.toml").read_text())["pieces"] for name in piece["recipes"]]


@pytest.fixture
def best(tmp_path, monkeypatch):
    """Let the studies that others begin with have been run."""
    monkeypatch.chdir(tmp_path)
    for name in ("screen", "final"):
        rows = [{"recipe": recipe, "gap": gap} for gap, recipe in enumerate(SCREEN)]
        folder = Path("experiments/results") / name
        folder.mkdir(parents=True)
        (folder / "league.json").write_text(json.dumps({"title": name, "rows": rows, "deviation": 0.1, "freedom": 9}))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_study_can_be_read(file, best):
    found = study.read_study(file)
    assert found.recipes[0] == "bf16"
    for piece in found.pieces:
        for job in found.jobs(piece):
            applied(job.config, job.recipe).schedule()
    held_out = found.config.data.sequence * found.config.data.batch * found.config.eval_batches
    assert held_out >= 4_000_000
    assert found.config.optim.steps % found.config.eval_every == 0


def test_the_screen_names_what_it_should():
    """Issue and page name 21 recipes and two rows of noise; the baseline is the first."""
    assert len(SCREEN) == len(set(SCREEN)) == 24
    assert [name for name in SCREEN if treatment_of(name).is_control] == ["naive_fp4@all"]
    late = next(name for name in SCREEN if "late" in name)
    assert treatment_of(late).schedule == "0.8:bf16/nvfp4"


@pytest.mark.parametrize("name", SCREEN)
def test_every_recipe_of_the_screen_takes_a_step(name, run):
    config, text = run(steps=2, eval_every=2, log_every=1)
    result = loop.Trainer(applied(config, name), name, text).train()
    assert math.isfinite(result["held_out_loss"]) and result["steps"] == 2


def script():
    spec = importlib.util.spec_from_file_location("corpora", FOLDER / "corpora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path) -> dict[str, str]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {record["name"]: record["text"] for record in map(json.loads, lines)}


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)


def test_packages_are_whole_on_one_side_and_no_text_is_on_both(tmp_path):
    sources = {f"p{i}/m{j}.py": f"value = {i}, {j}\n".encode() * 40 for i in range(12) for j in range(3)}
    shared = {f"p{i}/same.py": b"the_same = True\n" * 30 for i in range(12)}
    others = {"p1/bad.py": b"\xff\xfe", "p2/nul.py": b"a\0b", "p3/empty.py": b" \n", "p4/data.txt": b"no source",
              "p5/__pycache__/x.py": b"compiled = 1\n", "alone.py": b"single = 1\n" * 50}  # fmt: skip
    write(tmp_path / "root", sources | shared | others)
    out, corpora = tmp_path / "out", script()
    summary = corpora.build(corpora.packages([tmp_path / "root"]), out, held_out=4000)
    train, held_out = read(out / "train"), read(out / "held_out")
    assert set(train) | set(held_out) >= set(sources) | {"alone.py"} and not set(train) & set(held_out)
    assert not set(train.values()) & set(held_out.values())
    assert not {name.split("/")[0] for name in train} & {name.split("/")[0] for name in held_out}
    assert sum("same.py" in name for name in train) == 1 and not any("same.py" in name for name in held_out)
    assert not set(others) - {"alone.py"} & (set(train) | set(held_out))
    sizes = {part: sum(len(text.encode()) for text in found.values()) for part, found in
             (("train", train), ("held_out", held_out))}  # fmt: skip
    assert {part: summary[part]["bytes"] for part in sizes} == sizes and sizes["held_out"] < sizes["train"]
    again = corpora.build(corpora.packages([tmp_path / "root"]), tmp_path / "again", held_out=4000)
    assert again == summary


@pytest.mark.parametrize(
    "words, said",
    [
        (["--out", "out"], "--out out: train is there already; delete the folder"),
        (["--out", "new", "--held-out", "0"], "--held-out 0: give a number of bytes"),
        (["--out", "new", "--held-out", "999999"], "--held-out 999999: no document is left for train/"),
        (["--out", "new", "--roots", "nowhere"], "--roots nowhere: is no folder"),
        (["--out", "new", "--roots", "empty"], "no document is left for train/"),
    ],
)
def test_what_a_text_refuses(words, said, tmp_path, monkeypatch, capsys):
    """A second text in one folder would have packages of the first on the other side."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "root", {f"p{i}/m.py": f"value = {i}\n".encode() * 40 for i in range(12)})
    (tmp_path / "empty").mkdir()
    assert script().main(["packages", "--roots", "root", "--out", "out", "--held-out", "900"]) == 0
    before = read(tmp_path / "out" / "train")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        script().main(["packages", *([] if "--roots" in words else ["--roots", "root"]), *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert read(tmp_path / "out" / "train") == before and not list(tmp_path.glob("new/*")), "half a text was left"


def number(value: int) -> str:
    """Write a number as the index of a dictionary does, independently of how the script reads it."""
    digits = base64.b64encode(value.to_bytes(6, "big")).decode()
    return digits.lstrip("A") or "A"


def test_a_dictionary_gives_its_entries(tmp_path):
    words = {f"word{i}": f"Word{i}\n   the meaning of {i}\n" for i in range(300)}
    text, index = "about\n", ["00-database-info\tA\tG"]
    for word, entry in words.items():
        index.append(f"{word}\t{number(len(text))}\t{number(len(entry))}")
        text += entry
    index.append(index[5].replace("word4", "word four"))  # a second headword of one entry
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "gcide.index").write_text("\n".join(index) + "\n")
    assert script().main(["gcide", "--dict", str(tmp_path / "gcide.dict.dz"), "--out", str(tmp_path / "out"),
                          "--held-out", "900"]) == 0  # fmt: skip
    train, held_out = read(tmp_path / "out" / "train"), read(tmp_path / "out" / "held_out")
    assert sorted([*train.values(), *held_out.values()]) == sorted(words.values())
    assert 900 <= sum(map(len, held_out.values())) < 2000


def test_a_dictionary_that_is_not_there_or_broken_is_named(tmp_path, capsys):
    dictionary, index = tmp_path / "some.dict.dz", tmp_path / "some.index"
    words = ["gcide", "--dict", str(dictionary), "--out", str(tmp_path / "out")]
    for make, said in (
        (lambda: None, f"{dictionary}: is not there; install Debian's dict-gcide, or give --dict"),
        (lambda: dictionary.write_bytes(gzip.compress(b"a text")), f"{index}: is not there"),
        (lambda: index.write_text("a\tA\tB\nword\n"), f"{index} line 2: no word with where its entry begins"),
        (lambda: index.write_text("word\tA\t-\n"), f"{index} line 1: no word"),
    ):
        make()
        with pytest.raises(SystemExit) as ended:
            script().main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


def test_a_text_of_its_own_is_held_out(run, folder):
    config, _ = run()
    (folder / "other").mkdir()
    (folder / "other" / "a.txt").write_text("a text that nobody trained on, " * 200)
    apart = replace(config, data=replace(config.data, held_out_corpus=str(folder / "other")))
    plain, found = (data.load_data(one.data, one.run.cache) for one in (config, apart))
    assert len(found.train) == len(plain.train) + len(plain.held_out)
    assert bytes(found.held_out[:31]) == b"a text that nobody trained on, "
    assert found.summary["held_out_sha256"] != found.summary["sha256"] == plain.summary["sha256"]
    identities = [loop.identity(one, "bf16", text) for one, text in ((config, plain), (apart, found))]
    assert "held_out_sha256" not in identities[0] and identities[1]["held_out_sha256"]


def test_a_league_of_the_screen_chooses_the_next(best):
    found = study.read_study(FOLDER / "final.toml")
    named = ("bf16", "nvfp4", "nvfp4_mxfp8_bwd", "quartet2", "quartet2+late(0.2)", "row_scaled")
    assert found.recipes[:6] == named and len(found.recipes) == 11
    assert league.best(league.read_values(Path("experiments/results/screen")), 3, named) == list(found.recipes[6:9])
