"""The largest finite magnitude of every group of tokens, of its rows or columns, or of every expert's weights.

What training meets, bf16 tokens whose rows need no rotation and whose columns have one amax a group, is read in words
of two values: the maxima of both orientations from one read, NaN and Inf left out only where a program found one, as
in `amax`. Everything else goes through a kernel of tuples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax import rotated as ra
from halfbyte.kernels.amax import route
from halfbyte.kernels.amax.grouped_wide import wide_amax
from halfbyte.kernels.amax.route import AmaxesOfGroups, amax_rule
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rotate_wide as rw
from halfbyte.kernels.device.loads import load_col_groups, load_row_groups
from halfbyte.kernels.device.tiles import rotate_group
from halfbyte.kernels.groups import GroupPlan, group_of_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice
from halfbyte.rng import Draw
from halfbyte.spec import Spec


@jit(do_not_specialize=("sign_stream", "groups", "strips"))
def packed_amax_kernel(
    x_ptr, plain_ptr, rotated_ptr, sign_ptr, sign_stream, table_ptr, tile_group_ptr, groups, cols, stride_r, strips,
    RULE: tl.constexpr, FULL: tl.constexpr, TR: tl.constexpr, T: tl.constexpr, VEC: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Raise a group's amax of x (plain_ptr) and of x.T after RULE's rotation (rotated_ptr), int32, by TR rows of it.

    A program reads T words of two columns. FULL: they all exist. Either pointer may be None.
    """
    overlap.begin(OVERLAP)
    SIZE: tl.constexpr = RULE.group
    strip = tl.program_id(0) % strips
    tile = tl.program_id(0) // strips
    group, start, end, first_tile = group_of_tile(tile, tile_group_ptr, table_ptr)
    if group < groups:
        # The hint keeps a thread's share of a row at VEC words, so that it holds all rows of a rotated group.
        line = strip * T + tl.max_contiguous(tl.arange(0, T), VEC)
        lines = tl.cast(cols, tl.int64) // 2
        stride = tl.cast(stride_r, tl.int64) // 2
        words_ptr = x_ptr.to(tl.pointer_type(tl.uint32)) + line
        first = (start + (tile - first_tile) * TR).to(tl.int64)
        last = tl.minimum(first + TR, end)
        plain = tl.zeros((T,), tl.uint32)
        top = tl.zeros((T,), tl.float32)
        if rotated_ptr is not None:
            flips = rw.sign_flips(None if sign_ptr is None else sign_ptr + group * 2, sign_stream, RULE)
        for g in range(first, last, SIZE):
            x = load_words(words_ptr, g, last, line < lines, stride, SIZE, FULL)
            if plain_ptr is not None:
                plain = mg.raised(plain, mg.largest_pair(x))
            if rotated_ptr is not None:
                low, high = ra.column_halves(x, True)
                top = rw.nan_max(top, rw.largest_rotated(low, flips))
                top = rw.nan_max(top, rw.largest_rotated(high, flips))
        # The factor and the rounding keep the order: they are applied to the maxima alone.
        bits = mg.magnitude_bits(dc.cast(tl.fma(top, RULE.norm, 0.0), tl.bfloat16))
        plain_bits = mg.larger_bits(plain)
        if tl.max(tl.maximum(bits, plain_bits), axis=0) >= mg.INF_BITS:
            bits = tl.zeros((T,), tl.int32)
            plain_bits = tl.zeros((T,), tl.int32)
            for g in range(first, last, SIZE):
                halves = ra.column_halves(load_words(words_ptr, g, last, line < lines, stride, SIZE, FULL), True)
                for k in tl.static_range(2):
                    plain_bits = tl.maximum(plain_bits, tl.max(mg.finite_bits(mg.magnitude_bits(halves[k])), axis=1))
                    if rotated_ptr is not None:
                        y = rw.unpacked(rw.rotated_pairs(halves[k], flips, RULE))
                        bits = tl.maximum(bits, tl.max(mg.finite_bits(mg.magnitude_bits(y)), axis=1))
        if plain_ptr is not None:
            tl.atomic_max(plain_ptr + group, tl.max(plain_bits, axis=0), sem="relaxed")
        if rotated_ptr is not None:
            tl.atomic_max(rotated_ptr + group, tl.max(bits, axis=0), sem="relaxed")


