"""Files that are made once from a text and kept, and believed only if a note beside them has their hash and origin."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from halfbyte import files

NAMES = "[0-9a-f]" * 16 + "-*"
"""What files in a cache are called: the beginning of the text's hash, and what they are."""


def ensure(path: Path, origin: dict[str, str], chunks: Callable[[], Iterable[bytes]]) -> str:
    """Make `path` unless it is there as it was made; say so if what is there is not believed.

    Args:
        path: the file; its note is beside it, with `.json` behind the name.
        origin: what its bytes follow from.
        chunks: returns its bytes.

    Returns:
        The file's SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    files.remove_leftovers(path.parent, NAMES)
    note = path.with_name(f"{path.name}.json")
    found, noted = files.sha256(path), _read(note)
    if found and noted == {**origin, "sha256": found}:
        return found
    if found:
        print(f"{path}: the cached file {_reason(noted, origin)}; it is made again", file=sys.stderr)
    digest = hashlib.sha256()
    with files.atomic(path) as file:
        for chunk in chunks():
            digest.update(chunk)
            file.write(chunk)
    files.write_json(note, {**origin, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _reason(noted: dict, origin: dict[str, str]) -> str:
    if "sha256" not in noted:
        return "has no hash beside it"
    if any(noted.get(key) != value for key, value in origin.items()):
        return "was made from something else"
    return "is damaged: it has not the hash that it was made with"


def _read(path: Path) -> dict:
    """Return a note, {} for one that is damaged or absent: then the file is made again."""
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}
