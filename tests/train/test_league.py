"""The league of a study: quantiles, paired gaps, pooled scatter, places, and who goes on to the next study."""

import json
import math
import statistics

import pytest

from halfbyte.train import league, plot
from halfbyte.train.league import t_quantile


@pytest.mark.parametrize(
    "freedom, quantile",  # tables of Student's t, two-sided 5 %
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (10, 2.2281),
        (17, 2.1098),
        (30, 2.0423),
        (120, 1.9799),
    ],
)
def test_quantiles_are_those_of_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_another_level_and_no_freedom():
    assert t_quantile(4, 0.99) == pytest.approx(4.6041, abs=1e-4)
    with pytest.raises(ValueError, match="freedom=0"):
        t_quantile(0)


def result(loss, speed=100.0, memory=10):
    lost = loss is None
    return {
        "held_out_loss": loss,
        "is_diverged": lost,
        "diverged_at": 3 if lost else None,
        "diverged_in": "training loss" if lost else None,
        "steps": 3,
        "tokens_per_second": speed,
        "peak_memory_bytes": memory,
    }


LOSSES = {
    "bf16": (3.00, 3.10, 3.05),
    "nvfp4": (3.03, 3.14, 3.08),
    "mxfp8": (3.003, 3.101, 3.055),
    "rl": (3.031, 3.139, 3.082),
    "naive_fp4@all": (3.5, 4.0, 5.0),
}


def made(losses=LOSSES, **options):
    results = {
        (name, seed): result(loss, 80.0 if name == "nvfp4" else 100.0)
        for name, own in losses.items()
        for seed, loss in enumerate(own)
    }
    return league.league(results, list(losses), dict.fromkeys(losses, 0.5), **options)


def gaps(name):
    return [100 * (own / base - 1) for own, base in zip(LOSSES[name], LOSSES["bf16"], strict=True)]


def test_gaps_are_paired_and_their_scatter_pooled_without_controls():
    found = made()
    names = ("nvfp4", "mxfp8", "rl")
    pooled = math.sqrt(statistics.mean(statistics.variance(gaps(name)) for name in names))
    assert found.deviation == pytest.approx(pooled) and found.freedom == 6
    rows = {row.recipe: row for row in found.rows}
    for name in (*names, "naive_fp4@all"):
        assert rows[name].gap == pytest.approx(statistics.mean(gaps(name)))
        assert rows[name].half == pytest.approx(2.446912 * pooled / math.sqrt(3), rel=1e-5)
    assert rows["bf16"].half is None and rows["bf16"].gap == 0
    assert rows["nvfp4"].speed == pytest.approx(0.8) and rows["nvfp4"].memory == 1


def test_runs_that_are_the_baselines_to_the_bit_narrow_no_interval():
    """Another order of sums changes nothing in fp32 on a CPU: three gaps of 0 are no sample of how gaps scatter."""
    found = made({**LOSSES, "bf16+order": LOSSES["bf16"]})
    plain = made()
    assert (found.deviation, found.freedom) == (plain.deviation, plain.freedom)
    assert next(row.gap for row in found.rows if row.recipe == "bf16+order") == 0


def test_rows_that_intervals_do_not_tell_apart_share_a_place():
    found = made()
    assert [(row.recipe, row.place) for row in found.rows] == [
        ("bf16", None),
        ("mxfp8", 1),
        ("nvfp4", 2),
        ("rl", 2),
        ("naive_fp4@all", None),
    ]
    text = league.league_table(found)
    assert "| 2 | `rl` | 3 |" in text and "6 degrees of freedom" in text


