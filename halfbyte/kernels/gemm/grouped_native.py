"""Grouped GEMM on the FP4 and FP8 tensor cores of sm_100: `torch.nn.functional.scaled_grouped_mm` on the stored bytes.

What it cannot do (row factors, other outputs than bf16, accumulation, ragged features) is emulated, with the reason.
The call was checked against ATen's conditions, not run: no such GPU was at hand (docs/internals/grouped.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    ScalingType,
    SwizzleType,
    scaled_grouped_mm,  # pyrefly: ignore[missing-module-attribute]  its stub lacks it
)

from halfbyte.formats import FLT_MAX, SWIZZLE_COLS, SWIZZLE_ROWS, f32
from halfbyte.kernels.gemm import native
from halfbyte.kernels.gemm.grouped import clear_tail
from halfbyte.kernels.unpack.grouped_swizzle import grouped_swizzle
from halfbyte.layout import LINEAR, Blocks, GroupedOperand, group_alignment, group_ends, round_up
from halfbyte.spec import NVFP4, Spec

ALIGNMENT = 16  # bytes along the contraction, and rows of each operand


def grouped_gemm_nt(a: GroupedOperand, b: GroupedOperand, offsets: Tensor, K: int) -> Tensor:
    """Return a_g @ b_g.T of every group in bf16, rounded once; for operands that `unsupported` accepts.

    Args:
        a: tokens [M, K]; or, groups along the contraction, [R, K].
        b: experts [E, N, K]; or [C, K].
        offsets: integer [E], cumulative ends along M or, of the contraction, along K.
        K: the logical contraction length.

    Returns:
        bf16 [M, N], rows behind the last group zero; or [E, R, C].
    """
    y = scaled_grouped_mm(**call_arguments(a, b, offsets, K))
    return clear_tail(y, offsets) if y.dim() == 2 else y


def call_arguments(a: GroupedOperand, b: GroupedOperand, offsets: Tensor, K: int) -> dict[str, Any]:
    """Return the keyword arguments of `scaled_grouped_mm`."""
    spec = a.spec
    assert spec is not None and isinstance(b.data, Blocks), "quantized operands have a spec"
    nvfp4, split = isinstance(spec, NVFP4), b.data.qdata.dim() == 2
    recipe = [ScalingType.BlockWise1x16 if nvfp4 else ScalingType.BlockWise1x32]
    order = [SwizzleType.SWIZZLE_32_4_4]
    if nvfp4:
        recipe, order = [*recipe, ScalingType.TensorWise], [*order, SwizzleType.NO_SWIZZLE]
    ends = group_ends(offsets, group_alignment(spec)) if split else offsets
    return {
        "mat_a": _elements(a),
        "mat_b": _elements(b).mT,
        "scale_a": _scales(a, offsets, K, split),
        "scale_recipe_a": recipe,
        "swizzle_a": order,
        "scale_b": _scales(b, offsets, K, split),
        "scale_recipe_b": recipe,
        "swizzle_b": order,
        "offs": ends.to(torch.int32),
        "output_dtype": torch.bfloat16,
    }


def _elements(side: GroupedOperand) -> Tensor:
    blocks, spec = side.data, side.spec
    assert isinstance(blocks, Blocks) and spec is not None, "a native operand holds codes"
    return blocks.qdata.view(torch.float4_e2m1fn_x2 if isinstance(spec, NVFP4) else native.ELEMENTS[spec.element])


def _scales(side: GroupedOperand, offsets: Tensor, K: int, split: bool) -> list[Tensor]:
    """Return the groups' swizzled block scales, [padded rows, blocks] or [E, bytes], and the groups' fp32 factors."""
    blocks, spec, scale_layout = side
    assert isinstance(blocks, Blocks) and spec is not None, "a native operand holds codes"
    scale, experts = blocks.block_scale, blocks.qdata.dim() == 3
    if scale_layout == LINEAR:
        scale = grouped_swizzle(scale, spec, None if experts else offsets, contraction=split, total=K)
    if not experts:
        rows, count = blocks.qdata.shape[0], _blocks_per_row(blocks.qdata, spec)
        scale = scale.view(round_up(rows, SWIZZLE_ROWS), -1) if split else scale.view(-1, round_up(count, SWIZZLE_COLS))
    scales = [scale.view(torch.float8_e4m3fn if isinstance(spec, NVFP4) else torch.float8_e8m0fnu)]
    if isinstance(spec, NVFP4):
        divisor = spec.e4m3_max * spec.fp4_max
        scales.append(blocks.amax.clamp_min(f32(divisor / FLT_MAX)) * f32(1 / divisor))
    return scales


def _blocks_per_row(qdata: Tensor, spec: Spec) -> int:
    return qdata.shape[-1] * (2 if isinstance(spec, NVFP4) else 1) // spec.block_length
