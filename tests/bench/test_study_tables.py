"""What docs say of a study follows from the results of its runs, computed here anew."""

import json
from statistics import mean

import pytest

from bench import study_tables

STUDIES = sorted(path.parent.name for path in study_tables.RESULTS.glob("*/league.json"))


def results(name):
    found = {}
    for path in study_tables.RESULTS.glob(f"{name}/seed-*/*/result.json"):
        run = json.loads(path.read_text())
        assert run["recipe"] == path.parent.name
        found[run["recipe"], int(path.parent.parent.name.removeprefix("seed-"))] = run
    return found


@pytest.mark.parametrize("name", STUDIES)
def test_rows_are_those_of_the_results(name):
    runs, table = results(name), study_tables.league(name)([])
    rows = json.loads((study_tables.RESULTS / name / "league.json").read_text())["rows"]
    assert {row["recipe"] for row in rows if row["seeds"]} == {recipe for recipe, _ in runs}
    for row in rows:
        if not row["seeds"]:
            assert (
                f"| `{row['recipe']}` |" not in table and f"`{row['recipe']}`" in table.rpartition("Not trained yet")[2]
            )
            continue
        own = [runs[row["recipe"], seed] for seed in row["seeds"]]
        base = [runs["bf16", seed] for seed in row["seeds"]]
        pairs = list(zip(own, base, strict=True))
        gap = mean(100 * (a["held_out_loss"] / b["held_out_loss"] - 1) for a, b in pairs)
        alike = [(a, b) for a, b in pairs if a.get("processor") == b.get("processor")]
        speeds = [a["steady_tokens_per_second"] / b["steady_tokens_per_second"] for a, b in alike]
        memory = mean(a["peak_memory_bytes"] / b["peak_memory_bytes"] for a, b in pairs)
        (line,) = [line for line in table.splitlines() if f"| `{row['recipe']}` |" in line]
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert float(cells[3]) == pytest.approx(mean(run["held_out_loss"] for run in own), abs=6e-5)
        if row["recipe"] != "bf16":
            assert float(cells[4].replace("−", "-").split(" ")[0]) == pytest.approx(gap, abs=6e-3)
        if speeds:
            assert float(cells[5].rstrip("×")) == pytest.approx(mean(speeds), abs=6e-3)
        else:
            assert not cells[5] and f"`{row['recipe']}`" in table.partition("another CPU")[2].partition("\n")[0]
        assert float(cells[6].rstrip("×")) == pytest.approx(memory, abs=6e-3)


@pytest.mark.parametrize("name", STUDIES)
def test_runs_of_a_study_differ_in_recipe_and_seed_alone(name):
    """And in what a change behind a recipe's name says."""
    texts = set()
    for (recipe, _), run in results(name).items():
        told = dict(run["identity"])
        assert told.pop("recipe").partition("+")[0] == recipe.partition("+")[0]
        for key in ("recipe_key", "seed", "recipe_schedule", "bits"):
            told.pop(key, None)
        if "+" not in recipe:
            texts.add(json.dumps(told, sort_keys=True))
    assert len(texts) == 1


def test_the_screen_has_the_best_learning_rate():
    rates = {run["identity"]["optim"]["lr"]: run["held_out_loss"] for run in results("lr").values()}
    assert {run["identity"]["optim"]["lr"] for run in results("screen").values()} == {min(rates, key=rates.get)}
