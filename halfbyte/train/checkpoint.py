"""Checkpoints that are whole or absent, and that are refused with a reason when they are not ours.

A file is what `torch.save` writes for a dict with the keys of `KEYS`; loading runs no code from it. `latest` names the
newest one.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from pathlib import Path

import torch

from halfbyte.train import files
from halfbyte.train.config import differences

FORMAT = "halfbyte-checkpoint"
VERSION = 1
KEYS = ("identity", "step", "position", "seconds", "model", "optimizer", "run_state")
LATEST = "latest"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when the first is saved.
        keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def save(self, content: dict) -> Path:
        """Write `content`, which has the keys of `KEYS`, point `latest` at it and delete the oldest."""
        assert set(content) == set(KEYS), sorted(content)
        path = self._folder / f"step-{content['step']:08d}.pt"
        with files.atomic(path) as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
        files.write_text(self._folder / LATEST, path.name + "\n")
        for old in self._all()[: -self._keep]:
            old.unlink()
        return path

    def latest(self) -> Path | None:
        """Return the checkpoint that `latest` names, the newest one if that is gone, None if there is none."""
        files.remove_leftovers(self._folder)
        pointer = self._folder / LATEST
        if pointer.exists():
            named = self._folder / pointer.read_text(errors="replace").strip()
            if named.is_file():
                return named
        return (self._all() or [None])[-1]

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.pt"))


def load(path: Path, identity: dict) -> dict:
    """Return what `Checkpoints.save` wrote to `path`, on the CPU.

    Args:
        identity: of the run that wants to go on.

    Raises:
        ValueError: the file is truncated, corrupt, not ours, or of another run; the message names it and the reason.
    """
    remedy = "delete it to go on from the one before, or restore it from a copy"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load skips the checksums
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise ValueError(f"checkpoint {path}: truncated or not a checkpoint ({error}); {remedy}") from error
    if broken is not None:
        raise ValueError(f"checkpoint {path}: corrupt ({broken} does not match its checksum); {remedy}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"checkpoint {path}: not a checkpoint of halfbyte ({reason}); {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: foreign (no format={FORMAT!r} in it); {remedy}")
    if content.get("version") != VERSION:
        raise ValueError(f"checkpoint {path}: version {content.get('version')}, this is {VERSION}; start a new run")
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"checkpoint {path}: lacks {', '.join(missing)}; {remedy}")
    if not isinstance(content["identity"], dict):
        raise ValueError(f"checkpoint {path}: its identity is no dict; {remedy}")
    changed = differences(identity, content["identity"])
    if changed:
        reason = "; ".join(changed)
        raise ValueError(f"checkpoint {path}: of another run ({reason}); choose another --out or --overwrite")
    return content