def test_speeds_of_different_devices_are_not_compared():
    def on(device, loss, tokens):
        return result(loss, tokens) | {"environments": [{"step": 0, "device": device}]}

    results = {
        ("bf16", 0): on("NVIDIA H200", 3.0, 100.0),
        ("bf16", 1): on("NVIDIA H100", 3.0, 60.0),
        ("nvfp4", 0): on("NVIDIA H200", 3.03, 80.0),
        ("mxfp8", 0): on("NVIDIA H100", 3.01, 54.0),
        ("rl", 0): on("NVIDIA H100", 3.02, 30.0),
        ("rl", 1): on("NVIDIA H100", 3.02, 45.0),
    }
    names = ("bf16", "nvfp4", "mxfp8", "rl", "row_scaled")
    found = league.league(results, list(names), dict.fromkeys(names, 0.5))
    assert {row.recipe: row.speed for row in found.rows} == {
        "bf16": 1.0,
        "nvfp4": pytest.approx(0.8),
        "mxfp8": None,
        "rl": pytest.approx(0.75),  # of the seed that both trained there
        "row_scaled": None,
    }
    text = league.league_table(found)
    assert "Trained on another device or CPU than bf16, so that speeds do not compare: `mxfp8`." in text
    assert "another device" not in league.league_table(made())


def test_speeds_beside_different_cpus_are_not_compared():
    results = {
        ("bf16", 0): result(3.0, 100.0) | {"processor": "a"},
        ("nvfp4", 0): result(3.1, 90.0) | {"processor": "a"},
        ("mxfp8", 0): result(3.1, 45.0) | {"processor": "b"},
        ("rl", 0): result(3.1, 80.0),  # of a run before CPUs were noted
    }
    names = ("bf16", "nvfp4", "mxfp8", "rl")
    found = league.league(results, list(names), dict.fromkeys(names, 0.5))
    assert [row.speed for row in found.rows if row.recipe in ("mxfp8", "rl")] == [None, None]
    assert next(row for row in found.rows if row.recipe == "nvfp4").speed == pytest.approx(0.9)


def test_one_seed_takes_the_scatter_of_another_study():
    single = {name: losses[:1] for name, losses in LOSSES.items()}
    alone = made(single)
    assert alone.deviation is None and all(row.half is None for row in alone.rows)
    assert "no intervals" in league.league_table(alone)
    found = made(single, pooled=(0.1, 4, "Final"))
    assert {row.recipe: row.half for row in found.rows}["nvfp4"] == pytest.approx(0.1 * 2.7764, abs=1e-4)
    assert "from Final" in league.league_table(found)


def test_a_run_that_diverged_has_no_gap_and_no_place():
    found = made(LOSSES | {"rl": (3.03, None, 3.1)})
    row = next(row for row in found.rows if row.recipe == "rl")
    assert (row.loss, row.gap, row.half, row.place, row.diverged) == (None, None, None, None, 1)
    assert "1 of 3 diverged" in league.league_table(found)


def test_missing_runs_leave_the_others():
    results = {("bf16", 0): result(3.0), ("nvfp4", 1): result(3.1)}
    found = league.league(results, ["bf16", "nvfp4", "rl"], dict.fromkeys(["bf16", "nvfp4", "rl"], 0.0))
    assert [row.gap for row in found.rows] == [0, None, None]


def test_the_best_are_no_control_no_noise_and_new(tmp_path):
    losses = {"bf16": (3.0,), "bf16+order": (2.9,), "nvfp4+bits(1)": (2.95,), "rl": (3.02,), "mxfp8": (3.01,),
              "nvfp4": (3.03,), "naive_fp4@all": (2.0,), "quartet2": (None,)}  # fmt: skip
    league.write(tmp_path, made(losses), "A study")
    values = league.read_values(tmp_path)
    assert league.best(values, 2, ["nvfp4"]) == ["mxfp8", "rl"]
    assert league.best(values, 1, ["mxfp8", "rl"]) == ["nvfp4"]
    with pytest.raises(ValueError, match=r"best\(4\): the study 'A study' has 3 such recipes"):
        league.best(values, 4, [])
    with pytest.raises(ValueError, match="run that study first"):
        league.read_values(tmp_path / "none")


