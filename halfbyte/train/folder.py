"""The folder of a run: which files are in it, whether it ended, and how it is emptied."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from pathlib import Path

from halfbyte import files
from halfbyte.train import auto, checkpoint, environment, extension, log, sampled, tune
from halfbyte.train.config import TrainConfig, differences
from halfbyte.train.data import Data
from halfbyte.train.recorded import (
    CHECKPOINTS,
    COMPARISON,
    CONFIG,
    LAYERS,
    LEAGUE,
    RESULT,
    TENSORBOARD,
    read_result,
    recorded_config,
)

EVENTS = "events.out.tfevents.*"


def identity(config: TrainConfig, recipe: str, data: Data) -> dict:
    """Return everything that decides the result: the config, the recipe's values and the hash of the text."""
    of_sources = tune.tune_identity(config.tune)
    texts = {"corpus_sha256": data.summary["sha256"]}
    if "held_out_sha256" in data.summary:
        texts["held_out_sha256"] = data.summary["held_out_sha256"]
    return settled(config)[0].identity(recipe) | texts | of_sources


def settled(config: TrainConfig, *folders: Path) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return the config with nothing left to "auto" of what train/auto.py chooses, and what a user should know of it.

    Args:
        config: as it was asked for; one that is settled comes back as it is, with nothing to say.
        folders: where the runs are that are to go on, the first that holds one decides; `config.run.out` by default.

    Raises:
        ValueError: a folder holds a file that is damaged.
    """
    if "auto" not in (config.fuse, config.compile, config.run.graph):
        return config, ()
    facts = auto.facts(auto.device_of(config))
    found = () if config.run.overwrite else map(_begun, folders or (config.run.out,))
    choices = auto.choose_options(config, facts, next(filter(None, found), {}))
    return auto.apply(config, choices), auto.lines(config, facts, choices)


def _begun(folder: Path) -> dict[str, bool]:
    """Return what of `auto.OF_THE_RESULT` the run in `folder` began with, nothing if there is none."""
    if os.path.lexists(folder / RESULT):
        found = read_result(folder / RESULT)["identity"]
    elif os.path.lexists(folder / CONFIG):
        found = recorded_config(folder)["identity"]
    else:
        return {}
    return {option: found[option] for option in auto.OF_THE_RESULT if type(found.get(option)) is bool}


def finished(config: TrainConfig, recipe: str, data: Data) -> dict | None:
    """Return the result of the run in `config.run.out` if it ended, None if there is none or it can be extended.

    Raises:
        ValueError: the folder holds a run of another config, several runs, or a file that is damaged; the message says
            what differs.
    """
    folder, ours = config.run.out, identity(config, recipe, data)
    several = next((name for name in (COMPARISON, LEAGUE) if (folder / name).exists()), None)
    if several is not None and not os.path.lexists(folder / CONFIG):
        raise ValueError(
            f"out={str(folder)!r} holds the runs of a comparison ({several}); choose another --out, or a folder in it"
        )
    _refuse_other_tokens(folder, data)
    if os.path.lexists(folder / RESULT):
        result = read_result(folder / RESULT)
        if _refuse_another(folder, ours, result["identity"], result):
            return result
    elif os.path.lexists(folder / CONFIG):
        _refuse_another(folder, ours, recorded_config(folder)["identity"], None)
    return None


def refuse_run(folder: Path) -> None:
    """Raise ValueError if a folder into which several runs are to go holds one, and no comparison."""
    if os.path.lexists(folder / CONFIG) and not any((folder / name).exists() for name in (COMPARISON, LEAGUE)):
        raise ValueError(f"out={str(folder)!r} holds one run ({CONFIG}); choose another --out for several")


def _refuse_another(folder: Path, ours: dict, theirs: dict, result: dict | None) -> bool:
    """Raise if the run there is another; return whether it is the very same, not one to be extended."""
    changed = extension.refusal(ours, theirs, None if result is None else result["steps"])
    is_same = not differences(ours, theirs)
    if not is_same and not changed and result is not None:
        if result["is_diverged"]:
            changed = f"it diverged at step {result['steps']}, which more steps do not mend"
        elif checkpoint.Checkpoints(folder / CHECKPOINTS, keep=1).latest() is None:
            changed = "it ended and its checkpoints are gone, so that it cannot be extended"
    if changed:
        raise ValueError(f"out={str(folder)!r} holds another run ({changed}); choose another --out or --overwrite")
    return is_same


def _refuse_other_tokens(folder: Path, data: Data) -> None:
    """Raise if the same text was cut into other tokens there, as another release of `tokenizers` may do."""
    if not os.path.lexists(folder / CONFIG):
        return
    facts = recorded_config(folder).get("data")
    facts = facts if isinstance(facts, dict) else {}
    ours, theirs = data.summary.get("tokens_sha256"), facts.get("tokens_sha256")
    is_same_text = facts.get("sha256", data.summary.get("sha256")) == data.summary.get("sha256")
    if is_same_text and None not in (ours, theirs) and ours != theirs:
        raise ValueError(
            f"out={str(folder)!r} holds a run on other tokens of this text (tokens_sha256: {theirs!r} there, {ours!r} "
            "here); put the cache of tokenizers back that it used, or choose another --out or --overwrite"
        )


def environments(folder: Path, history: list[dict]) -> list[dict]:
    """Return the environments of the run in `folder`: `history`, or for one without what config.json says."""
    if history or not (folder / CONFIG).exists():
        return history
    facts = recorded_config(folder)
    found = {key: facts["environment"][key] for key in environment.COMPARED if key in facts.get("environment", {})}
    found |= {"dtype": facts["dtype"]} if "dtype" in facts else {}
    return [{"step": 0, **found}]


def say_what_no_step_writes(config: TrainConfig) -> None:
    """Say which files that are asked for a run that ended will not come: it has no step left that writes them."""
    asked = {
        f"--stats-every {config.run.stats_every}": (config.run.stats_every > 0, sampled.NAME),
        "--tensorboard": (config.run.tensorboard, TENSORBOARD),
    }
    lacking = [option for option, (wanted, name) in asked.items() if wanted and not (config.run.out / name).exists()]
    if lacking:
        said = f"{config.run.out}: the run ended without {' and '.join(lacking)}, and no step is left"
        print(f"{said}; --overwrite trains it again", file=sys.stderr, flush=True)


def clean_folder(folder: Path) -> None:
    """Delete what writers that were killed left in the folder of a run."""
    files.remove_leftovers(folder, CONFIG, RESULT, LAYERS, log.NAME, sampled.NAME)
    files.remove_leftovers(folder / TENSORBOARD, EVENTS)
    checkpoint.remove_unfinished(folder / CHECKPOINTS)


def clear(folder: Path) -> None:
    """Delete what a run wrote to `folder`, and nothing else: all of it or, if something cannot be deleted, nothing.

    Raises:
        ValueError: a part is a symbolic link or cannot be deleted; the message names it.
    """
    aside: list[tuple[Path, Path]] = []
    try:
        for path in _written(folder):
            away = path.with_name(f".{path.name}.replaced.tmp")
            os.rename(path, away)
            aside.append((path, away))
    except OSError as error:
        for path, away in aside:
            os.rename(away, path)
        raise ValueError(
            f"{error.filename}: cannot be deleted ({error.strerror}), so --overwrite deleted nothing; change its "
            "rights or choose another --out"
        ) from error
    for _, away in aside:
        shutil.rmtree(away) if away.is_dir() else away.unlink()
    for name in (CHECKPOINTS, TENSORBOARD):
        with contextlib.suppress(OSError):  # absent, or there are files of others in it
            (folder / name).rmdir()


def _written(folder: Path) -> list[Path]:
    """Return the files of a run, config.json last: what is left of a run half deleted must not go on as if whole.

    A checkpoint of several ranks is a folder.
    """
    inner, saved = [], []
    if _is_there(folder / CHECKPOINTS, stat.S_ISDIR):
        inner += [folder / CHECKPOINTS / checkpoint.LATEST]
        saved += checkpoint.checkpoints_in(folder / CHECKPOINTS)
    if _is_there(folder / TENSORBOARD, stat.S_ISDIR):
        inner += sorted((folder / TENSORBOARD).glob(EVENTS))
    outer = [folder / name for name in (RESULT, LAYERS, log.NAME, sampled.NAME, CONFIG)]
    kinds = [(path, stat.S_ISREG if path.suffix else stat.S_ISDIR) for path in saved]
    kinds += [(path, stat.S_ISREG) for path in (*inner, *outer)]
    return [path for path, is_kind in kinds if _is_there(path, is_kind)]


def _is_there(path: Path, is_kind) -> bool:
    """Return whether `path` is there; raise if it is a link or something else than a run makes."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if is_kind(mode):
        return True
    kind = f"a symbolic link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "not what a run makes"
    raise ValueError(
        f"{path}: {kind}, so --overwrite deleted nothing; delete it and what belongs to it yourself, or choose another "
        "--out"
    )
