"""Readers of exported folders: safetensors, numpy and the published layouts, nothing of ours."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors import safe_open

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(folder):
    """Return every tensor of a folder, with float8 as its bytes, read by safetensors alone."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key)
                result[key] = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return result


def config(folder):
    return json.loads((folder / "config.json").read_text())


def e4m3(codes):
    """Return the numbers that E4M3 bytes stand for, from the format's definition."""
    codes = np.asarray(codes)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


def nibbles(packed):
    packed = np.asarray(packed)
    return np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)


def decoded(tensors, prefix):
    """Return a weight as either form defines it, fp32 by numpy."""
    scale = e4m3(tensors[f"{prefix}.weight_scale"].numpy())
    if f"{prefix}.weight_packed" in tensors:
        codes = tensors[f"{prefix}.weight_packed"]
        scale = scale / tensors[f"{prefix}.weight_global_scale"].numpy()
    else:
        codes = tensors[f"{prefix}.weight"]
        scale = scale * tensors[f"{prefix}.weight_scale_2"].numpy()
    return E2M1[nibbles(codes.numpy())] * np.repeat(scale, 16, 1)
