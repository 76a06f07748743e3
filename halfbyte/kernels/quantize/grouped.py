"""Quantize tokens in groups and the weights of experts; the same bytes as a loop over the groups (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.kernels.amax.grouped import grouped_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.operands import Places, Pointers, WrittenOperand, arguments_of_both
from halfbyte.kernels.groups import GroupPlan, keep_plan, plan_groups, tiles_of_pass
from halfbyte.kernels.quantize import grouped_wide as wide
from halfbyte.kernels.quantize.experts import experts_amax, quantize_experts
from halfbyte.kernels.quantize.grouped_kernels import grouped_quantize_kernel, grouped_transpose_kernel
from halfbyte.kernels.quantize.grouped_route import (
    PLANNED,
    GroupedCall,
    PlannedSides,
    choose_grouped,
    choose_next_side,
)
from halfbyte.kernels.quantize.route import SHARED
from halfbyte.kernels.quantize.strips_route import is_packed
from halfbyte.kernels.unpack.grouped_dequantize import grouped_values
from halfbyte.kernels.unpack.swizzle import grouped_swizzle
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import (
    GROUP_COLUMNS,
    LINEAR,
    Blocks,
    EndsOfGroups,
    GroupEnds,
    as_offsets,
    ceil_div,
    check_scale_layout,
    group_alignment,
    grouped_shapes,
    round_up,
    row_bytes,
)
from halfbyte.rng import Draw
from halfbyte.sides import Side, Sides, share_tiles
from halfbyte.spec import NVFP4, Spec

TRANSPOSE_WORDS = 32


class Grid(NamedTuple):
    """The grouped tensor of one call.

    x: [rows, cols], contiguous along the columns; experts below each other.
    offsets: None for the weights of experts.
    ends: the same, as it was given.
    """

    x: Tensor
    offsets: Tensor | None
    groups: int
    ends: EndsOfGroups | None = None

    @property
    def stacked(self) -> bool:
        return self.offsets is None

    @property
    def group_rows(self) -> int:
        """Rows of each expert."""
        return self.x.shape[0] // self.groups


class GroupedOutput(NamedTuple):
    """One orientation of the output; decoded: qdata holds bf16 values, there are no scales."""

    side: Side
    qdata: Tensor
    block_scale: Tensor
    blocks: int

    @property
    def decoded(self) -> bool:
        return self.side.transient


def grouped_quantize_row_col(
    x: Tensor, offsets: EndsOfGroups | None, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Quantize every group both ways; a transient side is returned decoded, as in `quantize_row_col`."""
    if row is None or col is None or not share_tiles(row.spec, col.spec):
        return quantize_groups(x, offsets, row, col)
    codes = quantize_groups(x, offsets, row._replace(transient=False), col._replace(transient=False))
    out = []
    for i, (side, blocks) in enumerate(zip((row, col), codes, strict=True)):
        if side.transient and blocks is not None:
            total = x.shape[-2 if i else -1]
            split = bool(i) and offsets is not None
            ends = None if offsets is None else as_offsets(offsets)
            values = grouped_values(blocks, side.spec, ends, total, side.scale_layout, split=split)
            blocks = blocks.decoded(values)
        out.append(blocks)
    return out[0], out[1]


