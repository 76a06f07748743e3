"""When kernels read a matrix in words of two values, and which strips of 16x16 tiles they take (`strips`)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.route import Choice, Reason
from halfbyte.layout import ceil_div
from halfbyte.spec import Spec

MAX_STRIDE = 1 << 23  # of rows that are read in words


def is_packed(x: Tensor) -> bool:
    """Say whether kernels may read x [R, C] in words of two bf16: `Rule.packed`."""
    aligned = x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(0) < MAX_STRIDE
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


class StripTile(NamedTuple):
    """Strips side by side, a thread each, and warps."""

    strips: int
    num_warps: int


STRIP_TILES = (StripTile(128, 4), StripTile(32, 1))
FEW_PROGRAMS = 1024  # with fewer, the smaller tile spreads over more multiprocessors


def strips_problem(w: Tensor, spec: Spec) -> Reason | None:
    """Say why strips do not cover matrices [E, N, K] of 16x16 tiles rounded to nearest."""
    if not spec.is_tile:
        return Reason("its blocks are no 16x16 tiles")
    if spec.rounding != "nearest" or spec.rotation or not spec.has_tensor_amax or spec.tries_candidates:
        return Reason("strips round to nearest, by one amax, without rotation or candidates")
    if w.numel() == 0:
        return Reason("there are no values")
    rows, cols = w.shape[1:]
    if not w.is_contiguous() or not is_packed(w.view(-1, cols)):
        return Reason("x is not contiguous bf16 in aligned rows of multiples of 8 columns")
    if rows % 16 or cols % 16:
        return Reason("{} x {} has cut tiles", (rows, cols))
    least = 8 * STRIP_TILES[-1].strips
    return Reason("{} columns are fewer than {}", (cols, least)) if cols < least else None


def choose_strips(w: Tensor, spec: Spec) -> Choice:
    """Return the tile whose programs exceed the columns the least, the larger one if equal and many are left."""
    experts, rows, cols = w.shape
    lines = experts * rows // 16
    usable = (tile for tile in STRIP_TILES if cols >= 8 * tile.strips)
    tile = min(usable, key=lambda tile: ceil_div(cols, 8 * tile.strips) * tile.strips)
    if lines * ceil_div(cols, 8 * tile.strips) < FEW_PROGRAMS:
        tile = STRIP_TILES[-1]
    beside = ceil_div(cols, 8 * tile.strips)
    rule = replace(sc.rule_of(spec, sc.hardware_of(w.device)), packed=True, full=True)
    constants = {"RULE": rule, "W": tile.strips, "MOVES": cols % (8 * tile.strips) != 0, "num_warps": tile.num_warps}
    return Choice("quantize_tiles_kernel", (experts * (rows // 16) * beside,), constants, beside)
