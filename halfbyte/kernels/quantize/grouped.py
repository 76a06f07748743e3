"""Quantize tokens in groups and the weights of experts; the same bytes as a loop over the groups (docs/numerics.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.kernels.amax.grouped import grouped_amax
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.groups import Plan, make_plan
from halfbyte.kernels.quantize import grouped_wide as wide
from halfbyte.kernels.quantize.experts import experts_amax, quantize_experts
from halfbyte.kernels.quantize.grouped_kernels import grouped_quantize_kernel, grouped_transpose_kernel
from halfbyte.kernels.quantize.grouped_route import PLANNED, Grouped, Sides, grouped
from halfbyte.kernels.quantize.grouped_route import side as side_route
from halfbyte.kernels.quantize.lines import divisor
from halfbyte.kernels.quantize.route import SHARED, is_packed
from halfbyte.kernels.route import Choice
from halfbyte.kernels.unpack.grouped_swizzle import grouped_swizzle
from halfbyte.kernels.unpack.transpose import transpose
from halfbyte.layout import (
    GROUP_COLUMNS,
    LINEAR,
    Blocks,
    ceil_div,
    check_scale_layout,
    group_alignment,
    grouped_shapes,
    round_up,
)
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, Spec

TRANSPOSE_WORDS = 32


class Grid(NamedTuple):
    """The grouped tensor of one call.

    x: [rows, cols], contiguous along the columns; experts below each other.
    offsets: None for the weights of experts.
    """

    x: Tensor
    offsets: Tensor | None
    groups: int

    @property
    def stacked(self) -> bool:
        return self.offsets is None

    @property
    def group_rows(self) -> int:
        """Rows of each expert."""
        return self.x.shape[0] // self.groups


class Side(NamedTuple):
    """One orientation of the output; decoded: qdata holds bf16 values, there are no scales."""

    spec: Spec
    qdata: Tensor
    block_scale: Tensor
    blocks: int
    decoded: bool
    draw: Draw | None
    sign_draw: Draw | None


def grouped_quantize_row_col(
    x: Tensor,
    offsets: Tensor | None,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    transient: tuple[bool, bool] = (False, False),
) -> tuple[Blocks | None, Blocks | None]:
    """Return quantize_row_col of every group, joined; group g draws with its own seed.

    Args:
        x: tokens [M, C] with offsets [E], or expert weights [E, N, K] with offsets None; bf16, fp16 or fp32.
        row_amax, col_amax: fp32 in the shape of `layout.grouped_shapes`, of expert weights [E] or [E, rows].
        transient: whether row and col are returned decoded: bf16 element * block_scale as qdata, and no scales. What
            lies behind the last group is then undefined.

    Returns:
        Blocks in the shapes of `layout.grouped_shapes`; of expert weights, every tensor has a leading [E].
    """
    check_scale_layout(scale_layout)
    choice = grouped(Grouped(x, offsets, row_spec, col_spec, transient[0]))
    if row_spec is not None and choice.kernel == SHARED:
        assert not any(transient), "both orientations of one tile are codes"
        row, _ = grouped_quantize_row_col(x, offsets, row_spec, None, draw=draw, row_amax=row_amax)
        assert row is not None, "the row has a spec"
        col = _transposed(row, x, offsets)
        if scale_layout == LINEAR:
            return row, col
        return _swizzled(row, row_spec, x, offsets, False), _swizzled(col, row_spec, x, offsets, True)
    if row_spec is not None and choice.kernel != PLANNED:
        row = quantize_experts(choice, row_amax)
        is_linear = transient[0] or scale_layout == LINEAR
        return (row if is_linear else _swizzled(row, row_spec, x, None, False)), None
    x = x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(0) == x.shape[1] * x.stride(1)) else x.contiguous()
    grid = Grid(x.flatten(0, -2), offsets, x.shape[0] if offsets is None else offsets.shape[0])
    specs, given = (row_spec, col_spec), (row_amax, col_amax)
    plan = _plan(grid, specs, given, draw, sign_draw)
    amaxes = _amaxes(grid, plan, specs, given, sign_draw)
    sides = [
        None if spec is None else _allocate(grid, spec, i, is_transient, place, sign_draw)
        for i, spec, is_transient, place in zip((0, 1), specs, transient, (draw, draw and draw.next()), strict=True)
    ]
    _quantize(grid, plan, sides, amaxes)
    out = []
    for i, (side, amax) in enumerate(zip(sides, given, strict=True)):
        if side is None:
            out.append(None)
            continue
        blocks = Blocks(side.qdata, side.block_scale, _own_amax(side.spec, amaxes, i, grid) if amax is None else amax)
        blocks = _stacked(blocks, side.spec, grid.groups) if grid.stacked else blocks
        if scale_layout != LINEAR and not side.decoded:
            blocks = _swizzled(blocks, side.spec, x, offsets, i == 1)
        out.append(blocks)
    return out[0], out[1]


def _plan(
    grid: Grid,
    specs: tuple[Spec | None, Spec | None],
    amaxes: tuple[Tensor | None, Tensor | None],
    draw: Draw | None,
    sign_draw: Draw | None,
) -> Plan:
    """Return the plan of both orientations, with the amaxes of the groups of tokens that were given."""
    col = specs[1]
    row_given, col_given = (
        None if amax is None or grid.stacked or _by_row(spec) else amax.contiguous()
        for spec, amax in zip(specs, amaxes, strict=True)
    )
    return make_plan(
        grid.offsets,
        grid.groups,
        grid.x.shape[0],
        GROUP_COLUMNS if col is None else group_alignment(col),
        grid.x.device,
        (draw and draw.base, sign_draw and sign_draw.base),
        (row_given, col_given),
    )


def _stacked(blocks: Blocks, spec: Spec, groups: int) -> Blocks:
    qdata, scale = (t.unflatten(0, (groups, t.shape[0] // groups)) if t.dim() == 2 else t for t in blocks[:2])
    amax = blocks.amax
    return Blocks(qdata, scale, amax.view(groups, amax.numel() // groups) if _by_row(spec) else amax)


def _allocate(
    grid: Grid, spec: Spec, orientation: int, decoded: bool, draw: Draw | None, sign_draw: Draw | None
) -> Side:
    """Return one orientation with unwritten LINEAR storage; the experts' lie below each other."""
    rows, cols = grid.x.shape
    if not grid.stacked:
        shape = (cols, rows) if orientation else (rows, cols)
        shapes = grouped_shapes(shape, grid.groups, spec, LINEAR, contraction=bool(orientation))
        q_shape, s_shape = shapes.qdata, shapes.block_scale
    else:
        rows, cols = (grid.groups * cols, grid.group_rows) if orientation else (rows, cols)
        blocks = round_up(cols, spec.alignment) // spec.block_length
        q_shape, s_shape = (rows, blocks * (8 if isinstance(spec, NVFP4) else spec.block_length)), (rows, blocks)
    new, blocks = grid.x.new_empty, s_shape[1]
    if decoded:
        values = new((s_shape[0], blocks * spec.block_length), dtype=torch.bfloat16)
        return Side(spec, values, new(0, dtype=torch.uint8), blocks, True, draw, sign_draw)
    qdata, scale = new(q_shape, dtype=torch.uint8), new(s_shape, dtype=torch.uint8)
    return Side(spec, qdata, scale, blocks, False, draw, sign_draw)


