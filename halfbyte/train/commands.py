"""The commands `halfbyte train` and `halfbyte compare`: options in, a training run out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar, get_args

import tyro

from halfbyte.train import allocator, auto, data, divergence, launch, loop, meaning, signals, treatment
from halfbyte.train import compare as comparison
from halfbyte.train import config as configs

Options = TypeVar("Options", "Train", "Compare")
PRESET = "two_cores"


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model under one recipe. A run found in --out goes on where it stopped."""

    recipe: str = "nvfp4"
    """A recipe of `halfbyte.recipes`; with `@all` behind it no layer stays in high precision."""
    preset: str = PRESET
    """Where the defaults below come from: two_cores, two_cores_moe, one_gpu, tiny."""
    config: configs.TrainConfig = field(default_factory=configs.two_cores)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train several recipes alike and write a table and a plot. What finished before is kept."""

    recipes: str = ",".join(comparison.DEFAULT)
    """Recipes, separated by commas, each with or without `@all`; gaps are measured against the first."""
    preset: str = PRESET
    """Where the defaults below come from: two_cores, two_cores_moe, one_gpu, tiny."""
    config: configs.TrainConfig = field(default_factory=configs.two_cores)


def train_command(arguments: list[str]) -> int:
    """Run `halfbyte train`; the exit status is 1 if the run diverged, 130 or 143 if a signal stopped it."""
    return _until_stopped(_train, _parse(Train, arguments, out=Path("runs/train")))


def compare_command(arguments: list[str]) -> int:
    """Run `halfbyte compare`; the exit status is 1 if the baseline or a recipe diverged that is no control."""
    return _until_stopped(_compare, _parse(Compare, arguments, out=Path("runs/compare")))


def _until_stopped(run: Callable[[Options, signals.Interrupts], int], options: Options) -> int:
    """Run a command; ctrl-C and SIGTERM end it with one line and the status that shells expect."""
    name, overwrite = type(options).__name__.lower(), options.config.run.overwrite
    launch.refuse_many(f"halfbyte {name}")
    allocator.keep_freed_memory()
    command = "the same command without --overwrite" if overwrite else "the same command"

    def say(stopped: signals.Stopped) -> None:
        begin = "\n" if sys.stderr.isatty() else ""  # after the ^C that a terminal echoes
        print(f"{begin}halfbyte {name}: {stopped}; {command} goes on {stopped.where}", file=sys.stderr, flush=True)

    try:
        with signals.watch(say) as interrupts:
            return run(options, interrupts)
    except signals.Stopped as stopped:
        say(stopped)
        return stopped.status


def _train(options: Train, interrupts: signals.Interrupts) -> int:
    treatment.treatment_of(options.recipe)  # before the text is read
    run = options.config.run
    text = data.load_data(options.config.data, run.cache)
    result = loop.train(options.config, options.recipe, text, interrupts=interrupts)
    diverged = divergence.of(result)
    if diverged:
        print(f"{options.recipe} {diverged} ({diverged.what} not finite); the log is in {run.out}", file=sys.stderr)
        return 1
    print(f"{options.recipe}: held-out loss {result['held_out_loss']:.4f}, {result['tokens_per_second']:,.0f} tokens/s")
    print(f"log, checkpoints and result are in {run.out}")
    return 0


def _compare(options: Compare, interrupts: signals.Interrupts) -> int:
    names = comparison.check_names(name.strip() for name in options.recipes.split(",") if name.strip())
    results = comparison.compare(options.config, names, interrupts=interrupts)
    out = options.config.run.out
    print("\n" + "\n\n".join((comparison.table(results), *comparison.remarks(results))) + "\n")
    print(f"written to {out}: {comparison.TABLE}, {comparison.RESULTS}, {comparison.PLOT}\n")
    print("What this means, and what to do next:")
    for line in meaning.closing_lines(options.config, results):
        print(f"- {line}")
    return int(comparison.failed(results))


def _with_values(arguments: list[str]) -> list[str]:
    """Return the arguments with a value behind each of `--fuse`, `--compile`, `--graph` and their `--no-` forms."""
    plain = []
    for argument, after in zip_longest(arguments, arguments[1:]):
        option = argument.removeprefix("--no-") if argument.startswith("--no-") else argument.removeprefix("--")
        if not argument.startswith("--") or option not in auto.OPTIONS:
            plain.append(argument)
        elif argument.startswith("--no-"):
            plain += [f"--{option}", "off"]
        else:
            plain += [argument] if after in get_args(configs.Switch) else [argument, "on"]
    return plain


def _parse(kind: type[Options], arguments: list[str], out: Path) -> Options:
    """Read the options of one command; `--preset` is looked up first, because it sets the defaults of the others."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", default=PRESET)
    preset = configs.training_preset(peek.parse_known_args(arguments)[0].preset)
    preset = replace(preset, run=replace(preset.run, out=out))
    return tyro.cli(
        kind,
        prog=f"halfbyte {kind.__name__.lower()}",
        args=_with_values(arguments),
        default=kind(config=preset),
        config=(tyro.conf.OmitArgPrefixes,),
    )
