"""Dequantization and the GEMM on quantized operands (docs/numerics.md sections 3 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import MXFP8_BLOCK, NVFP4_BLOCK, f32
from halfbyte.layout import LINEAR, Blocks, ceil_div, round_up, unswizzle
from halfbyte.reference import mxfp8
from halfbyte.reference.cast import e2m1_values, fp8_values
from halfbyte.reference.scale import clamped_amax, global_scale
from halfbyte.spec import MXFP8, Spec


class Decoded(NamedTuple):
    """A GEMM operand: fp32 values [rows, K] and the fp32 factor g, [] or [rows], applied after the sum."""

    values: Tensor
    factor: Tensor | None


def _linear_scale(blocks: Blocks, spec: Spec, cols: int, scale_layout: str) -> Tensor:
    if scale_layout == LINEAR:
        return blocks.block_scale
    length = MXFP8_BLOCK if isinstance(spec, MXFP8) else NVFP4_BLOCK
    return unswizzle(blocks.block_scale, blocks.qdata.shape[0], ceil_div(round_up(cols, spec.alignment), length))


def dequantize(
    blocks: Blocks,
    spec: Spec,
    cols: int,
    dtype: torch.dtype = torch.float32,
    scale_layout: str = LINEAR,
) -> Tensor:
    """Return the values that the bytes stand for, computed in fp32 and cast once.

    Args:
        blocks: the operand's bytes.
        cols: logical columns; padding is dropped.
        dtype: bf16, fp16 or fp32.

    Returns:
        dtype [rows, cols].
    """
    scale = _linear_scale(blocks, spec, cols, scale_layout)
    if isinstance(spec, MXFP8):
        return mxfp8.decode(blocks.qdata, scale, spec)[:, :cols].to(dtype).contiguous()
    a = clamped_amax(blocks.amax, spec)
    inverse = f32(1 / (spec.e4m3_max * spec.fp4_max))
    if spec.outer == "row":
        a = a[:, None]
    scale = fp8_values(scale.view(torch.float8_e4m3fn))
    # Above 2^100 scale * A may overflow though the product with the constant does not: move 2^16 between them.
    factor = torch.where(a >= 2.0**100, ((scale * 2.0**-16) * a) * (inverse * 2.0**16), (scale * a) * inverse)
    values = e2m1_values(blocks.qdata).unflatten(1, (-1, NVFP4_BLOCK))
    return (values * factor[..., None]).flatten(1)[:, :cols].to(dtype).contiguous()


def decode(blocks: Blocks, spec: Spec, cols: int, scale_layout: str = LINEAR) -> Decoded:
    """Return q * block_scale (exact) and the factor that a GEMM applies to its sum.

    Args:
        blocks: the operand's bytes.
        cols: logical columns; the values keep the padding that takes part in the GEMM.
    """
    scale = _linear_scale(blocks, spec, cols, scale_layout)
    if isinstance(spec, MXFP8):
        return Decoded(mxfp8.decode(blocks.qdata, scale, spec), None)
    values = e2m1_values(blocks.qdata).unflatten(1, (-1, NVFP4_BLOCK))
    values = (values * fp8_values(scale.view(torch.float8_e4m3fn))[..., None]).flatten(1)
    return Decoded(values, global_scale(blocks.amax, spec))


def from_values(values: Tensor, amax: Tensor, spec: Spec) -> Decoded:
    """Return a transient operand, whose values quantization returned, as a GEMM operand."""
    return Decoded(values, None if isinstance(spec, MXFP8) else global_scale(amax, spec))


def plain(x: Tensor) -> Decoded:
    """Return an unquantized matrix as a GEMM operand."""
    return Decoded(x.float(), None)


def gemm_nt(
    a: Decoded,
    b: Decoded,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Return a @ b.T with factors, bias and the existing output applied in fp32 before the only rounding.

    Args:
        a: values [M, K].
        b: values [N, K].
        out_dtype: dtype of the result if `out` is None.
        bias: [N] or None.
        out: [M, N] to write into.
        accumulate: add to what `out` holds.

    Returns:
        [M, N], `out` itself if given.
    """
    y = a.values @ b.values.T
    y = _apply_factors(y, a.factor, b.factor)
    if bias is not None:
        y += bias.float()
    if accumulate:
        assert out is not None, "accumulate needs out"
        y += out.float()
    if out is None:
        return y.to(out_dtype)
    return out.copy_(y)


def gemm_nt_add(a: Decoded, b: Decoded, addend: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b.T + addend [M, N], added in fp32 before the only rounding."""
    y = _apply_factors(a.values @ b.values.T, a.factor, b.factor)
    return (y + addend.float()).to(out_dtype)


def _apply_factors(y: Tensor, ga: Tensor | None, gb: Tensor | None) -> Tensor:
    """Multiply by the scalar factors first, as one product unless it overflows, then by a's column and b's row."""
    scalars = [g for g in (ga, gb) if g is not None and g.dim() == 0]
    if len(scalars) == 2:
        first, second = scalars
        product = first * second
        overflows = product.isinf()
        if y.device.type == "cpu" and not bool(overflows):
            scalars = [product]
        else:
            scalars = [torch.where(overflows, first, product), torch.where(overflows, second, torch.ones_like(second))]
    for scalar in scalars:
        y.mul_(scalar)
    if ga is not None and ga.dim():
        y.mul_(ga[:, None])
    if gb is not None and gb.dim():
        y.mul_(gb)
    return y
