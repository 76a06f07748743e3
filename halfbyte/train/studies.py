"""The commands `halfbyte inspect` and `halfbyte sensitivity`: a model in, tables, CSV and pictures out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from halfbyte import convert, files, stats
from halfbyte.nn.linear import describe_recipe
from halfbyte.policy import Keep
from halfbyte.spec import Recipe
from halfbyte.stats.inspection import RECIPES, WEIGHT_HEAD, InspectReport
from halfbyte.stats.sensitivity import BUDGET, HEAD
from halfbyte.stats.sinks import WIDTH
from halfbyte.stats.table import HEAD as STEP_HEAD
from halfbyte.train.asked import read_options
from halfbyte.train.documents import TEXT_FIELD
from halfbyte.train.subject import Subject, load_subject
from halfbyte.train.treatment import treatment_of
from halfbyte.values import split_outside

SHOWN = 40
"""Rows of a table; the CSV has all."""
DEFAULT = "nvfp4"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Which text a step reads."""

    batch: int = 4
    """Sequences of the step."""
    sequence: int = 256
    """Tokens of one sequence."""
    text_field: str = TEXT_FIELD
    """Of the records of JSON and Parquet files, that holds their text."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the GEMMs. auto: bfloat16 on a GPU, float32 on a CPU."""
    budget: float = BUDGET
    """Share of the linear layers' FLOPs that the proposal may put in high precision."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget={self.budget}: give a share, 0 < budget <= 1")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Say which layers and operands of a model lose most under which recipe, what is wrong with them, what to keep."""

    source: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, one of its checkpoints, or a folder of transformers."""
    text: Path | None = None
    """A text, of which one step is run: activations, gradients and the proposal come from it. A file or a folder, as
    `halfbyte train --corpus`."""
    recipes: str = ",".join(RECIPES)
    """To measure weights under, separated by commas; the step runs under the first, of heads too with `@all` behind."""
    out: Path = Path("runs/inspect")
    """Folder of inspect.csv, the heat-map and the histograms."""
    step: Annotated[Text, tyro.conf.arg(name="")] = Text()


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions:
    """Put one operand at a time in high precision, run the same step, and rank what that gives back."""

    source: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, one of its checkpoints, or a folder of transformers."""
    text: Path
    """A text, of which one step is run: a file or a folder, as `halfbyte train --corpus`."""
    recipe: str = ""
    """Of the layers, of heads too with `@all` behind it; by default that of the run, else nvfp4."""
    by: Literal["kind", "layer"] = "kind"
    """Try layers together whose names differ in numbers only, or every layer alone."""
    operands: bool = True
    """Try each of the six operands too, not only all of a layer together."""
    out: Path = Path("runs/sensitivity")
    """Folder of sensitivity.csv and the heat-map."""
    step: Annotated[Text, tyro.conf.arg(name="")] = Text()


def _parse(kind: Any, name: str, arguments: list[str]) -> Any:
    prog = f"halfbyte {name}"
    return read_options(lambda: tyro.cli(kind, prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,)), prog)