def _own_amax(spec: Spec, amaxes: list[Tensor], i: int, grid: Grid) -> Tensor:
    """Return an amax without the place of the tail, in memory of its own; MXFP8 has none."""
    amax = amaxes[i]
    size = 0 if isinstance(spec, MXFP8) else amax.shape[0] if _by_row(spec) and amax.dim() == 1 else grid.groups
    return amax[:size].clone() if i and amax is amaxes[0] else amax[:size]


def _by_row(spec: Spec | None) -> bool:
    return isinstance(spec, NVFP4) and spec.outer == "row"


def _amaxes(
    grid: Grid,
    plan: Plan,
    specs: tuple[Spec | None, Spec | None],
    given: tuple[Tensor | None, Tensor | None],
    sign_draw: Draw | None,
) -> list[Tensor]:
    """Return the amax of each orientation, of tokens with a zero for the tail; those not given from one read of x."""
    rows, cols = grid.x.shape
    own: list[Tensor] = []
    needed: list[NVFP4 | None] = [None, None]
    for i, (spec, amax) in enumerate(zip(specs, given, strict=True)):
        if not isinstance(spec, NVFP4):
            own.append(plan.amax[i])
        elif amax is None:
            needed[i] = spec
            shape = ((grid.groups + 1) * cols,) if i else (rows,)
            own.append(torch.zeros(shape, device=grid.x.device) if _by_row(spec) else plan.amax[i])
        elif grid.offsets is None:
            own.append(amax.flatten())
        elif not _by_row(spec):
            own.append(plan.amax[i])
        elif i:
            own.append(pad(amax.flatten(), (0, cols)))
        else:
            inside = torch.arange(rows, device=amax.device) < grid.offsets[-1]
            own.append(torch.where(inside, amax, 0.0))
    _fill_amaxes(grid, plan, (needed[0], needed[1]), own, sign_draw)
    if _by_row(specs[1]) and given[1] is None:
        own[1] = own[1].view(grid.groups + 1, cols)
    return own