@triton.jit
def load_words(words_ptr, g, end, in_line, stride, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Return the words [T, SIZE] of rows g to g + SIZE, 0 behind `end`; words_ptr [T]: of row 0."""
    row = g + tl.arange(0, SIZE)
    inside = (row < end)[None, :]
    if not FULL:
        inside = inside & in_line[:, None]
    return tl.load(words_ptr[:, None] + row[None, :] * stride, mask=inside, other=0)


@triton.jit
def rotated_values(xs, sign_ptr, sign_stream, NARROW: tl.constexpr, RULE: tl.constexpr):
    """Return the fp32 values of a group after the rule's rotation."""
    return pm.unpack_pairs(rotate_group(xs, sign_ptr, sign_stream, NARROW, RULE), 0, RULE.group)


@triton.jit
def largest(m):
    return tl.max(tl.max(m, axis=1), axis=0)


@jit(do_not_specialize=("row_sign_stream", "col_sign_stream", "col_tiles", "groups"))
def grouped_amax_kernel(
    x_ptr, row_out_ptr, col_out_ptr, row_sign_ptr, col_sign_ptr, row_sign_stream, col_sign_stream, table_ptr,
    tile_group_ptr, groups, cols, stride_r, stride_c, col_tiles,
    ROW: tl.constexpr, COL: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """amax of every group, or of its rows, along the rows and along the columns; out int32, zero before.

    The row's maximum comes from the column's read where it needs neither rotation nor rows of its own.
    """
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    i_col = tl.program_id(0) % col_tiles * TC
    tile = tl.program_id(0) // col_tiles
    group, start, end, first = group_of_tile(tile, tile_group_ptr, table_ptr)
    if group < groups:
        i_row = start + (tile - first) * TR
        if COL is not None:
            o_group = i_row + tl.arange(0, TR // COL.group) * COL.group
            col = i_col + tl.arange(0, TC)
            in_col = col < cols
            xs = load_col_groups(x_ptr, o_group, end, col, in_col, stride_r, stride_c, COL.group)
            if ROW is not None:  # noqa: SIM102  compiled one by one
                if ROW.norm == 0.0 and not ROW.row_amax:
                    tl.atomic_max(row_out_ptr + group, largest(mg.finite_max(xs)), sem="relaxed")
            if COL.norm != 0.0:
                p_sign = None if col_sign_ptr is None else col_sign_ptr + group * 2
                xs = rotated_values(xs, p_sign, col_sign_stream, NARROW, COL)
            m = mg.finite_max(xs)
            if COL.row_amax:
                p_out = col_out_ptr + group.to(tl.int64) * cols + col
                tl.atomic_max(p_out, tl.max(m, axis=0), mask=in_col, sem="relaxed")
            else:
                tl.atomic_max(col_out_ptr + group, largest(m), sem="relaxed")
        if ROW is not None:  # noqa: SIM102
            if COL is None or ROW.norm != 0.0 or ROW.row_amax:
                row = i_row + tl.arange(0, TR)
                in_row = row < end
                row64 = row.to(tl.int64)
                o_col = i_col + tl.arange(0, TC // ROW.group) * ROW.group
                xs = load_row_groups(x_ptr, row64 * stride_r, in_row, o_col, cols, stride_c, ROW.group)
                if ROW.norm != 0.0:
                    p_sign = None if row_sign_ptr is None else row_sign_ptr + group * 2
                    xs = rotated_values(xs, p_sign, row_sign_stream, NARROW, ROW)
                m = mg.finite_max(xs)
                if ROW.row_amax:
                    tl.atomic_max(row_out_ptr + row64, tl.max(m, axis=1), mask=in_row, sem="relaxed")
                else:
                    tl.atomic_max(row_out_ptr + group, largest(m), sem="relaxed")


def grouped_amax(
    x: Tensor,
    plan: GroupPlan,
    specs: tuple[Spec | None, Spec | None],
    out: tuple[Tensor, Tensor],
    sign_draw: Draw | None,
) -> None:
    """Raise the amaxes of the groups of x and of x.T.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], contiguous along the columns.
        plan: the groups of rows, with the bases of fresh signs.
        specs: of x and x.T; None where nothing is wanted.
        out: fp32 of at least [E], or one for each row, or column of each group; zeros before.
        sign_draw: where fresh signs lie in the stream.
    """
    row, col = (None if spec is None else amax_rule(spec) for spec in specs)
    outs = [t.view(torch.int32) for t in out]
    stream = 0 if sign_draw is None else sign_draw.stream
    rest = False
    while row is not None or col is not None:
        choice = route.choose_group_amaxes(AmaxesOfGroups(x, plan, row, col, rest))
        if choice.kernel == "packed_amax_kernel":
            return _launch_packed(choice, outs, stream)
        if choice.kernel == "grouped_amax_kernel":
            return _launch_tuples(choice, outs, stream)
        columns = choice.constants["COLUMNS"]
        wide_amax(choice, outs[columns], stream)
        row, col, rest = (row, None, True) if columns else (None, col, True)


def _launch_packed(choice: Choice, outs: list[Tensor], stream: int) -> None:
    x, plan, row, col, _ = choice.request
    fresh = col is not None and col.fresh
    packed_amax_kernel[choice.grid](
        x,
        None if row is None else outs[0],
        None if col is None else outs[1],
        plan.signs if fresh else None,
        stream if fresh else 0,
        plan.table,
        plan.tile_group,
        plan.groups,
        x.shape[1],
        x.stride(0),
        choice.facts,
        **choice.constants,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )


def _launch_tuples(choice: Choice, outs: list[Tensor], stream: int) -> None:
    groups: AmaxesOfGroups = choice.request
    x, plan = groups.x, groups.plan
    grouped_amax_kernel[choice.grid](
        x,
        *outs,
        plan.signs,
        plan.signs,
        stream,
        stream,
        plan.table,
        plan.tile_group,
        plan.groups,
        x.shape[1],
        *x.stride(),
        choice.facts,
        **choice.constants,
        enable_fp_fusion=False,
    )
