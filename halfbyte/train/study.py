"""The command `halfbyte study`: many recipes, several seeds, side by side, in pieces; a table and a figure of all.

A study is a TOML file (docs/studies.md). Every run is a run of `halfbyte train` in a folder of its own, so a piece that
was cut off goes on where it stopped, and one that ended is not trained again.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import halfbyte as hb
from halfbyte import files
from halfbyte.arguments import ArgumentParser, given_path
from halfbyte.nn.linear import LinearLayer
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.spec import GemmSpec, Recipe
from halfbyte.train import commands, data, folder, jobs, league, log, loop, treatment
from halfbyte.train import config as configs
from halfbyte.train import model as models
from halfbyte.train.config import TrainConfig
from halfbyte.train.recorded import CONFIG, LAYERS, RESULT, read_result
from halfbyte.train.signals import Interrupts


class KeyKind(NamedTuple):
    """What a key of a study's file takes: whether a value fits, and how one is written."""

    fits: Callable[[Any], bool]
    remedy: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0  # True is an int, too


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


KINDS = {
    "title": KeyKind(_is_text, 'a text, as in title = "A study"'),
    "options": KeyKind(
        _all(lambda value: isinstance(value, str)), 'a list of texts, as in options = ["--steps", "400"]'
    ),
    "pieces": KeyKind(lambda value: isinstance(value, list), "tables, each under a line [[pieces]]"),
    "noise_of": KeyKind(_is_text, "the folder of a study, as a text"),
    "best_of": KeyKind(_is_text, "the folder of a study, as a text"),
}
KINDS_OF_A_PIECE = {
    "recipes": KeyKind(_all(_is_text), 'a list of texts, as in recipes = ["bf16", "nvfp4"]'),
    "seeds": KeyKind(_all(_is_seed), "a list of whole numbers, 0 or more, as in seeds = [0, 1, 2]"),
}
BEST = re.compile(r"best\((\d+)\)")
FIELDS = set(KINDS)
RECORDED = (CONFIG, RESULT, LAYERS, log.NAME)
"""Files of a run that are small enough to be kept with the source."""
KEPT_STEPS = 10
OF_THE_MACHINE = ("device", "dtype", "fuse", "compile")
"""What of a run's identity may differ where its pieces are trained on several machines."""


@dataclass(frozen=True, kw_only=True)
class StudyPiece:
    """Runs that are trained in one go: every recipe with every seed."""

    recipes: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("recipes", "seeds"):
            values = [str(value) for value in getattr(self, name)]
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={','.join(values)!r}: name each once")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Several recipes under one config.

    Args:
        title: of table and figure.
        config: of all runs, but for seed and folder; `config.run.out` is the folder of the study.
        pieces: the first recipe of the first is what gaps are measured against.
        noise_of: folder of a study whose scatter of gaps this one takes if it has one run of each recipe.
    """

    title: str
    config: TrainConfig
    pieces: tuple[StudyPiece, ...]
    noise_of: Path | None = None

    def __post_init__(self) -> None:
        if not self.pieces or not all(piece.recipes and piece.seeds for piece in self.pieces):
            raise ValueError("pieces: give at least one, each with recipes and seeds")
        for name in self.recipes:
            treatment.applied(self.config, name)
        treatment.refuse_twins(self.recipes)

    @property
    def recipes(self) -> tuple[str, ...]:
        """All of them, in the order in which they are first named."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.recipes))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for piece in self.pieces for seed in piece.seeds))

    def jobs(self, piece: StudyPiece) -> list[jobs.RunJob]:
        """Return the runs of a piece: recipes in turn, the baseline's first."""
        schedules = treatment.schedules_of(self.config, self.recipes)
        found = []
        for seed in piece.seeds:
            for name in piece.recipes:
                out = league.run_folder(self.config.run.out, name, seed)
                run = replace(self.config.run, out=out)
                config = replace(self.config, seed=seed, recipe_schedule=schedules[name], run=run)
                found.append(jobs.RunJob(name=f"{name}, seed {seed}", recipe=name, config=config))
        return found


