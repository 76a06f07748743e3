"""gemm_nt on the FP4 and FP8 tensor cores of sm_100 and later: `torch.nn.functional.scaled_mm` on the stored bytes.

What scaled_mm cannot do is done by one pass over its fp32 result: row factors, an addend, an outer product, a bias of
another dtype.
Checked against ATen's conditions on fake tensors, not run: no such GPU was at hand (docs/internals/gemm.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.gemm.dense import combine, ends, output, without_products
from halfbyte.kernels.unpack.dequantize import from_values
from halfbyte.kernels.unpack.swizzle import swizzle
from halfbyte.layout import LINEAR, Operand, blocks_per_row, round_up
from halfbyte.sides import Epilogue

ALIGNMENT = 16  # bytes along the contraction, and rows of b: what scaled_mm requires
DTYPES = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
"""How torch calls what elements and scales are."""

SCALINGS = {16: ScalingType.BlockWise1x16, 32: ScalingType.BlockWise1x32}


def native_gemm_nt(a: Operand, b: Operand, epilogue: Epilogue = Epilogue()) -> Tensor:
    """Return a @ b.T [M, N], `epilogue.out` itself if given, rounded once.

    Where the product of the two tensor factors overflows fp32, a result that scaled_mm finishes by itself is infinite.

    Args:
        a: NVFP4 or MXFP8 [M, K].
        b: the same format [N, K].
        epilogue: bias, addend and output.
    """
    left, right, out = a.blocks.qdata, b.blocks.qdata, epilogue.out
    if 0 in (*left.shape, right.shape[0]):
        y = output(left, right, epilogue)
        return without_products(y, epilogue) if y.numel() else y
    if _finishes_alone(a, b, epilogue):
        y = scaled_mm(**scaled_mm_arguments(a, b, epilogue.dtype, epilogue.bias))[:, : right.shape[0]]
        return y if out is None else out.copy_(y)
    raw = scaled_mm(**scaled_mm_arguments(a, b, None, None))
    factors = (from_values(*side.blocks[::2], side.spec) for side in (a, b))
    y = output(left, right, epilogue)
    target, addend = ends(y, epilogue)
    combine(raw, 1, *factors, epilogue._replace(out=target, addend=addend))
    return y if target is y else y.copy_(target)


def _finishes_alone(a: Operand, b: Operand, epilogue: Epilogue) -> bool:
    """Whether scaled_mm can do everything: tensor factors, nothing added, a bias of the (half) output dtype."""
    added = epilogue.addend is not None or epilogue.outer is not None
    if added or any(side.spec.has_row_amax for side in (a, b)):
        return False
    return epilogue.bias is None or epilogue.bias.dtype == epilogue.dtype != torch.float32


def scaled_mm_arguments(a: Operand, b: Operand, dtype: torch.dtype | None, bias: Tensor | None) -> dict[str, Any]:
    """Return the keyword arguments of `scaled_mm`, operands padded as it requires.

    Args:
        a, b: operands of one format with the same contraction.
        dtype: output dtype of a call that applies the tensor factors; None: fp32 without any factor.
        bias: [N] of dtype `dtype`, or None.

    Returns:
        The result of such a call is [M, round_up(N, 16)].
    """
    assert a.blocks.qdata.shape[1] == b.blocks.qdata.shape[1], "operands differ along the contraction"
    recipe, order = [SCALINGS[a.spec.block_length]], [SwizzleType.SWIZZLE_32_4_4]
    two_level = a.spec.format.has_amax and dtype is not None
    if two_level:
        recipe, order = [*recipe, ScalingType.TensorWise], [*order, SwizzleType.NO_SWIZZLE]
    rows, N = a.blocks.qdata.shape[0], b.blocks.qdata.shape[0]
    padded_rows = round_up(N, ALIGNMENT)
    if bias is not None:
        bias = pad(bias, (0, padded_rows - N))
    return {
        "mat_a": _elements(a, rows),
        "mat_b": _elements(b, padded_rows).t(),
        "scale_a": _scales(a, rows, two_level),
        "scale_recipe_a": recipe,
        "swizzle_a": order,
        "scale_b": _scales(b, padded_rows, two_level),
        "scale_recipe_b": recipe,
        "swizzle_b": order,
        "bias": bias,
        "output_dtype": torch.float32 if dtype is None else dtype,
    }


def _elements(side: Operand, rows: int) -> Tensor:
    """Return the element bytes in the dtype that scaled_mm reads, [rows, whole multiples of 16 bytes].

    Padding bytes along the contraction may hold anything finite: their block scale is zero.
    """
    qdata = side.blocks.qdata
    width = round_up(qdata.shape[1], ALIGNMENT)
    if rows != qdata.shape[0]:
        qdata = pad(qdata, (0, width - qdata.shape[1], 0, rows - qdata.shape[0]))
    elif _has_room(qdata, width):
        qdata = qdata.as_strided((rows, width), (qdata.stride(0), 1))
    else:
        qdata = pad(qdata, (0, width - qdata.shape[1])).contiguous()
    return qdata.view(DTYPES[side.spec.format.element.name])


def _has_room(qdata: Tensor, width: int) -> bool:
    """Whether rows of `width` bytes lie behind the view: aligned, apart from each other, inside the storage."""
    stride, start = qdata.stride(0), qdata.storage_offset()
    if qdata.stride(1) != 1 or stride % ALIGNMENT or start % ALIGNMENT or stride < width:
        return False
    return start + (qdata.shape[0] - 1) * stride + width <= qdata.untyped_storage().nbytes()


def _scales(side: Operand, rows: int, two_level: bool) -> list[Tensor]:
    """Return the swizzled block scales of `rows` rows, and the fp32 tensor factor if the call applies it."""
    spec, scale = side.spec, side.blocks.block_scale
    if side.scale_layout == LINEAR:
        scale = swizzle(scale.view(torch.uint8))
    # A buffer holds whole 128-row tiles, so rows padded to 16 need no further scales.
    assert scale.numel() == round_up(rows, 128) * round_up(blocks_per_row(side.blocks.qdata, spec), 4)
    return [scale.view(DTYPES[spec.format.scale.name]), *([tensor_factor(side)] if two_level else [])]


def tensor_factor(side: Operand) -> Tensor:
    """Return g = A * f(1 / divisor) of docs/numerics.md section 3, fp32 like the operand's amax."""
    divisor = side.spec.divisor
    return side.blocks.amax.clamp_min(f32(divisor / FLT_MAX)) * f32(1 / divisor)
