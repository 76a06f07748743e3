"""Which kernel takes the gradient of a norm, and with which tile (docs/internals/fused.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from halfbyte.arithmetic import LANES, ROW_GROUP, Normed
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.layout import ceil_div

HELD_TILES = 8


class NormGradient(NamedTuple):
    """Take the gradient of a norm of x [rows, cols], contiguous tensors; dtotal: another gradient of x, or None."""

    dy: Tensor
    normed: Normed
    dtotal: Tensor | None

    @property
    def tiles(self) -> int:
        """Tiles of lanes of a row."""
        return ceil_div(self.normed.x.shape[1], LANES)

    @property
    def are_words(self) -> bool:
        """Whether all rows are of bf16, and can be read two values at once."""
        tensors = [t for t in (self.dy, self.normed.x, self.dtotal) if t is not None]
        aligned = all(t.dtype == torch.bfloat16 and t.data_ptr() % 4 == 0 for t in tensors)
        return aligned and self.normed.x.shape[1] % 2 == 0

    def choice(self, kernel: str, **constants: int | bool) -> Choice:
        """Return the choice of a kernel whose programs have a group of rows."""
        constants |= {"CENTERED": self.normed.centered, "BIAS": self.normed.has_bias}
        return Choice(kernel, (ceil_div(self.normed.x.shape[0], ROW_GROUP),), constants)


def _held_problem(one: NormGradient) -> Reason | None:
    if one.tiles <= HELD_TILES:
        return None
    return Reason(
        "rows of {} columns are wider than the {} that a program holds", (one.normed.x.shape[1], HELD_TILES * LANES)
    )


def _held(one: NormGradient) -> Choice:
    """16 values a thread; half where a row of two tiles has a gap.

    A row ahead costs registers, and so programs: not where masks or a LayerNorm's means of one tile cost them already.
    """
    full = one.normed.x.shape[1] % LANES == 0
    warps = triton.next_power_of_2(one.tiles) * (2 if one.tiles == 2 and not full else 1)
    ahead = one.tiles > 1 if one.normed.centered else full
    constants = {"TILES": one.tiles, "FULL": full, "PAIRED": one.are_words, "AHEAD": ahead, "num_warps": warps}
    return one.choice("norm_backward_held_kernel", **constants)


def _in_tiles(one: NormGradient) -> Choice:
    """Two of a row's tiles of lanes are loaded ahead."""
    rows, cols = one.normed.x.shape
    tile = 2 * LANES
    full = rows % ROW_GROUP == 0 and cols >= tile
    return one.choice("norm_backward_kernel", C=tile, AHEAD=2, FULL=full, num_warps=8)


GRADIENT = (
    Candidate("norm_backward_held_kernel", _held_problem, _held, "each row is read once"),
    Candidate("norm_backward_kernel", fits_all, _in_tiles, "rows of any width"),
)


def choose_gradient(one: NormGradient) -> Choice:
    """Return how the gradient of a norm is taken."""
    return choose_from(GRADIENT, one)
