"""From codes and scales to values, of operands in groups: tokens, and the weights of experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.kernels.unpack.dequantize import decode, dequantize
from halfbyte.kernels.unpack.swizzle import grouped_unswizzle
from halfbyte.layout import LINEAR, Blocks, Operand, blocks_per_row
from halfbyte.spec import Spec


def grouped_values(
    blocks: Blocks, spec: Spec, offsets: Tensor | None, K: int, scale_layout: str = LINEAR, *, split: bool = False
) -> Tensor:
    """Return element * block_scale of codes, bf16, with all the padding of the storage.

    Args:
        blocks: tokens, or the experts' [E, N, bytes].
        offsets: None for experts.
        K: logical columns.
        split: whether the groups split the columns.
    """
    qdata = blocks.qdata.flatten(0, -2)
    scale = linear_scale(blocks, spec, offsets, K, scale_layout, split=split).flatten(0, -2)
    cols = blocks_per_row(qdata, spec) * spec.block_length
    values = decode(Operand(Blocks(qdata, scale, blocks.amax), spec, cols if split else K)).values
    return values.view(*blocks.qdata.shape[:-1], -1)


def linear_scale(
    blocks: Blocks, spec: Spec, offsets: Tensor | None, K: int, scale_layout: str, *, split: bool = False
) -> Tensor:
    """Return LINEAR block scales."""
    if scale_layout == LINEAR:
        return blocks.block_scale
    shape = (*blocks.qdata.shape[:-1], blocks_per_row(blocks.qdata, spec))
    own = None if blocks.qdata.dim() == 3 else offsets
    return grouped_unswizzle(blocks.block_scale, shape, spec, own, contraction=split, total=K)


def grouped_dequantize(operand: Operand, offsets: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of tokens in groups along the rows, zeros behind the last, or of expert weights (offsets None).

    Args:
        operand: quantized.

    Returns:
        dtype [M, cols] or [E, N, cols].
    """
    blocks, spec, cols, scale_layout = operand
    scale = linear_scale(blocks, spec, offsets, cols, scale_layout).flatten(0, -2)
    qdata = blocks.qdata.flatten(0, -2)
    amax = blocks.amax.flatten()
    if spec.format.has_amax and not spec.has_row_amax:  # the factor of its group for every row
        rows = torch.arange(qdata.shape[0], device=qdata.device)
        if offsets is None:
            amax = amax[rows // blocks.qdata.shape[1]]
        else:
            amax = torch.cat((amax, amax.new_zeros(1)))[torch.bucketize(rows, offsets, right=True)]
        spec = replace(spec, block=(1, 16), outer="row")
    return dequantize(Operand(Blocks(qdata, scale, amax), spec, cols), dtype).view(*blocks.qdata.shape[:-1], cols)
