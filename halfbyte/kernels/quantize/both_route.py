"""Which kernels quantize one matrix both ways, with which tiles, and why: `PAIR` is the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from halfbyte.formats import SWIZZLE_ROWS
from halfbyte.kernels.amax.route import AmaxesOfPair, choose_amaxes
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.quantize.route import (
    APART,
    SHARED,
    WIDE,
    OneSide,
    by_lines,
    by_products,
    is_full,
    judged_quickly,
    makes_values,
)
from halfbyte.kernels.quantize.strips_route import MAX_STRIDE, is_packed, strips_problem
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import target_of
from halfbyte.layout import LINEAR, ceil_div, round_up
from halfbyte.sides import Side, share_tiles
from halfbyte.spec import Spec


class Pair(NamedTuple):
    """Quantize x [rows, cols] by `row` and x.T by `col`."""

    x: Tensor
    row: Side
    col: Side

    @property
    def apart(self) -> tuple[OneSide, OneSide]:
        """What the row and the column ask for by themselves."""
        return OneSide(self.x, self.row, APART), OneSide(self.x.T, self.col, APART)

    @property
    def col_lies_as_x(self) -> bool:
        """Whether `lies_as_x` holds of what is asked for."""
        return self.col.transient and lies_as_x(self.x, self.row.spec, self.col.spec, self.col.scale_layout)

    def with_values(self, row: sc.Rule, col: sc.Rule) -> tuple[sc.Rule, sc.Rule]:
        """Return the rules of kernels that read x in words, with what is made without codes."""
        linear = self.row.scale_layout == LINEAR
        values = row.packed and row.decoded and linear and makes_values(self.row.spec)
        return replace(row, values=values), replace(col, values=col.packed and self.col_lies_as_x)


def lies_as_x(x: Tensor, row: Spec | None, col: Spec | None, scale_layout: str) -> bool:
    """Whether the values of a transient col lie in memory as x [rows, cols] does; only dtype and columns of x count.

    Tensor maps then read the transpose, and nothing changes threads before it is stored. A compiler that asks may not
    know how many rows there are, nor whether there are any.
    """
    if row is None or col is None or scale_layout != LINEAR or not makes_values(col):
        return False
    read = x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and x.shape[-1] < MAX_STRIDE
    return read and max(row.alignment, col.alignment) < WIDE and target_of(x.device).tma


SMALL_PAIR_VALUES = 1 << 22  # an H200 takes as long both ways between 4 and 8 million
MAX_PROGRAMS = 256  # of the first launch: every program of the second reads what they found
STRIP_LINES = 128  # words of two columns, of a program of the first launch


class SmallTiles(NamedTuple):
    """Rows and groups of a row tile, groups and columns of a column tile, and warps of a program."""

    rows: int
    row_groups: int
    col_groups: int
    cols: int
    num_warps: int


SMALL_TILES, INTERPRETED_TILES = SmallTiles(4, 16, 4, 32, 2), SmallTiles(64, 16, 4, 256, 2)


def _small_tiles(x: Tensor) -> SmallTiles:
    return INTERPRETED_TILES if target_of(x.device).interpreter else SMALL_TILES


def _tiles_problem(pair: Pair) -> Reason | None:
    return None if share_tiles(pair.row.spec, pair.col.spec) else Reason("the orientations do not share 16x16 tiles")


def _small_pair_problem(pair: Pair) -> Reason | None:
    x, row, col = pair.x, pair.row.spec, pair.col.spec
    if pair.row.amax is not None or pair.col.amax is not None:
        return Reason("an amax is given")
    if not 0 < x.numel() <= SMALL_PAIR_VALUES:
        return Reason("{} values are not 1 to {}", (x.numel(), SMALL_PAIR_VALUES))
    if pair.row.scale_layout != LINEAR:
        return Reason("its scales would be swizzled")
    if not is_packed(x):
        return Reason("x is not bf16 in aligned rows of multiples of 8 columns")
    if not (row.format.has_amax and col.format.has_amax) or row.rotation is not None or col.rotation is None:
        return Reason("only NVFP4 rows without rotation and columns with one have two amaxes from one read")
    if not all(spec.has_tensor_amax and spec.alignment == 16 and not spec.is_tile for spec in (row, col)):
        return Reason("a side has an amax a row, 16x16 tiles or a rotation wider than 16")
    tiles, (rows, cols) = _small_tiles(x), x.shape
    whole = rows % (tiles.col_groups * 16) == 0 == rows % tiles.rows
    if not whole or cols % (tiles.row_groups * 16) or cols % tiles.cols:
        return Reason("{} x {} is no multiple of its tiles", (rows, cols))
    strips = ceil_div(cols, 2 * STRIP_LINES)
    return Reason("{} columns take more than {} programs", (cols, MAX_PROGRAMS)) if strips > MAX_PROGRAMS else None


def _small_pair(pair: Pair) -> Choice:
    tiles, (rows, cols) = _small_tiles(pair.x), pair.x.shape
    hardware = sc.hardware_of(pair.x.device)
    row, col = (
        replace(sc.rule_of(side.spec, hardware), packed=True, full=True, decoded=side.transient)
        for side in (pair.row, pair.col)
    )
    row, col = pair.with_values(row, col)
    strips = ceil_div(cols, 2 * STRIP_LINES)
    found = min(MAX_PROGRAMS, triton.next_power_of_2(strips * ceil_div(rows, col.group)))
    along_cols = rows // (tiles.col_groups * 16) * (cols // tiles.cols)
    along_rows = rows // tiles.rows * (cols // (tiles.row_groups * 16))
    constants = {"ROW": row, "COL": col, "PROGRAMS": found, "R": tiles.rows, "RN": tiles.row_groups}
    constants |= {"CN": tiles.col_groups, "C": tiles.cols, "num_warps": tiles.num_warps}
    return Choice("quantize_row_col_small_kernel", (along_cols + along_rows,), constants, strips)


def _apart_problem(pair: Pair) -> Reason | None:
    if max(pair.row.spec.alignment, pair.col.spec.alignment) >= WIDE or pair.x.numel() == 0 or pair.x.stride(1) != 1:
        return None
    return Reason("one read serves both: rows are contiguous, no rotation is {} or wider", (WIDE,))


def with_quick_errors(row: sc.Rule, col: sc.Rule, x: Tensor) -> tuple[sc.Rule, sc.Rule]:
    """Return the rules with candidates judged by `quick_errors`, where that is possible for all that are tried.

    They take pairs of neighbours of a block: rows of a packed x are read in them, rotated columns have them, and others
    are paired one at a time (`quantize_columns_in_turn`), not as values. As values both ways more than two spill.
    """
    target, blocks = target_of(x.device), x.numel() // 16
    has_pairs = row.packed, col.packed and (col.norm != 0.0 or not col.values)
    fits = not (row.values and col.values) or max(len(row.candidates), len(col.candidates)) <= 2
    quick = [
        fits and rule.group == 16 and has and judged_quickly(rule, blocks, target)
        for rule, has in zip((row, col), has_pairs, strict=True)
    ]
    if any(rule.candidates and not own for rule, own in zip((row, col), quick, strict=True)):
        return row, col
    row, col = (replace(rule, errors="quick") if own else rule for rule, own in zip((row, col), quick, strict=True))
    return row, col


class PairTile(NamedTuple):
    """What one program covers at once, its warps, and `Rule.words`."""

    rows: int
    cols: int
    num_warps: int
    words: int = 1


def tile_for(row: sc.Rule, col: sc.Rule) -> PairTile:
    """Return the tile that was fastest on an H200 for a pair of rules, grown to whole groups both ways."""
    quick = "quick" in (row.errors, col.errors)
    if row.values and col.values:
        best = PairTile(16, 128, 2, 1) if row.drawn or col.drawn or quick else PairTile(16, 128, 1, 2)
    elif quick:
        best = PairTile(64, 64, 4, 1)
    elif row.values or col.values or row.drawn or col.drawn or col.group > 16:
        best = PairTile(64, 64, 4, 1) if not col.element else PairTile(64, 64, 2, 1)
    else:
        best = PairTile(64, 64, 2, 2)
    return best._replace(rows=max(best.rows, col.group), cols=max(best.cols, row.group))


def runs_along(row: sc.Rule, col: sc.Rule) -> bool:
    """Say whether `Rule.along` was faster for the columns of a pair of rules; others were not timed."""
    if row.values:
        return col.packed and col.full and not (col.decoded or col.row_amax or col.eden) and col.group == 16
    return row_runs_along(row, col) and col.group == 16


def row_runs_along(row: sc.Rule, col: sc.Rule) -> bool:
    """Say whether `Rule.along` was faster for the rows of whole tiles; MXFP8 columns go through shared memory."""
    plain = all(not (r.candidates or r.eden or r.decoded != r.values) for r in (row, col))
    if row.row_amax or col.row_amax:
        plain = plain and by_lines(row, col)
    if not plain or row.element or row.group != 16 or not (row.packed and row.full):
        return False
    if row.values and col.values:
        return row.drawn
    return row.values or col.group == 16 or col.element != ""


def widened(tile: PairTile, row: sc.Rule, col: sc.Rule, cols: int) -> PairTile:
    """Return `tile` with twice the columns and warps where that was faster: a store then fills more of a line."""
    timed = row_runs_along(replace(row, full=True), col) and row.rounding == col.rounding == "nearest"
    if not timed or row.decoded or col.decoded or cols % (2 * tile.cols):
        return tile
    return tile._replace(cols=2 * tile.cols, num_warps=2 * tile.num_warps)


QUICK_REGISTERS = {2: 80, 3: 96, 4: 96}  # by most candidates, where both try some: unasked it gives 72, and spills
EDEN_PAIR_TILE = PairTile(64, 128, 4, 2)
EDEN_PAIR_REGISTERS = 72  # 28 warps; unasked it gives 80
EDEN_VALUES = 1 << 26  # from how many on that is faster; at a quarter of it 3 % slower, at a sixteenth 48
LOOPS = ((8192, 2),)
"""(from how many tiles on, tiles of one program at most), where both draw: codes, or values made at once."""


def loop_of(loops: tuple[tuple[int, int], ...], rules: Sequence[sc.Rule | None], row_tiles: int, col_tiles: int) -> int:
    """Return how many tiles beside each other are a program, a divisor of col_tiles; loops: as `LOOPS`, most first."""
    for rule in rules:
        if rule is None or rule.rounding != "stochastic" or rule.row_amax or rule.decoded != rule.values:
            return 1
    most = next((loop for least, loop in loops if row_tiles * col_tiles >= least), 1)
    return next(loop for loop in range(most, 0, -1) if col_tiles % loop == 0)


def _are_large_eden(row: sc.Rule, col: sc.Rule, x: Tensor, swizzled: bool) -> bool:
    """Say whether MS-EDEN of x is best made in whole `EDEN_PAIR_TILE`s: rows not rotated, columns by 16 at most."""
    rows, cols = x.shape
    whole = rows % EDEN_PAIR_TILE.rows == 0 == cols % EDEN_PAIR_TILE.cols and not swizzled and not row.norm
    plain = all(r.eden and r.packed and not (r.decoded or r.row_amax) and r.group == 16 for r in (row, col))
    # With conversions to E2M1 another code fills more registers.
    return whole and plain and x.numel() >= EDEN_VALUES and not target_of(x.device).e2m1


def _both(pair: Pair) -> Choice:
    x, hardware = pair.x, sc.hardware_of(pair.x.device)
    sides = pair.apart
    swizzled = sides[0].swizzled or sides[1].swizzled
    row, col = (
        replace(rule, decoded=one.side.transient, packed=is_packed(x) and not rule.tile)
        for rule, one in ((sc.rule_of(one.spec, hardware), one) for one in sides)
    )
    row, col = with_quick_errors(*pair.with_values(row, col), x)
    row, col = by_products(row, col), by_products(col, row)
    # Codes that are judged by quick errors want the lanes and tiles of codes without candidates.
    timed = [
        replace(r, candidates=()) if r.errors == "quick" and not (r.values or r.row_amax) else r for r in (row, col)
    ]
    tile, eden = tile_for(row, col), _are_large_eden(row, col, x, swizzled)
    if eden:
        tile = EDEN_PAIR_TILE
    elif not swizzled:
        tile = widened(tile, *timed, x.shape[1])
    # Swizzled scales have padding that is zeroed: up to 128 rows, or four blocks of at most 32.
    rows, cols = (round_up(n, SWIZZLE_ROWS) if swizzled else n for n in x.shape)
    whole = (tile.rows, tile.cols // row.group), (tile.cols, tile.rows // col.group)
    full = (rows, cols) == x.shape and all(
        is_full(one.x, one.blocks, one.swizzled, rule, tiles)
        for one, rule, tiles in zip(sides, (row, col), whole, strict=True)
    )
    row, col = (replace(rule, full=full, words=tile.words) for rule in (row, col))
    timed = [replace(rule, full=full) for rule in timed]
    row_along, along = row_runs_along(*timed) and not swizzled, runs_along(*timed) and not swizzled
    row, col = replace(row, along=row_along or eden), replace(col, along=along or eden)
    col_tiles, row_tiles = ceil_div(cols, tile.cols), ceil_div(rows, tile.rows)
    loop = loop_of(LOOPS, (row, col), row_tiles, col_tiles)
    beside = col_tiles // loop
    constants = {"ROW": row, "COL": col, "SWIZZLED": swizzled, "TR": tile.rows, "TC": tile.cols, "LOOP": loop}
    quick = "quick" in (row.errors, col.errors)
    constants["TURNS"] = tile.rows * tile.cols // (16 * 32 * tile.num_warps) if quick and not col.values else 0
    if quick and row.candidates and col.candidates and target_of(x.device).ptx:
        constants["maxnreg"] = QUICK_REGISTERS[max(len(row.candidates), len(col.candidates))]
    elif eden and target_of(x.device).ptx:
        constants["maxnreg"] = EDEN_PAIR_REGISTERS
    return Choice("quantize_row_col_kernel", (row_tiles * beside,), constants | {"num_warps": tile.num_warps}, beside)


BOTH_LINES, BOTH_STRIPS = 4, 8  # of a warp: lines of 16x16 tiles, and strips of 8 columns
BOTH_CODES = 3 << 22  # values up to which both codes from one launch take no longer than a transpose of one; an H200


def _both_tiles_problem(pair: Pair) -> Reason | None:
    reason = _tiles_problem(pair) or strips_problem(pair.x[None], pair.row.spec)
    if reason is not None:
        return reason
    if pair.row.scale_layout != LINEAR:
        return Reason("strips store scales in rows")
    if pair.col.transient:
        return Reason("values of the transpose are decoded from its codes")
    if not pair.row.transient and pair.x.numel() > BOTH_CODES:
        return Reason("a transpose of {} codes is the faster one", (pair.x.numel(),))
    if pair.x.shape[0] < 16 * BOTH_LINES:
        return Reason("{} rows are fewer than {}", (pair.x.shape[0], 16 * BOTH_LINES))
    return None


def _both_tiles(pair: Pair) -> Choice:
    rows, cols = pair.x.shape
    beside = ceil_div(cols, 8 * BOTH_STRIPS)
    rule = replace(sc.rule_of(pair.row.spec, sc.hardware_of(pair.x.device)), packed=True, full=True)
    constants = {"RULE": rule, "L": BOTH_LINES, "W": BOTH_STRIPS, "num_warps": 1}
    return Choice("quantize_tiles_both_kernel", (ceil_div(rows, 16 * BOTH_LINES) * beside,), constants, beside)


PAIR = (
    Candidate(
        "quantize_tiles_both_kernel",
        _both_tiles_problem,
        _both_tiles,
        "the tiles of a weight are turned in registers: one launch writes rows, as codes or values, and columns",
    ),
    Candidate(SHARED, _tiles_problem, lambda _: Choice(SHARED), "both orientations are the same 16x16 tiles"),
    Candidate(
        "quantize_row_col_small_kernel",
        _small_pair_problem,
        _small_pair,
        "maxima and codes of a small tensor in two launches, without a workspace of zeros",
    ),
    Candidate(APART, _apart_problem, lambda _: Choice(APART), "a wide rotation, or rows that are not contiguous"),
    Candidate("quantize_row_col_kernel", fits_all, _both, "one read of x serves both orientations"),
)


class Residual(NamedTuple):
    """Quantize x [rows, cols] without its mean over rows by `row` and x.T by `col`; None where nothing is asked for."""

    x: Tensor
    row: Side | None
    col: Side | None

    @property
    def amaxes(self) -> AmaxesOfPair:
        """The amaxes that have to be found."""
        needed = (side.spec if side is not None and side.amax is None else None for side in (self.row, self.col))
        return AmaxesOfPair(self.x, *needed)


def _on_load_problem(residual: Residual) -> Reason | None:
    """Say why a mean is not subtracted by the kernels that find both amaxes and quantize both ways."""
    if residual.row is None or residual.col is None:
        return Reason("one orientation alone is asked for")
    pair = Pair(*residual)
    if choose_pair(pair).kernel != "quantize_row_col_kernel":
        return Reason("other kernels than one that reads x once quantize it")
    if not is_packed(pair.x) or pair.row.spec.is_tile or pair.col.spec.is_tile:
        return Reason("x is not read in aligned words of two bf16")
    amaxes = choose_amaxes(residual.amaxes)
    if amaxes.kernel != "amax_rotated_kernel" or not amaxes.constants["PACKED"]:
        return Reason("no kernel finds both amaxes from one read of words of two bf16")
    return None


def _on_load(residual: Residual) -> Choice:
    assert residual.row is not None and residual.col is not None, "both orientations are asked for"
    return Choice(ON_LOAD, facts=(choose_amaxes(residual.amaxes), choose_pair(Pair(*residual))))


ON_LOAD, WRITTEN = "the mean is subtracted where x is read", "x without its mean is written once, and quantized"

RESIDUAL = (
    Candidate(ON_LOAD, _on_load_problem, _on_load, "nothing is written but the operands"),
    Candidate(WRITTEN, fits_all, lambda _: Choice(WRITTEN), "any dtype, specs and strides"),
)


def choose_residual(request: Residual) -> Choice:
    """Choose for x without its mean."""
    return choose_from(RESIDUAL, request)


def choose_pair(request: Pair) -> Choice:
    """Choose for both orientations."""
    return choose_from(PAIR, request)
