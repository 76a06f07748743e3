"""MXFP8: 8-bit floats with an E8M0 scale per 32 values (docs/numerics.md section 6)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import E8M0_NAN, MXFP8_BLOCK, f32
from halfbyte.layout import Blocks, ceil_div
from halfbyte.reference.cast import FP8_DTYPES, e8m0_ceil, e8m0_value, fp8
from halfbyte.spec import MXFP8


def quantize(x: Tensor, spec: MXFP8) -> Blocks:
    """Quantize [R, C] along its last dimension: element bytes [R, C'] (C' padded to 32) and scales [R, C' / 32]."""
    rows, cols = x.shape
    blocks = ceil_div(cols, MXFP8_BLOCK)
    no_amax = torch.empty(0, dtype=torch.float32, device=x.device)
    if rows == 0 or blocks == 0:
        qdata = torch.empty(rows, blocks * MXFP8_BLOCK, dtype=torch.uint8, device=x.device)
        return Blocks(qdata, torch.empty(rows, blocks, dtype=torch.uint8, device=x.device), no_amax)
    x = pad(x, (0, blocks * MXFP8_BLOCK - cols)).unflatten(1, (blocks, MXFP8_BLOCK))
    # As in NVFP4, the elements of a block lead.
    x_32RB = x.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    amax = x_32RB.abs().amax(0)
    poison = ~amax.isfinite()
    exponent = e8m0_ceil(torch.where(poison, 0.0, amax) * f32(1 / spec.element_format.max))
    encode = e8m0_value(254 - exponent)
    codes = fp8(x_32RB * encode, spec.element_format).view(torch.uint8).masked_fill_(poison, 0)
    scale = exponent.to(torch.uint8).masked_fill_(poison, E8M0_NAN)
    qdata = codes.permute(1, 2, 0).contiguous()  # of one block a reshape alone would be a view across the rows
    return Blocks(qdata.view(rows, blocks * MXFP8_BLOCK), scale, no_amax)


def decode(qdata: Tensor, block_scale: Tensor, spec: MXFP8) -> Tensor:
    """Return code * 2^(e - 127) as fp32 [R, C'] of element bytes [R, C'] and LINEAR scales [R, C' / 32]."""
    values = qdata.view(FP8_DTYPES[spec.element]).float().unflatten(1, (-1, MXFP8_BLOCK))
    return (values * e8m0_value(block_scale)[..., None]).flatten(1)
