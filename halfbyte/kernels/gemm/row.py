"""A product of one row, in one launch: b is read once, by as many programs as there are few rows for each.

What is multiplied by a GEMM's tiles is their height times larger, and few columns need splits, whose sums a second
launch adds. Here a program multiplies some rows of b whole, without tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.gemm.row_route import RowTile
from halfbyte.kernels.gemm.tile import Ending, Products, Rows, finish, store_tile
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div


@triton.jit
def pairs_added(x):
    """Return [R], the sums of rows of x [R, L]: neighbours meet, then their sums, in every layout alike."""
    R: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    if L == 1:
        return tl.reshape(x, (R,))
    else:
        return pairs_added(tl.sum(tl.reshape(x, (R, L // 2, 2)), axis=2))


@triton.jit
def lane_sums(a_ptr, p_b, m, lane, K, R: tl.constexpr, AHEAD: tl.constexpr, RAISE: tl.constexpr):
    """Return the lanes of R products of a [K] and rows of b, and m; RAISE: raised by the magnitudes of b.

    p_b: where lanes of each row begin, [R, LANES]. m: int32 bits [R, LANES], or anything.
    """
    LANES: tl.constexpr = lane.shape[0]
    acc = tl.zeros((R, LANES), tl.float32)
    STEP: tl.constexpr = LANES * AHEAD
    whole = K // STEP * STEP
    for i_k in range(0, whole, STEP):
        xs = ()
        ys = ()
        for j in tl.static_range(AHEAD):
            xs = xs + (tl.load(a_ptr + i_k + j * LANES + lane),)
            ys = ys + (tl.load(p_b + i_k + j * LANES),)
        for j in tl.static_range(AHEAD):
            acc += pm.to_fp32(xs[j])[None, :] * pm.to_fp32(ys[j])
            if RAISE:
                m = tl.maximum(m, mg.magnitude_bits(ys[j]))
    for i_k in range(whole, K, LANES):
        inside = i_k + lane < K
        x = tl.load(a_ptr + i_k + lane, mask=inside, other=0.0)
        y = tl.load(p_b + i_k, mask=inside[None, :], other=0.0)
        acc += pm.to_fp32(x)[None, :] * pm.to_fp32(y)
        if RAISE:
            m = tl.maximum(m, mg.magnitude_bits(y))
    return acc, m


@jit(do_not_specialize=("shape.N",))
def row_product_kernel(
    a_ptr, b, out, addend, applied, shape, by,
    FACTORS: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [1, N] = a [K] @ b.T of Rows b [N, K], R rows a program.

    Lane l adds the fp32 products of columns l, l + LANES, ... in order from +0; then lanes (0, 1), (2, 3), ... meet,
    until one is left. AHEAD steps of LANES columns are loaded before the first is added.
    """
    overlap.begin(OVERLAP)
    M, N, K = shape
    o_n = tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.arange(0, LANES)
    # Rows beyond the edge read the last one in place of a mask: their results are never stored.
    p_b = b.ptr + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * b.stride + lane[None, :]
    acc, _ = lane_sums(a_ptr, p_b, 0, lane, K, R, AHEAD, False)
    o_m = tl.arange(0, 1)
    y = finish(pairs_added(acc)[None, :], o_m, o_n, M, N, applied, by, FACTORS)
    store_tile(y, out, addend, o_m, o_n, M, N)


def row_product(tile: RowTile, a: Tensor, b: Tensor, ends: tuple[Tensor, Tensor | None], ending: Ending) -> None:
    """Write a @ b.T, ended as any GEMM, to the first of `ends`.

    Args:
        tile: that was chosen.
        a: [1, K] of bf16, fp16 or fp32, columns together.
        b: [N, K] of any of these, columns together; rows at any distance.
        ends: output [1, N] and addend, which may be one tensor.
        ending: factors, bias and outer product.
    """
    (N, K), (out, addend) = b.shape, ends
    row_product_kernel[(ceil_div(N, tile.rows),)](
        a,
        Rows(b, b.stride(0)),
        Rows(out, 0),  # of one row, whose length would be compiled in
        None if addend is None else Rows(addend, 0),
        ending.applied,
        Products(1, N, K),
        ending.by,
        FACTORS=ending.kinds,
        **tile.constants,
        **overlap.launch_options(out.device),
    )