def read_study(path: Path, out: Path | None = None) -> Study:
    """Return the study of a TOML file.

    Args:
        path: of the file; folders that it names are relative to the working directory.
        out: folder of the study, "runs/" and the file's name by default.

    Raises:
        ValueError: there is no such file, or it says something else than a study.
    """
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the TOML file of a study") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}), which TOML is") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML ({error})") from error
    unknown = sorted(set(values) - FIELDS)
    if unknown or not {"title", "options", "pieces"} <= set(values):
        what = f"{unknown[0]!r} is no field" if unknown else "title, options or pieces is missing"
        raise ValueError(f"{path}: {what}; a study has {', '.join(sorted(FIELDS))}")
    _check_types(path, values, KINDS)
    config = commands.config_of_options(values["options"], out or Path("runs") / path.stem)
    best_of = None if "best_of" not in values else Path(values["best_of"])
    pieces = tuple(_piece(path, piece, best_of) for piece in values["pieces"])
    noise = None if "noise_of" not in values else Path(values["noise_of"])
    return Study(title=values["title"], config=config, pieces=pieces, noise_of=noise)


def _check_types(path: Path, values: dict[str, Any], kinds: dict[str, KeyKind]) -> None:
    """Raise ValueError where a key of a file has a value of another type than it should."""
    for key, value in values.items():
        if not kinds[key].fits(value):
            raise ValueError(f"{path}: {key}={value!r}; give {kinds[key].remedy}")


def _piece(path: Path, values: Any, best_of: Path | None) -> StudyPiece:
    if not isinstance(values, dict) or set(values) != {"recipes", "seeds"}:
        raise ValueError(f"{path}: a piece has recipes and seeds, two lists, and nothing else")
    _check_types(path, values, KINDS_OF_A_PIECE)
    names: list[str] = []
    for name in values["recipes"]:
        found = BEST.fullmatch(name)
        if found and best_of is None:
            raise ValueError(f"{path}: {name} and no best_of; name the folder of the study whose best they are")
        if found and best_of is not None:
            names += league.best(league.read_values(best_of), int(found[1]), names)
        else:
            names.append(name)
    return StudyPiece(recipes=tuple(names), seeds=tuple(values["seeds"]))


def four_bit_share(config: TrainConfig, name: str) -> float:
    """Return the share of the FLOPs of the blocks' linear layers whose operands are both NVFP4, over the whole run.

    Channels that are multiplied apart count as FLOPs in more bits. The head does not count.
    """
    config, chosen = treatment.applied(config, name), treatment.treatment_of(name)
    shape = models.model_preset(config.model)
    with torch.device("meta"):
        model: nn.Module = models.Decoder(shape)
    state = hb.RunState(0, config.schedule())
    if chosen.recipe.specs or state.schedule is not None:
        hb.quantize_(model, chosen.recipe, keep=chosen.keep, state=state)
    steps, starts = config.optim.steps, [0, *(state.schedule.starts if state.schedule else ())]
    ends = [*starts[1:], steps]
    total = four = 0.0
    for module in model.modules():
        if not isinstance(module, (nn.Linear, FollowsRecipe)) or module is getattr(model, "lm_head", None):
            continue
        size, width = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1), _width(module)
        for start, end in zip(starts, ends, strict=True):
            recipe = getattr(module, "recipe", Recipe())
            is_kept = not isinstance(module, FollowsRecipe) or getattr(module, "kept", False)
            later = None if state.schedule is None or is_kept else state.schedule.at(start)
            part, whole = _flops(later or recipe, width)
            total, four = total + whole * size * (end - start), four + part * size * (end - start)
    return four / total if total else 0.0


def _width(module: nn.Module) -> int:
    return module.in_features if isinstance(module, (nn.Linear, LinearLayer)) else 0


