"""RMSNorm and LayerNorm with the amaxes of their output, and their backward: the roundings of halfbyte/arithmetic.py.

A program owns whole rows, as many as the column rotation is wide. It reads them for the mean, for the variance and for
y; all but the first read come from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.arithmetic import GROUP_LANES as GROUP_LANES_
from halfbyte.arithmetic import LANES as LANES_
from halfbyte.arithmetic import ROW_GROUP as ROW_GROUP_
from halfbyte.formats import f32
from halfbyte.kernels import decode as dc
from halfbyte.kernels import primitives as pm
from halfbyte.kernels import running_max as rm
from halfbyte.kernels.running_max import LANES, ROW_GROUP, Wanted
from halfbyte.kernels.targets import CompileCase
from halfbyte.layout import ceil_div
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Hadamard

GROUP_LANES = tl.constexpr(GROUP_LANES_)
NUM_WARPS = 8
SUM_COLUMNS = 64  # of a program that adds up the groups' partial sums


@triton.jit
def meet_lanes(x):
    """Sum [R, LANES] over lanes, neighbours first: [R]."""
    R: tl.constexpr = x.shape[0]
    for stage in tl.static_range(9):
        x = tl.sum(tl.reshape(x, (R, LANES >> (stage + 1), 2)), axis=2)
    return tl.reshape(x, (R,))


@triton.jit
def row_tiles(ptr, row0, rows, c, cols, COUNT: tl.constexpr):
    """Return COUNT tiles [ROW_GROUP, LANES] as stored, from row row0 and column c on, zero outside: all loads first."""
    i = tl.arange(0, ROW_GROUP)
    tiles = ()
    for j in tl.static_range(COUNT):
        col = tl.arange(0, LANES) + (c + j * LANES)
        pointers = ptr + row0.to(tl.int64) * cols + (i[:, None] * cols + col[None, :])
        tiles = tiles + (tl.load(pointers, mask=(row0 + i < rows)[:, None] & (col < cols)[None, :], other=0.0),)
    return tiles


@triton.jit
def store_statistics(x_ptr, mean_ptr, rstd_ptr, row0, rows, cols, eps, CENTERED: tl.constexpr):
    """Write mean (if CENTERED) and 1 / sqrt(variance + eps) of ROW_GROUP rows."""
    row = row0 + tl.arange(0, ROW_GROUP)
    AHEAD: tl.constexpr = 2 if CENTERED else 4  # tiles that are loaded before the first is used
    lane = tl.arange(0, LANES)
    count = tl.zeros((ROW_GROUP,), tl.float32) + cols
    mean = tl.zeros((ROW_GROUP,), tl.float32)
    if CENTERED:
        total = tl.zeros((ROW_GROUP, LANES), tl.float32)
        for c in range(0, cols, LANES * AHEAD):
            xs = row_tiles(x_ptr, row0, rows, c, cols, AHEAD)
            for j in tl.static_range(AHEAD):
                total += pm.to_fp32(xs[j])
        mean = tl.div_rn(meet_lanes(total), count)
        tl.store(mean_ptr + row, mean, mask=row < rows)
    squares = tl.zeros((ROW_GROUP, LANES), tl.float32)
    for c in range(0, cols, LANES * AHEAD):
        xs = row_tiles(x_ptr, row0, rows, c, cols, AHEAD)
        for j in tl.static_range(AHEAD):
            d = pm.to_fp32(xs[j])
            if CENTERED:
                d = tl.where((lane + (c + j * LANES) < cols)[None, :], d - mean[:, None], 0.0)
            squares += d * d
    variance = tl.div_rn(meet_lanes(squares), count)
    rstd = tl.div_rn(tl.full((ROW_GROUP,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=("eps", "sign_stream"))
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, row_ptr, col_ptr, space_ptr, sign_ptr, sign_stream,
    rows, cols, eps, CENTERED: tl.constexpr, WANTED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y [rows, cols] = ((x - mean) * rstd) * weight + bias, its statistics and the wanted maxima."""
    row0 = tl.program_id(0) * WANTED.group
    first = row0.to(tl.int64) * cols
    for r in range(0, WANTED.group, ROW_GROUP):
        store_statistics(x_ptr, mean_ptr, rstd_ptr, row0 + r, rows, cols, eps, CENTERED)
    tl.debug_barrier()  # the statistics are read back, one row for all threads
    GROUP: tl.constexpr = WANTED.group
    words = rm.sign_words(sign_ptr, sign_stream, WANTED)
    rstds = rm.load_numbers(rstd_ptr, row0, rows, GROUP)
    if CENTERED:
        means = rm.load_numbers(mean_ptr, row0, rows, GROUP)
    plain = tl.zeros((C,), tl.float32)
    rotated = tl.zeros((C,), tl.float32)
    for c in range(0, cols, C):
        col = c + tl.arange(0, C)
        in_col = col < cols
        weight = pm.to_fp32(tl.load(weight_ptr + col, mask=in_col, other=0.0))
        if bias_ptr is not None:
            bias = pm.to_fp32(tl.load(bias_ptr + col, mask=in_col, other=0.0))
        xs = rm.load_rows(x_ptr + first, row0, rows, col, cols, cols, GROUP, False)
        ys = ()
        for i in tl.static_range(GROUP):
            inside = in_col & (row0 + i < rows)
            d = pm.to_fp32(xs[i])
            if CENTERED:
                d = d - means[i]
            y = (d * rstds[i]) * weight
            if bias_ptr is not None:
                y = y + bias
            y = dc.cast(tl.where(inside, y, 0.0), y_ptr.dtype.element_ty)
            tl.store(y_ptr + first + (i * cols + col), y, mask=inside)
            plain = rm.raise_plain(plain, pm.to_fp32(y), WANTED)
            ys = ys + (y,)
        rotated = rm.raise_rotated(rotated, ys, words, WANTED)
    rm.store_row_maxima(row_ptr, y_ptr, row0, rows, cols, WANTED)
    if WANTED.row == "tensor" or WANTED.col != "":
        m_plain, m_rotated = rm.settle(plain, rotated, y_ptr, row0, rows, 0, cols, cols, words, WANTED, C)
        rm.publish_wanted(m_plain, m_rotated, row_ptr, col_ptr, space_ptr, tl.num_programs(0), WANTED)