def quantize_groups(
    x: Tensor, groups: EndsOfGroups | None, row: Side | None, col: Side | None
) -> tuple[Blocks | None, Blocks | None]:
    """Return quantize_row_col of every group, joined; group g draws with its own seed.

    Args:
        x: tokens [M, C] with the ends of groups [E], or expert weights [E, N, K] with None; bf16, fp16 or fp32.
        row, col: what is asked for, or None; an amax in the shape of `layout.grouped_shapes`, of expert weights [E] or
            [E, rows]. A transient one is returned decoded: bf16 element * block_scale as qdata, and no scales. What
            lies behind the last group is then undefined.

    Returns:
        Blocks in the shapes of `layout.grouped_shapes`; of expert weights, every tensor has a leading [E].
    """
    for side in (row, col):
        check_scale_layout(LINEAR if side is None else side.scale_layout)
    offsets = None if groups is None else as_offsets(groups)
    choice = choose_grouped(GroupedCall(x, offsets, row, col))
    if row is not None and col is not None and choice.kernel == SHARED:
        assert not (row.transient or col.transient), "both orientations of one tile are codes"
        codes, _ = quantize_groups(x, groups, row._replace(scale_layout=LINEAR), None)
        assert codes is not None, "the row has a spec"
        turned = _transposed(codes, x, offsets)
        return _laid_out(codes, row, x, offsets, False), _laid_out(turned, col, x, offsets, True)
    if row is not None and choice.kernel != PLANNED:
        return _laid_out(quantize_experts(choice, x, row), row, x, None, False), None
    x = x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(0) == x.shape[1] * x.stride(1)) else x.contiguous()
    grid = Grid(x.flatten(0, -2), offsets, x.shape[0] if offsets is None else offsets.shape[0], groups)
    plan = _plan(grid, row, col)
    amaxes = _amaxes(grid, plan, (row, col))
    outputs = [None if side is None else _allocate(grid, side, i) for i, side in enumerate((row, col))]
    _quantize(grid, plan, outputs, amaxes)
    out = []
    for i, output in enumerate(outputs):
        if output is None:
            out.append(None)
            continue
        side = output.side
        amax = _own_amax(side.spec, amaxes, i, grid) if side.amax is None else side.amax
        blocks = Blocks(output.qdata, output.block_scale, amax)
        blocks = _stacked(blocks, side.spec, grid.groups) if grid.stacked else blocks
        out.append(_laid_out(blocks, side, x, offsets, i == 1))
    return out[0], out[1]


def _plan(grid: Grid, row: Side | None, col: Side | None) -> GroupPlan:
    """Return the plan of both orientations, with the amaxes of the groups of tokens that were given."""
    given = [
        None if side is None or side.amax is None or grid.stacked or side.spec.has_row_amax else side.amax.contiguous()
        for side in (row, col)
    ]
    first = row or col
    assert first is not None, "one orientation is asked for"
    tile_rows = GROUP_COLUMNS if col is None else group_alignment(col.spec)
    wanted = grid.ends.base if isinstance(grid.ends, GroupEnds) else None
    base = wanted if first.draw is None else first.draw.base
    plan = plan_groups(
        grid.offsets,
        grid.groups,
        grid.x.shape[0],
        tiles_of_pass(grid.ends, tile_rows),
        grid.x.device,
        (base, first.sign_draw and first.sign_draw.base),
        (given[0], given[1]),
    )
    if isinstance(grid.ends, GroupEnds) and wanted is not None and base is wanted and plan.draws is not None:
        grid.ends.copied = plan.draws[0]  # that of group 0 is the base itself
    return keep_plan(grid.ends, plan)


