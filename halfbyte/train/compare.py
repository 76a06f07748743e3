"""Several recipes from the same initial weights on the same data in the same order: a table and a picture.

Every recipe is a run of its own in `out`/<recipe>. What finished is kept and what was stopped goes on, so a comparison
that broke off costs nothing but the steps since its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from halfbyte.train import data, files, lock, loop, measure, plot, treatment
from halfbyte.train import model as models
from halfbyte.train.config import TrainConfig

RESULTS, TABLE, PLOT = "results.json", "table.md", "losses.png"
DEFAULT = ("bf16", "nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "naive_fp4@all")
"""The baseline, the recipes, and a control that should lose: truncated gradients and no rotation, in every layer.

To see that the layers alone do not explain it, name `nvfp4@all` too: the same layers, gradients rounded well."""


def check(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the recipes to compare.

    Raises:
        ValueError: none, an unknown one, or one named twice.
    """
    names = tuple(names)
    if not names:
        raise ValueError("recipes='': name at least one")
    for name in names:
        treatment.get(name)
    if len(set(names)) != len(names):
        raise ValueError(f"recipes={','.join(names)!r}: name each once")
    return names


def compare(config: TrainConfig, names: tuple[str, ...] = DEFAULT) -> list[dict]:
    """Train every recipe and write results.json, table.md and losses.png to `config.run.out`.

    A schedule of recipes is for those that quantize a GEMM: a baseline in high precision stays one to its last step.

    Args:
        config: the run that all recipes share.
        names: recipes; gaps are measured against the first.

    Returns:
        The results in the order of `names`, each with `gap_percent` to the first (None if either diverged) and
        `recipe_schedule`, that it followed ("" for none).

    Raises:
        ValueError: an unknown recipe, no text, a folder with runs of another config or one that another process writes
            to, or a schedule that none follows.
    """
    names = check(names)
    schedules = {name: config.recipe_schedule if treatment.get(name).recipe.specs else "" for name in names}
    if config.recipe_schedule and not any(schedules.values()):
        raise ValueError(
            f"recipe_schedule={config.recipe_schedule!r}: it is for recipes that quantize a GEMM, and "
            f"recipes={','.join(names)!r} has none; name one, or use `halfbyte train`"
        )
    corpus = data.load(config.data, config.run.cache)
    runs = {
        name: replace(config, recipe_schedule=schedules[name], run=replace(config.run, out=config.run.out / name))
        for name in names
    }
    unfinished = [
        one.run.out for name, one in runs.items() if config.run.overwrite or not loop.finished(one, name, corpus)
    ]
    with lock.hold(f"compare {','.join(names)}", config.run.out, *unfinished):
        return _compare_held(config, runs, corpus, heading(config, corpus, schedules))


def _compare_held(config: TrainConfig, runs: dict[str, TrainConfig], corpus: data.Data, title: str) -> list[dict]:
    """Train every run in turn, holding the locks of all folders."""
    print(title, flush=True)
    files.remove_leftovers(config.run.out, RESULTS, TABLE, PLOT)
    results: list[dict] = []
    for number, (name, one) in enumerate(runs.items(), 1):
        if config.run.overwrite is False and loop.finished(one, name, corpus):
            print(f"[{number}/{len(runs)}] {name}: finished before, kept", flush=True)
        result = loop.train_held(one, name, corpus, title=f"[{number}/{len(runs)}] {name}")
        results.append(result | {"recipe_schedule": one.recipe_schedule})
        with_gaps(results)
        _write(config.run.out, config, corpus, results, title)
    return results


def with_gaps(results: list[dict]) -> None:
    """Add to every result its gap to the first in percent of the held-out loss."""
    base = results[0]["held_out_loss"]
    for result in results:
        loss = result["held_out_loss"]
        result["gap_percent"] = None if base is None or loss is None else 100 * (loss / base - 1)


def heading(config: TrainConfig, corpus: data.Data, schedules: Mapping[str, str]) -> str:
    """Return a line that says what is trained on what; schedules: of every recipe, "" for none."""
    shape = replace(models.get(config.model), vocab_size=corpus.vocab_size)
    device = loop.resolve_device(config)
    dtype = str(loop.resolve_dtype(config, device)).removeprefix("torch.")
    following = [name for name, schedule in schedules.items() if schedule]
    others = ", ".join(name for name, schedule in schedules.items() if not schedule)
    changes = f"; recipe schedule {config.recipe_schedule} for {', '.join(following)}" if following else ""
    return (
        f"{shape.parameters / 1e6:.2f}M parameters, {config.tokens / 1e6:.2f}M tokens per recipe of "
        f"{corpus.summary['corpus']} ({corpus.summary['tokenizer']}), {device.type}, GEMMs in {dtype}"
        f"{changes}{f', not for {others}' if following and others else ''}"
    )


def table(results: list[dict]) -> str:
    """Return the results as a Markdown table."""
    base = results[0]["recipe"]
    rows = [
        ("recipe", "held-out loss", f"gap to {base}", "tokens/s", "peak memory", "saved for backward"),
        ("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for result in results:
        loss, gap = result["held_out_loss"], result["gap_percent"]
        rows.append(
            (
                _followed(result),
                "diverged" if loss is None else f"{loss:.4f}",
                "" if gap is None or result["recipe"] == base else f"{gap:+.2f} %",
                f"{result['tokens_per_second']:,.0f}",
                _bytes(result["peak_memory_bytes"]),
                _bytes(result["saved_activation_bytes"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _followed(result: dict) -> str:
    schedule = result.get("recipe_schedule", "")
    return f"{result['recipe']}, then {schedule}" if schedule else result["recipe"]


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def _write(folder: Path, config: TrainConfig, corpus: data.Data, results: list[dict], title: str) -> None:
    content = {
        "heading": title,
        "data": corpus.summary,
        "environment": measure.environment(loop.resolve_device(config)),
        "results": results,
    }
    files.write_json(folder / RESULTS, content)
    notes = (
        "Held-out loss in nats per token, in high precision. Memory on a CPU is that of the whole process. Saved for "
        "backward: bytes that one micro-batch keeps, parameters not counted."
    )
    files.write_text(folder / TABLE, f"{title}\n\n{table(results)}\n\n{notes}\n")
    plot.curves(folder / PLOT, results, tokens_per_step=config.data.tokens_per_step, title=title)