def _in_dtype(loss: Any, dtype: str) -> Any:
    """Return the loss with GEMMs in a dtype."""

    def run(model: torch.nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device.type
        in_bf16 = dtype == "bfloat16" or (dtype == "auto" and device == "cuda")
        with torch.autocast(device, torch.bfloat16, enabled=in_bf16):
            return loss(model)

    return run


def _print(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # cells cut to fit say nothing; lines may wrap
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, no_wrap=True, justify="left" if i < 2 else "right")
    for row in rows[:SHOWN]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > SHOWN:
        console.print(f"… {len(rows) - SHOWN} more rows in the CSV", markup=False)


def inspect_command(arguments: list[str]) -> int:
    """Run `halfbyte inspect`; returns 0."""
    options: InspectOptions = _parse(InspectOptions, "inspect", arguments)
    asked = [word for word in split_outside(options.recipes, ",") if word]
    chosen = {word: _of_a_step(word, "recipes") for word in asked}
    if not chosen:
        raise ValueError("recipes='': name at least one")
    if len(chosen) < len(asked):
        raise ValueError(f"recipes={options.recipes!r}: name each once")
    subject = load_subject(options.source)
    step = options.step
    batch = None
    if options.text is not None:
        batch = _in_dtype(subject.batch(options.text, step.batch, step.sequence, step.text_field), step.dtype)
    (_, keep), *_ = chosen.values()
    found = stats.inspect(
        subject.model, batch, recipes=[recipe for recipe, _ in chosen.values()], budget=step.budget, keep=keep
    )
    report = _named(found, {describe_recipe(recipe): word for word, (recipe, _) in chosen.items()})
    files.write_text(options.out / "inspect.csv", report.csv())
    paths = report.draw(options.out)
    _print(f"weights of {subject.name}, those that lose most first", WEIGHT_HEAD, report.weight_rows())
    if report.step is not None:
        _print("one step", STEP_HEAD, report.step.operand_rows())
    _print_lines(report.closing_lines(), ["inspect.csv", *(path.name for path in paths)], options.out)
    return 0


def _named(report: InspectReport, names: dict[str, str]) -> InspectReport:
    """Return a report with recipes called as they were asked for: the key of one with options fills a screen."""
    weights = tuple(replace(one, recipe=names[one.recipe]) for one in report.weights)
    step = report.step
    if step is not None:
        step = replace(
            step, layers=tuple(replace(row, recipe=names.get(row.recipe, row.recipe)) for row in step.layers)
        )
    return replace(report, weights=weights, step=step)


def _print_lines(said: list[str], names: list[str], out: Path) -> None:
    for line in said:
        print(line)
    print(f"written to {out}: {', '.join(names)}")


def sensitivity_command(arguments: list[str]) -> int:
    """Run `halfbyte sensitivity`; returns 0."""
    options: SensitivityOptions = _parse(SensitivityOptions, "sensitivity", arguments)
    subject = load_subject(options.source)
    recipe, keep = _of_a_step(options.recipe, "recipe") if options.recipe else _own_recipe(subject)
    if recipe.amax is not None:
        named = options.recipe or subject.recipe
        raise ValueError(f"--recipe={named}: one step has no amaxes of earlier ones; give a recipe without amax=")
    step = options.step
    loss = _in_dtype(subject.batch(options.text, step.batch, step.sequence, step.text_field), step.dtype)
    convert.quantize_(subject.model, recipe, keep=keep)
    report = stats.sensitivity(subject.model, lambda: loss(subject.model), by=options.by, operands=options.operands)
    files.write_text(options.out / "sensitivity.csv", report.csv())
    paths = report.draw(options.out)
    _print(f"{subject.name}: one at a time in high precision", HEAD, report.rows())
    quantized, plain = report.losses
    said = [
        f"all quantized: gradient cosine {report.cosine:.6f}, loss {quantized:.6f}; unquantized {plain:.6f}",
        *str(report.propose(options.step.budget)).split("\n"),
    ]
    _print_lines(said, ["sensitivity.csv", *(path.name for path in paths)], options.out)
    return 0


def _of_a_step(word: str, option: str) -> tuple[Recipe, Keep]:
    """Return the recipe of a word, and which layers of a model do not follow it: with `@all` none."""
    name, *changes = split_outside(word, "+")
    if changes:
        raise ValueError(
            f"--{option}={word!r}: one step is looked at, and +{changes[0]} changes a run of many; leave it out"
        )
    chosen = treatment_of(name)
    return chosen.recipe, Keep(last_fraction=0) if chosen.keep is None else chosen.keep


def _own_recipe(subject: Subject) -> tuple[Recipe, Keep]:
    """Return what a run began with, nvfp4 where it quantized nothing or nobody says."""
    name, *_ = split_outside(subject.recipe, "+")
    recipe, keep = _of_a_step(name or DEFAULT, "recipe")
    return (recipe, keep) if recipe.specs else _of_a_step(DEFAULT, "recipe")
