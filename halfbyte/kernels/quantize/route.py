"""Which kernel quantizes one matrix along its rows, with which tile, and why (docs/internals/kernels.md).

`ONE` is the table; a plan is all that a launcher is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.amax.route import halved, shares_signs
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.near_errors import MOST_CANDIDATES
from halfbyte.kernels.quantize.strips_route import choose_strips, is_packed, strips_problem
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import Target, target_of
from halfbyte.layout import LINEAR, ceil_div, round_up
from halfbyte.rng import Draw
from halfbyte.sides import Side
from halfbyte.spec import NVFP4, Eden, Spec

WIDE = 64
"""The least width of a rotation whose groups are rows of tensors, not tuples."""

ALONE, SHARED, APART = "alone", "one orientation, transposed", "one orientation after the other"


class OneSide(NamedTuple):
    """Quantize x [rows, cols] along its rows.

    of: ALONE, or whose part it is: of a pair whose orientations SHARE tiles, or of one that is quantized APART.
    """

    x: Tensor
    side: Side
    of: str = ALONE

    @property
    def spec(self) -> Spec:
        return self.side.spec

    @property
    def swizzled(self) -> bool:
        """Whether scales are stored swizzled; transient operands have none."""
        return not self.side.transient and self.side.scale_layout != LINEAR

    @property
    def blocks(self) -> int:
        """Blocks of a row of the output."""
        return round_up(self.x.shape[1], self.spec.alignment) // self.spec.block_length


ROUNDED = ("nearest", "stochastic")  # by kernels that need no code for it


def makes_values(spec: Spec) -> bool:
    """Whether kernels make a decoded operand's values in registers: `Rule.values`."""
    if not isinstance(spec, NVFP4) or spec.is_tile or spec.alignment >= WIDE:
        return False
    return spec.rounding in ROUNDED and not isinstance(spec.scaling, Eden)


# One launch for amax and codes.

SMALL_VALUES = 16384  # 64 a thread: more take longer in one program than a second launch does
SMALL_WARPS = 8


def _small_tile(one: OneSide) -> tuple[int, int]:
    """Return rows and groups of a tile that covers an operand, the padding of swizzled scales included."""
    spec, rows, blocks = one.spec, one.x.shape[0], one.blocks
    if one.swizzled:
        rows, blocks = round_up(rows, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLS)
    groups = ceil_div(blocks * spec.block_length, spec.alignment)
    least = 16 if spec.is_tile else 1
    return max(least, int(triton.next_power_of_2(rows))), int(triton.next_power_of_2(groups))


def _small_problem(one: OneSide) -> Reason | None:
    if one.side.amax is not None:
        return Reason("an amax is given")
    if one.of == SHARED:
        return Reason("both orientations share its tiles, whose amax is a launch of its own")
    if not one.spec.format.has_amax:
        return Reason("MXFP8 has no amax")
    if one.spec.alignment >= WIDE:
        return Reason("a rotation of {} is {} or wider", (one.spec.alignment, WIDE))
    count = one.x.numel()
    if not 0 < count <= SMALL_VALUES:
        return Reason("{} values are not 1 to {}", (count, SMALL_VALUES))
    rows, groups = _small_tile(one)
    if rows * groups * one.spec.alignment > SMALL_VALUES:
        return Reason("padded to {} x {} it has more than {} values", (rows, groups * one.spec.alignment, SMALL_VALUES))
    return None


def _small(one: OneSide) -> Choice:
    rows, groups = _small_tile(one)
    rule = replace(sc.rule_of(one.spec, sc.hardware_of(one.x.device)), decoded=one.side.transient)
    constants = {"RULE": rule, "SWIZZLED": one.swizzled, "R": rows, "N": groups, "num_warps": SMALL_WARPS}
    return Choice("quantize_small_kernel", (1,), constants)


# Strips of 16x16 tiles.


def _strips_problem(one: OneSide) -> Reason | None:
    if one.of == APART:
        return Reason("the other orientation is quantized by lines too: strips were not timed beside it")
    if one.swizzled:
        return Reason("strips store scales in rows")
    return strips_problem(one.x[None], one.spec)


