"""halfbyte inspect, sensitivity and report on the folder of one run."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny, write_corpus

from halfbyte import cli
from halfbyte.train import loop, page
from halfbyte.train.data import load_data
from halfbyte.train.subject import load_subject


@pytest.fixture
def folder(run):
    config, data = run(steps=2, stats_every=1, checkpoint_every=2)
    loop.train(config, "nvfp4@all", data)
    return config.run.out


def test_the_three_commands(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the model reads a block of sixteen values and keeps one scale for them " * 4)
    step = ["--text", str(text), "--batch", "1", "--sequence", "32", "--budget", "0.3"]
    out = tmp_path / "inspect"
    assert cli.main(["inspect", str(folder), *step, "--recipes", "nvfp4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "layers.1.mlp.down_proj" in said and "rules = {" in said and "dy.col" in said
    assert {path.suffix for path in out.iterdir()} == {".csv", ".png", ".svg"}

    out = tmp_path / "sensitivity"
    (checkpoint,) = (folder / "checkpoints").glob("*.pt")
    assert cli.main(["sensitivity", str(checkpoint), *step, "--no-operands", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader((out / "sensitivity.csv").read_text().splitlines()))
    assert len(rows) == 8 and {row["target"] for row in rows} >= {"layers.*.mlp.up_proj", "lm_head"}, "nvfp4@all"
    assert "gradient cosine" in said and "keep = hb.Keep" in said

    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    for part in ("Held-out loss", "layers.0.self_attn.q_proj", "held-out loss", "Where it ran", "dy.col", "torch"):
        assert part in page
    assert "dp_shard 1" in page and "capacity" not in page  # what is not set is not shown
    assert "<script" not in page and "http" not in page
    assert sum(name in page for name in ("<svg", "<details", 'tabindex="0"')) == 3


def test_a_run_in_high_precision_is_tried_in_nvfp4_and_a_budget_of_all_takes_all_that_gains(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    config = tiny(tmp_path, steps=1)
    loop.train(config, "bf16", load_data(config.data, config.run.cache))
    (tmp_path / "page.txt").write_text("the model reads a block of sixteen values " * 20)
    step = ["--text", str(tmp_path / "page.txt"), "--batch", "1", "--sequence", "32", "--budget", "1"]
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["sensitivity", str(config.run.out), *step, "--no-operands", *out]) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out" / "sensitivity.csv").read_text().splitlines()))
    gaining = {row["target"] for row in rows if float(row["gain"]) > 0}
    assert sum(float(row["share"]) for row in rows if row["target"] in gaining) > 0.1, "the default would not do"
    assert {row["target"] for row in rows if f"    {row['target']!r}: None," in said} == gaining


def test_recipes_with_options_are_called_as_they_were_asked_for(folder, tmp_path, capsys):
    """Their keys are longer than a line."""
    named = "nvfp4(rht=64,tiles=1x16)"
    (tmp_path / "page.txt").write_text("the model reads a block of sixteen values " * 20)
    step = ["--text", str(tmp_path / "page.txt"), "--batch", "1", "--sequence", "32"]
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["inspect", str(folder), *step, "--recipes", f"{named},mxfp8", *out]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "inspect.csv").read_text().splitlines()))
    assert {row["recipe"] for row in rows} == {named, "mxfp8", f"{named} (step)"}
    shown = capsys.readouterr().out
    assert f"│ {named} │" in shown and max(map(len, shown.splitlines())) <= 160


def test_heads_are_looked_at_where_the_word_says_all(folder, tmp_path, capsys):
    (tmp_path / "page.txt").write_text("the model reads a block of sixteen values " * 20)
    step = ["--text", str(tmp_path / "page.txt"), "--batch", "1", "--sequence", "32"]

    def tried(*words):
        assert cli.main([words[0], str(folder), *step, *words[1:], "--out", str(tmp_path / words[0])]) == 0
        rows = list(csv.DictReader((tmp_path / words[0] / f"{words[0]}.csv").read_text().splitlines()))
        return {row.get("target", row.get("layer")) for row in rows if "(step)" in row.get("recipe", "(step)")}

    assert "lm_head" in tried("sensitivity", "--no-operands", "--recipe", "mxfp8@all")
    assert "lm_head" not in tried("sensitivity", "--no-operands", "--recipe", "mxfp8")
    assert "lm_head" in tried("inspect", "--recipes", "nvfp4@all,mxfp8")
    assert "lm_head" not in tried("inspect", "--recipes", "nvfp4,mxfp8@all")
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), *step, "--recipes", "mxfp8,nvfp4+late(0.2)"]) == 2
    assert "--recipes='nvfp4+late(0.2)': one step is looked at, and +late(0.2) changes a run" in capsys.readouterr().err


def test_one_step_has_no_amax_of_an_earlier_one(folder, tmp_path, capsys):
    (tmp_path / "page.txt").write_text("the model reads a block of sixteen values " * 20)
    step = ["--text", str(tmp_path / "page.txt"), "--batch", "1", "--sequence", "32"]
    assert cli.main(["sensitivity", str(folder), *step, "--recipe", "nvfp4(amax=delayed)"]) == 2
    error = capsys.readouterr().err
    assert "--recipe=nvfp4(amax=delayed): one step has no amaxes of earlier ones; give a recipe without" in error


def test_a_page_shows_one_seed(folder, tmp_path, capsys):
    one = tmp_path / "both" / "seed-1"
    one.mkdir(parents=True)
    folder.rename(one / "nvfp4@all")
    assert cli.main(["report", str(one.parent)]) == 2
    assert f"both: several seeds, and a page shows one; give one of {one}\n" in capsys.readouterr().err
    assert cli.main(["report", str(one)]) == 0


def test_the_baseline_of_a_page_is_that_of_the_comparison(folder, tmp_path, capsys):
    """Also of one seed of it, and where the name of a recipe has a slash, so that its run lies deeper."""
    one = tmp_path / "both" / "seed-1"
    (one / "nvfp4").mkdir(parents=True)
    shutil.copytree(folder, one / "bf16")
    shutil.copytree(folder, one / "nvfp4" / "bf16")
    rows = [{"recipe": "nvfp4/bf16"}, {"recipe": "bf16"}]
    for path, key in ((one.parent / "league.json", "rows"), (one / "results.json", "results")):
        path.write_text(json.dumps({key: rows}))
        assert list(page._runs(one)) == ["nvfp4/bf16", "bf16"]
        path.unlink()
    assert list(page._runs(one)) == ["bf16"], "which is all that its name says"


def test_a_tokenizer_is_found_from_any_folder(tmp_path, monkeypatch):
    """A run whose --out and --cache are relative to where it was started."""
    pytest.importorskip("tokenizers")
    write_corpus(tmp_path / "corpus")
    config = tiny(tmp_path, tokenizer="bpe:300", steps=2, out=Path("runs/x"), cache=Path("runs/cache"))
    monkeypatch.chdir(tmp_path)
    loop.train(config, "bf16", load_data(config.data, config.run.cache))
    expected = load_subject(Path("runs/x")).encode("the model reads")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_subject(tmp_path / "runs" / "x").encode("the model reads") == expected
    (tmp_path / "runs" / "x").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="the tokenizer of .*moved is gone"):
        load_subject(tmp_path / "moved")


def test_inspect_of_what_measures_no_weight(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["inspect", str(folder), "--recipes", "bf16", "--out", str(out)]) == 2
    assert "recipes=['bf16']: none quantizes a weight; name one that does, such as 'nvfp4'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["inspect", "file"], "file: there is no "),
        (["inspect", "absent"], "is not there"),
        (["inspect", "."], "holds no config.json"),
        (["sensitivity", ".", "--text", "x", "--budget", "2"], "budget=2.0"),
        (["report", "."], "holds no run"),
        (["inspect", ".", "--recipes", "fp3"], "not a preset"),
        (["inspect", ".", "--recipes", "nvfp4,nvfp4"], "recipes='nvfp4,nvfp4': name each once"),
    ],
)
def test_mistakes_are_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no checkpoint")
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
