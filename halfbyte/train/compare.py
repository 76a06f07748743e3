"""Several recipes from the same initial weights on the same data in the same order: a table and a picture.

Every recipe is a run of its own in `out`/<recipe>. What finished is kept and what was stopped goes on, so a comparison
that broke off costs nothing but the steps since its last checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from halfbyte import files
from halfbyte.train import auto, data, divergence, folder, loop, measure, plot, progress, treatment
from halfbyte.train import model as models
from halfbyte.train.config import TrainConfig
from halfbyte.train.ranks import World
from halfbyte.train.recorded import COMPARISON, speed
from halfbyte.train.signals import Interrupts

RESULTS, TABLE, PLOT = COMPARISON, "table.md", "losses.png"
DEFAULT = ("bf16", "nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "naive_fp4@all")
"""The baseline, the recipes, and a control that should lose: truncated gradients and no rotation, in every layer.

To see that the layers alone do not explain it, name `nvfp4@all` too: the same layers, gradients rounded well."""


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the recipes to compare.

    Raises:
        ValueError: none, an unknown one, or one named twice.
    """
    names = tuple(names)
    if not names:
        raise ValueError("recipes='': name at least one")
    if len(set(names)) != len(names):
        raise ValueError(f"recipes={','.join(names)!r}: name each once")
    treatment.refuse_twins(names)
    return names


def compare(
    config: TrainConfig,
    names: tuple[str, ...] = DEFAULT,
    *,
    interrupts: Interrupts | None = None,
    ranks: World | None = None,
) -> list[dict]:
    """Train every recipe and write results.json, table.md and losses.png to `config.run.out`.

    A schedule of recipes is for those that quantize a GEMM: a baseline in high precision stays one to its last step.

    Args:
        config: the run that all recipes share.
        names: recipes; gaps are measured against the first.
        interrupts, ranks: who hears of signals, and with whom this process trains, see loop.Trainer.

    Returns:
        The results in the order of `names`, each with `gap_percent` to the first (None if either diverged, or the
        first's loss is 0) and `recipe_schedule`, that it followed ("" for none). One that diverged has no
        `held_out_loss` either.

    Raises:
        ValueError: an unknown recipe, no text, a folder with runs of another config or one that another process writes
            to, or a schedule that none follows.
        Stopped: a signal came.
    """
    names, ranks = check_names(names), ranks or World()
    schedules = treatment.schedules_of(config, names)
    if config.recipe_schedule and not any(schedules.values()):
        raise ValueError(
            f"recipe_schedule={config.recipe_schedule!r}: it is for recipes that quantize a GEMM, and "
            f"recipes={','.join(names)!r} has none; name one, or use `halfbyte train`"
        )
    ranks.first(lambda: folder.refuse_run(config.run.out))
    corpus = ranks.first_here(lambda: data.load_data(config.data, config.run.cache, config.run.out), "load_data")
    folders = [config.run.out / name for name in names]
    config, notes = ranks.first(lambda: folder.settled(loop.over(config, ranks), *folders))  # alike, or gaps mislead
    runs = {
        name: treatment.applied(
            replace(config, recipe_schedule=schedules[name], run=replace(config.run, out=config.run.out / name)), name
        )
        for name in names
    }

    def is_unfinished(name: str) -> bool:
        return config.run.overwrite or not loop.finished(runs[name], name, corpus)

    unfinished = ranks.first(lambda: [one.run.out for name, one in runs.items() if is_unfinished(name)])
    with loop.held_by_first(ranks, f"compare {','.join(names)}", config.run.out, *unfinished):
        title = heading(config, corpus, schedules)
        print(title, flush=True)
        auto.say(notes if unfinished else ())
        auto.say(note for name, one in runs.items() for note in treatment.notes(one, name))
        ranks.first(lambda: files.remove_leftovers(config.run.out, RESULTS, TABLE, PLOT))
        return _compare_held(config, runs, corpus, title, interrupts, ranks)


def _compare_held(
    config: TrainConfig,
    runs: dict[str, TrainConfig],
    corpus: data.Data,
    title: str,
    interrupts: Interrupts | None,
    ranks: World,
) -> list[dict]:
    """Train every run in turn for a caller whose first rank holds the locks of all folders."""
    results: list[dict] = []
    with progress.board(tuple(runs)) as board:
        for number, (name, one) in enumerate(runs.items(), 1):
            title_of_run = f"[{number}/{len(runs)}] {name}"
            before = None if config.run.overwrite else ranks.first(partial(loop.finished, one, name, corpus))
            if before:
                print(f"{title_of_run}: finished before{_in_brackets(divergence.of(before))}, kept", flush=True)
            _forget_the_last_run(config)
            result = loop.train_held(one, name, corpus, show=board.start, interrupts=interrupts, ranks=ranks)
            diverged = divergence.of(result)
            if diverged and not before:
                print(f"{title_of_run}: {diverged.in_full()}", flush=True)
            results.append(_without_loss(result, diverged) | {"recipe_schedule": one.recipe_schedule})
            with_gaps(results)
            board.finish(name, *_loss_and_gap(results[-1], results[0]["recipe"]))
            ranks.first(partial(_write, config.run.out, config, corpus, results, title))
    return results


