"""QuantTensors as plain tensors and strings, the two things a safetensors file holds.

Each QuantTensor `name` becomes `name.qdata`, `name.block_scale` and, where it has them, `name.amax` and
`name.group_offsets`; the metadata entry `halfbyte.name` says how to read them. Codes and scales are raw bytes (uint8),
which every version of every reader understands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.layout import Blocks
from halfbyte.spec import parse
from halfbyte.tensor.quant_tensor import VALUE_DTYPES, QuantTensor

PREFIX = "halfbyte."
VERSION = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in VALUE_DTYPES}


def to_safetensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return plain tensors and metadata for `safetensors.torch.save_file(plain, path, metadata)`.

    Args:
        tensors: names to QuantTensors and plain tensors; plain ones pass through.

    Returns:
        (plain, metadata): contiguous tensors and str -> str, the input of `from_safetensors`.

    Raises:
        ValueError: two entries would have the same name.
    """
    plain: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantTensor):
            metadata[PREFIX + name] = _describe(tensor)
            parts = {f"{name}.{part}": _alone(value, memory) for part, value in _parts(tensor).items()}
        else:
            parts = {name: tensor}
        for key, value in parts.items():
            if key in plain:
                raise ValueError(f"tensors has two entries that are stored as {key!r}; rename one of them")
            plain[key] = value
    return plain, metadata


def from_safetensors(plain: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Return the tensors that `to_safetensors` was given; entries without halfbyte metadata pass through.

    Args:
        plain: what the file holds, as from `safetensors.torch.load_file` or `safe_open`.
        metadata: the file's metadata, as from `safe_open(...).metadata()`.

    Raises:
        ValueError: metadata is damaged or of an unknown version, or a tensor it names is missing or does not fit.
    """
    rest, out = dict(plain), {}
    for key, text in (metadata or {}).items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            out[name] = _restore(name, text, rest)
    clash = out.keys() & rest.keys()
    if clash:
        raise ValueError(f"tensor {sorted(clash)[0]!r} is stored both quantized and plain; the file is damaged")
    return out | rest


def _parts(q: QuantTensor) -> dict[str, Tensor]:
    blocks = q.blocks
    parts = {"qdata": blocks.qdata.contiguous(), "block_scale": blocks.block_scale.contiguous()}
    if q.amax is not None:
        parts["amax"] = q.amax
    if q.group_offsets is not None:
        parts["group_offsets"] = q.group_offsets
    return parts


def _alone(part: Tensor, memory: set[int]) -> Tensor:
    """Return a part, or a copy where another lies in the same memory, as those of slices do: safetensors refuses that.

    Args:
        part: of a QuantTensor.
        memory: the storages met so far; that of the result is added.
    """
    shared = part.numel() > 0 and part.untyped_storage().data_ptr() in memory
    part = part.clone() if shared else part
    memory.add(part.untyped_storage().data_ptr())
    return part


def _describe(q: QuantTensor) -> str:
    values = {
        "version": VERSION,
        "spec": q.spec.key,
        "scale_layout": q.scale_layout,
        "shape": list(q.shape),
        "dtype": str(q.dtype).removeprefix("torch."),
        "grouped": q.group_offsets is not None,
        "splits_columns": q.splits_columns,
    }
    return json.dumps(values, sort_keys=True)


def _restore(name: str, text: str, rest: dict[str, Tensor]) -> QuantTensor:
    """Build the QuantTensor `name` and take its parts out of `rest`."""
    try:
        values = json.loads(text)
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']} is not {VERSION}")
        spec, shape, dtype = parse(values["spec"]), tuple(map(int, values["shape"])), DTYPES[values["dtype"]]
        names = ["qdata", "block_scale", *(["amax"] if spec.key.startswith("nvfp4") else [])]
        parts = {part: rest.pop(f"{name}.{part}") for part in names}
        offsets = rest.pop(f"{name}.group_offsets") if values["grouped"] else None
        blocks = Blocks(parts["qdata"], parts["block_scale"], parts.get("amax", torch.empty(0, dtype=torch.float32)))
        groups = {"group_offsets": offsets, "splits_columns": values["splits_columns"]}
        options = {"scale_layout": values["scale_layout"], **groups}
        return QuantTensor(blocks, spec, shape=shape, dtype=dtype, **options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"tensor {name!r}: cannot be read as a QuantTensor: {error!r}; save it again") from error
