"""Philox4x32-10 in plain torch (Salmon et al. 2011), keyed by logical position (docs/numerics.md sections 4 and 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.rng import Draw

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of each counter, as int64 in 0..2^32-1.

    Args:
        counter: four int64 tensors that broadcast, each holding a 32-bit word.
        key: two int64 scalars on the same device, each holding a 32-bit word.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))
    multipliers = _column((_M0, _M1), even)
    keys = torch.stack(key).view(-1, *[1] * c0.dim())
    steps = _column((_W0, _W1), even)
    for i in range(10):
        # The low 64 bits of a product are right even where int64 wraps. Words 1 and 3 carry junk above 32 bits, which
        # the mask after the exclusive or removes.
        product = even * multipliers
        even = (product >> 32).flip(0).bitwise_xor_(odd).bitwise_xor_(keys + i * steps).bitwise_and_(_LOW)
        odd = product.flip(0)
    odd = odd.bitwise_and_(_LOW)
    return even[0], odd[0], even[1], odd[1]


def _column(values: tuple[int, int], like: Tensor) -> Tensor:
    """Return two numbers as int64 [2, 1, ...] that broadcasts with `like` [2, ...], filled on its device."""
    column = torch.empty(2, *[1] * (like.dim() - 1), dtype=torch.int64, device=like.device)
    column[0].fill_(values[0])
    column[1].fill_(values[1])
    return column


def _words(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return seed lo, seed hi, offset lo, offset hi as int64 scalars on the draw's device."""
    seed, offset = draw.base[0], draw.base[1] + draw.stream
    return seed & _LOW, (seed >> 32) & _LOW, offset & _LOW, (offset >> 32) & _LOW


def block_bytes(blocks: Tensor, draw: Draw) -> Tensor:
    """Return the 16 random bytes of each 1x16 block.

    Args:
        blocks: int64 [...], the linear index B of every block in its operand.
        draw: the place in the random stream.

    Returns:
        uint8 [16, ...]: byte i belongs to element i of the block.
    """
    k0, k1, o0, o1 = _words(draw)
    words = philox4x32((blocks & _LOW, (blocks >> 32) & _LOW, o0, o1), (k0, k1))
    return torch.stack([(word >> (8 * i)).to(torch.uint8) for word in words for i in range(4)])


def sign_bits(width: int, draw: Draw) -> Tensor:
    """Return int64 [width]: 1 where a fresh-sign rotation negates the element (section 7).

    Args:
        width: at most 128, the bits of one Philox call.
        draw: the Philox place that both operands of the GEMM share.
    """
    k0, k1, o0, o1 = _words(draw)
    zero = torch.zeros((), dtype=torch.int64, device=draw.base.device)
    words = torch.stack(philox4x32((zero, zero, o0, o1 ^ 0x80000000), (k0, k1)))
    bit = torch.arange(32, device=words.device)
    return ((words[:, None] >> bit) & 1).flatten()[:width]
