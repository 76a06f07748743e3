"""The commands `halfbyte train` and `halfbyte compare`: options in, a training run out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import tyro

from halfbyte.arguments import ArgumentParser
from halfbyte.train import (
    allocator,
    auto,
    data,
    divergence,
    launch,
    loop,
    meaning,
    measure,
    recorded,
    signals,
    threads,
    treatment,
)
from halfbyte.train import compare as comparison
from halfbyte.train import config as configs
from halfbyte.train.asked import read_options
from halfbyte.train.ranks import World, is_lost, joined, lost_in_words
from halfbyte.values import split_outside

Options = TypeVar("Options", "Train", "Compare")
FAILED = 1
LATEST = "from its last checkpoint"


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model under one recipe. A run found in --out goes on where it stopped."""

    recipe: str = "nvfp4"
    """A recipe of `halfbyte.recipes`, with options as in `nvfp4(rht=64,sr=off)`; with `@all` behind it no layer stays
    in high precision; `+late(0.2)`, `+schedule(…)`, `+bits(1)` and `+order` change the run (docs/studies.md)."""
    preset: str = auto.PRESET
    """Where the defaults below come from: two_cores, two_cores_moe, small_gpu, one_gpu, tiny. auto: on a GPU one_gpu
    for a --model of 50M parameters or more, else small_gpu; without one two_cores."""
    config: configs.TrainConfig = field(default_factory=configs.two_cores)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train several recipes alike and write a table and a plot. What finished before is kept."""

    recipes: str = ",".join(comparison.DEFAULT)
    """Recipes, separated by commas, each with or without options and `@all`, as for `train`; gaps are measured against
    the first."""
    seeds: str = ""
    """Several seeds, as in `0,1,2`: every recipe is trained with each, and gaps are paired by seed, with intervals."""
    workers: int = 1
    """Runs side by side, each a process with a GPU of its own; 0: as many as there are GPUs."""
    preset: str = auto.PRESET
    """Where the defaults below come from: two_cores, two_cores_moe, small_gpu, one_gpu, tiny. auto: on a GPU one_gpu
    for a --model of 50M parameters or more, else small_gpu; without one two_cores."""
    config: configs.TrainConfig = field(default_factory=configs.two_cores)


def train_command(arguments: list[str]) -> int:
    """Run `halfbyte train`; the exit status is 1 if the run diverged, 130 or 143 if a signal stopped it."""
    return _command(Train, _train, arguments, out=Path("runs/train"))


def compare_command(arguments: list[str]) -> int:
    """Run `halfbyte compare`; the exit status is 1 if the baseline or a recipe diverged that is no control."""
    return _command(Compare, _compare, arguments, out=Path("runs/compare"))


def _command(
    kind: type[Options], run: Callable[[Options, signals.Interrupts, World], int], arguments: list[str], out: Path
) -> int:
    """Run a command on this rank, and end it with one line, of one rank, whatever ends it."""
    with joined(launch.launched()) as ranks:
        try:
            options, why = _parse(kind, arguments, out, ranks.size)
            if isinstance(options, Train):
                treatment.check_command(options.config, options.recipe)
            if isinstance(options, Compare) and options.seeds and _peeked(kind, arguments, "seed") is not None:
                raise ValueError("seed: --seeds says them all; leave --seed out")
            if why and ranks.is_first:
                ranks.say(why)
            ranks.compare(_asked(options), configs.differences)
        except Exception as error:
            if ranks.size > 1:
                signals.ignore_launcher()
            if ranks.speaks_of(error):
                raise
            return FAILED
        return _until_stopped(run, options, ranks)


def _asked(options: Options) -> dict:
    """Return what ranks have to have in common: options, but for where each keeps tokens, and packages."""
    asked = asdict(options)
    asked |= asked.pop("config")
    del asked["run"]["cache"]
    return asked | measure.package_versions()


def _until_stopped(run: Callable[[Options, signals.Interrupts, World], int], options: Options, ranks: World) -> int:
    """Run a command; ctrl-C and SIGTERM end it with one line and the status that shells expect."""
    name, overwrite = type(options).__name__.lower(), options.config.run.overwrite
    auto.say(threads.settle_threads(auto.device_of(options.config)))
    return until_stopped(name, overwrite, lambda interrupts: run(options, interrupts, ranks), ranks)


def train_alone(recipe: str, config: configs.TrainConfig, wait: Callable[[], None] | None = None) -> int:
    """Do what `halfbyte train` does with a recipe and a config, in one process.

    Args:
        recipe, config: of the run.
        wait: called when the text is read and before anything touches the GPU.
    """
    run = partial(_train, wait=wait)
    return _until_stopped(run, Train(recipe=recipe, config=config), World())


def until_stopped(
    name: str, overwrite: bool, run: Callable[[signals.Interrupts], int], ranks: World | None = None
) -> int:
    """Run what a command does; ctrl-C and SIGTERM end it with one line and the status that shells expect.

    Args:
        name: of the command.
        overwrite: whether it began with --overwrite.
        run: does it.
        ranks: with whom; by default alone.
    """
    ranks = ranks or World()
    allocator.keep_freed_memory()
    command = "the same command without --overwrite" if overwrite else "the same command"

    def say(stopped: signals.Stopped) -> None:
        if ranks.is_first:
            begin = "\n" if sys.stderr.isatty() else ""  # after the ^C that a terminal echoes
            print(f"{begin}halfbyte {name}: {stopped}; {command} goes on {stopped.where}", file=sys.stderr, flush=True)

    try:
        with signals.watch(say) as interrupts:
            try:
                return run(interrupts)
            except Exception as error:
                interrupts.defer()
                if ranks.size > 1:
                    signals.ignore_launcher()
                if ranks.size > 1 and is_lost(error):
                    if ranks.speaks_of(error):
                        ranks.say(f"halfbyte {name}: {lost_in_words(error, ranks)}; {command} goes on {LATEST}")
                    return FAILED
                if ranks.speaks_of(error):
                    raise
                return FAILED
    except signals.Stopped as stopped:
        say(stopped)
        return stopped.status


def _train(
    options: Train, interrupts: signals.Interrupts, ranks: World, *, wait: Callable[[], None] | None = None
) -> int:
    config = treatment.applied(options.config, options.recipe)  # refused before the text is read
    if ranks.is_first:
        auto.say(treatment.notes(config, options.recipe))
    config = ranks.first(lambda: loop.over(config, ranks))
    run = config.run
    text = ranks.first_here(lambda: data.load_data(config.data, run.cache, run.out), "load_data")
    if wait is not None:
        wait()
    result = loop.train(config, options.recipe, text, interrupts=interrupts, ranks=ranks)
    diverged = divergence.of(result)
    if diverged:
        print(f"{options.recipe} {diverged.in_full()}; the log is in {run.out}", file=sys.stderr)
        return 1
    served = result.get("held_out_loss_as_trained")
    also = "" if served is None else f" in high precision, {served:.4f} in the recipe"
    print(
        f"{options.recipe}: held-out loss {result['held_out_loss']:.4f}{also}, {recorded.speed(result):,.0f} tokens/s"
    )
    print(f"log, checkpoints and result are in {run.out}")
    return 0


def _compare(options: Compare, interrupts: signals.Interrupts, ranks: World) -> int:
    names = comparison.check_names(filter(None, split_outside(options.recipes, ",")))
    if options.seeds or options.workers != 1:
        return _compare_side_by_side(options, names, interrupts, ranks)
    config = ranks.first(lambda: loop.over(options.config, ranks))
    results = comparison.compare(config, names, interrupts=interrupts, ranks=ranks)
    out = options.config.run.out
    print("\n" + "\n\n".join((comparison.table(results), *comparison.remarks(results))) + "\n")
    print(f"written to {out}: {comparison.TABLE}, {comparison.RESULTS}, {comparison.PLOT}\n")
    print("What this means, and what to do next:")
    for line in meaning.closing_lines(options.config, results):
        print(f"- {line}")
    return int(comparison.failed(results))


def _compare_side_by_side(
    options: Compare, names: tuple[str, ...], interrupts: signals.Interrupts, ranks: World
) -> int:
    """Train recipes with several seeds, or several at a time, and print their league."""
    from halfbyte.train import study  # which asks for this module too

    if ranks.size > 1:
        raise ValueError(f"seeds, workers: {ranks.size} ranks train one run; start `halfbyte compare` without torchrun")
    seeds = options.seeds or str(options.config.seed)
    if not all(seed.strip().isdecimal() for seed in seeds.split(",")):
        raise ValueError(f"seeds={options.seeds!r}: give numbers with commas between, as in 0,1,2")
    piece = study.StudyPiece(recipes=names, seeds=tuple(int(seed) for seed in seeds.split(",")))
    title = f"{options.config.model}, {options.config.optim.steps} steps"
    whole = study.Study(title=title, config=options.config, pieces=(piece,))
    return study.run_and_print(whole, whole.pieces, workers=options.workers, interrupts=interrupts)


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
            plain += [argument] if after is not None and not after.startswith("-") else [argument, "on"]
    return plain


def config_of_options(
    arguments: Sequence[str], out: Path, preset: configs.TrainConfig | None = None
) -> configs.TrainConfig:
    """Return the config that options of `halfbyte train` stand for, `--recipe` and `--out` left out.

    Args:
        arguments: the options.
        out: folder of the run.
        preset: where values come from that are not given; by default that of `--preset`, two_cores on any machine.

    Raises:
        ValueError: an option names a recipe, which belongs elsewhere.
    """
    named = [one for one in arguments if one.partition("=")[0] in ("--recipe", "--out", "--seed")]
    if named:
        raise ValueError(f"options: {named[0]!r} is said for each run; leave it out")
    name, words = _peeked(Train, arguments, "preset"), _with_values(list(arguments))
    if preset is not None and name is not None:
        raise ValueError(f"options: --preset {name} is said by the study; leave it out")
    if preset is None:
        preset = configs.two_cores() if name in (None, auto.PRESET) else configs.training_preset(name)
    return _read(Train, words, Train(config=replace(preset, run=replace(preset.run, out=out)))).config


def _parse(kind: type[Options], arguments: list[str], out: Path, ranks: int = 1) -> tuple[Options, str]:
    """Read the options of one command, and say which preset was chosen where none is named.

    `--preset` and `--model` are looked up first, because they set the defaults of the others. Of options that cannot be
    used, a mesh that the ranks do not fill is the first to be said: what it asks of a batch is beside the point.
    """
    name, why = _peeked(kind, arguments, "preset"), ""
    if name in (None, auto.PRESET):
        preset, why = auto.preset_here(_peeked(kind, arguments, "model"))
    else:
        preset = configs.training_preset(name)
    preset = replace(preset, run=replace(preset.run, out=out))
    try:
        return _read(kind, _with_values(arguments), kind(config=preset)), why
    except ValueError:
        numbers = {name: _peeked(kind, arguments, name) for name in ("dp_shard", "dp_replicate", "tp", "ep")}
        asked: dict[str, Any] = {name: int(number) for name, number in numbers.items() if number and number.isdecimal()}
        configs.MeshConfig(**asked).over(ranks)
        raise


def _peeked(kind: type[Options], arguments: Sequence[str], option: str) -> str | None:
    """Return the value that arguments give to an option, None for none."""
    peek = ArgumentParser(prog=_prog(kind), add_help=False, allow_abbrev=False)
    peek.add_argument(*dict.fromkeys((f"--{option.replace('_', '-')}", f"--{option}")))
    return getattr(peek.parse_known_args(arguments)[0], option)


def _read(kind: type[Options], arguments: list[str], default: Options) -> Options:
    prog, plain = _prog(kind), (tyro.conf.OmitArgPrefixes,)
    return read_options(lambda: tyro.cli(kind, prog=prog, args=arguments, default=default, config=plain), prog)


def _prog(kind: type[Options]) -> str:
    return f"halfbyte {kind.__name__.lower()}"
