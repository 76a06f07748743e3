"""The documents of one file: a text file is one; JSON Lines, JSON and Parquet hold one in a field of every record.

`.jsonl` and `.ndjson` are records, one a line. `.json` is what it holds: lines of objects, an array of objects or one
object with the field are records; anything else, such as a package.json among sources, is text as it stands.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LINES = (".jsonl", ".ndjson")
JSON, PARQUET, GZIP = ".json", ".parquet", ".gz"
OTHER_PACKINGS = {".zst": "zstd -d", ".xz": "unxz", ".bz2": "bunzip2"}
TEXT_FIELD = "text"
BOM = "\ufeff"
"""Some editors begin files with it; JSON does not."""
BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


class Documents(NamedTuple):
    """What one file holds: whether its documents are fields of records, and their texts, in order."""

    are_records: bool
    texts: Iterator[bytes]


class NotText(ValueError):
    """A file that holds something else than UTF-8 text."""


def find_documents(path: Path, field: str, *, named: bool) -> Documents:
    """Return the documents of a file; they are read as they are asked for.

    Args:
        path: .jsonl, .ndjson and .json (each also .gz), .parquet, or text (also .gz).
        field: of a record, that holds its text.
        named: whether the user named this very file: then a .json has to hold records.

    Raises:
        ValueError: unreadable, packed otherwise, no record where there has to be one; while reading: a record that is
            broken, lacks the field or has no string there. The message names file and line.
        NotText: not UTF-8 text; the message names the file.
        ImportError: Parquet without pyarrow.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    kind = suffixes[0] if last == GZIP and len(suffixes) == 2 else last
    if last in OTHER_PACKINGS and suffixes[0] in (*LINES, JSON):
        raise ValueError(f"corpus file {path}: packed as {last}; unpack it ({OTHER_PACKINGS[last]}) or pack it as .gz")
    if last == PARQUET:
        return Documents(True, _parquet(path, field))
    if kind in LINES:
        return Documents(True, _lines(path, field))
    if kind == JSON:
        return _json(path, field, named)
    return Documents(False, iter((read_document(path),)))


def read_document(path: Path) -> bytes:
    """Return the text of one file, unpacked if its name ends in .gz, checked to be UTF-8 without NUL.

    Raises:
        ValueError: the file cannot be read, is a broken gzip, or is not text; the message names it.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.suffix.lower() == GZIP:
        try:
            text = gzip.decompress(text)
        except (OSError, *BROKEN_GZIP) as error:
            raise _broken_gzip(path, error) from error
    if b"\0" in text:
        raise NotText(f"corpus file {path}: binary (a NUL byte at {text.index(0)}); give UTF-8 text")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise NotText(f"corpus file {path}: not UTF-8 (byte {error.start}); give UTF-8 text") from error
    return text


def _lines(path: Path, field: str) -> Iterator[bytes]:
    """Yield the field of every line; lines end at a newline alone, since JSON may hold Unicode's other separators."""
    opener = gzip.open if path.suffix.lower() == GZIP else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                place = f"corpus file {path} line {number}"
                try:
                    text = line.decode().removeprefix(BOM)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{place}: not UTF-8 (byte {error.start}); repair or delete the line") from error
                if text.strip():
                    yield _text(_parse(text, place), field, place)
    except BROKEN_GZIP as error:
        raise _broken_gzip(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _json(path: Path, field: str, named: bool) -> Documents:
    text = read_document(path)
    whole = text.decode().removeprefix(BOM).strip()
    lines = [line for line in whole.split("\n") if line.strip()]
    if len(lines) > 1 and any(isinstance(_try(line), dict) for line in lines[:2]):
        return Documents(True, _lines(path, field))
    content = _parse(whole, f"corpus file {path}") if whole.startswith("[") else _try(whole)
    records = [content] if isinstance(content, dict) and field in content else content
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        places = (f"corpus file {path} record {number}" for number in range(1, len(records) + 1))
        return Documents(True, (_text(*one) for one in zip(records, [field] * len(records), places, strict=True)))
    if named:
        raise ValueError(
            f"corpus file {path}: neither lines nor an array of objects with a field {field!r}; name the field with "
            "--text-field, or call the file .txt to train on it as it stands"
        )
    return Documents(False, iter((text,)))


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"corpus file {path}: Parquet needs the package `pyarrow`: pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise _missing(f"corpus file {path}", field, columns)
            for batch in file.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text({field: value}, field, f"corpus file {path} row {number}")
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"corpus file {path}: broken Parquet ({reason}); restore it from a copy") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _text(record: Any, field: str, place: str) -> bytes:
    """Return the text of one record as UTF-8."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {_kind(record)}, no object with a field {field!r}; repair or delete it")
    if field not in record:
        raise _missing(place, field, list(record))
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {field!r} is {_kind(text)}, no string; repair or delete the record")
    if "\0" in text:  # it ends documents
        raise ValueError(f"{place}: field {field!r} holds a NUL character; repair or delete the record")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: field {field!r} holds half a surrogate pair; repair the record") from error


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deep, or a number of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(f"{place}: not JSON ({reason}); repair or delete it") from error


def _try(text: str) -> Any:
    """Return what JSON text stands for, None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _missing(place: str, field: str, found: list[str]) -> ValueError:
    names = ", ".join(map(repr, found[:10])) or "nothing"
    return ValueError(f"{place}: no field {field!r}, it has {names}; name the one with the text by --text-field")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"corpus file {path}: cannot be read ({error.strerror or error}); check the path and rights")


def _broken_gzip(path: Path, error: Exception) -> ValueError:
    return ValueError(f"corpus file {path}: broken gzip ({error}); pack it again")
