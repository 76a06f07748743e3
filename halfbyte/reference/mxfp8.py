"""MXFP8: 8-bit floats with an E8M0 scale per 32 values (docs/numerics.md section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import E8M0_NAN, MXFP8_BLOCK, f32
from halfbyte.layout import Blocks, ceil_div
from halfbyte.reference.blocks import block_maxima, in_blocks
from halfbyte.reference.cast import FP8_DTYPES, e8m0_ceil, e8m0_value, fp8, fp8_values
from halfbyte.spec import MXFP8


def quantize_mxfp8(x: Tensor, spec: MXFP8, values: Tensor | None = None) -> Blocks:
    """Quantize [R, C] along its last dimension: element bytes [R, C'] (C' padded to 32) and scales [R, C' / 32].

    `values` fp32 [R, C'], if given, is filled with element * scale instead.
    """
    rows, cols = x.shape
    blocks = ceil_div(cols, MXFP8_BLOCK)
    no_amax = torch.empty(0, dtype=torch.float32, device=x.device)
    qdata = torch.empty(rows, blocks * MXFP8_BLOCK, dtype=torch.uint8, device=x.device)
    if rows == 0 or blocks == 0:
        return Blocks(qdata, torch.empty(rows, blocks, dtype=torch.uint8, device=x.device), no_amax)
    x_RB32 = in_blocks(x, MXFP8_BLOCK)
    amax = block_maxima(x_RB32)
    poison = ~amax.isfinite()
    exponent = e8m0_ceil(torch.where(poison, 0.0, amax) * f32(1 / spec.element_format.max))
    codes = fp8(x_RB32 * e8m0_value(254 - exponent)[..., None], spec.element_format)
    exponent = exponent.masked_fill_(poison, E8M0_NAN)
    if x.device.type != "cpu" or bool(poison.any()):  # on a GPU, mask rather than ask
        codes = codes.view(torch.uint8).masked_fill_(poison[..., None], 0).view(codes.dtype)
    if values is not None:
        torch.mul(fp8_values(codes), e8m0_value(exponent)[..., None], out=values.view(rows, blocks, MXFP8_BLOCK))
    else:
        qdata.view(rows, blocks, MXFP8_BLOCK).copy_(codes.view(torch.uint8))
    # Of a transposed x the exponents lie in its order, and compiled code asks for rows.
    return Blocks(qdata, exponent.to(torch.uint8, memory_format=torch.contiguous_format), no_amax)


def decode_mxfp8(qdata: Tensor, block_scale: Tensor, spec: MXFP8) -> Tensor:
    """Return code * 2^(e - 127) as fp32 [R, C'] of element bytes [R, C'] and LINEAR scales [R, C' / 32]."""
    values = fp8_values(qdata.view(FP8_DTYPES[spec.element])).unflatten(1, (-1, MXFP8_BLOCK))
    return (values * e8m0_value(block_scale)[..., None]).flatten(1)
