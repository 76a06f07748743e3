"""RMSNorm and LayerNorm with the amaxes of their output: the roundings of halfbyte/arithmetic.py.

A program owns whole rows, as many as the column rotation is wide. It reads them for the mean, for the variance and for
y; all but the first read come from the cache. Where a residual is added to x first, the first read adds and writes the
sum, which the others read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import f32
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rows as pr
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.loads import masked_load, masked_store
from halfbyte.kernels.device.running_max import LANES, AmaxPair
from halfbyte.kernels.fused.collected import collected, with_column
from halfbyte.kernels.fused.norm_route import NormForward, choose_forward
from halfbyte.kernels.launch import jit
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4


class Added(NamedTuple):
    """What is added to x before a norm, and where the sum goes, [rows, cols]; kernels take None where nothing is."""

    residual: Any
    total: Any


@triton.jit
def meet_lanes(x):
    """Sum [R, LANES] over lanes, neighbours first: [R]."""
    R: tl.constexpr = x.shape[0]
    for stage in tl.static_range(9):
        x = tl.sum(tl.reshape(x, (R, LANES >> (stage + 1), 2)), axis=2)
    return tl.reshape(x, (R,))


@triton.jit
def row_tiles(ptr, row0, rows, c, cols, PART: tl.constexpr, COUNT: tl.constexpr, FULL: tl.constexpr):
    """Return COUNT tiles [PART, LANES] as stored, from row row0 and column c on, zero outside: all loads first.

    FULL: no row is outside.
    """
    i = tl.arange(0, PART)
    tiles = ()
    for j in tl.static_range(COUNT):
        col = tl.arange(0, LANES) + (c + j * LANES)
        pointers = ptr + row0.to(tl.int64) * cols + (i[:, None] * cols + col[None, :])
        mask = (col < cols)[None, :] if FULL else (row0 + i < rows)[:, None] & (col < cols)[None, :]
        tiles = tiles + (tl.load(pointers, mask=mask, other=0.0),)
    return tiles


@triton.jit
def add_tiles(x_ptr, added, row0, rows, c, cols, PART: tl.constexpr, COUNT: tl.constexpr, FULL: tl.constexpr):
    """Return `row_tiles` of x or, where something is added, of the sum, which is rounded and written."""
    xs = row_tiles(x_ptr, row0, rows, c, cols, PART, COUNT, FULL)
    if added is None:
        return xs
    else:
        i = tl.arange(0, PART)
        residuals = row_tiles(added.residual, row0, rows, c, cols, PART, COUNT, FULL)
        totals = ()
        for j in tl.static_range(COUNT):
            total = dc.cast(pm.to_fp32(xs[j]) + pm.to_fp32(residuals[j]), added.total.dtype.element_ty)
            col = tl.arange(0, LANES) + (c + j * LANES)
            pointers = added.total + row0.to(tl.int64) * cols + (i[:, None] * cols + col[None, :])
            tl.store(pointers, total, mask=(row0 + i < rows)[:, None] & (col < cols)[None, :])
            totals = totals + (total,)
        return totals


@triton.jit
def store_statistics(
    x_ptr, added, mean_ptr, rstd_ptr, row0, rows, cols, eps,
    CENTERED: tl.constexpr, PASS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the sum (if one is wanted), mean (if CENTERED) and 1 / sqrt(variance + eps) of PASS.part rows."""
    PART: tl.constexpr = PASS.part
    AHEAD: tl.constexpr = PASS.ahead
    row = row0 + tl.arange(0, PART)
    lane = tl.arange(0, LANES)
    count = tl.zeros((PART,), tl.float32) + cols
    mean = tl.zeros((PART,), tl.float32)
    if CENTERED:
        total = tl.zeros((PART, LANES), tl.float32)
        for c in range(0, cols, LANES * AHEAD):
            xs = add_tiles(x_ptr, added, row0, rows, c, cols, PART, AHEAD, FULL)
            for j in tl.static_range(AHEAD):
                total += pm.to_fp32(xs[j])
        mean = tl.div_rn(meet_lanes(total), count)
        tl.store(mean_ptr + row, mean, mask=row < rows)
        if added is not None:
            tl.debug_barrier()  # what other threads added is read now
    squares = tl.zeros((PART, LANES), tl.float32)
    for c in range(0, cols, LANES * AHEAD):
        if not CENTERED:
            xs = add_tiles(x_ptr, added, row0, rows, c, cols, PART, AHEAD, FULL)
        elif added is None:
            xs = row_tiles(x_ptr, row0, rows, c, cols, PART, AHEAD, FULL)
        else:
            xs = row_tiles(added.total, row0, rows, c, cols, PART, AHEAD, FULL)
        for j in tl.static_range(AHEAD):
            d = pm.to_fp32(xs[j])
            if CENTERED:
                d = tl.where((lane + (c + j * LANES) < cols)[None, :], d - mean[:, None], 0.0)
            squares += d * d
    variance = tl.div_rn(meet_lanes(squares), count)
    rstd = tl.div_rn(tl.full((PART,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@jit(do_not_specialize=("eps", "sign_stream"))
def norm_kernel(
    x_ptr, added, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, amaxes, space_ptr, sign_ptr, sign_stream,
    rows, cols, eps, CENTERED: tl.constexpr, WANTED: tl.constexpr, C: tl.constexpr, PASS: tl.constexpr,
    FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [rows, cols] = ((x - mean) * rstd) * weight + bias, its statistics and the wanted maxima.

    added: what goes to x first, and where the sum goes, or None.
    FULL: whole groups of rows, of a tile of C columns at least; the last tile may do columns again.
    """
    overlap.begin(OVERLAP)
    row0 = tl.program_id(0) * WANTED.group
    first = row0.to(tl.int64) * cols
    for r in range(0, WANTED.group, PASS.part):
        store_statistics(x_ptr, added, mean_ptr, rstd_ptr, row0 + r, rows, cols, eps, CENTERED, PASS, FULL)
    tl.debug_barrier()  # the statistics are read back, one row for all threads, and the sum
    if added is None:
        read_ptr = x_ptr
    else:
        read_ptr = added.total
    GROUP: tl.constexpr = WANTED.group
    words = rm.wanted_sign_words(sign_ptr, sign_stream, WANTED)
    rstds = rm.load_numbers(rstd_ptr, row0, rows, GROUP)
    if CENTERED:
        means = rm.load_numbers(mean_ptr, row0, rows, GROUP)
    PAIRED: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
    plain = pr.no_maxima(C, PAIRED)
    rotated = tl.zeros((C,), tl.float32)
    # Backwards: what was read last is still in the cache of the multiprocessor.
    for i_tile in range(tl.cdiv(cols, C)):
        col = rm.tile_at((tl.cdiv(cols, C) - 1 - i_tile) * C, cols, C, FULL)
        in_col = col < cols
        weight = pm.to_fp32(masked_load(weight_ptr + col, in_col, FULL))
        if bias_ptr is not None:
            bias = pm.to_fp32(masked_load(bias_ptr + col, in_col, FULL))
        xs = rm.load_group(read_ptr + first, row0, rows, col, cols, cols, GROUP, FULL)
        ys = ()
        for i in tl.static_range(GROUP):
            d = pm.to_fp32(xs[i])
            if CENTERED:
                d = d - means[i]
            y = (d * rstds[i]) * weight
            if bias_ptr is not None:
                y = y + bias
            if not FULL:
                y = tl.where(in_col & (row0 + i < rows), y, 0.0)
            ys = ys + (y,)
        stored = pr.rounded_rows(ys, y_ptr.dtype.element_ty)
        for i in tl.static_range(GROUP):
            y = pr.stored_row(stored, i, PAIRED)
            masked_store(y_ptr + first + (i * cols + col), y, in_col & (row0 + i < rows), FULL)
        plain = pr.raise_plain_rows(plain, stored, PAIRED, WANTED)
        rotated = pr.raise_rotated_rows(rotated, stored, words, PAIRED, WANTED)
    plain = pr.plain_values(plain, PAIRED)
    rm.store_row_maxima(amaxes.row, y_ptr, row0, rows, cols, WANTED)
    if WANTED.row == "tensor" or WANTED.col != "":
        m_plain, m_rotated = rm.settle(plain, rotated, y_ptr, row0, rows, 0, cols, cols, words, WANTED, C)
        rm.publish_wanted(m_plain, m_rotated, amaxes, space_ptr, tl.num_programs(0), WANTED)


def norm_with_amaxes(
    x: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    kind: tuple[float, bool, torch.dtype],
    row: str,
    col: NVFP4 | None,
    sign_draw: Draw | None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return y, the sum, (mean, rstd) and the amaxes with which y and y.T will be quantized, most from one launch.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        parameters: weight and bias [cols]; bias may be None.
        kind: eps, whether centered (LayerNorm), dtype of y.
        row, col, sign_draw: as for `halfbyte.reference.operand_amaxes`.
        residual: as for `halfbyte.reference.norm_with_amaxes`.
    """
    (weight, bias), (eps, centered, dtype) = parameters, kind
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    added = None if residual is None else added_to(x, residual)
    rows, cols = x.shape
    y = torch.empty(rows, cols, dtype=dtype, device=x.device)
    mean, rstd = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (rows if centered else 0, rows))
    wanted = rm.wanted_of(row, collected(col))
    amaxes = rm.allocate_amaxes(wanted, rows, x.device)
    total = None if added is None else added.total
    if not x.numel():
        amaxes = AmaxPair(amaxes.row.zero_(), amaxes.col.zero_())
        return y, total, (mean.zero_(), rstd.zero_()), with_column(amaxes, y, col, sign_draw)
    choice = choose_forward(NormForward(x, total, wanted, centered))
    norm_kernel[choice.grid](
        x,
        added,
        weight,
        bias,
        y,
        mean,
        rstd,
        amaxes,
        rm.workspace(wanted, x.device),
        *rm.fresh_signs(wanted, sign_draw),
        rows,
        cols,
        f32(eps),
        CENTERED=centered,
        WANTED=wanted,
        **choice.constants,
        **overlap.launch_options(x.device),
        enable_fp_fusion=False,
    )
    return y, total, (mean, rstd), with_column(amaxes, y, col, sign_draw)


def added_to(x: Tensor, residual: Tensor) -> Added:
    """Return what is added to x, and room for the sum, of the dtype that torch gives it."""
    # torch.promote_types of bf16, fp16 and fp32, which is an op and would keep the launch out of a record.
    dtype = x.dtype if x.dtype == residual.dtype else torch.float32
    return Added(residual.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device))
