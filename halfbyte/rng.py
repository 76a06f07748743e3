"""Random bits as values: a Philox seed and offset that quantize reads and never changes (docs/numerics.md section 4).

A value reaches an op as an int64 tensor [2] = (seed, offset) on the operand's device plus a static `stream` that is
added to the offset. A step that advances changes the tensor, never a Python number, so nothing recompiles and a CUDA
graph replays with new bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.spec import HADAMARD_SIGNS, Hadamard

SEED_LIMIT = 1 << 64
OFFSET_LIMIT = 1 << 63
BLOCK_LIMIT = 1 << 63  # an op takes them as int64

SIGN_PERIOD = 128
"""Every string of signs divides it, as it divides a rotation's width."""

GROUP_SEED_STEP = 0x9E3779B97F4A7C15
"""Group g of a grouped operand draws with seed + g * this, modulo 2**64 (numerics.md section 8)."""

RANK_LIMIT = 1 << 16
RANK_SEED_STEP = 1 << 48
"""Data-parallel rank r draws with seed + r * this, modulo 2**64 (numerics.md section 4)."""


class Draw(NamedTuple):
    """What an op receives: a tensor that may change between steps and static numbers that may not.

    base: int64 [2] = (seed, offset), 64 bits each, on the operand's device.
    stream: added to the offset.
    first_block, blocks_per_row: where a shard lies in the whole operand: its 1x16 block (row, j) has the linear index
        first_block + row * blocks_per_row + j. None means the operand's own number of blocks.
    """

    base: Tensor
    stream: int = 0
    first_block: int = 0
    blocks_per_row: int | None = None

    def next(self) -> Draw:
        """Return the draw of the second operand of `quantize_row_col`: one offset further."""
        return self._replace(stream=self.stream + 1)

    def before(self) -> Draw:
        """Return the draw of which this is the `next`."""
        return self._replace(stream=self.stream + -1)

    def group(self, index: int) -> Draw:
        """Return the draw of one group of a grouped operand: another seed (docs/numerics.md section 8)."""
        step = torch.zeros_like(self.base)
        step[0] = as_signed64(index * GROUP_SEED_STEP % SEED_LIMIT)
        return self._replace(base=self.base + step)  # int64 wraps, which is the sum modulo 2**64


def as_signed64(value: int) -> int:
    """Return the int64 that holds the same 64 bits as the unsigned `value`."""
    return value - SEED_LIMIT if value >= SEED_LIMIT >> 1 else value


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed with which a data-parallel rank draws: that of the run for rank 0 (numerics.md section 4).

    Raises:
        TypeError, ValueError: rank is no int, or not within 0 <= rank < 2**16.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank={rank!r}: give an int, that of this process among the data-parallel ranks")
    if not 0 <= rank < RANK_LIMIT:
        raise ValueError(f"rank={rank}: give 0 <= rank < 2**16, that of this process among the data-parallel ranks")
    return (seed + rank * RANK_SEED_STEP) % SEED_LIMIT


@dataclass(frozen=True)
class Philox:
    """One place in the random stream: Philox4x32-10 with key `seed` and the upper counter words `offset`.

    Args:
        seed: 0 <= seed < 2**64.
        offset: 0 <= offset < 2**63. One quantize uses one offset, `quantize_row_col` uses `offset` and `offset + 1`.
        first_block: linear index of the first 1x16 block, not 0 if the tensor is a shard of a larger operand.
        blocks_per_row: 1x16 blocks in a row of that larger operand; None means the tensor's own.
    """

    seed: int
    offset: int = 0
    first_block: int = 0
    blocks_per_row: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("seed", SEED_LIMIT), ("offset", OFFSET_LIMIT)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: give an int")
            if not 0 <= value < limit:
                raise ValueError(f"{name}={value}: give 0 <= {name} < 2**{limit.bit_length() - 1}")
        for name in ("first_block", "blocks_per_row"):
            value = getattr(self, name)
            if name == "blocks_per_row" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: give an int")
            if not 0 <= value < BLOCK_LIMIT:
                raise ValueError(f"{name}={value}: give 0 <= {name} < 2**63")

    def at(self, stream: int) -> Philox:
        """Return the place `stream` offsets further."""
        return replace(self, offset=self.offset + stream)

    def group(self, index: int) -> Philox:
        """Return the place where group `index` of a grouped operand draws (docs/numerics.md section 8)."""
        return replace(self, seed=(self.seed + index * GROUP_SEED_STEP) % SEED_LIMIT)

    def signs_on(self, device: torch.device) -> Draw:
        """Return the draw of fresh signs on `device`: the same place."""
        return self.on(device)

    def on(self, device: torch.device) -> Draw:
        """Return the draw on `device`."""
        base = torch.empty(2, dtype=torch.int64, device=device)
        base[0].fill_(as_signed64(self.seed))  # filled on the device: copying from the host would wait for it
        base[1].fill_(self.offset)
        return Draw(base, 0, self.first_block, self.blocks_per_row)


@dataclass(frozen=True, eq=False)
class StreamPhilox:
    """A place in the random stream of a run: its (seed, position << 32) tensor and a static stream number.

    Args:
        base: int64 [2], owned by a RunState; read when an op runs.
        stream: added to the offset; 0 <= stream < 2**32.
        shift: int64 [2], added to the base: a stream as a tensor, for code that is compiled once for many layers.
        sign_base: int64 [2], as base, where fresh signs draw: the same on all data-parallel ranks. None for `base`.
    """

    base: Tensor
    stream: int
    shift: Tensor | None = None
    sign_base: Tensor | None = None

    def at(self, stream: int) -> StreamPhilox:
        """Return the place `stream` offsets further."""
        return StreamPhilox(self.base, self.stream + stream, self.shift, self.sign_base)

    def on(self, device: torch.device) -> Draw:
        """Return the draw of rounding bits on `device`."""
        return self._draw(self.base, device)

    def signs_on(self, device: torch.device) -> Draw:
        """Return the draw of fresh signs on `device`."""
        return self._draw(self.base if self.sign_base is None else self.sign_base, device)

    def _draw(self, base: Tensor, device: torch.device) -> Draw:
        base = base if base.device == device else base.to(device, non_blocking=True)
        return Draw(base if self.shift is None else base + self.shift, self.stream)


AnyPhilox = Philox | StreamPhilox


def given_sign_bits(rotation: Hadamard | None) -> int:
    """Return 128 bits, bit i set where a rotation negates element i (numerics.md section 7); 0 if signs are drawn."""
    if rotation is None or rotation.signs in ("fresh", "none"):
        return 0
    signs = HADAMARD_SIGNS if rotation.signs == "fixed" else rotation.signs
    return sum(1 << i for i in range(SIGN_PERIOD) if signs[i % len(signs)] == "-")
