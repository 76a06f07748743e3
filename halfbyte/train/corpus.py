"""Text that is already there: the interpreter's own sources, or files the user names. Nothing is downloaded.

Files come in the order of the SHA-256 of their names, so that the held-out tail is a fair sample and every machine with
the same files reads the same stream; the records of one file (documents.py) stay in their order.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.train import documents
from halfbyte.train.documents import TEXT_FIELD, NotText

NOT_SOURCES = ("site-packages", "dist-packages", "__pycache__")
PYTHON = "python"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A list of text files that was read once.

    Args:
        name: what the user asked for.
        root: the folder that document names are relative to.
        names: files in reading order.
        sha256: over every document's file name, length and bytes in reading order.
        size: bytes of text, unpacked.
        count: documents that are not empty.
        text_field: of the records of JSON and Parquet files, that holds their text.
        skipped: files of the folder that are not UTF-8 text.
        has_records: whether a file of JSON or Parquet is among them.
    """

    name: str
    root: Path
    names: tuple[str, ...]
    sha256: str
    size: int
    count: int
    text_field: str = TEXT_FIELD
    skipped: tuple[str, ...] = ()
    has_records: bool = False

    def documents(self) -> Iterator[bytes]:
        """Yield the bytes of every document."""
        for name in self.names:
            yield from filter(None, documents.find_documents(self.root / name, self.text_field, named=False).texts)

    def summary(self) -> dict:
        """Return what a run records about its text."""
        return {
            "corpus": self.name,
            "sha256": self.sha256,
            "bytes": self.size,
            "documents": self.count,
            "skipped": list(self.skipped),
        }


def load_corpora(names: Sequence[str], text_field: str = TEXT_FIELD) -> list[Corpus]:
    """Return what `load_corpus` does of each; one with records suffices for a text_field.

    Raises:
        ValueError: as `load_corpus` does.
    """
    found = [_found(name, text_field) for name in names]
    if text_field != TEXT_FIELD and not any(corpus.has_records for corpus in found):
        one = " and ".join(f"corpus={name!r}" for name in names)
        raise ValueError(f"text_field={text_field!r}: {one} has no JSON Lines, JSON or Parquet; leave it out")
    return found


def load_corpus(name: str, text_field: str = TEXT_FIELD) -> Corpus:
    """Find and hash the documents of `python` or of a file or folder.

    Files of a folder that are not text are left out and listed; a file named by itself must be text. Hidden files and
    folders are left out.

    Args:
        name: "python", or a path.
        text_field: of the records of JSON and Parquet files, that holds their text.

    Raises:
        ValueError: nothing there, unreadable, binary, or no text in it; a broken record; a text_field without records.
            The message names the path.
    """
    return load_corpora([name], text_field)[0]


def _found(name: str, text_field: str) -> Corpus:
    if not name:
        raise ValueError("corpus='': use 'python' or a path to text")
    if name == PYTHON:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in _files(root, NOT_SOURCES) if path.suffix == ".py"]
    else:
        root = Path(name)
        if root.is_file():
            return _scan(name, root.parent, [root], text_field, is_folder=False)
        if root.exists() and not root.is_dir():
            raise ValueError(
                f"corpus={name!r}: a pipe or a device, and text is read more than once; write it to a file first"
            )
        if not root.is_dir():
            raise ValueError(f"corpus={name!r}: no such file or folder; use 'python' or a path to text")
        paths = _files(root)
    return _scan(name, root, paths, text_field, is_folder=True)


def _files(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Return the files below root but hidden ones; folders that are hidden or in `left_out` are not even listed."""

    def refuse(error: OSError) -> None:
        where = f"corpus={str(root)!r}: {error.filename} cannot be listed"
        raise ValueError(f"{where} ({error.strerror}); check its rights") from error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        found += [path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file()]
    return found


def _scan(name: str, root: Path, paths: list[Path], text_field: str, *, is_folder: bool) -> Corpus:
    for path in paths:
        _check_name(path)
    names = sorted((p.relative_to(root).as_posix() for p in paths), key=lambda n: (_sha(n.encode()), n))
    digest, size, count, kept, skipped, has_records = hashlib.sha256(), 0, 0, [], [], False
    for file in names:
        try:
            found = documents.find_documents(root / file, text_field, named=not is_folder)
        except NotText:
            if not is_folder:
                raise
            skipped.append(file)
            continue
        has_records |= found.are_records
        before = count
        for text in filter(None, found.texts):
            digest.update(f"{file}\0{len(text)}\0".encode())
            digest.update(text)
            size += len(text)
            count += 1
        kept += [file] if count > before else []
    if not size:
        what = f"{len(skipped)} binary files" if skipped else "nothing"
        raise ValueError(f"corpus={name!r}: no text in it ({what}); give UTF-8 text, plain or .gz")
    facts = {"names": tuple(kept), "sha256": digest.hexdigest(), "size": size, "count": count}
    more = {"skipped": tuple(skipped), "has_records": has_records}
    return Corpus(name=name, root=root, text_field=text_field, **facts, **more)


def _check_name(path: Path) -> None:
    """Raise ValueError unless a run can record the name of a file, and hash it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"corpus file {str(path)!a}: its name is not UTF-8; rename it") from error


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