def test_the_picture_has_the_mean_gap_in_percent_of_the_seeds_that_reached_a_step(tmp_path, monkeypatch):
    """Losses 4 and 2 of the baseline, 1 % and 2 % above them of seed 0, 3 % of seed 1, which has one evaluation."""
    losses = {("bf16", 0): (4.0, 2.0), ("bf16", 1): (4.0, 2.0), ("nvfp4", 0): (4.04, 2.04), ("nvfp4", 1): (4.12,)}
    for (name, seed), own in losses.items():
        folder = league.run_folder(tmp_path, name, seed)
        folder.mkdir(parents=True)
        lines = [{"kind": "eval", "step": 500 * i, "loss": loss} for i, loss in enumerate(own, 1)]
        (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = league.league(
        {key: result(own[-1]) for key, own in losses.items()}, ["bf16", "nvfp4"], {"bf16": 0, "nvfp4": 1}
    )
    drawn = []
    monkeypatch.setattr(plot, "gap_lines", lambda path, lines, base, title: drawn.append((path.name, lines, base)))
    league.draw_league(tmp_path, found, tokens_per_step=4000, title="A study")
    ((name, ((recipe, points),), base),) = drawn
    assert (name, recipe, base) == ("league.png", "nvfp4", "bf16")
    assert points == [(2.0, pytest.approx(2.0)), (4.0, pytest.approx(2.0))]  # millions of tokens; 1 and 3, then 2 alone


def test_what_was_not_trained_is_named_below():
    results = {(name, 0): result(LOSSES[name][0]) for name in ("bf16", "nvfp4")}
    found = league.league(results, list(LOSSES), dict.fromkeys(LOSSES, 0.5))
    table = league.league_table(found)
    assert "| `nvfp4` |" in table and "| `rl` |" not in table
    assert "Not trained yet: `mxfp8`, `rl`, `naive_fp4@all`." in table


def test_the_interval_of_the_row_before_decides_on_a_place():
    """One seed with gap 1.0 %, four about 1.2 %: their deviation is sqrt(0.04 / 3) %, t of 3 degrees is 3.1824."""
    found = made({"bf16": (1.0,) * 4, "nvfp4": (1.01,), "rl": (1.011, 1.013, 1.011, 1.013)})
    wide, narrow = 3.1824 * math.sqrt(0.04 / 3), 3.1824 * math.sqrt(0.04 / 3) / 2
    assert wide > 0.2 > narrow
    assert [row.half for row in found.rows[1:]] == [pytest.approx(half, rel=1e-3) for half in (wide, narrow)]
    assert [(row.recipe, row.place) for row in found.rows] == [("bf16", None), ("nvfp4", 1), ("rl", 1)]


def test_controls_are_last_behind_what_has_no_gap():
    found = made(LOSSES | {"rl": (None, None, None)})
    assert [row.recipe for row in found.rows] == ["bf16", "mxfp8", "nvfp4", "rl", "naive_fp4@all"]


def test_the_best_are_below_the_baseline_if_any_is():
    gaps = {"bf16": 0.0, "mxfp8": 0.1, "nvfp4": -0.5, "rl": 0.2}
    assert league.best({"rows": [{"recipe": n, "gap": gap} for n, gap in gaps.items()]}, 2, []) == ["nvfp4", "mxfp8"]


def test_a_loss_of_zero_is_a_gap_of_a_hundred_percent():
    assert made({"bf16": (2.0,), "nvfp4": (0.0,)}).rows[1].gap == -100


def test_a_run_that_moved_to_another_device_has_no_speed_beside_one_that_stayed():
    def on(*devices):
        return result(3.0) | {"environments": [{"step": 0, "device": device} for device in devices]}

    results = {("bf16", 0): on("H200"), ("nvfp4", 0): on("H200", "H100"), ("rl", 0): on("H200")}
    found = league.league(results, ["bf16", "nvfp4", "rl"], dict.fromkeys(["bf16", "nvfp4", "rl"], 0.5))
    assert {row.recipe: row.speed for row in found.rows} == {"bf16": 1.0, "nvfp4": None, "rl": 1.0}
