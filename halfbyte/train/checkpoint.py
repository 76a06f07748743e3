"""Checkpoints that are whole or absent, and that are refused with a reason when they are not ours.

A file is what `torch.save` writes for a dict with the keys of `KEYS`; loading runs no code from it. Several ranks write
a folder (train/sharded.py), of which the same file without tensors is a part. `latest` names the newest one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from halfbyte import files
from halfbyte.train import environment, extension
from halfbyte.train.background import Background
from halfbyte.train.ranks import World

FORMAT = "halfbyte-checkpoint"
VERSION = 1
KEYS = ("identity", "step", "position", "seconds", "model", "optimizer", "run_state")
OPTIONAL = ("environments",)
LATEST = "latest"
NAME = re.compile(r"step-(\d{8,})(\.pt)?")
FACTS = "run.pt"
"""What of a folder is not in the files of torch.distributed.checkpoint."""
REMEDY = "delete it to go on from the one before, or restore it from a copy"
DEPTH = 16
"""Of an identity, with room: a schedule's changes are four deep."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when the first is saved.
        keep: how many stay.
        ranks: who writes them; all must save together.
        background: ends the saves of several ranks, behind the steps that follow; None: they wait.
    """

    def __init__(
        self, folder: Path, keep: int, ranks: World | None = None, background: Background | None = None
    ) -> None:
        self._folder, self._keep, self._ranks = folder, keep, ranks or World()
        self._background = background

    def save(self, content: dict) -> Path:
        """Write `content`, which has the keys of `KEYS`, point `latest` at it and delete the oldest.

        In the background that has happened when `wait` returns; the save before has happened when this does.
        """
        assert set(content) - set(OPTIONAL) == set(KEYS), sorted(content)
        content = {"format": FORMAT, "version": VERSION, **content}
        path = self._folder / f"step-{content['step']:08d}"
        if self._background is not None:
            from halfbyte.train import sharded

            self._background.wait()
            together = self._background.ranks
            finish = sharded.start_saving(path, content, together)
            self._background.start(lambda: (finish(), together.first(lambda: self._acknowledge(path))))
            return path
        if self._ranks.size > 1:
            from halfbyte.train import sharded  # DCP takes a second to import

            sharded.save_sharded(path, content, self._ranks)
        else:
            path = path.with_suffix(".pt")
            with files.atomic(path) as file:
                torch.save(content, file)
        self._ranks.first(lambda: self._acknowledge(path))
        return path

    def wait(self) -> None:
        """Wait for a save in the background, and raise what it raised."""
        if self._background is not None:
            self._background.wait()

    def give_up(self) -> None:
        """Leave a save in the background a little time, for the run has failed."""
        if self._background is not None:
            self._background.give_up()

    def _acknowledge(self, path: Path) -> None:
        files.write_text(self._folder / LATEST, path.name + "\n")
        for old in checkpoints_in(self._folder)[: -self._keep]:
            remove(old)

    def latest(self) -> Path | None:
        """Return the checkpoint that `latest` names, the newest one if that is gone, None if there is none.

        Raises:
            ValueError: the folder cannot be read.
        """
        remove_unfinished(self._folder)
        found = checkpoints_in(self._folder)
        with contextlib.suppress(ValueError):
            named = files.read_text(self._folder / LATEST).strip()
            return next((path for path in found if path.name == named), (found or [None])[-1])
        return (found or [None])[-1]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest last.

    Raises:
        ValueError: the folder cannot be read.
    """
    try:
        named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error.strerror}); check its rights") from error
    return [path for _, _, path in sorted((int(match[1]), path.name, path) for match, path in named if match)]


def is_of_ranks(path: Path) -> bool:
    """Return whether several ranks wrote a checkpoint, which is a folder then, as its name says."""
    return not path.suffix


def remove(path: Path) -> None:
    """Delete a checkpoint; a folder is moved aside first, so that one half deleted is not taken for a checkpoint.

    Of a link, to another disk for one, the link alone.
    """
    if path.is_symlink() or not is_of_ranks(path):
        path.unlink()
        return
    with files.temporary_folder(path) as away:
        path.rename(away)


def remove_unfinished(folder: Path) -> None:
    """Delete what writers that were killed left in a folder of checkpoints."""
    files.remove_leftovers(folder, "step-*.pt", LATEST)
    files.remove_leftover_folders(folder, "step-*")


def load_checkpoint(path: Path, identity: dict) -> dict:
    """Return what `Checkpoints.save` wrote to `path`, on the CPU; what does not depend on the model is checked.

    Of a folder that several ranks wrote it is all but the tensors of model and optimizer.

    Args:
        identity: of the run that wants to go on.

    Raises:
        ValueError: the file cannot be read, is truncated, corrupt, not ours, or of another run; the message names it
            and the reason.
    """
    path = path / FACTS if is_of_ranks(path) else path
    content = _read(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: foreign (no format={FORMAT!r} in it); {REMEDY}")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        version = repr(content.get("version"))[:40].partition("\n")[0]
        raise ValueError(f"checkpoint {path}: version {version}, this is {VERSION}; start a new run")
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"checkpoint {path}: lacks {', '.join(missing)}; {REMEDY}")
    reason = _problem(content)
    if reason:
        raise ValueError(f"checkpoint {path}: {reason}; {REMEDY}")
    changed = extension.refusal(identity, content["identity"], content["step"])
    if changed:
        raise ValueError(f"checkpoint {path}: of another run ({changed}); choose another --out or --overwrite")
    return content


def _read(path: Path) -> Any:
    try:
        path.open("rb").close()
    except OSError as error:  # says nothing about what is in it
        raise ValueError(
            f"checkpoint {path}: cannot be read ({error.strerror}); check its rights and the disk"
        ) from error
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load skips the checksums
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place outside of the file, from its damaged list of contents
            raise ValueError(f"checkpoint {path}: truncated or not a checkpoint ({error}); {REMEDY}") from error
        raise ValueError(f"checkpoint {path}: cannot be read ({error.strerror}); check the disk") from error
    except Exception as error:  # a damaged archive makes zipfile raise whatever its parts do
        raise ValueError(f"checkpoint {path}: truncated or not a checkpoint ({_line(error)}); {REMEDY}") from error
    if broken is not None:
        raise ValueError(f"checkpoint {path}: corrupt ({broken} does not match its checksum); {REMEDY}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign pickle may fail in any way
        raise ValueError(f"checkpoint {path}: not a checkpoint of halfbyte ({_line(error)}); {REMEDY}") from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _problem(content: dict) -> str:
    """Say which of the plain values is not what a run saves, "" if all are."""
    for key in ("step", "position"):
        if type(content[key]) is not int or content[key] < 0:
            return f"{key}={str(content[key])[:40]!r} is no number of steps or batches"
    seconds = content["seconds"]
    if type(seconds) is not float or not 0 <= seconds < math.inf or (content["step"] and not seconds):
        return f"seconds={str(seconds)[:40]!r} is no time that steps take"
    if not isinstance(content["identity"], dict) or not _is_plain(content["identity"], DEPTH):
        return "its identity is no dict of plain values"
    environments = content.get("environments", [])
    if not _is_plain(environments, DEPTH):
        return "environments: no list of plain values"
    return environment.problem(environments)


def _is_plain(value: object, depth: int) -> bool:
    """Return whether JSON could hold `value`, nested at most `depth` times."""
    if isinstance(value, dict):
        return depth > 0 and all(type(k) is str and _is_plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or type(value) in (str, int, float, bool)
