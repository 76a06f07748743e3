"""A comparison: table, picture, and nothing lost that was finished."""

import json
from dataclasses import replace

import pytest

from halfbyte.train import compare, loop, meaning, plot, study
from halfbyte.train.config import two_cores

pytest.importorskip("matplotlib")


def test_table_results_and_picture(run):
    config, _ = run(steps=4, eval_every=2)
    results = compare.compare(config, ("bf16", "nvfp4", "naive_fp4@all"))
    out = config.run.out
    written = json.loads((out / "results.json").read_text())
    assert [r["recipe"] for r in written["results"]] == ["bf16", "nvfp4", "naive_fp4@all"]
    base, quantized = results[:2]
    assert base["gap_percent"] == 0
    assert quantized["gap_percent"] == 100 * (quantized["held_out_loss"] / base["held_out_loss"] - 1)
    assert written["data"]["sha256"] and written["environment"]["torch"]
    lines = (out / "table.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 3
    assert f"{quantized['gap_percent']:+.2f} %" in "\n".join(lines)
    picture = (out / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_a_schedule_leaves_the_baseline_alone(run, capsys):
    """A bf16 that quantizes from some step on is none to measure gaps against."""
    config, _ = run(steps=3, log_every=1, recipe_schedule="2:naive_fp4")
    base, quantized = compare.compare(config, ("bf16", "nvfp4"))
    assert (base["recipe_schedule"], quantized["recipe_schedule"]) == ("", "2:naive_fp4")
    assert "recipe_schedule" not in base["identity"] and "recipe_schedule" in quantized["identity"]
    out = config.run.out
    changes = [(out / name / "log.jsonl").read_text().count('"naive_fp4"') for name in ("bf16", "nvfp4")]
    assert changes == [0, 1]
    lines = (out / "table.md").read_text().splitlines()
    words = "; recipe schedule 2:naive_fp4 for nvfp4, not for bf16"
    assert lines[0].endswith(words) and words in capsys.readouterr().out
    assert [line.split(" |")[0].rstrip() for line in lines[4:6]] == ["| bf16", "| nvfp4, then 2:naive_fp4"]
    plain, _ = run(steps=3, log_every=1)
    alone = loop.train(replace(plain, run=replace(plain.run, out=out / "alone")), "bf16", run()[1])
    assert alone["held_out_loss"] == base["held_out_loss"]
    with pytest.raises(ValueError, match="recipe_schedule='2:naive_fp4'.*recipes='bf16' has none"):
        compare.compare(config, ("bf16",))


def test_a_crash_loses_nothing_that_finished(run, monkeypatch, capsys):
    config, _ = run(steps=4)
    names = ("bf16", "mxfp8", "nvfp4")
    train = loop.Trainer.train

    def fail(trainer):
        if trainer.recipe == "nvfp4":
            raise RuntimeError("power cut")
        return train(trainer)

    monkeypatch.setattr(loop.Trainer, "train", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        compare.compare(config, names)
    kept = json.loads((config.run.out / "results.json").read_text())["results"]
    assert [r["recipe"] for r in kept] == ["bf16", "mxfp8"]
    times = {name: (config.run.out / name / "result.json").stat().st_mtime_ns for name in names[:2]}

    monkeypatch.setattr(loop.Trainer, "train", train)
    results = compare.compare(config, names)
    assert results[:2] == kept
    assert times == {name: (config.run.out / name / "result.json").stat().st_mtime_ns for name in names[:2]}
    assert "mxfp8: finished before, kept" in capsys.readouterr().out


def test_another_config_does_not_overwrite_what_is_there(run):
    config, _ = run(steps=2)
    compare.compare(config, ("bf16",))
    other, _ = run(steps=3)
    with pytest.raises(
        ValueError, match=r"holds another run \(optim.steps: 2 there, 3 here: the learning rate of step 2"
    ):
        compare.compare(other, ("bf16",))


def test_divergence_is_a_result():
    fine = {"recipe": "bf16", "held_out_loss": 2.0, "tokens_per_second": 1e4}
    lost = {"recipe": "naive_fp4", "held_out_loss": None, "tokens_per_second": 1e3}
    memory = {"peak_memory_bytes": 3 << 30, "saved_activation_bytes": 5 << 20}
    results = [fine | memory, lost | memory]
    compare.with_gaps(results)
    text = compare.table(results)
    assert "diverged" in text and "3.00 GiB" in text and "5.0 MiB" in text


def test_of_a_loss_of_zero_nothing_is_a_percentage():
    """Text of one letter is learned without a rest."""
    memory = {"peak_memory_bytes": 3 << 30, "saved_activation_bytes": 5 << 20, "tokens_per_second": 1e4}
    losses = {"bf16": 0.0, "nvfp4": 0.25, "naive_fp4@all": 0.0}
    results = [{"recipe": name, "held_out_loss": loss} | memory for name, loss in losses.items()]
    compare.with_gaps(results)
    assert [result["gap_percent"] for result in results] == [None] * 3
    assert "| nvfp4         |        0.2500 |" in compare.table(results)
    said = meaning.closing_lines(two_cores(), results, has_gpu=False)
    assert "a loss of 0" in said[0] and "None" not in "".join(said)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "name at least one"),
        (("bf16", "bf16"), "name each once"),
        (("bf16", "fp3"), "recipe='fp3' is not a preset"),
    ],
)
def test_wrong_lists_of_recipes(names, reason):
    with pytest.raises(ValueError, match=reason):
        compare.check_names(names)


def test_smoothing_starts_at_the_first_loss_and_follows_a_constant():
    assert plot.smooth([4.0] * 5) == pytest.approx([4.0] * 5)
    assert plot.smooth([4.0, 2.0])[0] == pytest.approx(4.0)
    assert plot.smooth([]) == []


def test_one_run_and_several_do_not_share_a_folder(run):
    config, data = run(steps=2)
    compare.compare(config, ["bf16", "nvfp4"])
    several = config.run.out
    with pytest.raises(ValueError, match=r"run' holds the runs of a comparison \(results.json\); choose another --out"):
        loop.train(config, "bf16", data)
    with pytest.raises(ValueError, match="holds the runs of a comparison"):
        loop.train(replace(config, run=replace(config.run, overwrite=True)), "bf16", data)
    assert (several / "results.json").exists() and not (several / "config.json").exists()
    alone = replace(config, run=replace(config.run, out=several.with_name("alone")))
    loop.train(alone, "bf16", data)
    with pytest.raises(ValueError, match=r"alone' holds one run \(config.json\); choose another --out for several"):
        compare.compare(alone, ["bf16", "nvfp4"])
    whole = study.Study(title="x", config=alone, pieces=(study.StudyPiece(recipes=("bf16",), seeds=(0, 1)),))
    with pytest.raises(ValueError, match="alone' holds one run"):
        study.run_study(whole, whole.pieces, workers=1, minutes=0, interrupts=None)
    assert compare.compare(config, ["bf16", "nvfp4"])[0]["held_out_loss"] > 0