def _flops(recipe: Recipe, K: int) -> tuple[float, float]:
    """Return how many GEMMs of a training step are in four bits, and how many there are, what is added counted too."""
    gemms = [recipe.fprop, recipe.dgrad, recipe.wgrad]
    sides = [((g or GemmSpec()).a, (g or GemmSpec()).b) for g in gemms]
    four = sum(all(side is not None and side.format.element.name == "e2m1" for side in both) for both in sides)
    if recipe.channels is None or not K:
        return float(four), 3.0
    share = recipe.channels.count(K) / K
    reading = [g for g in (recipe.fprop, recipe.wgrad) if g is not None and g.specs]
    return float(four), 3.0 + share * (2.0 if recipe.channels.kind == "patch" else len(reading))


def run_study(
    study: Study,
    pieces: Sequence[StudyPiece],
    *,
    workers: int,
    minutes: float,
    interrupts: Interrupts,
    kept: Path | None = None,
) -> tuple[league.League, jobs.Outcome]:
    """Train the runs of some pieces, or go on with them, and write table, values and figure of all that ended.

    Args:
        study: as a whole.
        pieces: of it.
        workers: runs at a time, see `jobs.workplaces`.
        minutes: from this call on, reading the text included, after which runs stop with a checkpoint.
        interrupts: of the caller.
        kept: folder that keeps the small files of a run as soon as it ended.

    Raises:
        ValueError: no text, too few GPUs, a number of workers or minutes below 0, or a folder holds results of other
            options or text.
        Stopped: a signal came.
    """
    if not minutes >= 0:  # NaN is not
        raise ValueError(f"minutes={minutes}: give 0 or more; 0 begins no run, inf ends none")
    since, where, config = time.monotonic(), jobs.workplaces(study.config.device, workers), study.config
    folder.refuse_run(config.run.out)
    found = [job for piece in pieces for job in study.jobs(piece)]
    corpus = data.load_data(config.data, config.run.cache, config.run.out)  # here, once; the runs map it
    begun_anew = found if config.run.overwrite else []
    _refuse_other_runs(study, corpus, kept, {job.config.run.out for job in begun_anew})
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)  # now, not when the first run has ended
        if restore(study, kept):
            print(f"runs that ended before come from {kept}")
    ready = [job for job in found if not (job.config.run.out / RESULT).exists() or config.run.overwrite]
    print(f"{study.title}: {len(found)} runs, {len(found) - len(ready)} of them ended before; {len(where)} at a time")

    _print_notes(ready)

    def keep(job: jobs.RunJob) -> None:
        if kept is not None:
            try:
                record(study, kept)
            except OSError as error:  # the others train on; at the end it is tried again
                _say(f"{job.name}: not kept in {kept} ({error.strerror}); it is in {job.config.run.out}")

    outcome = jobs.run_side_by_side(
        ready,
        where,
        config.run.out / "jobs",
        seconds=60 * minutes - (time.monotonic() - since),  # a tokenizer's training can take minutes of them
        interrupts=interrupts,
        say=_say,
        done=keep,
    )
    made = write_league(study, corpus)
    return made, outcome


def _print_notes(ready: Sequence[jobs.RunJob]) -> None:
    said = (treatment.notes(treatment.applied(job.config, job.recipe), job.recipe) for job in ready)
    for line in dict.fromkeys(line for lines in said for line in lines):
        print(line)


def _refuse_other_runs(study: Study, corpus: data.Data, kept: Path | None, anew: set[Path]) -> None:
    """Raise ValueError if a result of the study's folder, or of `kept`, is not of this config; `anew` are not asked."""
    for job in (job for piece in study.pieces for job in study.jobs(piece)):
        out = job.config.run.out
        places = [out, *([] if kept is None else [kept / out.relative_to(study.config.run.out)])]
        for place in places:
            if out in anew or not (place / RESULT).exists():
                continue
            config = treatment.applied(job.config, job.recipe)
            ours = folder.identity(config, job.recipe, corpus)
            found = configs.differences(_wherever(ours), _wherever(read_result(place / RESULT)["identity"]))
            if found:
                option = "--out" if place is out else "--record"
                raise ValueError(
                    f"{place} holds the result of another run ({'; '.join(found)}); choose another {option}, or give "
                    "the options of that run"
                )


