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

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.gemm import native
from halfbyte.kernels.gemm.grouped import clear_tail
from halfbyte.kernels.unpack.swizzle import grouped_swizzle
from halfbyte.layout import LINEAR, Operand, blocks_per_row, group_alignment, group_ends, round_up

ALIGNMENT = 16  # bytes along the contraction, and rows of each operand


def native_grouped_gemm_nt(a: Operand, b: Operand, offsets: Tensor, K: int) -> Tensor:
    """Return a_g @ b_g.T of every group in bf16, rounded once; for operands that `grouped_unsupported` accepts.

    Args:
        a: tokens [M, K]; or, groups along the contraction, [R, K].
        b: experts [E, N, K]; or [C, K].
        offsets: integer [E], cumulative ends along M or, of the contraction, along K.
        K: the logical contraction length.

    Returns:
        bf16 [M, N], rows behind the last group zero; or [E, R, C].
    """
    y = scaled_grouped_mm(**scaled_grouped_mm_arguments(a, b, offsets, K))
    return clear_tail(y, offsets) if y.dim() == 2 else y


def scaled_grouped_mm_arguments(a: Operand, b: Operand, offsets: Tensor, K: int) -> dict[str, Any]:
    """Return the keyword arguments of `scaled_grouped_mm`."""
    spec, split = a.spec, b.blocks.qdata.dim() == 2
    recipe, order = [native.SCALINGS[spec.block_length]], [SwizzleType.SWIZZLE_32_4_4]
    if spec.format.has_amax:
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


def _elements(side: Operand) -> Tensor:
    return side.blocks.qdata.view(native.DTYPES[side.spec.format.element.name])


def _scales(side: Operand, offsets: Tensor, K: int, split: bool) -> list[Tensor]:
    """Return the groups' swizzled block scales, [padded rows, blocks] or [E, bytes], and the groups' fp32 factors."""
    blocks, spec, _, scale_layout = side
    scale, experts = blocks.block_scale, blocks.qdata.dim() == 3
    if scale_layout == LINEAR:
        scale = grouped_swizzle(scale, spec, None if experts else offsets, contraction=split, total=K)
    if not experts:
        rows, count = blocks.qdata.shape[0], blocks_per_row(blocks.qdata, spec)
        scale = scale.view(round_up(rows, SWIZZLE_ROWS), -1) if split else scale.view(-1, round_up(count, SWIZZLE_COLS))
    factors = [native.tensor_factor(side)] if spec.format.has_amax else []
    return [scale.view(native.DTYPES[spec.format.scale.name]), *factors]
