"""Checkpoints of several ranks: a folder of torch.distributed.checkpoint (DCP), in which each writes what it holds.

The folder is written beside its place and renamed into it when all ranks have finished, so that it is whole or absent.
Beside the tensors lies `run.pt`, which holds the rest of what a checkpoint of one process holds, and a hash of every
file. Any mesh loads it, one process too; loading runs no code from it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from halfbyte import files
from halfbyte.train import checkpoint
from halfbyte.train.checkpoint import FACTS, REMEDY
from halfbyte.train.ranks import Elsewhere, World

METADATA = ".metadata"
MODEL, OPTIMIZER = "model", "optimizer"
IN_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
    "torch": {"Size", "device", "strided", "contiguous_format", "preserve_format"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}
"""What a pickle of DCP's metadata consists of, beside dtypes: nothing that could do harm."""


class _Writer(dcp.FileSystemWriter):
    """Writes to `folder`; its errors name `path`, which the folder becomes."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._target = path

    def write_data(self, plan: Any, planner: Any) -> Any:
        with files.naming(self._target):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with files.naming(self._target):
            super().finish(metadata, results)


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration: some releases of Python 3.11 pickle it as a call of getattr."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)) or name not in owner.__members__:
        raise pickle.UnpicklingError(f"getattr of {owner!r} and {name!r} is in it, which no checkpoint needs")
    return owner[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is in it, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads metadata that consists of what `IN_METADATA` lists."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save_sharded(path: Path, content: dict, ranks: World) -> None:
    """Write a checkpoint to the folder `path` together with the other ranks; it is there, on the disk, when this ends.

    Args:
        content: what checkpoint.py writes for one process; tensors of model and optimizer may be DTensors.

    Raises:
        OSError: a rank could not write, as on a full disk; that rank's names `path`, which is as it was before.
        Elsewhere: it was another one.
    """
    with _becoming(path, ranks) as folder:
        try:
            dcp.save(_tensors(content), storage_writer=_Writer(folder, path), process_group=ranks.control)
        except dcp.api.CheckpointException as error:
            raise _of_this_rank(error, ranks) from error
        _publish(folder, path, _facts(content), ranks)


def start_saving(path: Path, content: dict, ranks: World) -> Callable[[], None]:
    """Copy what `save_sharded` writes, and return what ends the save, for another thread: steps may change tensors now.

    Args:
        ranks: with a group that nobody else uses until then.

    Raises:
        OSError, Elsewhere: as `save_sharded`, here or as the save ends.
    """
    held = contextlib.ExitStack()
    folder = held.enter_context(_becoming(path, ranks))
    with contextlib.ExitStack() as failing:
        failing.push(held.__exit__)
        facts = copy.deepcopy(_facts(content))
        writer = _Writer(folder, path)
        written: Any = dcp.async_save(_tensors(content), storage_writer=writer, process_group=ranks.control)
        failing.pop_all()

    def finish() -> None:
        with held:
            try:
                written.result()
            except dcp.api.CheckpointException as error:
                raise _of_this_rank(error, ranks) from error
            _publish(folder, path, facts, ranks)

    return finish


def _tensors(content: dict) -> dict:
    states = content[OPTIMIZER]["state"]
    return {MODEL: content[MODEL], OPTIMIZER: {str(index): state for index, state in states.items()}}


def _facts(content: dict) -> dict:
    return content | {MODEL: {}, OPTIMIZER: content[OPTIMIZER] | {"state": {}}}


def _publish(folder: Path, path: Path, facts: dict, ranks: World) -> None:
    """Give the folder, to which all ranks have written, its name."""
    written = ranks.gather({file.name: files.sha256(file) for file in folder.glob(f"__{ranks.place.rank}_*")})
    facts = facts | {"files": {name: digest for one in written for name, digest in one.items()}}
    ranks.first(lambda: _finish(folder, path, facts))


def _finish(folder: Path, path: Path, facts: dict) -> None:
    facts["files"][METADATA] = files.sha256(folder / METADATA)
    with files.naming(path, str(folder / FACTS)), files.atomic(folder / FACTS) as file:
        torch.save(facts, file)
    files.sync_folder(folder)
    if path.exists():  # of a run that was killed before it could name it the latest
        checkpoint.remove(path)
    os.rename(folder, path)
    files.sync_folder(path.parent)


@contextlib.contextmanager
def _becoming(path: Path, ranks: World) -> Iterator[Path]:
    """Yield the folder that is to become `path`, the same on all ranks; the first makes it and clears it away."""
    with contextlib.ExitStack() as held:
        yield ranks.first(lambda: held.enter_context(files.temporary_folder(path)))


def _of_this_rank(error: Any, ranks: World) -> BaseException:
    """Return what a rank raises if DCP failed: its reason on the first rank that has one, Elsewhere on the others."""
    first = min(error.failures)
    return error.failures[first][0] if first == ranks.place.rank else Elsewhere()


def load_tensors(path: Path, facts: dict, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: World) -> dict:
    """Return `facts`, what `run.pt` holds, with the tensors of model and optimizer as this rank holds them.

    Those of the model are written into its own parameters.

    Raises:
        ValueError: a file is missing or damaged, or a tensor is missing, of another shape or dtype; named.
        Elsewhere: another rank found that.
    """
    reader = _Reader(path)
    metadata = ranks.together(lambda: _checked_metadata(path, facts, reader, ranks))
    own: dict[str, dict[str, Any]] = {MODEL: model.state_dict(), OPTIMIZER: {}}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ranks.together(lambda: _check_model(path, metadata, own[MODEL]))
    for name, entry in metadata.items():
        kind, _, rest = name.partition(".")
        if kind == OPTIMIZER:
            index, _, key = rest.partition(".")
            own[OPTIMIZER].setdefault(index, {})[key] = _empty(entry, parameters, index)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read it, too
            dcp.load(own, storage_reader=reader, process_group=ranks.control, no_dist=ranks.size == 1)
    except dcp.api.CheckpointException as error:
        reason = _of_this_rank(error, ranks)
        if isinstance(reason, Elsewhere):
            raise reason from error
        raise ValueError(f"checkpoint {path}: cannot be read ({reason}); {REMEDY}") from error
    states = {int(index): state for index, state in own[OPTIMIZER].items()}
    return facts | {MODEL: own[MODEL], OPTIMIZER: facts[OPTIMIZER] | {"state": states}}


def _checked_metadata(path: Path, facts: dict, reader: _Reader, ranks: World) -> dict[str, TensorStorageMetadata]:
    """Return what DCP says of every tensor; this rank's share of the files is compared with their hashes."""
    names = facts.get("files")
    if not isinstance(names, dict) or METADATA not in names or any(Path(str(name)).name != name for name in names):
        raise ValueError(f"checkpoint {path}: {FACTS} does not list its files; {REMEDY}")
    mine = {METADATA, *sorted(names)[ranks.place.rank :: ranks.size]}
    for name in sorted(mine):
        found = files.sha256(path / name)
        if found != names[name]:
            reason = "does not have the hash that it was written with" if found else "is missing or cannot be read"
            raise ValueError(f"checkpoint {path}: corrupt ({name} {reason}); {REMEDY}")
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a foreign pickle may fail in any way
        raise ValueError(f"checkpoint {path}: {METADATA} cannot be read ({error}); {REMEDY}") from error
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for name in entries.keys() - tensors.keys():
        raise ValueError(f"checkpoint {path}: {name!r} is no tensor; {REMEDY}")
    return tensors


def _check_model(path: Path, metadata: dict[str, TensorStorageMetadata], own: dict[str, Tensor]) -> None:
    saved = {name.removeprefix(f"{MODEL}.") for name in metadata if name.startswith(f"{MODEL}.")}
    for name in sorted(saved ^ own.keys()):
        where = "here" if name in own else "there"
        raise ValueError(f"checkpoint {path}: model: {name!r} is on one side only, {where}; {REMEDY}")
    for name, tensor in own.items():
        entry = metadata[f"{MODEL}.{name}"]
        found, expected = (entry.properties.dtype, list(entry.size)), (tensor.dtype, list(tensor.shape))
        if found != expected:
            raise ValueError(
                f"checkpoint {path}: model: {name!r} is {found[0]} {found[1]}, here {expected[0]} {expected[1]}; "
                f"{REMEDY}"
            )


def _empty(entry: TensorStorageMetadata, parameters: list[Tensor], index: str) -> Tensor:
    """Return an empty tensor for part of an optimizer's state, shared as its parameter is if it is of its shape."""
    like = parameters[int(index)] if index.isdecimal() and int(index) < len(parameters) else None
    if like is not None and like.shape == entry.size:
        return torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
