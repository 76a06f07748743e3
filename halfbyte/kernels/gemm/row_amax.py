"""The product of one row with a weight, and the weight's largest finite magnitude, from one read of it."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import finite_amax
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.gemm.dense import gemm_nt
from halfbyte.kernels.gemm.row import lane_sums, pairs_added
from halfbyte.kernels.gemm.row_route import RowOfWeight, choose_row_of_weight
from halfbyte.kernels.gemm.tile import Products, Rows
from halfbyte.kernels.launch import jit
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.sides import Epilogue


@jit(do_not_specialize=("shape.N", "programs"))
def row_product_amax_kernel(
    a_ptr, b, out_ptr, bias_ptr, amax_ptr, space_ptr, shape, programs,
    R: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [N] = a [K] @ b.T (+ bias), the bits of `row_product_kernel`; and the finite amax of Rows b [N, K].

    A program takes every programs-th R rows.
    """
    overlap.begin(OVERLAP)
    _, N, K = shape
    lane = tl.arange(0, LANES)
    m = tl.zeros((R, LANES), tl.int32)
    for first in range(tl.program_id(0) * R, N, programs * R):
        o_n = first + tl.arange(0, R)
        p_b = b.ptr + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * b.stride + lane[None, :]
        acc, m = lane_sums(a_ptr, p_b, m, lane, K, R, AHEAD, True)
        y = pairs_added(acc)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + o_n, y, mask=o_n < N)
    bits = tl.max(m)
    if bits >= mg.INF_BITS:
        m = tl.zeros((R, LANES), tl.int32)
        for first in range(tl.program_id(0) * R, N, programs * R):
            o_n = first + tl.arange(0, R)
            p_b = b.ptr + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * b.stride + lane[None, :]
            for i_k in range(0, K, LANES):
                y = tl.load(p_b + i_k, mask=(i_k + lane < K)[None, :], other=0.0)
                m = tl.maximum(m, mg.finite_bits(mg.magnitude_bits(y)))
        bits = tl.max(m)
    rm.publish((bits,), (amax_ptr,), space_ptr, programs)


def amax_with_product(w: Tensor, a: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do what `halfbyte.reference.amax_with_product` does; the product has the bits of the product alone."""
    choice = choose_row_of_weight(RowOfWeight(w, a))
    if choice.kernel != "row_product_amax_kernel":
        return finite_amax(w), gemm_nt(Decoded(a[None]), Decoded(w), Epilogue(torch.float32, bias))[0]
    (N, K), tile = w.shape, choice.facts
    amax, out = (torch.empty(shape, dtype=torch.float32, device=w.device) for shape in ((), (N,)))
    row_product_amax_kernel[choice.grid](
        a.contiguous(),
        Rows(w, w.stride(0)),
        out,
        None if bias is None else bias.contiguous(),
        amax,
        rm.workspace(rm.Wanted("tensor"), w.device),
        Products(1, N, K),
        *choice.grid,
        **tile.constants,
        **overlap.launch_options(w.device),
    )
    return amax, out
