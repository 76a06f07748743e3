"""Philox4x32-10 in plain torch (Salmon et al. 2011), keyed by logical position (docs/numerics.md sections 4 and 7)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    c0, c1, c2, c3 = _ten_rounds(counter, key)
    return tuple(torch.broadcast_tensors(c0, c1 & _LOW, c2, c3 & _LOW))


def _ten_rounds(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words, the second and the last with junk above their 32 bits."""
    c0, c1, c2, c3 = counter
    # Tensors: every operation with a Python number would make one.
    m0, m1, low, half = (torch.full((), n, device=key[0].device, dtype=torch.int64) for n in (_M0, _M1, _LOW, 32))
    rounds = torch.arange(10, device=key[0].device)
    keys = [(k + rounds * step).unbind() for k, step in zip(key, (_W0, _W1), strict=True)]
    for i, (k0, k1) in enumerate(zip(*keys, strict=True)):
        # The low 64 bits of a product are right even where int64 wraps. Words 1 and 3 carry junk above 32 bits, and so
        # may keys, which the mask after the exclusive or removes.
        p0, p1 = c0 * m0, c2 * m1
        mixed = Tensor.bitwise_xor if i < 3 else Tensor.bitwise_xor_  # three rounds give all words the whole shape
        c0 = mixed(p1 >> half, c1).bitwise_xor_(k0).bitwise_and_(low)
        c2 = mixed(p0 >> half, c3).bitwise_xor_(k1).bitwise_and_(low)
        c1, c3 = p1, p0
    return c0, c1, c2, c3


def _words(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return seed lo, seed hi, offset lo, offset hi as int64 scalars on the draw's device."""
    seed, offset = draw.base[0], draw.base[1] + draw.stream
    return seed & _LOW, (seed >> 32) & _LOW, offset & _LOW, (offset >> 32) & _LOW


def block_bytes(blocks: Tensor, draw: Draw, together: bool = True) -> Tensor:
    """Return the 16 random bytes of each 1x16 block.

    Args:
        blocks: int64 [...], the linear index B of every block in its operand.
        draw: the place in the random stream.
        together: whether the bytes of a block shall be neighbours in memory; otherwise the first ones of all blocks
            are, then the second ones, and so on.

    Returns:
        uint8 [16, ...]: byte i belongs to element i of the block.
    """
    k0, k1, o0, o1 = _words(draw)
    words = _ten_rounds((blocks & _LOW, (blocks >> 32) & _LOW, o0, o1), (k0, k1))
    return _together(words) if together else _apart(words)


def block_numbers(blocks: Tensor, draw: Draw) -> Tensor:
    """Return one random number of each 1x16 block, the 24 high bits of its first word: fp32 of blocks' shape.

    Args:
        blocks: int64 [...], the linear index B of every block in its operand.
        draw: the place in the random stream.
    """
    k0, k1, o0, o1 = _words(draw)
    first, *_ = philox4x32((blocks & _LOW, (blocks >> 32) & _LOW, o0, o1), (k0, k1))
    return (first >> 8).float()


def bytes_of_both(rows: int, cols: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return what `block_bytes` does of a matrix and of its transpose at the next offset, in one computation.

    Args:
        rows, cols: of the matrix, multiples of 16.
        draw: the matrix's place; no shard.

    Returns:
        uint8 [16, rows, cols / 16], its bytes together, and [16, cols, rows / 16], its bytes apart in x's order.
    """
    device = draw.base.device
    # Under a tracer they are a fake tensor, which must not stay in the cache for eager calls.
    blocks = (_blocks_of_both if type(draw.base) is Tensor else _blocks_of_both.__wrapped__)(rows, cols, device)
    k0, k1, _, _ = _words(draw)
    offset = draw.base[1] + (torch.arange(2, device=device)[:, None] + draw.stream)
    words = _ten_rounds((blocks, torch.zeros_like(k0), offset & _LOW, (offset >> 32) & _LOW), (k0, k1))
    row = _together([word[0].view(rows, cols // 16) for word in words])
    return row, _apart([word[1].view(rows // 16, cols) for word in words]).transpose(1, 2)


@lru_cache(maxsize=32)
def _blocks_of_both(rows: int, cols: int, device: torch.device) -> Tensor:
    """Return the indices of a matrix's blocks, and of its transpose's in the order of the matrix, int64 [2, B]."""
    own = torch.arange(rows * cols // 16, device=device)
    turned = torch.arange(rows // 16, device=device)[:, None] + torch.arange(cols, device=device) * (rows // 16)
    return torch.stack((own, turned.view(-1)))


def _together(words: Sequence[Tensor]) -> Tensor:
    """Return the bytes of four words, [16, ...]; little-endian: byte i of a word is its i-th in memory.

    Args:
        words: int64; the second and the last may have junk above their 32 bits.
    """
    c0, c1, c2, c3 = words
    return torch.stack(((c1 << 32).bitwise_or_(c0), (c3 << 32).bitwise_or_(c2)), -1).view(torch.uint8).movedim(-1, 0)


def _apart(words: Sequence[Tensor]) -> Tensor:
    """Return the same bytes, the first ones of all words first in memory."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words[0].device).view(4, *[1] * words[0].dim())
    return torch.cat([(word.to(torch.int32) >> shifts).to(torch.uint8) for word in words])


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
