"""Which kernel finds the largest finite magnitudes, with which tile, and why (docs/internals/amax.md).

`ONE` is the table of an operand, `SEVERAL` that of tensors with one amax, `PAIR` that of both orientations, `GROUPS`
that of tokens and experts by a plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.groups import GroupPlan
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div
from halfbyte.spec import NVFP4, Spec

PLAIN = sc.rule_of(NVFP4(), hardware=0)

OF_TENSOR, OF_ROW, OF_ROW_PARTS = (tl.constexpr(i) for i in range(3))
"""What becomes of a row's maximum: it joins the tensor's, it is stored, or it joins those of other parts of the row."""


class AmaxTile(NamedTuple):
    """What a program reads at once and how many programs there are, as measured on an H200.

    size: elements; of a rotation, bytes that a thread reads of each row of a group.
    per_sm: programs for each multiprocessor, if the tensor is large: about as many as run at once.
    """

    size: int
    num_warps: int
    per_sm: int


PLAIN_TILE = AmaxTile(8192, 8, 8)
ROTATED_TILES = {16: AmaxTile(8, 4, 5), 32: AmaxTile(4, 4, 5), 64: AmaxTile(4, 4, 3), 128: AmaxTile(2, 4, 3)}


def amax_rule(spec: Spec) -> sc.Rule:
    """Return what the amax kernels are compiled for: nothing of the spec counts but its rows and its rotation."""
    rule = sc.rule_of(spec, hardware=0)
    return replace(PLAIN, row_amax=rule.row_amax, group=rule.group, norm=rule.norm, fresh=rule.fresh, signs=rule.signs)


PAIRED = 128
"""The width of a rotation whose groups two threads may share: 128 numbers are most of the registers of one."""


def shares_signs(rule: sc.Rule) -> bool:
    """Whether it has groups of `PAIRED` whose halves have equal signs, or fresh ones: two threads may share them."""
    half = rule.signs & ((1 << 64) - 1)
    return rule.group == PAIRED and rule.signs == half << 64 | half


def halved(rule: sc.Rule) -> sc.Rule:
    """Return the rule of threads that share groups of `PAIRED`."""
    return replace(rule, group=PAIRED // 2, paired=True)


class AmaxOfOne(NamedTuple):
    """Find the amax of x [rows, cols], or of its rows."""

    x: Tensor
    spec: Spec


def _rotated_problem(one: AmaxOfOne) -> Reason | None:
    return None if one.spec.rotation is not None else Reason("the operand is not rotated")


def _rows(one: AmaxOfOne) -> Choice:
    x, per_row = one.x, one.spec.has_row_amax
    if not per_row:  # without rows to tell apart, a contiguous tensor is one long row, and rows may be columns
        x = x.view(1, -1) if x.is_contiguous() else x.T if x.stride(0) == 1 else x
    rows, cols = x.shape
    c = min(PLAIN_TILE.size, max(16, triton.next_power_of_2(cols)))
    r = PLAIN_TILE.size // c
    tiles = ceil_div(rows, r)
    parts = mg.parts_of(ceil_div(cols, c), tiles, PLAIN_TILE.per_sm, x.device)
    result = OF_TENSOR if not per_row else OF_ROW if parts == 1 else OF_ROW_PARTS
    constants = {"RESULT": result, "PACKED": mg.reads_pairs(x), "R": r, "C": c, "num_warps": PLAIN_TILE.num_warps}
    return Choice("amax_rows_kernel", (tiles * parts,), constants, (x, parts))


class RotatedTile(NamedTuple):
    """What a program of a rotation's maximum reads at once.

    lines: columns, or words of two (packed); vec: how many of them a thread reads.
    num_warps, per_sm: as in `AmaxTile`.
    """

    lines: int
    vec: int
    packed: bool
    num_warps: int
    per_sm: int


def rotated_tile(rule: sc.Rule, packed: bool, hardware: int) -> RotatedTile:
    """Return the tile of a rotation's maximum.

    A thread holds whole groups, of as many columns as fit into its registers. Blackwell's assembler keeps fewer of
    them, and 128 fresh signs beside 128 values are too much for all but sm_90: there a thread reads one column or, of
    groups of 128, half of one. These tiles are compiled and compared, not measured.

    Args:
        rule: its group and fresh count.
        packed: whether x may be read in words.
        hardware: as `Rule.hardware`.
    """
    size, num_warps, per_sm = ROTATED_TILES[rule.group]
    if rule.group == 128 and (hardware >= 100 or (rule.fresh and hardware < 90)):
        return RotatedTile(32, 1, False, 2, 8)
    if rule.group >= 32 and hardware >= 100:
        return RotatedTile(128, 1, False, 4, per_sm)
    packed = packed and size >= 4
    vec = size // 4 if packed else 1
    return RotatedTile(32 * num_warps * vec, vec, packed, num_warps, per_sm)


def _rotated(x: Tensor, spec: Spec, both: bool) -> Choice:
    """Choose for x.T after a rotation along its rows and, with `both`, for x."""
    (rows, cols), rule = x.shape, amax_rule(spec)
    tile = rotated_tile(rule, mg.reads_pairs(x), sc.hardware_of(x.device))
    tile_cols = tile.lines * (2 if tile.packed else 1)
    strips = ceil_div(cols, tile_cols)
    parts = mg.parts_of(ceil_div(rows, rule.group), strips, tile.per_sm, x.device)
    full = cols % tile_cols == 0 and rows % rule.group == 0
    constants = {"RULE": rule, "BOTH": both, "PACKED": tile.packed, "FULL": full, "T": tile.lines, "VEC": tile.vec}
    constants |= {"PARTIAL": False, "OVERLAP": False, "num_warps": tile.num_warps}
    return Choice("amax_rotated_kernel", (strips * parts,), constants, (x, strips, parts))


ROW_LINES = 128  # groups, or halves of them, of a program
ROW_WARPS = 4
ROW_PROGRAMS = {16: 16, 32: 10, 64: 6, 128: 6}
"""Of a multiprocessor, by the width: one or two times what run at once, which left none of them waiting for a last."""
FRESH_PROGRAMS = {16: 16, 32: 7, 64: 3, 128: 3}  # 64 signs in registers leave room for three
MOST_GROUPS = 1 << 29  # `casts.divide` is exact up to twice as many


def _rotated_rows_problem(one: AmaxOfOne) -> Reason | None:
    """Say why rotated rows are not read in words."""
    reason = _rotated_problem(one)
    if reason is not None:
        return reason
    if one.spec.has_row_amax:
        return Reason("rows have an amax each")
    if not mg.reads_pairs(one.x):
        return Reason("x is not bf16 in aligned rows of multiples of 8 columns")
    groups = one.x.shape[0] * ceil_div(one.x.shape[1], one.spec.alignment)
    return None if groups <= MOST_GROUPS else Reason("{} groups are more than {}", (groups, MOST_GROUPS))


def _rotated_rows(one: AmaxOfOne) -> Choice:
    (rows, cols), rule = one.x.shape, amax_rule(one.spec)
    width, groups = rule.group, ceil_div(cols, rule.group)
    if shares_signs(rule):
        rule = halved(rule)
    lines = ROW_LINES // (width // rule.group)
    per_sm = (FRESH_PROGRAMS if rule.fresh else ROW_PROGRAMS)[width]
    programs = mg.parts_of(ceil_div(rows * groups, lines), 1, per_sm, one.x.device)
    full = cols % width == 0 and rows * groups % lines == 0
    constants = {"RULE": rule, "FULL": full, "T": ROW_LINES, "num_warps": ROW_WARPS}
    return Choice("amax_rotated_rows_kernel", (programs,), constants, (one.x, groups))


ONE = (
    Candidate("amax_rotated_rows_kernel", _rotated_rows_problem, _rotated_rows, "words of rows, whole groups a thread"),
    Candidate(
        "amax_rotated_kernel",
        _rotated_problem,
        lambda one: _rotated(one.x.T, one.spec, both=False),
        "a thread holds whole groups of a rotation",
    ),
    Candidate("amax_rows_kernel", fits_all, _rows, "plain maxima of a tensor or of its rows"),
)


def choose_amax(request: AmaxOfOne) -> Choice:
    """Choose for one operand with values."""
    return choose_from(ONE, request)


class AmaxOfSeveral(NamedTuple):
    """Find the amax that tensors have together."""

    xs: tuple[Tensor, ...]


MOST_TENSORS = 3
"""That one launch takes: q, k and v."""


def words_in(x: Tensor) -> int:
    """Return how many words of 4 bytes a tensor has."""
    return x.numel() * x.element_size() // 4


def _several_problem(several: AmaxOfSeveral) -> Reason | None:
    xs = several.xs
    if len(xs) > MOST_TENSORS:
        return Reason("{} tensors are more than {}", (len(xs), MOST_TENSORS))
    if xs[0].dtype not in (torch.bfloat16, torch.float32) or any(x.dtype != xs[0].dtype for x in xs):
        return Reason("the tensors are neither all bf16 nor all fp32")
    if all(x.is_contiguous() and x.numel() and x.data_ptr() % 16 == 0 and words_in(x) % 4 == 0 for x in xs):
        return None
    return Reason("a tensor is not one aligned piece of a multiple of 16 bytes")


def _several(several: AmaxOfSeveral) -> Choice:
    packed, words = several.xs[0].dtype == torch.bfloat16, PLAIN_TILE.size // 2
    runs = sum(ceil_div(words_in(x), words) for x in several.xs)
    programs = mg.parts_of(runs, 1, PLAIN_TILE.per_sm, several.xs[0].device)
    constants = {"PACKED": packed, "C": words, "num_warps": PLAIN_TILE.num_warps}
    return Choice("amax_several_kernel", (programs,), constants)


ONE_BY_ONE = "an amax of each tensor, then of these"

SEVERAL = (
    Candidate("amax_several_kernel", _several_problem, _several, "programs go through one tensor after the other"),
    Candidate(ONE_BY_ONE, fits_all, lambda _: Choice(ONE_BY_ONE), "any number of tensors of any dtype and strides"),
)


def choose_several(request: AmaxOfSeveral) -> Choice:
    """Choose for tensors with one amax."""
    return choose_from(SEVERAL, request)


class AmaxesOfPair(NamedTuple):
    """Find the amaxes of x by `row` and of x.T by `col`; None where none is wanted."""

    x: Tensor
    row: Spec | None
    col: Spec | None


def _one_read_problem(pair: AmaxesOfPair) -> Reason | None:
    if pair.row is None or pair.col is None:
        return Reason("one orientation has an amax already, or needs none")
    if pair.row.rotation is not None or not pair.row.has_tensor_amax:
        return Reason("the rows are rotated or have an amax each")
    return None if pair.x.numel() else Reason("there are no values")


def _same_problem(pair: AmaxesOfPair) -> Reason | None:
    reason = _one_read_problem(pair)
    if reason is not None or pair.col is None:
        return reason
    if pair.col.rotation is not None:
        return Reason("the columns are rotated")
    return None if pair.col.has_tensor_amax else Reason("the columns have an amax each")


def _rotated_pair_problem(pair: AmaxesOfPair) -> Reason | None:
    reason = _one_read_problem(pair)
    if reason is not None or pair.col is None:
        return reason
    return None if pair.col.rotation is not None else Reason("the columns are not rotated")


def _rotated_pair(pair: AmaxesOfPair) -> Choice:
    assert pair.col is not None, "the columns are rotated"
    return _rotated(pair.x, pair.col, both=True)


SAME, EACH = "one amax for both orientations", "an amax for each that needs one"

PAIR = (
    Candidate(SAME, _same_problem, lambda _: Choice(SAME), "neither orientation is rotated"),
    Candidate("amax_rotated_kernel", _rotated_pair_problem, _rotated_pair, "both amaxes from one read of x"),
    Candidate(EACH, fits_all, lambda _: Choice(EACH), "one read does not give both"),
)


def choose_amaxes(request: AmaxesOfPair) -> Choice:
    """Choose for both orientations."""
    return choose_from(PAIR, request)


class AmaxesOfGroups(NamedTuple):
    """Find the amaxes of the groups of x [rows, cols] along rows and columns; None where none is wanted.

    rest: whether the other side has had a kernel of its own.
    """

    x: Tensor
    plan: GroupPlan
    row: sc.Rule | None
    col: sc.Rule | None
    rest: bool = False


class GroupedAmaxTile(NamedTuple):
    """Columns and warps of a program."""

    cols: int
    num_warps: int


BOTH_TILE, ROW_TILE = GroupedAmaxTile(128, 4), GroupedAmaxTile(256, 8)
PACKED_WIDTH = 32  # the widest rotation of words of two columns: with 64, threads spill 300 bytes
INTERPRETED_COLS = 256  # the interpreter pays by the operation: large tiles


def _packed_problem(groups: AmaxesOfGroups) -> Reason | None:
    """Say why words of two columns do not serve for an unrotated amax of x, a rotated one of x.T, or both."""
    x, row, col = groups.x, groups.row, groups.col
    if groups.rest:
        return Reason("the other side has a kernel of its own, so that one read does not give both")
    if not mg.reads_pairs(x):
        return Reason("x is not bf16 in aligned rows of multiples of 8 columns")
    if row is not None and (row.norm != 0.0 or row.row_amax):
        return Reason("the rows are rotated or have an amax each")
    if col is None:
        return None
    if col.row_amax or col.norm == 0.0 or col.group > PACKED_WIDTH:
        return Reason("the columns have an amax each, no rotation, or one wider than {}", (PACKED_WIDTH,))
    if not rotated_tile(col, True, sc.hardware_of(x.device)).packed:
        return Reason("{} holds one column of a rotation of {} a thread", (target_of(x.device).name, col.group))
    return None


def _packed(groups: AmaxesOfGroups) -> Choice:
    cols, rule = groups.x.shape[1], groups.col or PLAIN
    tile = rotated_tile(rule, True, sc.hardware_of(groups.x.device))
    strips = ceil_div(cols, 2 * tile.lines)
    constants = {"RULE": rule, "FULL": cols % (2 * tile.lines) == 0, "TR": groups.plan.tile_rows, "T": tile.lines}
    constants |= {"VEC": tile.vec, "num_warps": tile.num_warps}
    return Choice("packed_amax_kernel", (groups.plan.tiles * strips,), constants, strips)


WIDE_OF_GROUPS = 32
"""The least width of a rotation whose groups are rows of tensors, not tuples with masks; quantization does likewise."""
WIDE_LINES = 128  # columns of a program where groups lie along the rows of x
VALUES_PER_WARP = 2048  # 64 a thread: with 128, a thread's values do not fit into its registers


def is_wide(rule: sc.Rule | None) -> bool:
    """Say whether an operand's rotation is one of `WIDE_OF_GROUPS`."""
    return rule is not None and rule.norm != 0.0 and rule.group >= WIDE_OF_GROUPS