def _fill_amaxes(
    grid: Grid, plan: Plan, needed: tuple[NVFP4 | None, NVFP4 | None], own: list[Tensor], sign_draw: Draw | None
) -> None:
    """Compute the amaxes of the specs that are not None in `own`, which holds zeros."""
    row, col = needed
    plain = [spec is not None and spec.rotation is None and spec.outer == "tensor" for spec in needed]
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


def _quantize(grid: Grid, plan: Plan, sides: list[Side | None], amaxes: list[Tensor]) -> None:
    row, col = sides
    if not any(side is not None and side.qdata.numel() for side in sides):
        return
    hardware, packed = sc.hardware_of(grid.x.device), is_packed(grid.x)
    rules: list[sc.Rule | None] = []
    for i, side in enumerate(sides):
        rule = None if side is None else sc.rule_of(side.spec, hardware)
        # In words of two columns, the columns of a 16x16 tile would each take a maximum of their own.
        rules.append(rule and rule._replace(decoded=side.decoded, packed=packed and not (i and rule.tile)))
    pointers = [_pointers(side, amax, plan) for side, amax in zip(sides, amaxes, strict=True)]
    streams = [[0, 0] if side is None else _streams(side) for side in sides]
    constants = [(0.0,) * 4 if side is None else sc.constants_of(side.spec) for side in sides]
    while rules != [None, None]:
        choice = side_route(Sides(grid.x, plan, list(rules), grid.stacked))
        if choice.kernel == "grouped_wide_kernel":
            i, _ = choice.facts
            wide.quantize(choice, sides[i].blocks, (pointers[i], streams[i], constants[i]))
            rules[i], pointers[i] = None, [None] * 5
            continue
        _launch(choice, grid, (row, col), (pointers, streams, constants))
        return


def _launch(choice: Choice, grid: Grid, sides: tuple[Side | None, Side | None], arguments: tuple) -> None:
    plan, (row, col) = choice.request.plan, sides
    pointers, streams, constants = arguments
    grouped_quantize_kernel[choice.grid](
        grid.x,
        *pointers[0],
        *pointers[1],
        plan.table,
        plan.tile_group,
        grid.groups,
        grid.x.shape[1],
        0 if row is None else row.blocks,
        0 if col is None else col.blocks,
        *grid.x.stride(),
        *streams[0],
        *streams[1],
        *constants[0],
        *constants[1],
        *divisor(choice.facts),
        **choice.constants,
        enable_fp_fusion=False,
        **overlap.launch_options(grid.x.device),
    )


def _pointers(side: Side | None, amax: Tensor, plan: Plan) -> list[Tensor | None]:
    if side is None:
        return [None] * 5
    qdata = side.qdata if side.decoded else side.qdata.view(torch.int64)
    draws = plan.draws if side.spec.needs_rng else None
    return [qdata, side.block_scale, amax, draws, plan.signs if side.spec.needs_sign_rng else None]


def _streams(side: Side) -> list[int]:
    return [
        side.draw.stream if side.draw is not None and side.spec.needs_rng else 0,
        side.sign_draw.stream if side.sign_draw is not None and side.spec.needs_sign_rng else 0,
    ]


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
    plan = make_plan(offsets, groups, total, GROUP_COLUMNS, x.device)
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


def _swizzled(blocks: Blocks, spec: Spec, x: Tensor, offsets: Tensor | None, contraction: bool) -> Blocks:
    scale = grouped_swizzle(blocks.block_scale, spec, offsets, contraction=contraction, total=x.shape[0])
    return blocks._replace(block_scale=scale)
