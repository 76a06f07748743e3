"""Which kernels quantize tokens in groups and the weights of experts, with which tiles, and why.

`GROUPED` is the table of a call; what needs a plan of the groups is chosen side by side from `SIDES`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from halfbyte.kernels.amax.route import WIDE_OF_GROUPS, is_wide, wide_side
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.groups import GroupPlan
from halfbyte.kernels.quantize import route, strips_route
from halfbyte.kernels.quantize.both_route import PairTile, loop_of, row_runs_along, runs_along, tile_for, widened
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div
from halfbyte.sides import Side, share_tiles

PLANNED = "kernels that are told where groups lie"


class GroupedCall(NamedTuple):
    """Quantize tokens [M, C] with offsets, or experts [E, N, K], along rows, columns or both."""

    x: Tensor
    offsets: Tensor | None
    row: Side | None
    col: Side | None


class ExpertsTile(NamedTuple):
    """Rows, columns and warps of a program."""

    rows: int
    cols: int
    num_warps: int


EXPERT_TILE = ExpertsTile(16, 256, 4)


def _shared_problem(call: GroupedCall) -> Reason | None:
    if call.row is None or call.col is None:
        return Reason("one orientation is wanted")
    if share_tiles(call.row.spec, call.col.spec):
        return None
    return Reason("the orientations do not share 16x16 tiles")


def _rows_of_experts_problem(call: GroupedCall) -> Reason | None:
    if call.offsets is not None:
        return Reason("groups of tokens have sizes that only the GPU knows")
    if call.row is None or call.col is not None:
        return Reason("more is wanted than the rows of experts")
    return None


def _strips_problem(call: GroupedCall) -> Reason | None:
    reason = _rows_of_experts_problem(call)
    if reason is not None:
        return reason
    assert call.row is not None, "the rows are wanted"
    return strips_route.strips_problem(call.x, call.row.spec)


def _strips(call: GroupedCall) -> Choice:
    assert call.row is not None, "the rows are wanted"
    return strips_route.choose_strips(call.x, call.row.spec)


def _experts_problem(call: GroupedCall) -> Reason | None:
    reason, w = _rows_of_experts_problem(call), call.x
    if reason is not None:
        return reason
    assert call.row is not None, "the rows are wanted"
    if call.row.spec.needs_rng or call.row.spec.rotation:
        return Reason("each expert draws or is rotated with a seed of its own")
    if w.numel() == 0:
        return Reason("there are no values")
    rows, cols = w.shape[1:]
    if not w.is_contiguous() or not strips_route.is_packed(w.view(-1, cols)):
        return Reason("experts are not contiguous bf16 in aligned rows of multiples of 8 columns")
    if rows % EXPERT_TILE.rows or cols % EXPERT_TILE.cols:
        return Reason("{} x {} is no multiple of {} x {}", (rows, cols, EXPERT_TILE.rows, EXPERT_TILE.cols))
    return None


def _experts(call: GroupedCall) -> Choice:
    (experts, rows, cols), tile = call.x.shape, EXPERT_TILE
    assert call.row is not None, "the rows are wanted"
    rule = sc.rule_of(call.row.spec, sc.hardware_of(call.x.device))
    rule = replace(rule, packed=True, full=True, decoded=call.row.transient)
    beside = cols // tile.cols
    constants = {"RULE": rule, "R": tile.rows, "N": tile.cols // rule.group, "num_warps": tile.num_warps}
    return Choice("quantize_experts_kernel", (experts * (rows // tile.rows) * beside,), constants, beside)


GROUPED = (
    Candidate(route.SHARED, _shared_problem, lambda _: Choice(route.SHARED), "both orientations are the same tiles"),
    Candidate("quantize_tiles_kernel", _strips_problem, _strips, "strips of 16x16 tiles fill whole sectors"),
    Candidate(
        "quantize_experts_kernel", _experts_problem, _experts, "experts of equal size are one tall matrix: no plan"
    ),
    Candidate(PLANNED, fits_all, lambda _: Choice(PLANNED), "groups of any size, both orientations, any spec"),
)


def choose_grouped(call: GroupedCall) -> Choice:
    """Choose for a call."""
    return choose_from(GROUPED, call)


# What needs a plan.

ROW_TILE = PairTile(16, 256, 4)
DECODED_COLS = 64  # of a tile that is stored as values: more of them keep too few programs on a multiprocessor
INTERPRETED_COLS = 256  # the interpreter pays by the operation: large tiles
LOOPS = ((32768, 4), (4096, 2))  # as `both_route`'s; fewer programs end unevenly, 8 tiles of 6 overflow the L1 cache
SHARED_REGISTERS = 104  # on sm_120: unasked it gives 96 and spills, of an amax a row
QUICK_REGISTERS = 96  # on sm_120, of both sides by quick errors: unasked it gives 80 and spills at ragged edges
DRAWN_REGISTERS = 80  # 24 warps on a multiprocessor; nothing spills where a program has several tiles

Rules = list[sc.Rule | None]


class PlannedSides(NamedTuple):
    """Quantize the sides of x [rows, cols], whose rules are known, by a plan."""

    x: Tensor
    plan: GroupPlan
    rules: Rules
    stacked: bool


def _wide_problem(sides: PlannedSides) -> Reason | None:
    if any(is_wide(rule) for rule in sides.rules):
        return None
    return Reason("no side has a rotation of {} or wider", (WIDE_OF_GROUPS,))


def _wide(sides: PlannedSides) -> Choice:
    """Choose for the first side with a wide rotation."""
    i = next(i for i, rule in enumerate(sides.rules) if is_wide(rule))
    rule = sides.rules[i]
    assert rule is not None, "it is wide"
    side = wide_side(sides.x, sides.plan, rule, bool(i))
    constants = {"RULE": side.rule, "COLUMNS": bool(i), "STACKED": sides.stacked, "PACKED": side.packed}
    constants |= {"TILE_ROWS": sides.plan.tile_rows, "T": side.lines, "num_warps": side.num_warps}
    if i and side.rule.paired and not side.rule.drawn and target_of(sides.x.device).capability >= 120:
        constants["maxnreg"] = SHARED_REGISTERS
    return Choice("grouped_wide_kernel", (side.programs,), constants, (i, side.beside))


def _tile(sides: PlannedSides) -> PairTile:
    """Return the tile of a pair of rules: that of one tensor, or as many rows as the plan has."""
    (row, col), tile_rows = sides.rules, sides.plan.tile_rows
    best = ROW_TILE
    if col is not None:
        dense = tile_for(row or col, col)
        if row is not None and row.packed and col.packed and not (row.row_amax or col.row_amax):
            dense = widened(dense, row, col, sides.x.shape[1])
        best = PairTile(min(dense.rows, tile_rows), dense.cols, dense.num_warps, dense.words)
        if col.decoded or (row is not None and row.decoded):
            best = best._replace(cols=DECODED_COLS, words=1)
    cols = max(best.cols, 0 if row is None else row.group)
    if target_of(sides.x.device).interpreter:
        best, cols = best._replace(rows=tile_rows), max(cols, INTERPRETED_COLS)
    return best._replace(cols=cols)


def _full_and_ragged(cols: int, rules: Rules, tile: PairTile, stacked: bool) -> tuple[Rules, Rules]:
    """Return the rules for tiles without a ragged edge, None where the columns have one, and those for the others.

    Tokens of a packed x in whole tiles of columns need no branch: `Rule.clamped` serves all their tiles. Not those of
    tiles with candidates, where rows that are there twice would count twice in the error.
    """
    full: Rules = [None if rule is None else replace(rule, full=True, words=tile.words) for rule in rules]
    if cols % tile.cols:
        return [None, None], [None if rule is None else replace(rule, words=tile.words) for rule in rules]
    may_repeat = all(rule is None or (rule.packed and not (rule.tile and rule.candidates)) for rule in rules)
    if stacked or not may_repeat:
        return full, [None if rule is None else replace(rule, words=tile.words) for rule in rules]
    row, col = full
    along = [False, False]
    if row is not None and col is not None and not (row.row_amax or col.row_amax):
        codes = replace(row, decoded=False), replace(col, decoded=False)
        along = [row_runs_along(*codes), runs_along(*codes)]
    return [None, None], [
        rule and replace(rule, clamped=True, along=own) for rule, own in zip(full, along, strict=True)
    ]


def _judged(sides: PlannedSides) -> PlannedSides:
    """Return the request with the rules of sides by `quick_errors`, of pairs of a block, and by products."""
    target, blocks = target_of(sides.x.device), sides.x.numel() // 16
    rules: Rules = []
    for i, rule in enumerate(sides.rules):
        has_pairs = rule is not None and rule.packed and rule.group == 16 and (not i or rule.norm != 0.0)
        quick = rule is not None and has_pairs and not rule.tile and route.judged_quickly(rule, blocks, target)
        rules.append(replace(rule, errors="quick") if rule is not None and quick else rule)
    row, col = rules
    if not any(rule and rule.row_amax for rule in rules):
        rules = [row and route.by_products(row, col), col and route.by_products(col, row)]
    return sides._replace(rules=rules)


def _together(sides: PlannedSides) -> Choice:
    sides = _judged(sides)
    plan, cols, tile = sides.plan, sides.x.shape[1], _tile(sides)
    col_tiles = ceil_div(cols, tile.cols)
    full, ragged = _full_and_ragged(cols, sides.rules, tile, sides.stacked)
    row_tiles = plan.tiles * (plan.tile_rows // tile.rows)
    tokens_in_all_tiles = full == [None, None] and not sides.stacked  # only the kernel's part for these has the loop
    loop = loop_of(LOOPS, ragged, row_tiles, col_tiles) if tokens_in_all_tiles else 1
    beside = col_tiles // loop
    constants = {"ROW": ragged[0], "COL": ragged[1], "FULL_ROW": full[0], "FULL_COL": full[1]}
    constants |= {"STACKED": sides.stacked, "TILE_ROWS": plan.tile_rows, "TR": tile.rows, "TC": tile.cols}
    constants |= {"LOOP": loop, "num_warps": tile.num_warps}
    may_cap = loop > 1 and all(rule is not None and rule.clamped and rule.group == 16 for rule in ragged)
    target = target_of(sides.x.device)
    if may_cap and target.ptx:
        constants["maxnreg"] = DRAWN_REGISTERS
    if all(rule is not None and rule.errors == "quick" for rule in ragged) and target.ptx and target.capability >= 120:
        constants["maxnreg"] = QUICK_REGISTERS
    return Choice("grouped_quantize_kernel", (row_tiles * beside,), constants, beside)


SIDES = (
    Candidate(
        "grouped_wide_kernel", _wide_problem, _wide, "with masks, tuples of a wide rotation take minutes to compile"
    ),
    Candidate("grouped_quantize_kernel", fits_all, _together, "one read of x serves the sides that are wanted"),
)


def choose_next_side(request: PlannedSides) -> Choice:
    """Choose what quantizes the next side, or the sides that are left together."""
    return choose_from(SIDES, request)