def _wherever(identity: dict) -> dict:
    """Return what of a run's identity is the same on every machine."""
    return {name: value for name, value in identity.items() if name not in OF_THE_MACHINE}


def _say(line: str) -> None:
    print(line, flush=True)


def write_league(study: Study, corpus: data.Data | None = None) -> league.League:
    """Write table, values and figure of the runs of a study that ended.

    Args:
        study: whose folder holds the runs.
        corpus: named in the title.

    Raises:
        ValueError: a result is damaged.
    """
    folder, shares = study.config.run.out, {name: four_bit_share(study.config, name) for name in study.recipes}
    results = league.read_results(folder, study.recipes, study.seeds)
    pooled = None
    if study.noise_of is not None and (study.noise_of / league.VALUES).exists():
        values = league.read_values(study.noise_of)
        pooled = None if values["deviation"] is None else (values["deviation"], values["freedom"], values["title"])
    found = league.league(results, study.recipes, shares, pooled=pooled)
    epochs = "" if corpus is None else f"; {study.config.tokens / len(corpus.train):.2f} epochs of {_text(corpus)}"
    title = f"{study.title}: {study.config.tokens / 1e6:.1f}M tokens a run{epochs}"
    league.write(folder, found, title)
    if results:
        league.draw_league(folder, found, tokens_per_step=study.config.data.tokens_per_step, title=study.title)
    return found


def _text(corpus: data.Data) -> str:
    summary = corpus.summary
    held_out = f", {summary['held_out_tokens'] / 1e6:.2f}M tokens held out"
    return f"{summary['corpus']} ({summary['tokenizer']}, sha256 {summary['sha256'][:12]}{held_out})"


def record(study: Study, folder: Path) -> int:
    """Copy the small files of all runs that ended, and those of the study, to `folder`; return how many runs."""
    out, count = study.config.run.out, 0
    for recipe in study.recipes:
        for seed in study.seeds:
            source = league.run_folder(out, recipe, seed)
            if (source / RESULT).exists():
                count += 1
                _copy(source, league.run_folder(folder, recipe, seed), RECORDED)
    _copy(out, folder, (league.TABLE, league.VALUES, league.FIGURE))
    return count


def restore(study: Study, folder: Path) -> int:
    """Copy recorded runs that are not in the study's folder back there; return how many.

    So a piece that is trained on another machine, another day, finds the runs that others ended.
    """
    count = 0
    for recipe in study.recipes:
        for seed in study.seeds:
            source, target = (league.run_folder(root, recipe, seed) for root in (folder, study.config.run.out))
            if (source / RESULT).exists() and not (target / CONFIG).exists():
                count += 1
                _copy(source, target, RECORDED)
    return count


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy files whole or not at all, the result of a run last; of a log every tenth step."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted((name for name in names if (source / name).exists()), key=lambda name: name == RESULT):
        content = (source / name).read_bytes()
        with files.atomic(target / name) as file:
            file.write(_thinned(content) if name == log.NAME else content)


def _thinned(content: bytes) -> bytes:
    return b"".join(line for line in content.splitlines(keepends=True) if not _is_between(line))


def _is_between(line: bytes) -> bool:
    """Whether a line of a log is a step that is left out; what is no such line stays as it is."""
    try:
        said = json.loads(line)
        return said["kind"] == "step" and said["step"] != 1 and said["step"] % KEPT_STEPS != 0
    except (ValueError, KeyError, TypeError):
        return False


