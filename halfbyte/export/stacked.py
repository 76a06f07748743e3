"""Experts that an architecture holds as one tensor [E, K, N] (gpt-oss, Llama 4): the layout that ModelOpt gives them.

Codes and block scales run along K as everywhere, and lie turned back as the tensor lies: codes uint8 [E, K/2, N],
linear E4M3 scales [E, K/16, N], one fp32 factor for all experts. Names follow the tensor's with `_` in place of `.`.
Here they are turned, [E, N, K/2] and [E, N, K/16].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.export import forms
from halfbyte.export.serve import decode_factor
from halfbyte.export.trained import RULE, Trained
from halfbyte.spec import NVFP4

SCALE, FACTOR, INPUT = "weight_scale", "weight_scale_2", "input_scale"


def check_stacked(trained: Mapping[str, Trained], form: str) -> None:
    """Raise ValueError where experts have no layout in a form."""
    one = next((one for one in trained.values() if one.transposed), None)
    if one is not None and form != forms.MODELOPT:
        raise ValueError(
            f"format={form!r}: {one.key} holds experts as [E, K, N], whose NVFP4 has a layout in ModelOpt's form "
            f"alone; use format={forms.MODELOPT!r}, or {RULE}"
        )


def stacked_planes(one: Trained) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 [E, N, K/2], scales uint8 [E, N, K/16] and the amax [] of experts that have one."""
    codes = torch.stack([q.qdata for q in one.quants])
    scales = torch.stack([q.block_scale.view(torch.uint8) for q in one.quants])
    amaxes = [q.amax for q in one.quants if q.amax is not None]
    assert all(torch.equal(amax, amaxes[0]) for amax in amaxes), "serve.servable gave them one"
    return codes, scales, amaxes[0].clone()


def stacked_tensors(key: str, values: tuple[Tensor, Tensor, Tensor], spec: NVFP4) -> dict[str, Tensor]:
    """Return what a checkpoint holds of the experts `key`."""
    codes, scales, amax = values
    turned = scales.mT.contiguous().view(torch.float8_e4m3fn)
    return {key: codes.mT.contiguous(), f"{key}_{SCALE}": turned, f"{key}_{FACTOR}": decode_factor(spec, amax)}


def part_key(key: str, part: str) -> str:
    """Return where a part of a weight lies, such as "input_scale"."""
    return f"{key.removesuffix('.weight')}.{part}" if key.endswith(".weight") else f"{key}_{part}"


def check_scales(path: Path, key: str, scale: Tensor) -> None:
    """Raise ValueError where block scales E4M3 are none: NaN or negative, as bytes of another layout are."""
    data = scale.view(torch.uint8)
    if bool((data >= 0x7F).any()):  # NaN is 0x7F, and the sign is the highest bit
        raise ValueError(
            f"{path}: block scales of {key} are NaN or negative, so they are none of NVFP4; copy the folder again"
        )


def find_stacked(path: Path, form: str, found: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return codes, scales E4M3 and the fp32 factor of every tensor of experts, turned.

    Raises:
        ValueError: a part is missing or of another shape.
    """
    result = {}
    for key, codes in found.items():
        if form != forms.MODELOPT or codes.dtype != torch.uint8 or codes.dim() != 3 or key.endswith(".weight"):
            continue
        scale, factor = (found.get(f"{key}_{part}") for part in (SCALE, FACTOR))
        for part, tensor in ((SCALE, scale), (FACTOR, factor)):
            if tensor is None:
                raise ValueError(f"{path}: {key}_{part} is missing beside {key}, which is uint8; copy the folder again")
        assert scale is not None and factor is not None, "found just now"
        experts, half, out_features = codes.shape
        expected = (experts, half // 8, out_features)
        if half % 8 or scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != expected:
            raise ValueError(
                f"{path}: {key} is uint8 {list(codes.shape)} and its block scale {scale.dtype} {list(scale.shape)}; "
                f"experts in NVFP4 have float8_e4m3fn {list(expected)}, linear"
            )
        if factor.numel() != 1 or not bool(torch.isfinite(factor.float()).all() & (factor.float() > 0).all()):
            values = factor.flatten().tolist()[:4]
            raise ValueError(f"{path}: {key}_{FACTOR} is {values}; one positive number for all experts is read")
        check_scales(path, key, scale)
        turned = scale.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)
        result[key] = (codes.mT.contiguous(), turned, factor.reshape(()).float())
    if form != forms.MODELOPT:
        return result
    orphans = [key for key in found if key.endswith(f"_{FACTOR}") and key.removesuffix(f"_{FACTOR}") not in result]
    if orphans:
        raise ValueError(f"{path}: {orphans[0]} is of experts that are missing or not packed; copy the folder again")
    return result
