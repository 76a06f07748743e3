"""The gradients of RMSNorm and LayerNorm: the roundings of halfbyte/arithmetic.py.

A program owns ROW_GROUP whole rows, whose part of the weight gradient it adds up in order. Rows of few tiles of
lanes stay in registers, one at a time, so that each is read once; others are all read for their means first, and again
for dx (`norm_route`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import GROUP_LANES as GROUP_LANES_
from halfbyte.arithmetic import LANES as LANES_
from halfbyte.arithmetic import Normed
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.device.running_max import LANES, ROW_GROUP
from halfbyte.kernels.fused.norm import meet_lanes, row_tiles
from halfbyte.kernels.fused.norm_route import NormGradient, choose_gradient
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div

GROUP_LANES = tl.constexpr(GROUP_LANES_)
PAIRS = tl.constexpr(LANES_ // 2)
SUM_COLUMNS = 512 if dc.INTERPRETED else 8  # of a program that adds up the groups' partial sums: a sector
SUM_AHEAD = 16
SUM_WARPS = 4


@triton.jit
def store_row_means(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, row0, rows, cols,
    CENTERED: tl.constexpr, AHEAD: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the means of g * normal and, if CENTERED, of g, over ROW_GROUP rows: means_ptr fp32 [2, rows]."""
    row = row0 + tl.arange(0, ROW_GROUP)
    in_rows = row < rows
    count = tl.zeros((ROW_GROUP,), tl.float32) + cols
    rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
    if CENTERED:
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
    along = tl.zeros((ROW_GROUP, LANES), tl.float32)
    total = tl.zeros((ROW_GROUP, LANES), tl.float32)
    for c in range(0, cols, LANES * AHEAD):
        xs = row_tiles(x_ptr, row0, rows, c, cols, ROW_GROUP, AHEAD, FULL)
        dys = row_tiles(dy_ptr, row0, rows, c, cols, ROW_GROUP, AHEAD, FULL)
        for j in tl.static_range(AHEAD):
            col = tl.arange(0, LANES) + (c + j * LANES)
            weight = pm.to_fp32(tl.load(weight_ptr + col, mask=col < cols, other=0.0))[None, :]
            normal = pm.to_fp32(xs[j])
            if CENTERED:
                normal = normal - mean[:, None]
            g = pm.to_fp32(dys[j]) * weight
            along += g * (normal * rstd[:, None])
            if CENTERED:
                total += g
    tl.store(means_ptr + row, tl.div_rn(meet_lanes(along), count), mask=in_rows)
    if CENTERED:
        tl.store(means_ptr + rows + row, tl.div_rn(meet_lanes(total), count), mask=in_rows)