def study_command(arguments: list[str]) -> int:
    """Run `halfbyte study`; the exit status is 1 if a run failed, 3 if runs are left."""
    parser = ArgumentParser(prog="halfbyte study", description="Run a study, or go on with it, and tabulate.")
    parser.add_argument("file", type=given_path, metavar="FILE", help="the study, a TOML file; see docs/studies.md")
    parser.add_argument("--piece", type=int, default=None, help="which of its pieces, from 1; all by default")
    parser.add_argument("--row", default="", help="one recipe of it alone")
    parser.add_argument("--workers", type=int, default=0, help="runs at a time; by default one for every GPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="from now on; then runs stop with a checkpoint")
    parser.add_argument("--out", type=given_path, default=None, help="folder of the runs; runs/NAME by default")
    parser.add_argument("--record", type=given_path, default=None, help="folder that keeps configs, logs and results")
    parser.add_argument(
        "--plan", action="store_true", help="print the runs and how much of each is in 4 bits; run none"
    )
    parser.epilog = "Behind --, options of `halfbyte train` for all runs."
    own, more = arguments, []
    if "--" in arguments:
        own, more = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = parser.parse_args(own)
    study = read_study(options.file, options.out)
    if more:
        study = replace(study, config=commands.config_of_options(more, study.config.run.out, study.config))
    pieces = _chosen(study, options.piece, options.row)
    if study.noise_of is not None and not (study.noise_of / league.VALUES).exists():
        print(f"noise_of={str(study.noise_of)!r}: no league is there, so that no spread is taken from it")
    if options.plan:
        return _print_plan(study, pieces)
    wanted: dict[str, Any] = {"workers": options.workers, "minutes": options.minutes, "kept": options.record}
    return commands.until_stopped(
        "study",
        study.config.run.overwrite,
        lambda interrupts: run_and_print(study, tuple(pieces.values()), **wanted, interrupts=interrupts),
    )


def run_and_print(
    study: Study,
    pieces: Sequence[StudyPiece],
    *,
    workers: int,
    minutes: float = math.inf,
    kept: Path | None = None,
    interrupts: Interrupts,
) -> int:
    """Do what `run_study` does, print the league, keep small files in `kept`; return the exit status of the command."""
    found, outcome = run_study(study, pieces, workers=workers, minutes=minutes, interrupts=interrupts, kept=kept)
    print("\n" + league.league_table(found) + "\n")
    print(f"written to {study.config.run.out}: {league.TABLE}, {league.VALUES}, {league.FIGURE}")
    if kept is not None:
        print(f"{record(study, kept)} runs recorded in {kept}")
    for name, reason in outcome.failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if outcome.left:
        print(f"left: {', '.join(outcome.left)}; the same command goes on with them")
    return 1 if outcome.failed else 3 if outcome.left else 0


def _chosen(study: Study, piece: int | None, row: str) -> dict[int, StudyPiece]:
    """Return the pieces that were asked for by their numbers, or the row of each that has it.

    Raises:
        ValueError: the study has no such one.
    """
    pieces = dict(enumerate(study.pieces, 1))
    if piece is not None and piece not in pieces:
        raise ValueError(f"--piece {piece}: the study has pieces 1 to {len(pieces)}")
    if row and row not in study.recipes:
        raise ValueError(f"--row {row!r}: the study has {', '.join(study.recipes)}")
    found = pieces if piece is None else {piece: pieces[piece]}
    if row:
        found = {number: replace(one, recipes=(row,)) for number, one in found.items() if row in one.recipes}
    if not found:
        raise ValueError(f"--row {row!r}: is not in piece {piece}; leave --piece out")
    return found


def _print_plan(study: Study, pieces: Mapping[int, StudyPiece]) -> int:
    for number, piece in pieces.items():
        for job in study.jobs(piece):
            share = four_bit_share(study.config, job.recipe)
            is_there = (job.config.run.out / RESULT).exists()
            print(f"{number}  {job.name:<60} {100 * share:3.0f} % of FLOPs in 4 bits{'  ended' if is_there else ''}")
    tokens = study.config.tokens / 1e6
    print(f"each {loop.resolve_device(study.config).type}, {study.config.model}, {tokens:.1f}M tokens")
    return 0
