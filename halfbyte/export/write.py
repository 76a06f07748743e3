"""A Hugging Face folder that is whole or absent: written beside its place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 2 << 30
"""The most that one file holds, unless one tensor is larger; a file is put together in memory before it is written."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` if the block ends without an exception, and goes otherwise.

    Raises:
        ValueError: `target` is there and not an empty folder.
        OSError: it cannot be written, as on a full disk; it names `target`, which is as it was.
    """
    refuse_taken(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(target):
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        with _naming(target):
            yield temporary
            _to_disk(temporary)
            os.chmod(temporary, 0o755)  # mkdtemp's 0700 would hide it from the rest of the team
            refuse_taken(target)
            os.replace(temporary, target)
            _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_taken(target: Path) -> None:
    """Raise ValueError where a folder would be written over something."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(f"folder={str(target)!r}: it is a file or a link; name a folder that is not there yet")
    if target.is_dir() and (found := next(target.iterdir(), None)) is not None:
        raise ValueError(
            f"folder={str(target)!r}: it holds files already ({found.name}, …), and nothing is written over; name "
            "another one, or delete it first"
        )


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Let errors of writing name the folder that the user asked for."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno is None:
            raise
        if error.errno == errno.ENOTEMPTY:
            refuse_taken(target)
        raise OSError(error.errno, f"{error.strerror}, nothing was written", str(target)) from error


def _to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors into one safetensors file, or several and an index; return their bytes."""
    from safetensors.torch import save

    shards = _shards(tensors)
    names = [WEIGHTS] if len(shards) == 1 else [_name(i, len(shards)) for i in range(len(shards))]
    for name, keys in zip(names, shards, strict=True):
        # Its own writer hides the number of an error behind text.
        content = save({key: tensors[key].detach().cpu().contiguous() for key in keys}, {"format": "pt"})
        (folder / name).write_bytes(content)
    total = sum(map(_nbytes, tensors.values()))
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_folder_json(folder / INDEX, index)
    return total


def _shards(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + _nbytes(tensor) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += _nbytes(tensor)
    return shards


def _name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_folder_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, each in memory of its own: safetensors refuses to write one storage twice."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[key] = tensor.clone(memory_format=torch.contiguous_format) if place in seen else tensor
        seen.add(place)
    return result