# Lines: blocks along rows or columns, rotations as tensors.


class LineTile(NamedTuple):
    """A tile of `outer` rows (columns) of `groups` groups each, warps, `Rule.words`, and how many tiles a program."""

    outer: int
    groups: int
    num_warps: int
    words: int = 1
    loop: int = 1


# Measured on an H200 at 8192 columns: the best of the tiles tried for each kind of kernel.
ROW_TILES = {
    16: LineTile(1, 512, 4),
    32: LineTile(1, 64, 2, loop=4),
    64: LineTile(1, 64, 2),
    128: LineTile(1, 64, 2),
}
ROTATED_TILE = LineTile(1, 128, 2, loop=4)
MXFP8_TILE = LineTile(1, 128, 4)
STOCHASTIC_TILE, EDEN_TILE = LineTile(1, 128, 2), LineTile(1, 256, 2)
CANDIDATE_TILE = LineTile(1, 128, 4, loop=4)
SQUARE_TILE = LineTile(16, 16, 4)
CANDIDATE_SQUARE_TILE, QUICK_SQUARE_TILE = LineTile(16, 4, 2, loop=8), LineTile(16, 2, 1, loop=4)
TILE_REGISTERS = 72  # of quick errors in tiles: 28 warps; unasked the compiler computes much anew to stay with 64
WAVE = 32  # programs of one warp that a multiprocessor takes at most
LEAST_WAVES = 3  # with fewer, the code that is read first takes longer than shorter programs save
EDEN_BLOCKS = 1 << 22  # from how many on programs of twice as many are faster: 7 %; at a quarter of it 2 % slower
LOOP_PROGRAMS = 16  # of a multiprocessor: with fewer, programs that go through several tiles leave it waiting
QUICK_BLOCKS = {2: 1 << 16, 3: 0, MOST_CANDIDATES: 0}  # candidates: from how many blocks on `quick_errors` are faster
QUICK_TILE_BLOCKS = {3: 1 << 18, MOST_CANDIDATES: 1 << 18}  # of 16x16 tiles, and with swizzled scales
SWIZZLED_TILE = LineTile(16, 16, 2)
COL_TILES = {16: LineTile(64, 4, 2, words=2), 32: LineTile(64, 4, 4), 64: LineTile(64, 1, 2), 128: LineTile(64, 2, 4)}
LONGEST_ROW = 8192
INTERPRETED_BLOCKS = 1024  # the interpreter pays by the operation: large tiles
WIDE_GROUPS, WIDE_WARPS = 128, 4
EDEN_GROUPS, EDEN_WARPS = 64, 2  # of rows
WIDE_REGISTERS = {64: 96, 128: 168}  # by the width, along columns: 20 and 12 warps on a multiprocessor
PAIRED_REGISTERS, EDEN_REGISTERS = 80, 112  # where two threads share a group of 128: 24 and 16 warps
STOCHASTIC_REGISTERS = {64: 128, 128: 168}  # the next step: with 96 they spill


class Shares(NamedTuple):
    """How many programs go through four steps, and how many through two; all others take one."""

    four: int
    two: int


class Lines(NamedTuple):
    """An operand as its launcher sees it, in rows as long as its blocks allow, and tiles side by side."""

    x: Tensor
    rows: int
    blocks: int
    swizzled: bool
    draw: Draw | None
    beside: int = 1
    shares: Shares | None = None


