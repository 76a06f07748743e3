"""The two published layouts of NVFP4 checkpoints: how their tensors are called, and what their configs say.

Both hold codes uint8 [N, K/2] with the even column in the low nibble, and linear E4M3 scales [N, K/16]. They differ in
names and in the direction of the fp32 factor that every block scale has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.export.serve import decode_factor, encode_factor
from halfbyte.spec import NVFP4
from halfbyte.version import __version__

MODELOPT, COMPRESSED_TENSORS = "modelopt", "compressed-tensors"
FORMATS = (MODELOPT, COMPRESSED_TENSORS)
INPUTS = {MODELOPT: "input_scale", COMPRESSED_TENSORS: "input_global_scale"}
STATIC, PER_TOKEN, NONE = "static", "per-token", "none"
ACTIVATIONS = (STATIC, PER_TOKEN, NONE)
PACKED = "nvfp4-pack-quantized"
PRODUCER = {"name": "halfbyte", "version": __version__}


def weight_tensors(prefix: str, form: str, planes: tuple[Tensor, Tensor, Tensor], spec: NVFP4) -> dict[str, Tensor]:
    """Return the tensors of one weight.

    Args:
        prefix: the module's name in the checkpoint.
        form: one of FORMATS.
        planes: codes uint8 [N, K/2], scales uint8 [N, K/16], amax fp32 [].
        spec: how they were quantized.
    """
    codes, scales, amax = planes
    scales = scales.view(torch.float8_e4m3fn)
    if form == MODELOPT:
        names = ("weight", "weight_scale", "weight_scale_2")
        values = (codes, scales, decode_factor(spec, amax))
    else:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        values = (codes, scales, encode_factor(spec, amax).reshape(1))
    return {f"{prefix}.{name}": value for name, value in zip(names, values, strict=True)}


def input_factor(form: str, amax: float, spec: NVFP4) -> Tensor:
    """Return the tensor that says the fp32 factor of a module's input, from the greatest magnitude that it saw."""
    value = torch.tensor(amax, dtype=torch.float32)
    return decode_factor(spec, value) if form == MODELOPT else encode_factor(spec, value).reshape(1)


def quantization_config(form: str, activations: str, exclude: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json."""
    make = _modelopt if form == MODELOPT else _compressed_tensors
    return make(activations, list(exclude))


def _modelopt(activations: str, exclude: list[str]) -> dict[str, Any]:
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4().block_length}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": operand}
    if activations != NONE:
        group["input_activations"] = operand | {"dynamic": activations == PER_TOKEN}
    return {
        "quant_method": MODELOPT,
        "quant_algo": _algorithm(activations),
        "ignore": exclude,
        "config_groups": {"group_0": group},
        "producer": PRODUCER,
    }


def _algorithm(activations: str) -> str:
    return "W4A16_NVFP4" if activations == NONE else "NVFP4"


def modelopt_file(activations: str, exclude: Sequence[str]) -> dict[str, Any]:
    """Return what `hf_quant_config.json` says, which vLLM, SGLang and TensorRT-LLM read first."""
    quantization = {
        "quant_algo": _algorithm(activations),
        "kv_cache_quant_algo": None,
        "group_size": NVFP4().block_length,
        "exclude_modules": list(exclude),
    }
    return {"producer": PRODUCER, "quantization": quantization}


def _compressed_tensors(activations: str, exclude: list[str]) -> dict[str, Any]:
    operand = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": NVFP4().block_length,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }
    group: dict[str, Any] = {"targets": ["Linear"], "format": PACKED, "weights": operand}
    if activations == STATIC:
        group["input_activations"] = operand | {"dynamic": "local", "observer": "static_minmax"}
    elif activations == PER_TOKEN:
        group["input_activations"] = operand | {"dynamic": True}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": PACKED,
        "quantization_status": "compressed",
        "ignore": exclude,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
