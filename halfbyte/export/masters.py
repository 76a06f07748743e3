"""Values in high precision to train on from: those that codes stand for, or neighbours that have the same codes.

Quantizing decoded values finds their codes again, but for three kinds of blocks that our own quantizer writes:

    scale 0             values are 0; the codes were +-6, for what was not 0
    scale 1 or 2 steps  the smallest of E4M3: codes 3 or 4, decoded, ask for the scale below
    fp4_max below 6     the largest of a block is code 6 all the same, and decodes to 6 / fp4_max of what it was

There the value is moved within those that round to its code, until its block asks for its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import layout
from halfbyte.formats import E2M1, E4M3
from halfbyte.spec import NVFP4, BlockMax
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.quant_tensor import exact_amax

MAGNITUDES = tuple(E2M1.decode(code) for code in range(1 << (E2M1.bits - 1)))
BELOW_ALL_SCALES = 2.0**-24
"""Of the amax: no block whose greatest magnitude this is has a scale, with any fp4_max and e4m3_max in use."""
MARGIN = 0.004
"""What a maximum keeps, relative, from where the next scale begins: rounding to bf16 takes 2^-8 of it."""
BLOCKS = 1 << 16
"""How many are moved at once: what that takes beside the values stays below 32 MiB."""


def decoded_values(quant: QuantTensor) -> Tensor:
    """Return what the codes stand for, fp32, with the amax's own bits where it was the amax."""
    assert quant.amax is not None, "NVFP4 has one"
    return exact_amax(quant.dequantize(torch.float32), quant.amax)


def quantizable_values(quant: QuantTensor) -> Tensor:
    """Return values, fp32, that quantize to `quant`'s bytes under its spec and amax, as far as rounding lets them.

    Args:
        quant: [..., N, K] of plain NVFP4 with one amax, quantized by this library.
    """
    spec, amax = quant.spec, quant.amax
    assert isinstance(spec, NVFP4) and amax is not None, "a contract names no other"
    values = decoded_values(quant)
    cols, length = values.shape[-1], spec.block_length
    padded = torch.nn.functional.pad(values, (0, -cols % length))
    blocks, qdata = padded.view(-1, length), quant.qdata.reshape(-1, length // 2)
    scales = quant.linear_scale().view(torch.uint8).reshape(-1)
    factors = _factors(spec).to(values.device)
    moves = (factors != 1).any(1)
    moves[0] = True
    tiny = amax * BELOW_ALL_SCALES
    for some in moves[scales.int()].nonzero()[:, 0].split(BLOCKS):
        scale, code = scales[some].int()[:, None], (layout.unpack(qdata[some]) & (len(MAGNITUDES) - 1)).int()
        moved = blocks[some] * factors[scale, code]
        blocks[some] = torch.where((scale == 0) & (code > 0), tiny.copysign(moved), moved)
    return padded[..., :cols].clamp_(-amax, amax)


def _factors(spec: NVFP4) -> Tensor:
    """Return what values are multiplied by, fp32 [scales, magnitudes]: to where the maximum of such a block lies.

    1 where they would not stay with their code.
    """
    if not isinstance(spec.scaling, BlockMax):
        return torch.ones(1 << 8, len(MAGNITUDES), dtype=torch.float32)
    table, scale = torch.tensor(MAGNITUDES, dtype=torch.float32), torch.arange(1 << 8)[:, None]
    middles = torch.cat((table[:1], (table[1:] + table[:-1]) / 2, torch.full_like(table[:1], torch.inf)))
    mantissa = 1 << E4M3.mantissa_bits
    steps = (scale % mantissa + mantissa * (scale >= mantissa)).float()  # of a scale, to the next scale
    reach = 0.5 / steps - MARGIN
    moved = torch.clamp(table, spec.fp4_max * (1 - reach), spec.fp4_max * (1 + reach))
    keeps = (moved > middles[:-1]) & (moved < middles[1:]) & (scale > 0) & (table > 0)
    return torch.where(keeps, moved / table, 1.0)