@triton.jit
def norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, means_ptr, partial_ptr,
    rows, cols, CENTERED: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx of ROW_GROUP rows, their part of the gradients of weight and bias; means_ptr: fp32 [2, rows] to work in."""
    row0 = tl.program_id(0) * ROW_GROUP
    first = row0.to(tl.int64) * cols
    rows16 = row0 + tl.arange(0, ROW_GROUP)
    in_rows = rows16 < rows
    lane = tl.arange(0, LANES)
    count = tl.zeros((ROW_GROUP,), tl.float32) + cols
    rstd = tl.load(rstd_ptr + rows16, mask=in_rows, other=0.0)
    along = tl.zeros((ROW_GROUP, LANES), tl.float32)
    total = tl.zeros((ROW_GROUP, LANES), tl.float32)
    for c in range(0, cols, LANES):
        col = c + lane
        normal = pm.to_fp32(row_tiles(x_ptr, row0, rows, c, cols, 1)[0])
        if CENTERED:
            normal = normal - tl.load(mean_ptr + rows16, mask=in_rows, other=0.0)[:, None]
        weight = pm.to_fp32(tl.load(weight_ptr + col, mask=col < cols, other=0.0))
        g = pm.to_fp32(row_tiles(dy_ptr, row0, rows, c, cols, 1)[0]) * weight[None, :]
        along += g * (normal * rstd[:, None])
        if CENTERED:
            total += g
    tl.store(means_ptr + rows16, tl.div_rn(meet_lanes(along), count), mask=in_rows)
    if CENTERED:
        tl.store(means_ptr + rows + rows16, tl.div_rn(meet_lanes(total), count), mask=in_rows)
    tl.debug_barrier()
    group = tl.program_id(0).to(tl.int64)
    for c in range(0, cols, C):
        col = c + tl.arange(0, C)
        in_col = col < cols
        weight = pm.to_fp32(tl.load(weight_ptr + col, mask=in_col, other=0.0))
        xs = rm.load_rows(x_ptr + first, row0, rows, col, cols, cols, ROW_GROUP, False)
        dys = rm.load_rows(dy_ptr + first, row0, rows, col, cols, cols, ROW_GROUP, False)
        dweight = tl.zeros((C,), tl.float32)
        dbias = tl.zeros((C,), tl.float32)
        for i in tl.static_range(ROW_GROUP):
            # The row's numbers are read when they are needed: registers for all rows would halve the warps.
            row = row0 + i
            scale = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
            normal = pm.to_fp32(xs[i])
            dy = pm.to_fp32(dys[i])
            g = dy * weight
            if CENTERED:
                normal = normal - tl.load(mean_ptr + row, mask=row < rows, other=0.0)
                g = g - tl.load(means_ptr + rows + row, mask=row < rows, other=0.0)
            normal = normal * scale
            dx = (g - normal * tl.load(means_ptr + row, mask=row < rows, other=0.0)) * scale
            tl.store(
                dx_ptr + first + (i * cols + col), dc.cast(dx, dx_ptr.dtype.element_ty), mask=in_col & (row < rows)
            )
            dweight += dy * normal
            if BIAS:
                dbias += dy
        tl.store(partial_ptr + group * cols + col, dweight, mask=in_col)
        if BIAS:
            groups = tl.num_programs(0)
            tl.store(partial_ptr + (groups + group) * cols + col, dbias, mask=in_col)


@triton.jit
def group_sum_kernel(partial_ptr, out_ptr, groups, cols, C: tl.constexpr):
    """out [2 or 1, cols] = sum of partial [2 or 1, groups, cols] over groups: GROUP_LANES lanes, then neighbours."""
    which = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * C + tl.arange(0, C)
    lane = tl.arange(0, GROUP_LANES)
    total = tl.zeros((GROUP_LANES, C), tl.float32)
    for b in range(0, groups, GROUP_LANES):
        pointers = partial_ptr + (which * groups + b + lane)[:, None] * cols + col[None, :]
        total += tl.load(pointers, mask=(b + lane < groups)[:, None] & (col < cols)[None, :], other=0.0)
    for stage in tl.static_range(5):
        total = tl.sum(tl.reshape(total, (GROUP_LANES >> (stage + 1), 2, C)), axis=1)
    tl.store(out_ptr + which * cols + col, tl.reshape(total, (C,)), mask=col < cols)


def norm_with_amaxes(
    x: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    kind: tuple[float, bool, torch.dtype],
    row: str,
    col: NVFP4 | None,
    sign_draw: Draw | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return y, (mean, rstd) and the amaxes with which y and y.T will be quantized, from one launch.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        parameters: weight and bias [cols]; bias may be None.
        kind: eps, whether centered (LayerNorm), dtype of y.
        row, col, sign_draw: as for `halfbyte.reference.operand_amaxes`.
    """
    (weight, bias), (eps, centered, dtype) = parameters, kind
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    rows, cols = x.shape
    y = torch.empty(rows, cols, dtype=dtype, device=x.device)
    mean, rstd = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (rows if centered else 0, rows))
    wanted = rm.wanted_of(row, col)
    amaxes = rm.allocate(wanted, rows, x.device)
    if not x.numel():
        return y, (mean.zero_(), rstd.zero_()), (amaxes[0].zero_(), amaxes[1].zero_())
    norm_kernel[(ceil_div(rows, wanted.group),)](
        x,
        weight,
        bias,
        y,
        mean,
        rstd,
        *amaxes,
        rm.workspace(wanted, x.device),
        *rm.signs(wanted, sign_draw),
        rows,
        cols,
        f32(eps),
        CENTERED=centered,
        WANTED=wanted,
        C=rm.TILE_ELEMENTS // wanted.group,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return y, (mean, rstd), amaxes


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: tuple[Tensor, Tensor], centered: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx of x's dtype and the gradients of weight and bias, fp32 [cols]; bias's empty without one."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    (rows, cols), (mean, rstd) = x.shape, statistics
    dx = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    sums = torch.empty(1 + has_bias, cols, dtype=torch.float32, device=x.device)
    none = sums.new_empty(0)
    if not x.numel():
        return dx, sums[0].zero_(), sums[1].zero_() if has_bias else none
    groups = ceil_div(rows, ROW_GROUP_)
    partial = sums.new_empty(1 + has_bias, groups, cols)
    norm_backward_kernel[(groups,)](
        dy,
        x,
        weight,
        mean,
        rstd,
        dx,
        sums.new_empty(2, rows),
        partial,
        rows,
        cols,
        CENTERED=centered,
        BIAS=has_bias,
        C=LANES_,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    grid = (ceil_div(cols, SUM_COLUMNS), 1 + has_bias)
    group_sum_kernel[grid](partial, sums, groups, cols, C=SUM_COLUMNS, num_warps=NUM_WARPS, enable_fp_fusion=False)
    return dx, sums[0], sums[1] if has_bias else none


COMPILED = (  # (centered, what is wanted): high precision and MXFP8, no rotation, the preset nvfp4
    (False, Wanted()),
    (True, rm.wanted_of("tensor", NVFP4())),
    (False, rm.wanted_of("tensor", NVFP4(rotation=Hadamard()))),
)


def compile_cases() -> list[CompileCase]:
    """Return the norms of the presets, forward and backward."""
    sizes = {**dict.fromkeys(("rows", "cols"), "i32:16"), "eps": "fp32", "sign_stream": "i32"}
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16:16")
    pointers |= dict.fromkeys(("rstd_ptr", "row_ptr", "col_ptr"), "*fp32:16")
    cases = []
    for centered, wanted in COMPILED:
        arguments = {
            **pointers,
            **sizes,
            "bias_ptr": "*bf16:16" if centered else None,
            "mean_ptr": "*fp32:16",
            "space_ptr": "*i32:16" if wanted.meets else None,
            "sign_ptr": "*i64:16" if wanted.fresh else None,
            "CENTERED": centered,
            "WANTED": wanted,
            "C": rm.TILE_ELEMENTS // wanted.group,
        }
        cases.append(CompileCase(norm_kernel, arguments, num_warps=NUM_WARPS, fp_fusion=False))
    backward = dict.fromkeys(("dy_ptr", "x_ptr", "weight_ptr", "dx_ptr"), "*bf16:16")
    backward |= dict.fromkeys(("mean_ptr", "rstd_ptr", "means_ptr", "partial_ptr"), "*fp32:16")
    backward |= dict.fromkeys(("rows", "cols"), "i32:16")
    for centered in (False, True):
        flags = {"CENTERED": centered, "BIAS": centered, "C": LANES_}
        cases.append(CompileCase(norm_backward_kernel, backward | flags, num_warps=NUM_WARPS, fp_fusion=False))
    sums = {"partial_ptr": "*fp32:16", "out_ptr": "*fp32:16", "groups": "i32:16", "cols": "i32:16", "C": SUM_COLUMNS}
    return [*cases, CompileCase(group_sum_kernel, sums, num_warps=NUM_WARPS, fp_fusion=False)]