def _row_tile(lines: Lines, groups: int, rule: sc.Rule, interpreted: bool) -> LineTile:
    """Return the tile of the row kernel for a [rows, groups] operand."""
    best = ROW_TILES[rule.group]
    if rule.tile and rule.candidates and not lines.swizzled:
        best = QUICK_SQUARE_TILE if rule.errors == "quick" else CANDIDATE_SQUARE_TILE
    elif rule.tile:
        best = SQUARE_TILE
    elif lines.swizzled and rule.group == 16:
        best = SWIZZLED_TILE
    elif rule.element:
        best = MXFP8_TILE
    elif rule.eden and rule.group == 16 and groups * lines.x.shape[0] >= EDEN_BLOCKS:
        best = EDEN_TILE
    elif rule.drawn and rule.group == 16:
        best = STOCHASTIC_TILE
    elif rule.candidates:
        best = CANDIDATE_TILE
    elif rule.group == 16 and rule.norm:
        best = ROTATED_TILE
    total = INTERPRETED_BLOCKS if interpreted else best.outer * best.groups
    least = 16 if rule.tile else 1
    n = min(triton.next_power_of_2(groups), total // least if interpreted else best.groups)
    whole = groups & -groups  # tiles without a ragged edge, unless they were very narrow
    if 8 <= whole < n and not interpreted:
        n = whole
    # A narrow operand fills the tile with rows: fewer blocks than threads would split blocks between threads.
    return LineTile(total // n, n, best.num_warps, loop=best.loop)


def _col_tile(groups: int, rule: sc.Rule, interpreted: bool) -> LineTile:
    """Return the tile of the column kernel for `groups` groups in each column."""
    best = COL_TILES[rule.group]
    total = INTERPRETED_BLOCKS if interpreted else best.outer * best.groups
    n = min(triton.next_power_of_2(groups), best.groups)
    return LineTile(total // n, n, best.num_warps, best.words)


def is_full(x: Tensor, blocks: int, swizzled: bool, rule: sc.Rule, tile: tuple[int, int]) -> bool:
    """Say whether tiles of `tile` (rows, groups) cover x [R, C] and all that is stored of it exactly: `Rule.full`."""
    rows, cols = x.shape
    ragged = rows % tile[0] or cols % (tile[1] * rule.group)
    return not ragged and not (swizzled and (rows % SWIZZLE_ROWS or blocks % SWIZZLE_COLS))


def in_long_rows(one: OneSide) -> Lines:
    """Return the same blocks, one after another in memory, as rows of a power of two where x has narrower whole tiles.

    What belongs to rows must not depend on where they end: no amax of a row, no tile of rows, no padding.
    """
    x, spec, draw = one.x, one.spec, one.side.draw
    kept = Lines(x, x.shape[0], one.blocks, one.swizzled, draw)
    cols = x.shape[1]
    by_row = spec.has_row_amax or spec.is_tile
    if by_row or one.swizzled or cols % spec.alignment or not x.is_contiguous():
        return kept
    if draw is not None and draw.blocks_per_row not in (None, kept.blocks):
        return kept
    width = min(x.numel() & -x.numel(), LONGEST_ROW)
    if width <= cols & -cols:
        return kept
    rows, blocks = x.numel() // width, width // spec.block_length
    return Lines(x.view(rows, width), rows, blocks, False, draw and draw._replace(blocks_per_row=None))


def _wide_problem(one: OneSide) -> Reason | None:
    if one.spec.alignment < WIDE:
        return Reason("its groups of {} values are no rotation of {} or wider", (one.spec.alignment, WIDE))
    rule = sc.rule_of(one.spec, 0)
    if rule.candidates:  # candidates are chosen among rotated blocks: the tuples compile too long
        return None
    lines = in_long_rows(one)
    interpreted = target_of(one.x.device).interpreter
    tile = _row_tile(lines, ceil_div(lines.x.shape[1], rule.group), rule, interpreted)
    if is_packed(lines.x) and is_full(lines.x, lines.blocks, lines.swizzled, rule, (tile.outer, tile.groups)):
        return Reason(
            "the row kernel needs no masks: tiles of {} x {} are whole", (tile.outer, tile.groups * rule.group)
        )
    return None


def _by_columns(x: Tensor) -> bool:
    """Whether rows of the operand lie beside each other in memory."""
    return x.stride(0) == 1 and x.stride(1) != 1


def _column_registers(rule: sc.Rule, swizzled: bool, target: Target) -> dict[str, int]:
    """Return the option that keeps a column kernel at a step of occupancy where it fits without spills, else none."""
    masked_eden = rule.eden and not rule.full  # spills 16 bytes on sm_80; with swizzled scales others do before sm_90
    least = 90 if swizzled else 80
    if rule.candidates or rule.decoded or masked_eden or not least <= target.capability < 120:  # on sm_120 8 bytes
        return {}
    if rule.paired and not rule.drawn:
        return {}  # 80 to 96 unasked; asked for 80, some spill
    if rule.paired:
        spills = not rule.eden and target.capability < 90
        return {} if spills else {"maxnreg": EDEN_REGISTERS if rule.eden else PAIRED_REGISTERS}
    registers = STOCHASTIC_REGISTERS if rule.rounding == "stochastic" else WIDE_REGISTERS
    return {"maxnreg": registers[rule.group]}


def _wide(one: OneSide) -> Choice:
    lines, target = in_long_rows(one), target_of(one.x.device)
    rule = replace(sc.rule_of(one.spec, target.level), decoded=one.side.transient)
    groups, columns = lines.blocks * 16 // rule.group, _by_columns(lines.x)
    of_eden_rows = rule.eden and not columns
    count, num_warps = (EDEN_GROUPS, EDEN_WARPS) if of_eden_rows else (WIDE_GROUPS, WIDE_WARPS)
    covered = round_up(lines.rows, SWIZZLE_ROWS) if lines.swizzled else lines.rows
    tiles = ceil_div(covered, count) if columns else 1
    full = is_full(lines.x, lines.blocks, lines.swizzled, rule, (count, 1))
    rule = by_products(replace(rule, full=full and columns))  # rows are read with masks anyway
    if (rule.full or not columns) and not rule.candidates and shares_signs(rule):  # beside candidates it saves nothing
        rule, tiles, groups = halved(rule), tiles * 2, groups if columns else groups * 2
    programs = tiles * groups if columns else ceil_div(covered * groups, count)
    constants = {
        "RULE": rule,
        "SWIZZLED": lines.swizzled,
        "COLUMNS": columns,
        "PACKED": not columns and mg.reads_pairs(lines.x),
        "T": count,
        "num_warps": num_warps,
    }
    if columns:
        constants |= _column_registers(rule, lines.swizzled, target)
    return Choice("quantize_wide_kernel", (programs,), constants, lines._replace(beside=tiles))


def _cols_problem(one: OneSide) -> Reason | None:
    return None if _by_columns(one.x) else Reason("blocks lie along the rows of memory")


def _tiled(lines: Lines, spec: Spec, rule: sc.Rule) -> tuple[int, int]:
    """Return how many groups a row has and how many rows there are, the padding of swizzled scales included."""
    if not lines.swizzled:
        return ceil_div(lines.blocks * spec.block_length, rule.group), lines.rows
    groups = ceil_div(round_up(lines.blocks, SWIZZLE_COLS) * spec.block_length, rule.group)
    return groups, round_up(lines.rows, SWIZZLE_ROWS)


def _cols(one: OneSide) -> Choice:
    lines, target = in_long_rows(one), target_of(one.x.device)
    x = lines.x.T
    rule = replace(sc.rule_of(one.spec, target.level), decoded=one.side.transient)
    # A thread's columns would share a tile.
    rule = by_products(replace(rule, packed=is_packed(x) and not rule.tile))
    groups, rows = _tiled(lines, one.spec, rule)
    tile = _col_tile(groups, rule, target.interpreter)
    full = is_full(lines.x, lines.blocks, lines.swizzled, rule, (tile.outer, tile.groups))
    rule = replace(rule, full=full, words=tile.words)
    beside = ceil_div(rows, tile.outer)
    constants = {"RULE": rule, "SWIZZLED": lines.swizzled, "N": tile.groups, "C": tile.outer}
    constants["num_warps"] = tile.num_warps
    grid = (beside * ceil_div(groups, tile.groups),)
    return Choice("quantize_cols_kernel", grid, constants, lines._replace(x=x, beside=beside))


def _paired(rule: sc.Rule, lines: Lines, target: Target) -> sc.Rule:
    """Return the rule of neighbouring threads that share groups: 128 numbers are most of the registers of one thread.

    Only in tiles of one row do lanes lie along its groups whatever the compiler prefers: else nothing is shuffled.
    """
    if not rule.packed or not shares_signs(rule):
        return rule
    paired = halved(rule)
    tile = _row_tile(lines, lines.blocks * 16 // paired.group, paired, target.interpreter)
    return paired if target.interpreter or tile.outer == 1 else rule


def judged_quickly(rule: sc.Rule, blocks: int, target: Target, swizzled: bool = False) -> bool:
    """Whether `quick_errors` serve the candidates of so many blocks."""
    least = (QUICK_TILE_BLOCKS if rule.tile or swizzled else QUICK_BLOCKS).get(len(rule.candidates))
    exact = rule.errors == "exact" and least is not None
    return exact and blocks >= least and (target.ptx or target.interpreter)


def by_lines(rule: sc.Rule, beside: sc.Rule) -> bool:
    """Whether codes of both orientations are rounded to nearest by an amax a row."""
    both = rule, beside
    return all(r.row_amax and r.rounding == "nearest" and not (r.decoded or r.candidates or r.eden) for r in both)


def by_products(rule: sc.Rule, beside: sc.Rule | None = None) -> sc.Rule:
    """Return the rule with pairs unpacked by products where that was faster on an H200; beside: of the same kernel.

    Not of drawn elements, beside MXFP8, or of values that are rotated or made both ways, which were 2 to 3 % slower.
    Values by candidates, and an amax a row of one orientation alone, were not timed.
    """
    timed = rule.hardware == 90 and rule.rounding == "nearest" and not rule.element
    if rule.values:
        timed = timed and not (rule.norm or rule.candidates or (beside and beside.values))
    if rule.row_amax:
        timed = timed and beside is not None and by_lines(rule, beside)
    return replace(rule, multiplied=timed and not (beside and beside.element))


def _is_quick(rule: sc.Rule, lines: Lines, blocks: int, target: Target) -> bool:
    """Whether `quick_errors` serve the errors of candidates: of pairs, so many that they pay."""
    if rule.decoded or rule.group != 16 or not (rule.packed or rule.norm):
        return False
    return judged_quickly(rule, blocks, target, lines.swizzled)


def _rule_of_rows(one: OneSide, lines: Lines, target: Target) -> tuple[sc.Rule, int, int]:
    """Return the rule, whose tiles are not known to be whole, and the groups and rows that `_tiled` says."""
    rule = sc.rule_of(one.spec, target.level)
    rule = replace(rule, decoded=one.side.transient, packed=is_packed(lines.x))
    rule = replace(rule, values=rule.decoded and rule.packed and makes_values(one.spec))
    rule = _paired(rule, lines, target)
    groups, rows = _tiled(lines, one.spec, rule)
    if _is_quick(rule, lines, rows * groups, target):
        rule = replace(rule, errors="quick")
    rotated_by_16 = rule.group == 16 and rule.norm != 0.0  # 7 % slower
    return rule if rotated_by_16 else by_products(rule), groups, rows


def _side_by_side(groups: int, interpreted: bool) -> int:
    """Return how many blocks of a row a turn of the kernel of neighbours takes, 0 if it fits no row."""
    if interpreted:
        return min(INTERPRETED_BLOCKS // 16, (groups & -groups) // 2)
    return 0 if groups % 4 else 2


def _neighbours_problem(one: OneSide) -> Reason | None:
    if not one.spec.is_tile:
        return Reason("its blocks are no 16x16 tiles")
    if one.swizzled:
        return Reason("neighbours are stored in rows")
    lines, target = in_long_rows(one), target_of(one.x.device)
    rule, groups, rows = _rule_of_rows(one, lines, target)
    if rule.errors != "quick" or rule.norm:
        return Reason("its candidates are not judged by quick errors")
    cols = lines.x.shape[1]
    n = _side_by_side(groups, target.interpreter)
    if rows % 16 or cols % 16 or not n:
        return Reason("{} x {} are no steps of 16 x 64", (rows, cols))
    steps, least = rows // 16 * (groups // (2 * n)), LEAST_WAVES * WAVE * target.multiprocessors
    return Reason("{} steps are fewer than {}", (steps, least)) if steps < least else None


def _neighbours(one: OneSide) -> Choice:
    lines, target = in_long_rows(one), target_of(one.x.device)
    rule, groups, rows = _rule_of_rows(one, lines, target)
    rule, n = replace(rule, full=True), _side_by_side(groups, target.interpreter)
    beside = groups // (2 * n)
    shares = shares_by_length(rows // 16 * beside, beside, WAVE * target.multiprocessors)
    constants = {"RULE": rule, "R": 16, "N": n, "num_warps": 1}
    if rule.joined and not rule.squares:
        constants["maxnreg"] = TILE_REGISTERS
    programs = rows // 16 * beside - 3 * shares.four - shares.two
    return Choice("quantize_neighbours_kernel", (programs,), constants, lines._replace(beside=beside, shares=shares))


def shares_by_length(count: int, in_row: int, wave: int) -> Shares:
    """Return by how many programs `count` steps are taken: about a wave each by short ones, which are the last.

    No program goes beyond a row of `in_row` steps; wave: a multiple of 4.
    """
    if in_row % 2:
        return Shares(0, 0)
    left = count - min(count, wave)
    if in_row % 4:
        return Shares(0, left // 2)
    two = min(left // 2, wave)
    return Shares((left - 2 * two) // 4, two)


def _rows(one: OneSide) -> Choice:
    lines, target = in_long_rows(one), target_of(one.x.device)
    rule, groups, rows = _rule_of_rows(one, lines, target)
    tile = _row_tile(lines, groups, rule, target.interpreter)
    rule = replace(rule, full=is_full(lines.x, lines.blocks, lines.swizzled, rule, (tile.outer, tile.groups)))
    row_tiles, group_tiles = ceil_div(rows, tile.outer), ceil_div(groups, tile.groups)
    if rule.errors == "quick" or (rule.tile and rule.candidates):
        enough = row_tiles * group_tiles // (LOOP_PROGRAMS * target.multiprocessors)
        tile = tile._replace(loop=min(tile.loop, 1 << max(0, enough.bit_length() - 1)))
    down = group_tiles % tile.loop != 0
    loop = tile.loop if not down or row_tiles % tile.loop == 0 else 1
    constants = {"RULE": rule, "SWIZZLED": lines.swizzled, "R": tile.outer, "N": tile.groups, "LOOP": loop}
    constants |= {"DOWN": down and loop > 1, "num_warps": tile.num_warps}
    if rule.errors == "quick" and rule.tile and rule.joined and rule.full and not lines.swizzled and not rule.squares:
        constants["maxnreg"] = TILE_REGISTERS
    beside = group_tiles if down else group_tiles // loop
    return Choice("quantize_rows_kernel", (row_tiles * group_tiles // loop,), constants, lines._replace(beside=beside))


ONE = (
    Candidate("quantize_small_kernel", _small_problem, _small, "one program finds the amax and quantizes: one launch"),
    Candidate(
        "quantize_tiles_kernel",
        _strips_problem,
        lambda one: choose_strips(one.x[None], one.spec),
        "strips of 16x16 tiles fill whole sectors at any width",
    ),
    Candidate(
        "quantize_wide_kernel", _wide_problem, _wide, "a thread holds a rotated group as one row: no masked tuples"
    ),
    Candidate("quantize_cols_kernel", _cols_problem, _cols, "rows of the operand are columns in memory: whole lines"),
    Candidate(
        "quantize_neighbours_kernel",
        _neighbours_problem,
        _neighbours,
        "whole 16x16 tiles: a lane has two neighbouring blocks and stores them at once",
    ),
    Candidate("quantize_rows_kernel", fits_all, _rows, "blocks along rows, any spec, shape, dtype and strides"),
)


def choose_one_side(request: OneSide) -> Choice:
    """Choose for one orientation."""
    return choose_from(ONE, request)
