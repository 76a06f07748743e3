"""The contract of training: what a checkpoint's layouts do not say and training goes on from, in halfbyte.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from halfbyte.spec import NVFP4, parse, parse_recipe
from halfbyte.tensor.quant_tensor import VALUE_DTYPES

FILE = "halfbyte.json"
VERSION = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in VALUE_DTYPES}


@dataclass(frozen=True, kw_only=True)
class ContractLayer:
    """One quantized weight of a checkpoint.

    Args:
        layer: the module of the model that it is of.
        spec: key of the NVFP4 that decodes it.
        amax: fp32, as float.hex() writes it.
        compute_dtype: that the weight was rounded to before it was quantized.
        sha256: of codes and block scales.
        shares: number of the group of layers that have one amax, None if it is the layer's own.
        changed: share of the bytes that are not the trained ones.
    """

    layer: str
    spec: str
    amax: str
    compute_dtype: str
    sha256: str
    shares: int | None
    changed: float


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What training knew.

    Args:
        version: of halfbyte.
        format, activations: of the checkpoint.
        layers: {weight's key in the checkpoint: ContractLayer}.
        recipes: {layer of the model: key of its recipe}, experts' `….up_recipe` and `….down_recipe` included; the
            others stay in high precision.
    """

    version: str
    format: str
    activations: str
    layers: Mapping[str, ContractLayer]
    recipes: Mapping[str, str]

    def to_json(self) -> str:
        """Return the text of halfbyte.json."""
        layers = {key: asdict(layer) for key, layer in self.layers.items()}
        values = {one.name: getattr(self, one.name) for one in fields(self)} | {"layers": layers}
        return json.dumps({"contract": VERSION, **values, "recipes": dict(self.recipes)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Contract:
        """Return what `to_json` wrote.

        Raises:
            ValueError: it is damaged, or of another version of this file.
        """
        try:
            values = json.loads(text)
            version = values.pop("contract")
            if version != VERSION:
                raise ValueError(f"it is of version {version}, and this halfbyte reads {VERSION}")
            layers = {key: ContractLayer(**layer) for key, layer in values["layers"].items()}
            for layer in layers.values():
                float.fromhex(layer.amax)
                if not isinstance(parse(layer.spec), NVFP4):
                    raise ValueError(f"spec={layer.spec!r} is not NVFP4")
                if layer.compute_dtype not in DTYPES:
                    raise ValueError(f"compute_dtype={layer.compute_dtype!r} is none of {', '.join(DTYPES)}")
            for key in set(values["recipes"].values()):
                parse_recipe(key)
            return Contract(**values | {"layers": layers})
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"{FILE}: cannot be read as a contract of training: {error}") from error


def digest(codes: Tensor, scales: Tensor) -> str:
    """Return sha256 of a weight's codes and block scales, uint8 or float8."""
    total = hashlib.sha256()
    for tensor in (codes, scales):
        data: Any = tensor.contiguous().view(torch.uint8).cpu().numpy()
        total.update(data)
    return total.hexdigest()
