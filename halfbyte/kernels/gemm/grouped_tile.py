"""The emulated grouped GEMM: the tiles of gemm_kernels.py, each of one group, with the group's factors.

`rows_tma_kernel` has the groups along the rows of a (2d-3d), `split_tma_kernel` along the contraction (2d-2d): both
persistent, with tensor maps. `grouped_pointer_kernel` does both with plain loads, any strides and any storage.
The sizes of groups come from a plan on the device (grouped_plan.py); row tiles behind the last group write zeros.
Programs are not placed before the kernel before has ended (`overlap.py`): placed early, they made a layer of 64 experts
2 to 14 % slower, differently in every call (docs/internals/grouped.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.gemm.tile import Applied, Rows, finish, split_columns, store_tile, tile_of
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit

VARYING = ("groups.count", "shape", "first_step")


class Groups(NamedTuple):
    """A plan on the device."""

    table_ptr: Any
    tile_group_ptr: Any
    count: int


class GroupStrides(NamedTuple):
    """Of a [rows, columns], b [groups, rows, columns] and out [groups, rows, columns], whose columns are contiguous."""

    a: int
    a_k: int
    b_g: int
    b: int
    b_k: int
    out_g: int
    out: int


class Steps(NamedTuple):
    """Of a contraction that groups split.

    stored: columns of which each group fills a multiple. most: steps of a launch. later: whether others came before.
    """

    stored: int
    most: int
    later: bool = False


@triton.jit
def factor_offset(group, rows_before, FACTOR: tl.constexpr):
    """Return where a group's amax lies, or those of its rows."""
    if FACTOR == dc.ROW_FACTOR:
        return rows_before
    else:
        return group