@jit
def norm_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, means_ptr, partial_ptr,
    rows, cols, CENTERED: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr,
    FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dx of ROW_GROUP rows, their part of the gradients of weight and bias; means_ptr: fp32 [2, rows] to work in.

    dtotal_ptr: another gradient of x, added to dx once that is rounded, or None.
    FULL: whole groups of rows, of a tile of C columns at least; the last tile may do columns again.
    """
    overlap.begin(OVERLAP)
    row0 = tl.program_id(0) * ROW_GROUP
    first = row0.to(tl.int64) * cols
    store_row_means(dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, row0, rows, cols, CENTERED, AHEAD, FULL)
    tl.debug_barrier()
    group = tl.program_id(0).to(tl.int64)
    for i_tile in range(tl.cdiv(cols, C)):  # backwards, as above
        col = rm.tile_at((tl.cdiv(cols, C) - 1 - i_tile) * C, cols, C, FULL)
        in_col = col < cols
        weight = pm.to_fp32(masked_load(weight_ptr + col, in_col, FULL))
        xs = rm.load_group(x_ptr + first, row0, rows, col, cols, cols, ROW_GROUP, FULL)
        dys = rm.load_group(dy_ptr + first, row0, rows, col, cols, cols, ROW_GROUP, FULL)
        if dtotal_ptr is not None:
            dtotals = rm.load_group(dtotal_ptr + first, row0, rows, col, cols, cols, ROW_GROUP, FULL)
        dweight = tl.zeros((C,), tl.float32)
        dbias = tl.zeros((C,), tl.float32)
        for i in tl.static_range(ROW_GROUP):
            # The row's numbers are read when they are needed: registers for all rows would halve the warps.
            row = row0 + i
            in_row = row < rows
            scale = masked_load(rstd_ptr + row, in_row, FULL)
            normal = pm.to_fp32(xs[i])
            dy = pm.to_fp32(dys[i])
            g = dy * weight
            if CENTERED:
                normal = normal - masked_load(mean_ptr + row, in_row, FULL)
                g = g - masked_load(means_ptr + rows + row, in_row, FULL)
            normal = normal * scale
            dx = (g - normal * masked_load(means_ptr + row, in_row, FULL)) * scale
            dx = dc.cast(dx, dx_ptr.dtype.element_ty)
            if dtotal_ptr is not None:
                dx = dc.cast(pm.to_fp32(dx) + pm.to_fp32(dtotals[i]), dx_ptr.dtype.element_ty)
            masked_store(dx_ptr + first + (i * cols + col), dx, in_col & in_row, FULL)
            dweight += dy * normal
            if BIAS:
                dbias += dy
        masked_store(partial_ptr + group * cols + col, dweight, in_col, FULL)
        if BIAS:
            groups = tl.num_programs(0)
            masked_store(partial_ptr + (groups + group) * cols + col, dbias, in_col, FULL)


@triton.jit
def first_tile(ptr, row, cols, PAIRED: tl.constexpr):
    """Return pointers to a row's first tile of lanes, [PAIRS] words of two bf16 if PAIRED, and how many a row has."""
    if PAIRED:
        words = ptr.to(tl.pointer_type(tl.uint32)) + row.to(tl.int64) * (cols // 2)
        return words + tl.arange(0, PAIRS), cols // 2
    else:
        return ptr + row.to(tl.int64) * cols + tl.arange(0, LANES), cols


@triton.jit
def is_inside(inside, count, j: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr):
    """Return which lanes or words of tile j a row has; FULL: all of them. inside: whether there is such a row."""
    WIDTH: tl.constexpr = PAIRS if PAIRED else LANES
    if not FULL:
        inside = inside & (tl.arange(0, WIDTH) + j * WIDTH < count)
    return inside


@triton.jit
def held_row(ptr, row, inside, cols, TILES: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr):
    """Return a row in TILES tiles as stored, zero outside: all loads first."""
    pointers, count = first_tile(ptr, row, cols, PAIRED)
    tiles = ()
    for j in tl.static_range(TILES):
        mask = is_inside(inside, count, j, FULL, PAIRED)
        tiles = tiles + (tl.load(pointers + j * pointers.shape[0], mask=mask, other=0),)
    return tiles


@triton.jit
def store_row_tile(ptr, row, inside, cols, j: tl.constexpr, stored, FULL: tl.constexpr, PAIRED: tl.constexpr):
    """Store tile j of a row."""
    pointers, count = first_tile(ptr, row, cols, PAIRED)
    tl.store(pointers + j * pointers.shape[0], stored, mask=is_inside(inside, count, j, FULL, PAIRED))


@triton.jit
def tile_values(tile, PAIRED: tl.constexpr):
    """Return a tile as fp32: of words their lower and their upper values."""
    if PAIRED:
        return pm.unpack_pairs((tile,), 0, 2)
    else:
        return (pm.to_fp32(tile),)


@triton.jit
def rounded_tile(parts, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """Return fp32 parts of a tile rounded to `dtype`, as it is stored."""
    if PAIRED:
        return pm.bf16_pairs(parts)[0]
    else:
        return dc.cast(parts[0], dtype)


@triton.jit
def mean_of_lanes(parts, cols):
    """Return the sum of lanes, neighbours first, over cols; parts: [LANES], or the even ones and the odd ones."""
    x = parts[0]
    for k in tl.static_range(1, len(parts)):
        x = x + parts[k]
    WIDTH: tl.constexpr = x.shape[0]
    for stage in tl.static_range(8 if WIDTH == PAIRS else 9):
        x = tl.sum(tl.reshape(x, (WIDTH >> (stage + 1), 2)), axis=1)
    return tl.div_rn(tl.sum(x, axis=0), tl.zeros((), tl.float32) + cols)


@triton.jit
def zeros_of(COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return COUNT tensors of zeros."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros((WIDTH,), tl.float32),)
    return out


@triton.jit
def raised_by_row(sums, xs, dys, weights, rstd, mean, CENTERED: tl.constexpr, BIAS: tl.constexpr, PAIRED: tl.constexpr):
    """Return sums with a row's gradients of weight and bias, its normal values, g = dy * weight, and their lane sums.

    Of each tile there are one or two parts, and of each part one sum, or two if BIAS.
    """
    PARTS: tl.constexpr = 2 if PAIRED else 1
    normals, gs, raised = (), (), ()
    along = zeros_of(PARTS, LANES // PARTS)
    total = zeros_of(PARTS if CENTERED else 0, LANES // PARTS)
    for j in tl.static_range(len(xs)):
        x, dy = tile_values(xs[j], PAIRED), tile_values(dys[j], PAIRED)
        more, more_total = (), ()
        for k in tl.static_range(PARTS):
            normal = x[k]
            if CENTERED:
                normal = normal - mean
            normal = normal * rstd
            g = dy[k] * weights[PARTS * j + k]
            more = more + (along[k] + g * normal,)
            if CENTERED:
                more_total = more_total + (total[k] + g,)
            normals, gs = normals + (normal,), gs + (g,)
            raised = raised + (sums[(PARTS * j + k) * (1 + BIAS)] + dy[k] * normal,)
            if BIAS:
                raised = raised + (sums[(PARTS * j + k) * 2 + 1] + dy[k],)
        along, total = more, more_total
    return raised, normals, gs, along, total


@jit
def norm_backward_held_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr,
    rows, cols, CENTERED: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
    PAIRED: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What `norm_backward_kernel` does, of rows of TILES tiles of lanes, which it holds.

    FULL: tiles are whole. PAIRED: rows are of bf16, and of words of two. AHEAD: x and dy of the next row are loaded
    before this one's means are known.
    """
    overlap.begin(OVERLAP)
    row0 = tl.program_id(0) * ROW_GROUP
    PARTS: tl.constexpr = 2 if PAIRED else 1
    weights = ()
    for part in tl.static_range(TILES * PARTS):
        col = (tl.arange(0, LANES // PARTS) + part // PARTS * (LANES // PARTS)) * PARTS + part % PARTS
        weights = weights + (pm.to_fp32(masked_load(weight_ptr + col, col < cols, FULL)),)
    sums = zeros_of(TILES * PARTS * (1 + BIAS), LANES // PARTS)
    end = tl.minimum(rows, row0 + ROW_GROUP)
    next_xs, next_dys = (), ()
    if AHEAD:
        next_xs = held_row(x_ptr, row0, row0 < end, cols, TILES, FULL, PAIRED)
        next_dys = held_row(dy_ptr, row0, row0 < end, cols, TILES, FULL, PAIRED)
    for i in range(ROW_GROUP):
        row = row0 + i
        inside = row < rows
        if AHEAD:
            xs, dys = next_xs, next_dys
            next_xs = held_row(x_ptr, row + 1, row + 1 < end, cols, TILES, FULL, PAIRED)
            next_dys = held_row(dy_ptr, row + 1, row + 1 < end, cols, TILES, FULL, PAIRED)
        else:
            xs = held_row(x_ptr, row, inside, cols, TILES, FULL, PAIRED)
            dys = held_row(dy_ptr, row, inside, cols, TILES, FULL, PAIRED)
        if dtotal_ptr is not None:
            dtotals = held_row(dtotal_ptr, row, inside, cols, TILES, FULL, PAIRED)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
        mean = rstd
        if CENTERED:
            mean = tl.load(mean_ptr + row, mask=inside, other=0.0)
        sums, normals, gs, along, total = raised_by_row(sums, xs, dys, weights, rstd, mean, CENTERED, BIAS, PAIRED)
        mean_along = mean_of_lanes(along, cols)
        if CENTERED:
            mean_total = mean_of_lanes(total, cols)
        for j in tl.static_range(TILES):
            dxs = ()
            for k in tl.static_range(PARTS):
                g = gs[PARTS * j + k]
                if CENTERED:
                    g = g - mean_total
                dxs = dxs + ((g - normals[PARTS * j + k] * mean_along) * rstd,)
            dx = rounded_tile(dxs, dx_ptr.dtype.element_ty, PAIRED)
            if dtotal_ptr is not None:
                once, more, dxs = tile_values(dx, PAIRED), tile_values(dtotals[j], PAIRED), ()
                for k in tl.static_range(PARTS):
                    dxs = dxs + (once[k] + more[k],)
                dx = rounded_tile(dxs, dx_ptr.dtype.element_ty, PAIRED)
            store_row_tile(dx_ptr, row, inside, cols, j, dx, FULL, PAIRED)
    group = tl.program_id(0).to(tl.int64)
    for which in tl.static_range(2 if BIAS else 1):
        out = partial_ptr + (which * tl.num_programs(0) + group) * cols
        for j in tl.static_range(TILES):
            col = tl.arange(0, LANES) + j * LANES
            value = sums[PARTS * j * (1 + BIAS) + which]
            if PAIRED:
                value = tl.reshape(tl.join(value, sums[(PARTS * j + 1) * (1 + BIAS) + which]), (LANES,))
            masked_store(out + col, value, col < cols, FULL)


@jit
def group_sum_kernel(
    partial_ptr, out_ptr, groups, cols, C: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [2 or 1, cols] = sum of partial [2 or 1, groups, cols] over groups: GROUP_LANES lanes, then neighbours."""
    overlap.begin(OVERLAP)
    which = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * C + tl.arange(0, C)
    lane = tl.arange(0, GROUP_LANES)
    total = tl.zeros((GROUP_LANES, C), tl.float32)
    for b in range(0, groups, GROUP_LANES * AHEAD):
        parts = ()
        for j in tl.static_range(AHEAD):
            group = b + j * GROUP_LANES + lane
            pointers = partial_ptr + (which * groups + group)[:, None] * cols + col[None, :]
            parts = parts + (tl.load(pointers, mask=(group < groups)[:, None] & (col < cols)[None, :], other=0.0),)
        for j in tl.static_range(AHEAD):
            total += parts[j]
    for stage in tl.static_range(5):
        total = tl.sum(tl.reshape(total, (GROUP_LANES >> (stage + 1), 2, C)), axis=1)
    tl.store(out_ptr + which * cols + col, tl.reshape(total, (C,)), mask=col < cols)


def norm_backward(dy: Tensor, normed: Normed, dtotal: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `halfbyte.reference.norm_backward` does, in two launches."""
    has_bias = normed.has_bias
    normed = normed._replace(x=normed.x.contiguous(), weight=normed.weight.contiguous())
    dy, x = dy.contiguous(), normed.x
    dtotal = None if dtotal is None else dtotal.contiguous()
    rows, cols = x.shape
    dx = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    sums = torch.empty(1 + has_bias, cols, dtype=torch.float32, device=x.device)
    none = sums.new_empty(0)
    if not x.numel():
        return dx, sums[0].zero_(), sums[1].zero_() if has_bias else none
    choice = choose_gradient(NormGradient(dy, normed, dtotal))
    (groups,) = choice.grid
    partial = sums.new_empty(1 + has_bias, groups, cols)
    tensors = dy, dtotal, x, normed.weight, *normed.statistics, dx
    options = {**overlap.launch_options(x.device), "enable_fp_fusion": False}
    if choice.kernel == "norm_backward_held_kernel":
        norm_backward_held_kernel[choice.grid](*tensors, partial, rows, cols, **choice.constants, **options)
    else:
        means = sums.new_empty(2, rows)
        norm_backward_kernel[choice.grid](*tensors, means, partial, rows, cols, **choice.constants, **options)
    group_sum_kernel[(ceil_div(cols, SUM_COLUMNS), 1 + has_bias)](
        partial, sums, groups, cols, C=SUM_COLUMNS, AHEAD=SUM_AHEAD, num_warps=SUM_WARPS, **options
    )
    return dx, sums[0], sums[1] if has_bias else none