class WideSide(NamedTuple):
    """How rotated groups of one orientation are launched.

    rule: of a thread's share of a group.
    packed: whether rows are read in words.
    programs, beside: all, and those beside each other.
    lines, num_warps: of a program; of a rule that is paired, two lines share a group.
    """

    rule: sc.Rule
    packed: bool
    programs: int
    beside: int
    lines: int
    num_warps: int


def wide_side(x: Tensor, plan: GroupPlan, rule: sc.Rule, columns: bool) -> WideSide:
    """Return what a launch of rotated groups covers; columns: whether groups lie along the columns of x."""
    width, cols = rule.group, x.shape[1]
    if shares_signs(rule) and not rule.candidates:  # beside candidates it saves no registers
        rule = halved(rule)
    share = width // rule.group
    lines = WIDE_LINES // share if columns else plan.tile_rows
    beside = ceil_div(cols, lines if columns else width)
    parts = plan.tile_rows // width if columns else 1
    num_warps = lines * max(width, 64) // VALUES_PER_WARP
    packed = not columns and rule.group >= 64 and mg.reads_pairs(x)
    return WideSide(rule, packed, plan.tiles * beside * parts, beside, lines * share, num_warps)


def _wide_problem(groups: AmaxesOfGroups) -> Reason | None:
    if is_wide(groups.row) or is_wide(groups.col):
        return None
    return Reason("no side has a rotation of {} or wider", (WIDE_OF_GROUPS,))


