"""The emulated GEMM: bf16 products with fp32 accumulation, everything else in fp32 before the only rounding.

Two kernels compute tiles of a @ b.T: `gemm_tma_kernel` (persistent, tensor-map loads, sm_90 and later) and
`gemm_pointer_kernel` (plain loads, sm_80 and later). `combine_kernel` ends a GEMM whose contraction was split. One row
has a kernel of its own (`gemm.row`), whose end is `finish` too.
Shapes: a [M, K], b [N, K], out [M, N].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.launch import jit


class Rows(NamedTuple):
    """A matrix with contiguous rows."""

    ptr: Any
    stride: Any


class ProductStrides(NamedTuple):
    """Of three matrices with contiguous rows."""

    a: int
    b: int
    out: int


class Products(NamedTuple):
    """Sizes of a [M, K] @ [N, K].T."""

    M: Any
    N: Any
    K: Any = None


class Applied(NamedTuple):
    """What ends a product: amaxes of operands that have some, a bias, and two vectors whose outer product is added."""

    a_amax_ptr: Any
    b_amax_ptr: Any
    bias_ptr: Any = None
    left_ptr: Any = None
    right_ptr: Any = None


class Divisors(NamedTuple):
    """What makes factors of amaxes: f(divisor / FLT_MAX) and f(1 / divisor) of each operand."""

    a_floor: float
    a_inverse: float
    b_floor: float
    b_inverse: float


class Turned(NamedTuple):
    """Of each operand, whether its columns are contiguous in place of its rows: the tensor map is that of x.T."""

    a: bool
    b: bool


class FactorKinds(NamedTuple):
    """Of each operand NO_FACTOR, TENSOR_FACTOR or ROW_FACTOR."""

    a: int
    b: int


class Ending(NamedTuple):
    """What `finish` does to a product."""

    applied: Applied
    by: Divisors
    kinds: FactorKinds


def divisors(a: float, b: float) -> Divisors:
    """Return those of two operands, of which each is e4m3_max * fp4_max of its spec."""
    return Divisors(f32(a / FLT_MAX), f32(1 / a), f32(b / FLT_MAX), f32(1 / b))


@triton.jit
def tile_of(i_tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return (row, column) of a tile: GROUP rows of tiles are walked together, so that their operands stay in L2."""
    width = GROUP * tiles_n
    first = i_tile // width * GROUP
    height = min(tiles_m - first, GROUP)
    return first + (i_tile % width) % height, (i_tile % width) // height


