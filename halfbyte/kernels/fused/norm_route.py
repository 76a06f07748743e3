"""With which tile a norm runs, and which kernel takes its gradient, with which tile (docs/internals/fused.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from halfbyte.arithmetic import LANES, ROW_GROUP, Normed
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.running_max import Wanted
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div

NARROW = 2 * LANES  # columns up to which small programs are faster: more of them fit a multiprocessor at once
TILE, NUM_WARPS = 1024, 8  # columns of all rows of a program, and its warps, where nothing is centered
CENTERED_TILES = ((4096, 512, 8), (None, 1024, 16))  # (up to how many columns, columns of a tile, warps)
CAPPED_REGISTERS = 104  # a thread of narrow passes that the assembler gives 96 and spills, unasked
WIDE_WARPS = 8  # of a rotation wider than 16, whose rows need more registers a thread
AHEAD = 4  # tiles of a row's lanes that are loaded before the first is used; half where a pass needs more registers


class NormForward(NamedTuple):
    """Norm x [rows, cols], contiguous, or `total`, to which a residual is added on the way, and collect maxima."""

    x: Tensor
    total: Tensor | None
    wanted: Wanted
    centered: bool

    @property
    def read(self) -> Tensor:
        """What is normed."""
        return self.x if self.total is None else self.total


class Pass(NamedTuple):
    """How statistics are worked out: of how many rows at once, and how many tiles of lanes are loaded ahead."""

    part: int
    ahead: int


def _forward(one: NormForward) -> Choice:
    rows, cols = one.x.shape
    tile, warps, part = _tile(one.wanted, cols, one.centered)
    if cols > NARROW and one.read.dtype == torch.float32:
        part //= 2  # registers for all rows would leave half the warps
    full = rows % one.wanted.group == 0 and cols >= tile
    constants = {"C": tile, "PASS": Pass(part, _ahead(cols, one.centered or one.total is not None)), "FULL": full}
    cap = _register_cap(one) if full else {}
    return Choice("norm_kernel", (ceil_div(rows, one.wanted.group),), {**constants, **cap, "num_warps": warps})


def _tile(wanted: Wanted, cols: int, centered: bool) -> tuple[int, int, int]:
    """Return the columns of a tile of `group` rows, warps, and how many rows' statistics are worked out at once."""
    if wanted.group != ROW_GROUP:
        return rm.TILE_ELEMENTS // wanted.group, WIDE_WARPS, ROW_GROUP
    if cols <= NARROW:
        return LANES if centered or cols % LANES == 0 else LANES // 2, 4, ROW_GROUP // 2
    if not centered:
        return TILE, NUM_WARPS, ROW_GROUP
    return *next((tile, warps) for most, tile, warps in CENTERED_TILES if most is None or cols <= most), ROW_GROUP


def _register_cap(one: NormForward) -> dict[str, int]:
    """Return the option with which narrow whole tiles do not spill, or none."""
    target, is_bf16 = target_of(one.x.device), one.x.dtype == one.read.dtype == torch.bfloat16
    is_narrow = target.ptx and is_bf16 and one.x.shape[1] <= NARROW
    return {"maxnreg": CAPPED_REGISTERS} if is_narrow and _spills(one, target.capability) else {}


def _spills(one: NormForward, capability: int) -> bool:
    """Say whether the assembler, unasked, spills a narrow norm of bf16."""
    wanted, is_sum, two_ahead = one.wanted, one.total is not None, _ahead(one.x.shape[1], True) > 1
    if capability == 89:
        return one.centered and not is_sum and two_ahead and wanted.row == "tensor" and not wanted.col
    if not 100 <= capability < 120 or (is_sum and two_ahead):  # 126 to 168 registers, and no spills
        return False
    if one.centered:
        return is_sum and not wanted.row and not wanted.col
    return wanted.group == ROW_GROUP and wanted.col == "rotated" and not wanted.fresh


def _ahead(cols: int, halved: bool) -> int:
    """Return how many tiles of a row's lanes a forward loads before the first is used: no more than are whole."""
    return max(1, min(AHEAD // 2 if halved else AHEAD, cols // LANES))


FORWARD = (Candidate("norm_kernel", fits_all, _forward, "statistics, norm and maxima from one launch"),)


def choose_forward(one: NormForward) -> Choice:
    """Return how a norm runs."""
    return choose_from(FORWARD, one)


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
