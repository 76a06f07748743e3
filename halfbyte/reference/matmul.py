"""Dequantization and the GEMM on quantized operands (docs/numerics.md sections 3 and 6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK, f32
from halfbyte.layout import LINEAR, Operand, round_up, unswizzle
from halfbyte.reference import mxfp8
from halfbyte.reference.cast import e2m1_values, fp8_values
from halfbyte.reference.scale import clamped_amax, global_scale
from halfbyte.sides import Epilogue
from halfbyte.spec import MXFP8, Spec

NVFP4_SEGMENT = 1024
"""Of products that are summed exactly in fp64: multiples of 2^-20 below 2^23, so that 2^10 of them have 53 bits."""
MXFP8_SEGMENT = 32
"""A block, whose products share a power of two: multiples of 2^-18 below 2^18, of which 2^5 have 41 bits."""


class Decoded(NamedTuple):
    """A GEMM operand: fp32 values [rows, K] and the fp32 factor g, [] or [rows], applied after the sum."""

    values: Tensor
    factor: Tensor | None


def _linear_scale(operand: Operand) -> Tensor:
    blocks, spec, cols, scale_layout = operand
    if scale_layout == LINEAR:
        return blocks.block_scale
    return unswizzle(blocks.block_scale, blocks.qdata.shape[0], round_up(cols, spec.alignment) // spec.block_length)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values that the bytes stand for, computed in fp32 and cast once.

    Args:
        operand: codes; padding beyond its logical columns is dropped.
        dtype: bf16, fp16 or fp32.

    Returns:
        dtype [rows, cols].
    """
    blocks, spec, cols, _ = operand
    scale = _linear_scale(operand)
    if isinstance(spec, MXFP8):
        return mxfp8.decode_mxfp8(blocks.qdata, scale, spec)[:, :cols].to(dtype).contiguous()
    a = clamped_amax(blocks.amax, spec)
    inverse = f32(1 / spec.divisor)
    if spec.has_row_amax:
        a = a[:, None]
    scale = fp8_values(scale.view(torch.float8_e4m3fn))
    # Above 2^100 scale * A may overflow though the product with the constant does not: move 2^16 between them.
    factor = torch.where(a >= 2.0**100, ((scale * 2.0**-16) * a) * (inverse * 2.0**16), (scale * a) * inverse)
    values = e2m1_values(blocks.qdata).unflatten(1, (-1, NVFP4_BLOCK))
    return (values * factor[..., None]).flatten(1)[:, :cols].to(dtype).contiguous()


def decode(operand: Operand) -> Decoded:
    """Return q * block_scale (exact) and the factor that a GEMM applies to its sum.

    Args:
        operand: codes; the values keep the padding that takes part in the GEMM.
    """
    blocks, spec, _, _ = operand
    scale = _linear_scale(operand)
    if isinstance(spec, MXFP8):
        return Decoded(mxfp8.decode_mxfp8(blocks.qdata, scale, spec), None)
    values = e2m1_values(blocks.qdata).unflatten(1, (-1, NVFP4_BLOCK))
    values = (values * fp8_values(scale.view(torch.float8_e4m3fn))[..., None]).flatten(1)
    return Decoded(values, global_scale(blocks.amax, spec))


def from_values(values: Tensor, amax: Tensor, spec: Spec) -> Decoded:
    """Return a transient operand, whose values quantization returned, as a GEMM operand."""
    return Decoded(values, global_scale(amax, spec) if spec.format.has_amax else None)


def plain(x: Tensor) -> Decoded:
    """Return an unquantized matrix as a GEMM operand."""
    return Decoded(x.float(), None)


def gemm_nt(a: Decoded, b: Decoded, epilogue: Epilogue = Epilogue()) -> Tensor:
    """Return a @ b.T [M, N], `epilogue.out` itself if given: factors, bias and addend in fp32 before the only rounding.

    Args:
        a: values [M, K].
        b: values [N, K].
        epilogue: bias, addend and output.
    """
    out_dtype, bias, addend, out, outer, batch_invariant = epilogue
    y = _apply_factors(_sum_alone(a, b) if batch_invariant else a.values @ b.values.T, a.factor, b.factor)
    if bias is not None:
        y += bias.float()
    if outer is not None:
        y += outer[0].float()[:, None] * outer[1].float()
    if addend is not None:
        y += addend.float()
    return y.to(out_dtype) if out is None else out.copy_(y)


def _sum_alone(a: Decoded, b: Decoded) -> Tensor:
    """Return a.values @ b.values.T of quantized operands, fp32, a row the same whatever other rows of a there are.

    Sums of a segment are exact in fp64, so that nobody sees their order; those of segments are added in order.
    """
    length = NVFP4_SEGMENT if a.factor is not None else MXFP8_SEGMENT
    total = torch.zeros(a.values.shape[0], b.values.shape[0], dtype=torch.float64, device=a.values.device)
    for start in range(0, a.values.shape[1], length):
        columns = slice(start, start + length)
        total = total + a.values[:, columns].double() @ b.values[:, columns].double().T
    return total.float()


def _apply_factors(y: Tensor, ga: Tensor | None, gb: Tensor | None) -> Tensor:
    """Multiply by the scalar factors first, as one product unless it overflows, then by a's column and b's row."""
    scalars = [g for g in (ga, gb) if g is not None and g.dim() == 0]
    if len(scalars) == 2:
        first, second = scalars
        product = first * second
        if y.device.type == "cpu" and not math.isinf(float(product)):
            scalars = [product]
        else:
            overflows = product.isinf()
            scalars = [torch.where(overflows, first, product), torch.where(overflows, second, torch.ones_like(second))]
    for scalar in scalars:
        y.mul_(scalar)
    if ga is not None and ga.dim():
        y.mul_(ga[:, None])
    if gb is not None and gb.dim():
        y.mul_(gb)
    return y
