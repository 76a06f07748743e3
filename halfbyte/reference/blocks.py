"""Matrices as blocks [rows, blocks, elements], in the memory order in which torch works fastest.

The order never shows in a byte. Of a matrix in rows the elements of a block are neighbours; of a transposed one the
rows are, and of what `elements_lead` returns the blocks: then reductions and sums over a block are a few whole-row
operations. Elementwise operations keep the order that they are given.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.layout import ceil_div

MAGNITUDE = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.bfloat16: (torch.int16, 0x7FFF)}
MAGNITUDE[torch.float16] = MAGNITUDE[torch.bfloat16]
"""Of a dtype, the integer of its size and the mask of all bits but the sign."""


def in_blocks(x: Tensor, length: int) -> Tensor:
    """Return x [rows, cols], padded with zeros to whole blocks, as [rows, blocks, length]."""
    blocks = ceil_div(x.shape[1], length)
    if x.shape[1] % length:
        x = pad(x, (0, blocks * length - x.shape[1]))
    return x.view(x.shape[0], blocks, length)


def elements_lead(x_RBL: Tensor) -> Tensor:
    """Return the same blocks, the first elements of all blocks first in memory, then the second, and so on."""
    return x_RBL.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of |x|: they order as the magnitudes, Inf and NaN above all, and integers reduce faster."""
    integer, mask = MAGNITUDE[x.dtype]
    return x.view(integer) & mask


def block_maxima(x_RBL: Tensor) -> Tensor:
    """Return the greatest magnitude of each block, Inf or NaN where it holds one: fp32 [rows, blocks] in x's order."""
    bits = magnitude_bits(x_RBL)
    in_rows = x_RBL.stride(0) > x_RBL.stride(1)
    maxima = bits.amax(2) if in_rows else bits.transpose(0, 1).amax(2).T
    return maxima.view(x_RBL.dtype).float()


def ordered_sum(values_RBL: Tensor) -> Tensor:
    """Return the sums over each block, elements 0, 1, ... added in this order, each sum rounded: [rows, blocks]."""
    first, *others = values_RBL.unbind(2)
    total = first.clone()
    for element in others:
        total += element
    return total
