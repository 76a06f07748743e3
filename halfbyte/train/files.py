"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed into it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` if the block ends without an exception, and leaves no trace otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from the rest of the team
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically; a number that is not finite, which JSON has not, becomes null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: object) -> object:
    """Return `value` with None for every number that is not finite, in dicts, lists and tuples too."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict:
    """Return the JSON object in `path`.

    Raises:
        ValueError: the file is not a JSON object; the message names it.
    """
    try:
        value = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}); delete it or restore it from a copy") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object; delete it or restore it from a copy")
    return value


def remove_leftovers(folder: Path) -> None:
    """Delete what writers that were killed left in `folder`."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened, and the rename is durable as it is
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