def _forget_the_last_run(config: TrainConfig) -> None:
    """Free its model and its graph, which refer to each other, and its compiled code, of which torch keeps so much."""
    gc.collect()
    if config.compile == "on":
        torch._dynamo.reset()


def with_gaps(results: list[dict]) -> None:
    """Add to every result its gap to the first in percent of its held-out loss, None if either diverged or it is 0."""
    base = divergence.loss(results[0]) or None  # of text without a surprise it is 0, of which nothing is a percentage
    for result in results:
        loss = divergence.loss(result)
        result["gap_percent"] = None if base is None or loss is None else 100 * (loss / base - 1)


def failed(results: list[dict]) -> bool:
    """Return whether the baseline or a recipe that is no control diverged: a control may."""
    lost = [result for result in results if divergence.of(result)]
    return any(result is results[0] or not treatment.treatment_of(result["recipe"]).is_control for result in lost)


def remarks(results: list[dict]) -> list[str]:
    """Return a sentence on every run that diverged, the first of them on the gaps that are missing for it."""
    lines = []
    for result in results:
        diverged = divergence.of(result)
        if diverged:
            name = result["recipe"]
            is_control = treatment.treatment_of(name).is_control
            who = f"{name}, a control that is meant to lose," if is_control else name
            consequence = ": there are no gaps without it" if result is results[0] else ""
            lines.append(f"{who} {diverged.in_full()}{consequence}.")
    return lines


def _without_loss(result: dict, diverged: divergence.Divergence | None) -> dict:
    """Return a result, of a run that diverged with everything that it has to say of that, whatever version wrote it."""
    if diverged is None:
        return result
    step, what = diverged
    return result | {"held_out_loss": None, "is_diverged": True, "diverged_at": step, "diverged_in": what}


def _in_brackets(diverged: divergence.Divergence | None) -> str:
    return f" ({diverged})" if diverged else ""


def heading(config: TrainConfig, corpus: data.Data, schedules: Mapping[str, str]) -> str:
    """Return a line that says what is trained on what; schedules: of every recipe, "" for none."""
    shape = replace(models.model_preset(config.model), vocab_size=corpus.vocab_size)
    device = loop.resolve_device(config)
    dtype = str(loop.resolve_dtype(config, device)).removeprefix("torch.")
    following = [name for name, schedule in schedules.items() if schedule]
    others = ", ".join(name for name, schedule in schedules.items() if not schedule)
    ranks = f", {config.mesh.size} ranks ({config.mesh.in_words()})" if config.mesh.size > 1 else ""
    texts = dict.fromkeys(schedules[name] for name in following)
    changes = f"; recipe schedule {' and '.join(texts)} for {', '.join(following)}" if following else ""
    return (
        f"{shape.parameters / 1e6:.2f}M parameters, {config.tokens / 1e6:.2f}M tokens per recipe of "
        f"{corpus.summary['corpus']} ({corpus.summary['tokenizer']}), {device.type}{ranks}, GEMMs in {dtype}"
        f"{auto.in_words(config)}{changes}{f', not for {others}' if following and others else ''}"
    )


def table(results: list[dict]) -> str:
    """Return the results as a Markdown table."""
    base = results[0]["recipe"]
    rows = [
        ("recipe", "held-out loss", f"gap to {base}", "tokens/s", "peak memory", "saved for backward"),
        ("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for result in results:
        rows.append(
            (
                _followed(result),
                *_loss_and_gap(result, base),
                f"{speed(result):,.0f}",
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


def _loss_and_gap(result: dict, base: str) -> tuple[str, str]:
    """Return the held-out loss of a result and its gap to that of the recipe `base`, in words."""
    diverged, gap = divergence.of(result), result["gap_percent"]
    loss = str(diverged) if diverged else f"{result['held_out_loss']:.4f}"
    return loss, "" if gap is None or result["recipe"] == base else f"{gap:+.2f} %"


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
    files.write_text(folder / TABLE, "\n\n".join((title, table(results), *remarks(results), notes)) + "\n")
    plot.curves(folder / PLOT, results, tokens_per_step=config.data.tokens_per_step, title=title)
