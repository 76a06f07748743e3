"""gemm_nt on the FP4 and FP8 tensor cores of sm_100 and later: `torch.nn.functional.scaled_mm` on the stored bytes.

What scaled_mm cannot do is done by one pass over its fp32 result: row factors, accumulation, a bias of another dtype.
Checked against ATen's conditions on fake tensors, not run: no such GPU was at hand (docs/internals/gemm.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.gemm.dense import bias_only, combine
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.kernels.unpack.swizzle import swizzle
from halfbyte.layout import LINEAR, Blocks, ceil_div, round_up
from halfbyte.spec import MXFP8, NVFP4, Spec

ALIGNMENT = 16  # bytes along the contraction, and rows of b: what scaled_mm requires
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Packed(NamedTuple):
    """A quantized operand as it is stored: its bytes, spec, logical columns and scale layout."""

    blocks: Blocks
    spec: Spec
    cols: int
    scale_layout: str = LINEAR

    @property
    def rows(self) -> int:
        return self.blocks.qdata.shape[0]

    @property
    def factors(self) -> Decoded:
        """What the epilogue needs of the operand: amax and divisor, none for MXFP8."""
        if isinstance(self.spec, MXFP8):
            return Decoded(self.blocks.qdata)
        return Decoded(self.blocks.qdata, self.blocks.amax, self.spec.e4m3_max * self.spec.fp4_max)


def gemm_nt(
    a: Packed,
    b: Packed,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Return a @ b.T, rounded once.

    Args:
        a: NVFP4 or MXFP8 [M, K].
        b: the same format [N, K].
        out_dtype: bf16, fp16 or fp32 of the result if `out` is None.
        bias: [N] of any float dtype, or None.
        out: [M, N] to write into.
        accumulate: add to what `out` holds.

    Returns:
        [M, N], `out` itself if given. Where the product of the two tensor factors overflows fp32, a result that
        scaled_mm finishes by itself is infinite.
    """
    assert out is not None or not accumulate, "accumulate needs out"
    M, N, dtype = a.rows, b.rows, out_dtype if out is None else out.dtype
    if M == 0 or N == 0 or a.blocks.qdata.shape[1] == 0:
        y = torch.empty(M, N, dtype=dtype, device=a.blocks.qdata.device) if out is None else out
        return bias_only(y, bias, y if accumulate else None) if y.numel() else y
    if _finishes_alone(a, b, dtype, bias, accumulate):
        y = scaled_mm(**call_arguments(a, b, dtype, bias))[:, :N]
        return y if out is None else out.copy_(y)
    raw = scaled_mm(**call_arguments(a, b, None, None))
    y = torch.empty(M, N, dtype=dtype, device=raw.device) if out is None else out
    target = y if y.stride(1) == 1 else y.contiguous()
    combine(raw, 1, a.factors, b.factors, target, bias=bias, addend=target if accumulate else None)
    return y if target is y else y.copy_(target)


def _finishes_alone(a: Packed, b: Packed, dtype: torch.dtype, bias: Tensor | None, accumulate: bool) -> bool:
    """Whether scaled_mm can do everything: tensor factors, no accumulation, a bias of the (half) output dtype."""
    row = any(isinstance(side.spec, NVFP4) and side.spec.outer == "row" for side in (a, b))
    return not row and not accumulate and (bias is None or bias.dtype == dtype != torch.float32)


def call_arguments(a: Packed, b: Packed, dtype: torch.dtype | None, bias: Tensor | None) -> dict[str, Any]:
    """Return the keyword arguments of `scaled_mm`, operands padded as it requires.

    Args:
        a, b: operands of one format with the same contraction.
        dtype: output dtype of a call that applies the tensor factors; None: fp32 without any factor.
        bias: [N] of dtype `dtype`, or None.

    Returns:
        The result of such a call is [M, round_up(N, 16)].
    """
    assert a.blocks.qdata.shape[1] == b.blocks.qdata.shape[1], "operands differ along the contraction"
    nvfp4 = isinstance(a.spec, NVFP4)
    recipe = [ScalingType.BlockWise1x16 if nvfp4 else ScalingType.BlockWise1x32]
    order = [SwizzleType.SWIZZLE_32_4_4]
    two_level = nvfp4 and dtype is not None
    if two_level:
        recipe, order = [*recipe, ScalingType.TensorWise], [*order, SwizzleType.NO_SWIZZLE]
    padded_rows = round_up(b.rows, ALIGNMENT)
    if bias is not None:
        bias = pad(bias, (0, padded_rows - b.rows))
    return {
        "mat_a": _elements(a, a.rows),
        "mat_b": _elements(b, padded_rows).t(),
        "scale_a": _scales(a, a.rows, two_level),
        "scale_recipe_a": recipe,
        "swizzle_a": order,
        "scale_b": _scales(b, padded_rows, two_level),
        "scale_recipe_b": recipe,
        "swizzle_b": order,
        "bias": bias,
        "output_dtype": torch.float32 if dtype is None else dtype,
    }


def _elements(side: Packed, rows: int) -> Tensor:
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
    return qdata.view(torch.float4_e2m1fn_x2 if isinstance(side.spec, NVFP4) else ELEMENTS[side.spec.element])


def _has_room(qdata: Tensor, width: int) -> bool:
    """Whether rows of `width` bytes lie behind the view: aligned, apart from each other, inside the storage."""
    stride, start = qdata.stride(0), qdata.storage_offset()
    if qdata.stride(1) != 1 or stride % ALIGNMENT or start % ALIGNMENT or stride < width:
        return False
    return start + (qdata.shape[0] - 1) * stride + width <= qdata.untyped_storage().nbytes()


def _scales(side: Packed, rows: int, two_level: bool) -> list[Tensor]:
    """Return the swizzled block scales of `rows` rows, and the fp32 tensor factor if the call applies it."""
    spec, scale = side.spec, side.blocks.block_scale
    if side.scale_layout == LINEAR:
        scale = swizzle(scale.view(torch.uint8))
    # A buffer holds whole 128-row tiles, so rows padded to 16 need no further scales.
    assert scale.numel() == round_up(rows, 128) * round_up(ceil_div(_values(side), spec.block_length), 4)
    scales = [scale.view(torch.float8_e4m3fn if isinstance(spec, NVFP4) else torch.float8_e8m0fnu)]
    if two_level:
        divisor = spec.e4m3_max * spec.fp4_max
        scales.append(side.blocks.amax.clamp_min(f32(divisor / FLT_MAX)) * f32(1 / divisor))
    return scales


def _values(side: Packed) -> int:
    return side.blocks.qdata.shape[1] * (2 if isinstance(side.spec, NVFP4) else 1)
