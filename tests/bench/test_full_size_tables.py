"""The run of full size: its table follows from what it wrote, and its plan is near what was measured."""

import json

import pytest

from bench import full_size_tables
from halfbyte.plan import plan

RUNS = {run.recipe: run for run in full_size_tables.load()}


def cells_of(recipe):
    (line,) = [line for line in full_size_tables.table([]).splitlines() if line.startswith(f"| `{recipe}` |")]
    return [cell.strip().replace(",", "").replace("−", "-") for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_the_table_says_what_the_run_wrote(recipe):
    folder = full_size_tables.FOLDER / recipe
    result, counted = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "full_size"))
    base = json.loads((full_size_tables.FOLDER / "bf16" / "result.json").read_text())
    cells = cells_of(recipe)
    assert int(cells[1]) == result["steps"] >= 150 and result["tokens"] == 65_536 * result["steps"]
    assert float(cells[2]) == pytest.approx(result["held_out_loss"], abs=6e-5)
    if recipe != "bf16":
        gap = 100 * (result["held_out_loss"] / base["held_out_loss"] - 1)
        assert float(cells[3].rstrip(" %")) == pytest.approx(gap, abs=0.06)
    assert float(cells[4]) == pytest.approx(result["steady_tokens_per_second"], abs=0.6)
    slower = base["steady_tokens_per_second"] / result["steady_tokens_per_second"]
    assert float(cells[6].rstrip("×")) == pytest.approx(slower, abs=6e-4)
    assert float(cells[7]) == pytest.approx(counted["step_bytes"] / counted["steps"] / 1e9, abs=6e-3)
    assert float(cells[9]) == pytest.approx(result["peak_memory_bytes"] / 2**30, abs=0.06)


def test_losses_are_means_of_ten_steps_of_the_log():
    lines = full_size_tables.curve([]).splitlines()
    ends = [int(cell.split("–")[1]) for cell in lines[0].split("|")[2:-1]]
    for recipe in RUNS:
        log = map(json.loads, (full_size_tables.FOLDER / recipe / "log.jsonl").read_text().splitlines())
        losses = {line["step"]: line["loss"] for line in log if line["kind"] == "step"}
        (line,) = [line for line in lines if line.startswith(f"| `{recipe}`")]
        for end, cell in zip(ends, line.split("|")[2:-1], strict=True):
            assert float(cell) == pytest.approx(sum(losses[end - i] for i in range(10)) / 10, abs=6e-4)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_the_plan_knows_every_byte_that_was_gathered(recipe):
    run = RUNS[recipe]
    sent = [c.message for c in plan(run.request).collectives if c.what == "weights"]
    assert sum(sent) * run.counted["steps"] == run.counted["step_bytes"]


def test_runs_differ_in_recipe_and_in_what_travels_alone():
    first, other = (run.config for run in RUNS.values())
    for key in first["identity"]:
        assert key in ("recipe", "recipe_key") or first["identity"][key] == other["identity"][key], key
    assert {k for k in first["mesh"] if first["mesh"][k] != other["mesh"][k]} <= {"weights", "head"}
