"""What lies in a folder of weights: JSON and safetensors, or one line that says what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.export.write import INDEX, WEIGHTS


def read_folder_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is missing, damaged, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"{path}: is not there; give a Hugging Face folder with config.json and safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no JSON ({error}); copy the folder again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not an object; copy the folder again")
    return value


def inner_object(path: Path, owner: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object that `owner` has under a name, empty where it has none.

    Raises:
        ValueError: it is something else.
    """
    value = owner.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} is {value!r:.60}, and an object is read; copy the folder again")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder.

    Raises:
        ValueError: a file is missing, truncated or none of safetensors, or lacks what the index says it has.
        ImportError: the package safetensors is missing.
    """
    if not (folder / INDEX).exists():
        return _read(folder / WEIGHTS)
    where = read_folder_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ValueError(f"{folder / INDEX}: has no weight_map of keys to files; copy the folder again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(where.values())):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX}: {name!r} is no file of this folder; copy the folder again")
        found = _read(folder / name)
        missing = [key for key, file in where.items() if file == name and key not in found]
        if missing:
            raise ValueError(f"{folder / name}: {missing[0]} is missing, which the index says is there; copy it again")
        tensors |= {key: tensor for key, tensor in found.items() if where.get(key) == name}
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"{path}: is not there; give a folder with {WEIGHTS} or {INDEX}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: is truncated or no safetensors file ({error}); copy it again") from error
