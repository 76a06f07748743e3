"""Text that is already there: the interpreter's own sources, or files the user names. Nothing is downloaded.

Documents come in the order of the SHA-256 of their names, so that the held-out tail is a fair sample and every machine
with the same files reads the same stream.
"""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOT_SOURCES = ("site-packages", "dist-packages", "__pycache__")
PYTHON = "python"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A list of text files that was read once.

    Args:
        name: what the user asked for.
        root: the folder that document names are relative to.
        names: documents in reading order.
        sha256: over every document's name, length and bytes in reading order.
        size: bytes of text, unpacked.
        skipped: files of the folder that are not UTF-8 text.
    """

    name: str
    root: Path
    names: tuple[str, ...]
    sha256: str
    size: int
    skipped: tuple[str, ...] = ()

    def documents(self) -> Iterator[bytes]:
        """Yield the bytes of every document."""
        for name in self.names:
            yield read(self.root / name)

    def summary(self) -> dict:
        """Return what a run records about its text."""
        return {
            "corpus": self.name,
            "sha256": self.sha256,
            "bytes": self.size,
            "documents": len(self.names),
            "skipped": list(self.skipped),
        }


class NotText(ValueError):
    """A file that holds something else than UTF-8 text."""


def read(path: Path) -> bytes:
    """Return the text of one file, unpacked if its name ends in .gz, checked to be UTF-8 without NUL.

    Raises:
        ValueError: the file cannot be read, is a broken gzip, or is not text; the message names it.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"corpus file {path}: cannot be read ({error.strerror}); check the path and rights") from error
    if path.suffix == ".gz":
        try:
            text = gzip.decompress(text)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"corpus file {path}: broken gzip ({error}); pack it again") from error
    if b"\0" in text:
        raise NotText(f"corpus file {path}: binary (a NUL byte at {text.index(0)}); give UTF-8 text")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise NotText(f"corpus file {path}: not UTF-8 (byte {error.start}); give UTF-8 text") from error
    return text


def load(name: str) -> Corpus:
    """Find and hash the documents of `python` or of a file or folder.

    Files of a folder that are not text are left out and listed; a file named by itself must be text. Hidden files and
    folders are left out.

    Raises:
        ValueError: nothing there, unreadable, binary, or no text in it; the message names the path.
    """
    if not name:
        raise ValueError("corpus='': use 'python' or a path to text")
    if name == PYTHON:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in _files(root) if p.suffix == ".py" and not set(p.relative_to(root).parts) & set(NOT_SOURCES)]
    else:
        root = Path(name)
        if root.is_file():
            return _scan(name, root.parent, [root], is_folder=False)
        if not root.is_dir():
            raise ValueError(f"corpus={name!r}: no such file or folder; use 'python' or a path to text")
        paths = _files(root)
    return _scan(name, root, paths, is_folder=True)


def _files(root: Path) -> list[Path]:
    try:
        return [p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root))]
    except OSError as error:
        raise ValueError(f"corpus={str(root)!r}: cannot be listed ({error.strerror}); check its rights") from error


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _scan(name: str, root: Path, paths: list[Path], *, is_folder: bool) -> Corpus:
    names = sorted((p.relative_to(root).as_posix() for p in paths), key=lambda n: (_sha(n.encode()), n))
    digest, size, kept, skipped = hashlib.sha256(), 0, [], []
    for document in names:
        try:
            text = read(root / document)
        except NotText:
            if not is_folder:
                raise
            skipped.append(document)
            continue
        if text:
            digest.update(f"{document}\0{len(text)}\0".encode())
            digest.update(text)
            size += len(text)
            kept.append(document)
    if not size:
        found = f"{len(skipped)} binary files" if skipped else "nothing"
        raise ValueError(f"corpus={name!r}: no text in it ({found}); give UTF-8 text, plain or .gz")
    return Corpus(name=name, root=root, names=tuple(kept), sha256=digest.hexdigest(), size=size, skipped=tuple(skipped))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