def amax_warps(side: WideSide, hardware: int) -> int:
    """Return the warps of the maxima's kernel; hardware: as `Rule.hardware`.

    With one group of 32 a thread, Blackwell's assembler takes 72 registers and spills; with two it does not.
    """
    return side.num_warps // 2 if side.rule.group == 32 and hardware >= 100 else side.num_warps


def _wide(groups: AmaxesOfGroups) -> Choice:
    """Choose for the first side with a wide rotation."""
    columns = not is_wide(groups.row)
    rule = groups.col if columns else groups.row
    assert rule is not None, "it is wide"
    side = wide_side(groups.x, groups.plan, rule, columns)
    constants = {"RULE": side.rule, "COLUMNS": columns, "PACKED": side.packed, "TILE_ROWS": groups.plan.tile_rows}
    constants |= {"T": side.lines, "num_warps": amax_warps(side, sc.hardware_of(groups.x.device))}
    return Choice("grouped_wide_amax_kernel", (side.programs,), constants, side.beside)


def _tuples(groups: AmaxesOfGroups) -> Choice:
    row, col = groups.row, groups.col
    tile, interpreted = ROW_TILE if col is None else BOTH_TILE, target_of(groups.x.device).interpreter
    tile_cols = max(tile.cols, 0 if row is None else row.group, INTERPRETED_COLS if interpreted else 0)
    beside = ceil_div(groups.x.shape[1], tile_cols)
    constants = {"ROW": row, "COL": col, "TR": groups.plan.tile_rows, "TC": tile_cols, "num_warps": tile.num_warps}
    return Choice("grouped_amax_kernel", (groups.plan.tiles * beside,), constants, beside)


GROUPS = (
    Candidate("packed_amax_kernel", _packed_problem, _packed, "words of two columns, both amaxes from one read"),
    Candidate("grouped_wide_amax_kernel", _wide_problem, _wide, "a thread holds a rotated group as one row"),
    Candidate("grouped_amax_kernel", fits_all, _tuples, "any dtype, an amax a row or column, narrow rotations"),
)


def choose_group_amaxes(request: AmaxesOfGroups) -> Choice:
    """Choose for the sides of groups, or for the first with a wide rotation."""
    return choose_from(GROUPS, request)
