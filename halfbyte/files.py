"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed into it.

A file is locked while it is written, so that others tell it from what a killed writer left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's share of it, or what `ulimit -f` allows."""


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` if the block ends without an exception, and leaves no trace otherwise.

    Raises:
        OSError: it cannot be written, as on a full disk; the error names `path`, which is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = _temporary(path)
    with naming(path, temporary):
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from the rest of the team
                os.replace(temporary, path)  # before the lock goes with the descriptor
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path, temporary: str | None = None) -> Iterator[None]:
    """Let errors of writing in the block name `path`, those too that torch.save wraps.

    Args:
        temporary: the name under which `path` is written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause.filename not in (None, temporary):
            raise
        reason = cause.strerror or str(cause)
        whole = ", what was saved before is whole" if cause.errno in FULL else ""
        raise OSError(cause.errno, f"{reason}{whole}", str(path)) from error


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


def read_text(path: Path) -> str:
    """Return the text in `path`, with a mark for each byte that is no UTF-8.

    Raises:
        ValueError: the file cannot be read; the message names it and says why.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check its rights and the disk") from error


def read_given_text(path: Path) -> str:
    """Return a text that the user gave: figures of it would be those of another text, if bytes were replaced.

    Raises:
        ValueError: the file is a device, cannot be read or is not UTF-8; the message names it.
    """
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path}: a device, which may have no end; give a file of UTF-8 text")
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check its rights and the disk") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}); give UTF-8 text") from error


def read_json(path: Path) -> dict:
    """Return the JSON object in `path`.

    Raises:
        ValueError: the file cannot be read or is not a JSON object; the message names it.
    """
    remedy = "delete it or restore it from a copy"
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON of ours (nested too deeply); {remedy}") from error
    except ValueError as error:  # an int of thousands of digits, or the message of read_text
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: not JSON of ours ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object; {remedy}")
    return value


def sha256(path: Path) -> str:
    """Return the SHA-256 of what is in `path`, "" if there is no such file or it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def remove_leftovers(folder: Path, *names: str) -> None:
    """Delete what killed writers of files of these names, which are patterns, left in `folder`.

    What a live writer, of this or of another process, is at work on stays; so does everything where the filesystem has
    no locks to tell one from the other.
    """
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            with contextlib.suppress(OSError):  # another process deleted or locked it, or has no right to
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, which is gone when the block ends unless it was renamed.

    Raises:
        OSError: there is no room for it; the error names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        while True:
            with naming(path):
                folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
            with contextlib.suppress(OSError):  # no locks here, or the folder is gone
                held.enter_context(_locked_folder(folder))
            if folder.exists():  # else `remove_leftover_folders` was faster
                break
        os.chmod(folder, 0o755)  # mkdtemp's 0700 would hide it from the rest of the team
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftover_folders(folder: Path, *names: str) -> None:
    """Do for those of `temporary_folder` what `remove_leftovers` does for files."""
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            with contextlib.suppress(OSError), _locked_folder(path):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    Raises:
        OSError: another process has it, the filesystem has no locks, or it is no folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> tuple[int, str]:
    """Return descriptor and name of a new file beside `path`, locked where the filesystem has locks."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # `remove_leftovers` was faster, and deletes it
            os.close(descriptor)
            continue
        except OSError:
            return descriptor, name
        if os.path.exists(name):
            return descriptor, name
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Let what was renamed within `folder` last, whatever happens to the machine."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and the rename is durable as it is
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
