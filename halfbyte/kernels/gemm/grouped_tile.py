"""The emulated grouped GEMM: the tiles of gemm_kernels.py, each of one group, with the group's factors.

`rows_tma_kernel` has the groups along the rows of a (2d-3d), `split_tma_kernel` along the contraction (2d-2d): both
persistent, with tensor maps. `grouped_pointer_kernel` does both with plain loads, any strides and any storage.
The sizes of groups come from a plan on the device (grouped_plan.py); row tiles behind the last group write zeros.
Programs are not placed before the kernel before has ended (`overlap.py`): placed early, they made a layer of 64 experts
2 to 14 % slower, differently in every call (docs/internals/grouped.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.gemm.tile import finish, split_columns, store_tile, tile_of
from halfbyte.kernels.groups import group_of_tile
from halfbyte.kernels.launch import jit

VARYING = ("groups", "M", "N", "K", "first_step")


@triton.jit
def factor_offset(group, rows_before, FACTOR: tl.constexpr):
    """Return where a group's amax lies, or those of its rows."""
    if FACTOR == dc.ROW_FACTOR:
        return rows_before
    else:
        return group


@jit(do_not_specialize=VARYING)
def rows_tma_kernel(
    a_desc,
    b_desc,
    out_desc,
    out_ptr,
    out_stride,
    a_amax_ptr,
    b_amax_ptr,
    table_ptr,
    tile_group_ptr,
    groups,
    M,
    N,
    K,
    a_floor,
    a_inverse,
    b_floor,
    b_inverse,
    A_FACTOR: tl.constexpr,
    B_FACTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OUT_TMA: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """b_desc: the experts below each other, [E * N, K], or, B_BY_ROWS, [E * K, N] with K a multiple of BK."""
    tiles_m = tl.load(table_ptr + groups * 3 + 2)
    if not ACCUMULATE:
        tiles_m += tl.cdiv(M - tl.load(table_ptr + groups * 3), BM)
    tiles_n, steps = tl.cdiv(N, BN), tl.cdiv(K, BK)
    for i in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=not UPCAST and not OUT_TMA):
        i_m, i_n = tile_of(i, tiles_m, tiles_n, GROUP)
        group, start, end, first = group_of_tile(i_m, tile_group_ptr, table_ptr)
        own = tl.minimum(group, groups - 1)
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
        a_factors = None if A_FACTOR == dc.NO_FACTOR else a_amax_ptr + factor_offset(own, start, A_FACTOR)
        b_factors = None if B_FACTOR == dc.NO_FACTOR else b_amax_ptr + factor_offset(own, own * N, B_FACTOR)
        parts = split_columns(acc, PARTS)
        for part in tl.static_range(PARTS):
            i_col = i_n * BN + part * (BN // PARTS)
            o_m = local + tl.arange(0, BM)
            o_n = i_col + tl.arange(0, BN // PARTS)
            y = finish(
                parts[part], o_m, o_n, rows, N, a_factors, b_factors, None,
                a_floor, a_inverse, b_floor, b_inverse, A_FACTOR, B_FACTOR, False,
            )  # fmt: skip
            y = tl.where(group < groups, y, 0.0)
            if OUT_TMA:
                if rows >= BM:
                    out_desc.store([start + local, i_col], dc.cast(y, out_desc.dtype))
                else:
                    p_out = out_ptr + start.to(tl.int64) * out_stride
                    store_tile(y, p_out, out_stride, p_out, out_stride, o_m, o_n, rows, N, False)
            else:
                p_out = out_ptr + start.to(tl.int64) * out_stride
                store_tile(y, p_out, out_stride, p_out, out_stride, o_m, o_n, rows, N, ACCUMULATE)


@triton.jit
def contraction_range(group, table_ptr, first_step, most, STORED: tl.constexpr, BK: tl.constexpr):
    """Return (first column in storage, number of steps) of a group, of its steps from first_step on at most `most`."""
    first = tl.load(table_ptr + group * 3 + 2)
    steps = (tl.load(table_ptr + group * 3 + 5) - first) * (STORED // BK)
    return first * STORED + first_step * BK, tl.minimum(tl.maximum(steps - first_step, 0), most)


@jit(do_not_specialize=VARYING)
def split_tma_kernel(
    a_desc,
    b_desc,
    out_desc,
    out_ptr,
    out_stride,
    a_amax_ptr,
    b_amax_ptr,
    table_ptr,
    groups,
    M,
    N,
    first_step,
    a_floor,
    a_inverse,
    b_floor,
    b_inverse,
    A_FACTOR: tl.constexpr,
    B_FACTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OUT_TMA: tl.constexpr,
    STORED: tl.constexpr,
    MOST: tl.constexpr,
    LATER: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """a [M, columns], b [N, columns]; a group starts at a multiple of STORED columns, zeros behind it. out [E, M, N].

    Steps of the contraction from first_step on, at most MOST of them; LATER: groups that have no such step are left.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    for i in tl.range(tl.program_id(0), groups * tiles, PROGRAMS, flatten=not UPCAST and not LATER):
        group = i // tiles
        i_m, i_n = tile_of(i % tiles, tiles_m, tiles_n, GROUP)
        i_k, steps = contraction_range(group, table_ptr, first_step, MOST, STORED, BK)
        if steps > 0 or not LATER:
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(steps):
                b_a = a_desc.load([i_m * BM, i_k + k * BK])
                b_b = b_desc.load([i_n * BN, i_k + k * BK]).T
                if UPCAST:
                    acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(b_a, b_b, acc)
            a_factors = None if A_FACTOR == dc.NO_FACTOR else a_amax_ptr + factor_offset(group, group * M, A_FACTOR)
            b_factors = None if B_FACTOR == dc.NO_FACTOR else b_amax_ptr + factor_offset(group, group * N, B_FACTOR)
            parts = split_columns(acc, PARTS)
            for part in tl.static_range(PARTS):
                i_col = i_n * BN + part * (BN // PARTS)
                o_m = i_m * BM + tl.arange(0, BM)
                o_n = i_col + tl.arange(0, BN // PARTS)
                y = finish(
                    parts[part], o_m, o_n, M, N, a_factors, b_factors, None,
                    a_floor, a_inverse, b_floor, b_inverse, A_FACTOR, B_FACTOR, False,
                )  # fmt: skip
                if OUT_TMA:
                    if ACCUMULATE:
                        y = y + tl.reshape(out_desc.load([group, i_m * BM, i_col]), (BM, BN // PARTS)).to(tl.float32)
                    y = tl.reshape(dc.cast(y, out_desc.dtype), (1, BM, BN // PARTS))
                    out_desc.store([group, i_m * BM, i_col], y)
                else:
                    p_out = out_ptr + (group * M).to(tl.int64) * out_stride
                    store_tile(y, p_out, out_stride, p_out, out_stride, o_m, o_n, M, N, ACCUMULATE)


@jit(do_not_specialize=VARYING)
def grouped_pointer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    a_stride,
    a_stride_k,
    b_stride_g,
    b_stride,
    b_stride_k,
    out_stride_g,
    out_stride,
    a_amax_ptr,
    b_amax_ptr,
    table_ptr,
    tile_group_ptr,
    groups,
    M,
    N,
    K,
    first_step,
    a_floor,
    a_inverse,
    b_floor,
    b_inverse,
    A_FACTOR: tl.constexpr,
    B_FACTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SPLIT: tl.constexpr,
    A_STORED: tl.constexpr,
    B_STORED: tl.constexpr,
    STORED: tl.constexpr,
    MOST: tl.constexpr,
    LATER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes one tile. SPLIT: groups along the contraction, of A_STORED and B_STORED ones as stored."""
    tiles_n = tl.cdiv(N, BN)
    if SPLIT:
        tiles_m = tl.cdiv(M, BM)
        group = tl.program_id(0) // (tiles_m * tiles_n)
        i_m, i_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        start, end = tl.load(table_ptr + group * 3), tl.load(table_ptr + group * 3 + 1)
        own, first, rows, row_factors = group, tl.load(table_ptr + group * 3 + 2) * STORED, M, group * M
        length, a_row = end - start, 0
        if A_STORED and B_STORED:  # a rotated tail counts
            length = tl.cdiv(length, STORED) * STORED
        a_col = first if A_STORED else start
        b_col = first if B_STORED else start
    else:
        i_m, i_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
        group, start, end, first = group_of_tile(i_m, tile_group_ptr, table_ptr)
        own, i_m, rows, row_factors = tl.minimum(group, groups - 1), i_m - first, end - start, start
        length, a_row, a_col, b_col = K, start, 0, 0
    steps = tl.minimum(tl.maximum(tl.cdiv(length, BK) - first_step, 0), MOST)
    # Rows behind the last group become zeros, unless something is added to them.
    wanted = (i_m * BM < rows) & (group < groups if ACCUMULATE else True) & (steps > 0 if LATER else True)
    if wanted:
        o_m = i_m * BM + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        o_k = first_step * BK + tl.arange(0, BK)
        p_a = a_ptr + (a_row + o_m).to(tl.int64)[:, None] * a_stride + (a_col + o_k).to(tl.int64)[None, :] * a_stride_k
        p_b = b_ptr + own.to(tl.int64) * b_stride_g + o_n.to(tl.int64)[:, None] * b_stride
        p_b += (b_col + o_k).to(tl.int64)[None, :] * b_stride_k
        in_m, in_n = (o_m < rows)[:, None] & (group < groups), (o_n < N)[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            in_k = (o_k + k * BK < length)[None, :]
            b_a = tl.load(p_a, mask=in_m & in_k, other=0.0)
            b_b = tl.load(p_b, mask=in_n & in_k, other=0.0)
            if UPCAST:
                acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32).T, acc, input_precision="ieee")
            else:
                acc = tl.dot(b_a, b_b.T, acc)
            p_a += BK * tl.cast(a_stride_k, tl.int64)
            p_b += BK * tl.cast(b_stride_k, tl.int64)
        a_factors = None if A_FACTOR == dc.NO_FACTOR else a_amax_ptr + factor_offset(own, row_factors, A_FACTOR)
        b_factors = None if B_FACTOR == dc.NO_FACTOR else b_amax_ptr + factor_offset(own, own * N, B_FACTOR)
        y = finish(
            acc, o_m, o_n, rows, N, a_factors, b_factors, None,
            a_floor, a_inverse, b_floor, b_inverse, A_FACTOR, B_FACTOR, False,
        )  # fmt: skip
        y = tl.where(group < groups, y, 0.0)
        p_out = out_ptr + (own.to(tl.int64) * out_stride_g if SPLIT else start.to(tl.int64) * out_stride)
        store_tile(y, p_out, out_stride, p_out, out_stride, o_m, o_n, rows, N, ACCUMULATE)


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