@triton.jit
def finish(acc, o_m, o_n, M, N, applied, by, FACTORS: tl.constexpr):
    """Apply the scalar factors as one product (unless it overflows), a's column, b's row, bias and outer product."""
    if FACTORS.a == dc.TENSOR_FACTOR and FACTORS.b == dc.TENSOR_FACTOR:
        ga = dc.clamped_amax(tl.load(applied.a_amax_ptr), by.a_floor) * by.a_inverse
        gb = dc.clamped_amax(tl.load(applied.b_amax_ptr), by.b_floor) * by.b_inverse
        alpha = ga * gb
        overflows = alpha == float("inf")
        acc = (acc * tl.where(overflows, ga, alpha)) * tl.where(overflows, gb, 1.0)
    elif FACTORS.a == dc.TENSOR_FACTOR:
        acc = acc * (dc.clamped_amax(tl.load(applied.a_amax_ptr), by.a_floor) * by.a_inverse)
    elif FACTORS.b == dc.TENSOR_FACTOR:
        acc = acc * (dc.clamped_amax(tl.load(applied.b_amax_ptr), by.b_floor) * by.b_inverse)
    if FACTORS.a == dc.ROW_FACTOR:
        amax = tl.load(applied.a_amax_ptr + o_m, mask=o_m < M, other=0.0)
        acc = acc * (dc.clamped_amax(amax, by.a_floor) * by.a_inverse)[:, None]
    if FACTORS.b == dc.ROW_FACTOR:
        amax = tl.load(applied.b_amax_ptr + o_n, mask=o_n < N, other=0.0)
        acc = acc * (dc.clamped_amax(amax, by.b_floor) * by.b_inverse)[None, :]
    if applied.bias_ptr is not None:
        acc = acc + tl.load(applied.bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    if applied.left_ptr is not None:
        left = pm.to_fp32(tl.load(applied.left_ptr + o_m, mask=o_m < M, other=0.0))
        right = pm.to_fp32(tl.load(applied.right_ptr + o_n, mask=o_n < N, other=0.0))
        acc = acc + left[:, None] * right[None, :]
    return acc


@triton.jit
def store_tile(acc, out, addend, o_m, o_n, M, N):
    """Round once and store to Rows, adding the addend first, if there is one."""
    p_out = out.ptr + o_m.to(tl.int64)[:, None] * out.stride + o_n[None, :]
    mask = (o_m < M)[:, None] & (o_n < N)[None, :]
    if addend is not None:
        p_addend = addend.ptr + o_m.to(tl.int64)[:, None] * addend.stride + o_n[None, :]
        acc = acc + tl.load(p_addend, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out, dc.cast(acc, out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def split_columns(x, PARTS: tl.constexpr):
    """Return the PARTS (2 or 4) column ranges of x [BM, BN], left to right."""
    BM: tl.constexpr = x.shape[0]
    BN: tl.constexpr = x.shape[1]
    left, right = tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))
    if PARTS == 2:
        return left, right
    else:
        first, second = split_columns(left, 2)
        third, fourth = split_columns(right, 2)
        return first, second, third, fourth


@triton.jit
def load_step(desc, i_row, i_k, TURNED: tl.constexpr):
    """Return rows of an operand from i_row on, columns from i_k on."""
    if TURNED:
        return desc.load([i_k, i_row]).T
    else:
        return desc.load([i_row, i_k])


@jit(do_not_specialize=("shape",))
def gemm_tma_kernel(
    a_desc, b_desc, out_desc, out, addend_desc, addend, applied, shape, by,
    FACTORS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """PROGRAMS programs walk all tiles. SPLITS > 1: out holds the partial sums, [SPLITS * round_up(M, BM), N].

    Without out_desc out is written by plain stores. TURNED: a `Turned`. The addend [M, N], if there is one, is out
    itself or lies elsewhere, in a dtype of its own.
    """
    overlap.begin(OVERLAP)
    M, N, K = shape
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    for i in tl.range(tl.program_id(0), tiles * SPLITS, PROGRAMS, flatten=not UPCAST):
        i_split = i // tiles
        i_m, i_n = tile_of(i % tiles, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            i_k = (i_split * steps + k) * BK
            b_a = load_step(a_desc, i_m * BM, i_k, TURNED.a)
            b_b = load_step(b_desc, i_n * BN, i_k, TURNED.b)
            if UPCAST:
                acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32).T, acc, input_precision="ieee")
            else:
                acc = tl.dot(b_a, b_b.T, acc)
        o_m = i_m * BM + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        # In parts, left to right: a whole fp32 tile fits neither in shared memory beside the pipeline nor in registers
        # beside the values it is added to.
        parts = split_columns(acc, PARTS)
        for part in tl.static_range(PARTS):
            i_col = i_n * BN + part * (BN // PARTS)
            o_m = i_m * BM + tl.arange(0, BM)
            o_n = i_col + tl.arange(0, BN // PARTS)
            y = finish(parts[part], o_m, o_n, M, N, applied, by, FACTORS)
            if out_desc is not None:
                i_row = (i_split * tiles_m + i_m) * BM
                if addend is not None:
                    y = y + addend_desc.load([i_row, i_col]).to(tl.float32)
                out_desc.store([i_row, i_col], dc.cast(y, out_desc.dtype))
            else:
                store_tile(y, out, addend, o_m, o_n, M, N)


@jit(do_not_specialize=("shape.M",))
def gemm_pointer_kernel(
    a_ptr, b_ptr, out_ptr, strides, addend, applied, shape, by,
    FACTORS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, UPCAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one split. SPLITS > 1: out as in gemm_tma_kernel."""
    overlap.begin(OVERLAP)
    M, N, K = shape
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    i_split = tl.program_id(0) // tiles
    i_m, i_n = tile_of(tl.program_id(0) % tiles, tiles_m, tiles_n, GROUP)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = i_split * steps * BK + tl.arange(0, BK)
    # Rows beyond the edge read some valid row instead of a mask: their results are never stored.
    p_a = a_ptr + (o_m % M).to(tl.int64)[:, None] * strides.a + o_k[None, :]
    p_b = b_ptr + (o_n % N).to(tl.int64)[:, None] * strides.b + o_k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(steps):
        in_k = (o_k < K - k * BK)[None, :]
        b_a = tl.load(p_a, mask=in_k, other=0.0)
        b_b = tl.load(p_b, mask=in_k, other=0.0)
        if UPCAST:
            acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32).T, acc, input_precision="ieee")
        else:
            acc = tl.dot(b_a, b_b.T, acc)
        p_a += BK
        p_b += BK
    acc = finish(acc, o_m, o_n, M, N, applied, by, FACTORS)
    p_split = out_ptr + (i_split * tiles_m * BM).to(tl.int64) * strides.out
    store_tile(acc, Rows(p_split, strides.out), addend, o_m, o_n, M, N)


@jit(do_not_specialize=("shape.M", "split_rows"))
def combine_kernel(
    parts_ptr, out_ptr, addend_ptr, parts_stride, out_stride, addend_stride, split_rows, applied, shape, by,
    FACTORS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum the partial products of a split contraction in order, then finish as one GEMM would."""
    overlap.begin(OVERLAP)
    M, N = shape.M, shape.N
    i_m, i_n = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 1)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    mask = (o_m < M)[:, None] & (o_n < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for i_split in tl.static_range(SPLITS):
        o_row = (i_split * split_rows + o_m).to(tl.int64)
        acc += tl.load(parts_ptr + o_row[:, None] * parts_stride + o_n[None, :], mask=mask, other=0.0)
    acc = finish(acc, o_m, o_n, M, N, applied, by, FACTORS)
    addend = None if addend_ptr is None else Rows(addend_ptr, addend_stride)
    store_tile(acc, Rows(out_ptr, out_stride), addend, o_m, o_n, M, N)