@jit(do_not_specialize=VARYING)
def rows_tma_kernel(
    a_desc, b_desc, out_desc, out, amaxes, groups, shape, by,
    FACTORS: tl.constexpr, ACCUMULATE: tl.constexpr, OUT_TMA: tl.constexpr, B_BY_ROWS: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """b_desc: the experts below each other, [E * N, K], or, B_BY_ROWS, [E * K, N] with K a multiple of BK."""
    M, N, K = shape
    tiles_m = tl.load(groups.table_ptr + groups.count * 3 + 2)
    if not ACCUMULATE:
        tiles_m += tl.cdiv(M - tl.load(groups.table_ptr + groups.count * 3), BM)
    tiles_n, steps = tl.cdiv(N, BN), tl.cdiv(K, BK)
    for i in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=not UPCAST and not OUT_TMA):
        i_m, i_n = tile_of(i, tiles_m, tiles_n, GROUP)
        group, start, end, first = group_of_tile(i_m, groups.tile_group_ptr, groups.table_ptr)
        own = tl.minimum(group, groups.count - 1)
        rows = end - start
        local = (i_m - first) * BM
        if not ACCUMULATE:
            # A group's last tile moves up to be whole: rows that two tiles compute get the same bits from both.
            local = tl.minimum(local, tl.maximum(rows - BM, 0))
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            b_a = a_desc.load([start + local, k * BK])
            if B_BY_ROWS:
                b_b = b_desc.load([own * K + k * BK, i_n * BN])
            else:
                b_b = b_desc.load([own * N + i_n * BN, k * BK]).T
            if UPCAST:
                acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(b_a, b_b, acc)
        a_amax = None if FACTORS.a == dc.NO_FACTOR else amaxes.a_amax_ptr + factor_offset(own, start, FACTORS.a)
        b_amax = None if FACTORS.b == dc.NO_FACTOR else amaxes.b_amax_ptr + factor_offset(own, own * N, FACTORS.b)
        parts = split_columns(acc, PARTS)
        for part in tl.static_range(PARTS):
            i_col = i_n * BN + part * (BN // PARTS)
            o_m = local + tl.arange(0, BM)
            o_n = i_col + tl.arange(0, BN // PARTS)
            y = finish(parts[part], o_m, o_n, rows, N, Applied(a_amax, b_amax), by, FACTORS)
            y = tl.where(group < groups.count, y, 0.0)
            if OUT_TMA:
                if rows >= BM:
                    out_desc.store([start + local, i_col], dc.cast(y, out_desc.dtype))
                else:
                    p_out = out.ptr + start.to(tl.int64) * out.stride
                    store_tile(y, Rows(p_out, out.stride), None, o_m, o_n, rows, N)
            else:
                p_out = out.ptr + start.to(tl.int64) * out.stride
                to = Rows(p_out, out.stride)
                store_tile(y, to, to if ACCUMULATE else None, o_m, o_n, rows, N)


@triton.jit
def contraction_range(group, table_ptr, first_step, STEPS: tl.constexpr, BK: tl.constexpr):
    """Return (first column in storage, number of steps) of a group, of its steps from first_step on at most so many."""
    first = tl.load(table_ptr + group * 3 + 2)
    steps = (tl.load(table_ptr + group * 3 + 5) - first) * (STEPS.stored // BK)
    return first * STEPS.stored + first_step * BK, tl.minimum(tl.maximum(steps - first_step, 0), STEPS.most)


@jit(do_not_specialize=VARYING)
def split_tma_kernel(
    a_desc, b_desc, out_desc, out, amaxes, groups, shape, first_step, by, FACTORS: tl.constexpr,
    ACCUMULATE: tl.constexpr, OUT_TMA: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """a [M, columns], b [N, columns]; a group starts at a multiple of STEPS.stored columns, zeros behind it.

    out [E, M, N]. Steps of the contraction from first_step on, at most STEPS.most of them; if STEPS.later, groups that
    have no such step are left.
    """
    M, N = shape.M, shape.N
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    for i in tl.range(tl.program_id(0), groups.count * tiles, PROGRAMS, flatten=not UPCAST and not STEPS.later):
        group = i // tiles
        i_m, i_n = tile_of(i % tiles, tiles_m, tiles_n, GROUP)
        i_k, steps = contraction_range(group, groups.table_ptr, first_step, STEPS, BK)
        if steps > 0 or not STEPS.later:
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(steps):
                b_a = a_desc.load([i_m * BM, i_k + k * BK])
                b_b = b_desc.load([i_n * BN, i_k + k * BK]).T
                if UPCAST:
                    acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(b_a, b_b, acc)
            a_amax = (
                None if FACTORS.a == dc.NO_FACTOR else amaxes.a_amax_ptr + factor_offset(group, group * M, FACTORS.a)
            )
            b_amax = (
                None if FACTORS.b == dc.NO_FACTOR else amaxes.b_amax_ptr + factor_offset(group, group * N, FACTORS.b)
            )
            parts = split_columns(acc, PARTS)
            for part in tl.static_range(PARTS):
                i_col = i_n * BN + part * (BN // PARTS)
                o_m = i_m * BM + tl.arange(0, BM)
                o_n = i_col + tl.arange(0, BN // PARTS)
                y = finish(parts[part], o_m, o_n, M, N, Applied(a_amax, b_amax), by, FACTORS)
                if OUT_TMA:
                    if ACCUMULATE:
                        y = y + tl.reshape(out_desc.load([group, i_m * BM, i_col]), (BM, BN // PARTS)).to(tl.float32)
                    y = tl.reshape(dc.cast(y, out_desc.dtype), (1, BM, BN // PARTS))
                    out_desc.store([group, i_m * BM, i_col], y)
                else:
                    p_out = out.ptr + (group * M).to(tl.int64) * out.stride
                    to = Rows(p_out, out.stride)
                    store_tile(y, to, to if ACCUMULATE else None, o_m, o_n, M, N)


@jit(do_not_specialize=VARYING)
def grouped_pointer_kernel(
    a_ptr, b_ptr, out_ptr, strides, amaxes, groups, shape, first_step, by,
    FACTORS: tl.constexpr, ACCUMULATE: tl.constexpr, SPLIT: tl.constexpr, A_STORED: tl.constexpr,
    B_STORED: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program computes one tile. SPLIT: groups along the contraction, of A_STORED and B_STORED ones as stored."""
    M, N, K = shape
    tiles_n = tl.cdiv(N, BN)
    if SPLIT:
        tiles_m = tl.cdiv(M, BM)
        group = tl.program_id(0) // (tiles_m * tiles_n)
        i_m, i_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        start, end = tl.load(groups.table_ptr + group * 3), tl.load(groups.table_ptr + group * 3 + 1)
        own, first, rows, row_factors = group, tl.load(groups.table_ptr + group * 3 + 2) * STEPS.stored, M, group * M
        length, a_row = end - start, 0
        if A_STORED and B_STORED:  # a rotated tail counts
            length = tl.cdiv(length, STEPS.stored) * STEPS.stored
        a_col = first if A_STORED else start
        b_col = first if B_STORED else start
    else:
        i_m, i_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
        group, start, end, first = group_of_tile(i_m, groups.tile_group_ptr, groups.table_ptr)
        own, i_m, rows, row_factors = tl.minimum(group, groups.count - 1), i_m - first, end - start, start
        length, a_row, a_col, b_col = K, start, 0, 0
    steps = tl.minimum(tl.maximum(tl.cdiv(length, BK) - first_step, 0), STEPS.most)
    # Rows behind the last group become zeros, unless something is added to them.
    wanted = (i_m * BM < rows) & (group < groups.count if ACCUMULATE else True) & (steps > 0 if STEPS.later else True)
    if wanted:
        o_m = i_m * BM + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        o_k = first_step * BK + tl.arange(0, BK)
        p_a = a_ptr + (a_row + o_m).to(tl.int64)[:, None] * strides.a
        p_a += (a_col + o_k).to(tl.int64)[None, :] * strides.a_k
        p_b = b_ptr + own.to(tl.int64) * strides.b_g + o_n.to(tl.int64)[:, None] * strides.b
        p_b += (b_col + o_k).to(tl.int64)[None, :] * strides.b_k
        in_m, in_n = (o_m < rows)[:, None] & (group < groups.count), (o_n < N)[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            in_k = (o_k + k * BK < length)[None, :]
            b_a = tl.load(p_a, mask=in_m & in_k, other=0.0)
            b_b = tl.load(p_b, mask=in_n & in_k, other=0.0)
            if UPCAST:
                acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32).T, acc, input_precision="ieee")
            else:
                acc = tl.dot(b_a, b_b.T, acc)
            p_a += BK * tl.cast(strides.a_k, tl.int64)
            p_b += BK * tl.cast(strides.b_k, tl.int64)
        a_amax = None if FACTORS.a == dc.NO_FACTOR else amaxes.a_amax_ptr + factor_offset(own, row_factors, FACTORS.a)
        b_amax = None if FACTORS.b == dc.NO_FACTOR else amaxes.b_amax_ptr + factor_offset(own, own * N, FACTORS.b)
        y = finish(acc, o_m, o_n, rows, N, Applied(a_amax, b_amax), by, FACTORS)
        y = tl.where(group < groups.count, y, 0.0)
        p_out = out_ptr + (own.to(tl.int64) * strides.out_g if SPLIT else start.to(tl.int64) * strides.out)
        to = Rows(p_out, strides.out)
        store_tile(y, to, to if ACCUMULATE else None, o_m, o_n, rows, N)


@jit(do_not_specialize=("groups", "M", "N"))
def clear_tail_kernel(out_ptr, offsets_ptr, out_stride, groups, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write zeros to the rows of out [M, N] behind the last group."""
    end = tl.load(offsets_ptr + groups - 1).to(tl.int32)
    if (tl.program_id(0) + 1) * ROWS > end:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        mask = ((row >= end) & (row < M))[:, None]
        for i_col in range(0, N, COLS):
            col = i_col + tl.arange(0, COLS)
            p_out = out_ptr + row.to(tl.int64)[:, None] * out_stride + col[None, :]
            tl.store(p_out, tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty), mask=mask & (col < N)[None, :])