def _stacked(blocks: Blocks, spec: Spec, groups: int) -> Blocks:
    qdata, scale = (t.unflatten(0, (groups, t.shape[0] // groups)) if t.dim() == 2 else t for t in blocks[:2])
    amax = blocks.amax
    return Blocks(qdata, scale, amax.view(groups, amax.numel() // groups) if spec.has_row_amax else amax)


def _allocate(grid: Grid, side: Side, orientation: int) -> GroupedOutput:
    """Return one orientation with unwritten LINEAR storage; the experts' lie below each other."""
    (rows, cols), spec = grid.x.shape, side.spec
    if not grid.stacked:
        shape = (cols, rows) if orientation else (rows, cols)
        shapes = grouped_shapes(shape, grid.groups, spec, LINEAR, contraction=bool(orientation))
        q_shape, s_shape = shapes.qdata, shapes.block_scale
    else:
        rows, cols = (grid.groups * cols, grid.group_rows) if orientation else (rows, cols)
        blocks = round_up(cols, spec.alignment) // spec.block_length
        q_shape, s_shape = (rows, row_bytes(cols, spec)), (rows, blocks)
    new, blocks = grid.x.new_empty, s_shape[1]
    if side.transient:
        values = new((s_shape[0], blocks * spec.block_length), dtype=torch.bfloat16)
        return GroupedOutput(side, values, new(0, dtype=torch.uint8), blocks)
    return GroupedOutput(side, new(q_shape, dtype=torch.uint8), new(s_shape, dtype=torch.uint8), blocks)


def _own_amax(spec: Spec, amaxes: list[Tensor], i: int, grid: Grid) -> Tensor:
    """Return an amax without the place of the tail, in memory of its own; MXFP8 has none."""
    amax = amaxes[i]
    size = 0 if not spec.format.has_amax else amax.shape[0] if spec.has_row_amax and amax.dim() == 1 else grid.groups
    return amax[:size].clone() if i and amax is amaxes[0] else amax[:size]


def _amaxes(grid: Grid, plan: GroupPlan, sides: Sides) -> list[Tensor]:
    """Return the amax of each orientation, of tokens with a zero for the tail; those not given from one read of x."""
    rows, cols = grid.x.shape
    own: list[Tensor] = []
    needed: list[Spec | None] = [None, None]
    for i, side in enumerate(sides):
        if side is None or not side.spec.format.has_amax:
            own.append(plan.amax[i])
            continue
        spec, amax = side.spec, side.amax
        if amax is None:
            needed[i] = spec
            shape = ((grid.groups + 1) * cols,) if i else (rows,)
            own.append(
                torch.zeros(shape, device=grid.x.device, dtype=torch.float32) if spec.has_row_amax else plan.amax[i]
            )
        elif grid.offsets is None:
            own.append(amax.flatten())
        elif not spec.has_row_amax:
            own.append(plan.amax[i])
        elif i:
            own.append(pad(amax.flatten(), (0, cols)))
        else:
            inside = torch.arange(rows, device=amax.device) < grid.offsets[-1]
            own.append(torch.where(inside, amax, 0.0))
    first, col = next(side for side in sides if side is not None), sides[1]
    _fill_amaxes(grid, plan, (needed[0], needed[1]), own, first.sign_draw)
    if col is not None and col.spec.has_row_amax and col.amax is None:
        own[1] = own[1].view(grid.groups + 1, cols)
    return own


def _fill_amaxes(
    grid: Grid, plan: GroupPlan, needed: tuple[Spec | None, Spec | None], own: list[Tensor], sign_draw: Draw | None
) -> None:
    """Compute the amaxes of the specs that are not None in `own`, which holds zeros."""
    row, col = needed
    plain = [spec is not None and spec.rotation is None and spec.has_tensor_amax for spec in needed]
    if grid.x.numel() == 0 or not (row or col):
        return
    if grid.stacked and grid.x.is_contiguous() and any(plain):
        amax = experts_amax(grid.x.view(grid.groups, grid.group_rows, -1), NVFP4())
        for i in (0, 1):
            own[i] = amax if plain[i] else own[i]
        row, col = (None if known else spec for spec, known in zip(needed, plain, strict=True))
    elif all(plain):
        own[1], col = own[0], None
    if row or col:
        grouped_amax(grid.x, plan, (row, col), (own[0], own[1]), sign_draw)


def _quantize(grid: Grid, plan: GroupPlan, sides: list[GroupedOutput | None], amaxes: list[Tensor]) -> None:
    if not any(side is not None and side.qdata.numel() for side in sides):
        return
    hardware, packed = sc.hardware_of(grid.x.device), is_packed(grid.x)
    rules: list[sc.Rule | None] = []
    for i, side in enumerate(sides):
        rule = None if side is None else sc.rule_of(side.side.spec, hardware)
        # In words of two columns, the columns of a 16x16 tile would each take a maximum of their own.
        rules.append(rule and replace(rule, decoded=side.decoded, packed=packed and not (i and rule.tile)))
    outs = [None if side is None else _written(side, amax, plan) for side, amax in zip(sides, amaxes, strict=True)]
    while rules != [None, None]:
        choice = choose_next_side(PlannedSides(grid.x, plan, list(rules), grid.stacked))
        if choice.kernel == "grouped_wide_kernel":
            i, _ = choice.facts
            wide.quantize_wide(choice, outs[i])
            rules[i] = outs[i] = None
            continue
        x, to, sizes, *numbers = arguments_of_both(grid.x, *outs)
        grouped_quantize_kernel[choice.grid](
            x,
            to,
            plan.table,
            plan.tile_group,
            grid.groups,
            sizes._replace(rows=None),  # a plan has them
            *numbers,
            pm.Divisor.of(choice.facts),
            **choice.constants,
            enable_fp_fusion=False,
            **overlap.launch_options(grid.x.device),
        )
        return


def _written(out: GroupedOutput, amax: Tensor, plan: GroupPlan) -> WrittenOperand:
    """Return what kernels take of one orientation; a group's blocks are counted in the kernel."""
    spec, draw, sign_draw, *_ = out.side
    draws, signs = spec.needs_rng and draw is not None, spec.needs_sign_rng and sign_draw is not None
    qdata = out.qdata if out.decoded else out.qdata.view(torch.int64)
    bases = plan.draws if spec.needs_rng else None, plan.signs if spec.needs_sign_rng else None
    streams = {"stream": draw.stream if draws else 0, "sign_stream": sign_draw.stream if signs else 0}
    to = Pointers(qdata, out.block_scale, amax, *bases)
    return WrittenOperand(to, out.blocks, Places(**streams), sc.constants_of(spec))


def _transposed(row: Blocks, x: Tensor, offsets: Tensor | None) -> Blocks:
    """Return the col orientation of 16x16 tiles: the row's bytes, moved."""
    if offsets is None:
        return Blocks(*transpose(row.qdata, row.block_scale, *x.shape[1:]), row.amax)
    (total, cols), groups = x.shape, offsets.shape[0]
    shapes = grouped_shapes((cols, total), groups, NVFP4(block=(16, 16)), LINEAR, contraction=True)
    qdata = torch.empty(shapes.qdata, dtype=torch.uint8, device=x.device)
    scale = torch.empty(shapes.block_scale, dtype=torch.uint8, device=x.device)
    if qdata.numel() == 0:
        return Blocks(qdata, scale, row.amax)
    plan = plan_groups(offsets, groups, total, GROUP_COLUMNS, x.device)
    words = row.qdata.shape[-1] // 4
    word_tiles = ceil_div(words, TRANSPOSE_WORDS)
    grouped_transpose_kernel[(plan.tiles * word_tiles,)](
        row.qdata.view(torch.int32),
        row.block_scale,
        qdata.view(torch.int32),
        scale,
        plan.table,
        plan.tile_group,
        groups,
        cols,
        words,
        shapes.block_scale[1] * 2,
        word_tiles,
        TILE_ROWS=GROUP_COLUMNS // 8,
        TILE_WORDS=TRANSPOSE_WORDS,
    )
    return Blocks(qdata, scale, row.amax)


def _laid_out(blocks: Blocks, side: Side, x: Tensor, offsets: Tensor | None, contraction: bool) -> Blocks:
    """Return LINEAR blocks with their scales in the layout that is asked for."""
    if side.transient or side.scale_layout == LINEAR:
        return blocks
    scale = grouped_swizzle(blocks.block_scale, side.spec, offsets, contraction=contraction, total=x.shape[0])
    return blocks._replace(block_scale=scale)
