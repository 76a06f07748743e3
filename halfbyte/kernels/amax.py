"""The largest finite magnitude: of an operand, of its rows, after its rotation, or of two operands in one pass.

A result stays on the device: programs meet in an atomic maximum of the fp32 bits, which order as integers do for
numbers that are not negative. NaN and Inf are left out (docs/numerics.md section 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.kernels import primitives as pm
from halfbyte.kernels import scaling as sc
from halfbyte.kernels.tiles import load_col_groups, load_row_groups, rotate_group
from halfbyte.layout import ceil_div
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec

ROW_TILE = (1, 512, 4)
COL_TILE = (128, 4, 4)
PLAIN = sc.rule_of(NVFP4(), hardware=False)


@triton.jit
def finite_max(xs):
    """Return max |x| over the finite elements of a group, as int32 bits."""
    m = tl.zeros_like(xs[0])
    for i in tl.static_range(len(xs)):
        a = tl.abs(xs[i])
        m = tl.maximum(m, tl.where(a < float("inf"), a, 0.0))
    return m.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("sign_stream", "tiles"))
def amax_rows_kernel(
    x_ptr, out_ptr, sign_ptr, sign_stream, rows, cols, stride_r, stride_c, tiles,
    RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """amax of x or of its rows, after a rotation along them; out int32 [] or [rows], zero before."""
    row = tl.program_id(0) // tiles * R + tl.arange(0, R)
    group = tl.program_id(0) % tiles * N + tl.arange(0, N)
    in_row = row < rows
    row64 = row.to(tl.int64)
    xs = load_row_groups(x_ptr, row64 * stride_r, in_row, group * RULE.group, cols, stride_c, RULE.group)
    if RULE.norm != 0.0:
        xs = pm.unpack_pairs(
            rotate_group(xs, sign_ptr, sign_stream, x_ptr.dtype.element_ty == tl.bfloat16, RULE), 0, RULE.group
        )
    m = finite_max(xs)
    if RULE.row_amax:
        tl.atomic_max(out_ptr + row64, tl.max(m, axis=1), mask=in_row, sem="relaxed")
    else:
        tl.atomic_max(out_ptr, tl.max(tl.max(m, axis=1), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=("sign_stream", "tiles"))
def amax_cols_kernel(
    x_ptr, out_ptr, plain_ptr, sign_ptr, sign_stream, rows, cols, stride_r, stride_c, tiles,
    RULE: tl.constexpr, PLAIN: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """amax of x.T or of its rows, after a rotation along them, and with PLAIN that of x itself from the same read."""
    group = tl.program_id(0) // tiles * N + tl.arange(0, N)
    col = tl.program_id(0) % tiles * C + tl.arange(0, C)
    in_col = col < cols
    xs = load_col_groups(x_ptr, group * RULE.group, rows, col, in_col, stride_r, stride_c, RULE.group)
    if PLAIN:
        tl.atomic_max(plain_ptr, tl.max(tl.max(finite_max(xs), axis=1), axis=0), sem="relaxed")
    if RULE.norm != 0.0:
        xs = pm.unpack_pairs(
            rotate_group(xs, sign_ptr, sign_stream, x_ptr.dtype.element_ty == tl.bfloat16, RULE), 0, RULE.group
        )
    m = finite_max(xs)
    if RULE.row_amax:
        tl.atomic_max(out_ptr + col.to(tl.int64), tl.max(m, axis=0), mask=in_col, sem="relaxed")
    else:
        tl.atomic_max(out_ptr, tl.max(tl.max(m, axis=1), axis=0), sem="relaxed")


def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32: [] or, with dim=-1, one per row; 0 for nothing.

    Args:
        x: bf16, fp16 or fp32, at most 2-D if dim is given.
        dim: None or -1.
    """
    x = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return operand_amax(x, NVFP4(outer="tensor" if dim is None else "row"), None)


def operand_amax(x: Tensor, spec: NVFP4, sign_draw: Draw | None) -> Tensor:
    """Return the amax that quantize(x, spec) uses: fp32 [] or [rows], after the spec's rotation.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], any strides.
        spec: its `outer` and `rotation` count.
        sign_draw: the place of fresh signs.
    """
    per_row = spec.outer == "row"
    out = torch.zeros((x.shape[0],) if per_row else (), dtype=torch.int32, device=x.device)
    if x.numel():
        rule = amax_rule(spec)
        if x.stride(0) == 1 and x.stride(1) != 1:
            _launch_cols(x.T, rule, out, None, sign_draw)
        else:
            # Without rows to tell apart, a contiguous tensor is one long row.
            flat = not per_row and spec.rotation is None and x.is_contiguous()
            _launch_rows(x.view(1, -1) if flat else x, rule, out, sign_draw)
    return out.view(torch.float32)


def row_col_amax(
    x: Tensor, row_spec: Spec | None, col_spec: Spec | None, sign_draw: Draw | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return operand_amax of (x, row_spec) and (x.T, col_spec) from one read of x where one read gives both.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        row_spec, col_spec: None and MXFP8 need no amax: None is returned.
        sign_draw: the place of fresh signs.
    """
    row = row_spec if isinstance(row_spec, NVFP4) else None
    col = col_spec if isinstance(col_spec, NVFP4) else None
    if row is not None and col is not None and row.rotation is None and row.outer == "tensor" and x.numel():
        if col.rotation is None and col.outer == "tensor":
            both = operand_amax(x, row, None)
            return both, both
        if x.stride(1) == 1:
            # Apart, since an op's outputs must not share memory, and zeroed by one launch.
            row_out = torch.empty((), dtype=torch.int32, device=x.device)
            col_out = row_out.new_empty((x.shape[1],) if col.outer == "row" else ())
            torch._foreach_zero_([row_out, col_out])
            _launch_cols(x, amax_rule(col), col_out, row_out, sign_draw)
            return row_out.view(torch.float32), col_out.view(torch.float32)
    return (
        operand_amax(x, row, sign_draw) if row is not None else None,
        operand_amax(x.T, col, sign_draw) if col is not None else None,
    )


def amax_rule(spec: NVFP4) -> sc.Rule:
    """Return what the amax kernels are compiled for: nothing of the spec counts but its rows and its rotation."""
    rule = sc.rule_of(spec, hardware=False)
    return PLAIN._replace(row_amax=rule.row_amax, group=rule.group, norm=rule.norm, fresh=rule.fresh)


def _signs(rule: sc.Rule, sign_draw: Draw | None) -> tuple[Tensor | None, int]:
    if not rule.fresh:
        return None, 0
    assert sign_draw is not None, "fresh signs need a draw"
    return sign_draw.base, sign_draw.stream


def _launch_rows(x: Tensor, rule: sc.Rule, out: Tensor, sign_draw: Draw | None) -> None:
    rows, cols = x.shape
    groups = ceil_div(cols, rule.group)
    total = ROW_TILE[0] * ROW_TILE[1] * NVFP4_BLOCK // rule.group
    n = min(triton.next_power_of_2(groups), total)
    r = min(total // n, triton.next_power_of_2(rows))
    group_tiles = ceil_div(groups, n)
    amax_rows_kernel[(ceil_div(rows, r) * group_tiles,)](
        x,
        out,
        *_signs(rule, sign_draw),
        rows,
        cols,
        *x.stride(),
        group_tiles,
        RULE=rule,
        R=r,
        N=n,
        num_warps=ROW_TILE[2],
        enable_fp_fusion=False,
    )


def _launch_cols(x: Tensor, rule: sc.Rule, out: Tensor, plain: Tensor | None, sign_draw: Draw | None) -> None:
    rows, cols = x.shape
    groups = ceil_div(rows, rule.group)
    n = min(triton.next_power_of_2(groups), COL_TILE[1])
    c = COL_TILE[0] * COL_TILE[1] * NVFP4_BLOCK // rule.group // n
    col_tiles = ceil_div(cols, c)
    amax_cols_kernel[(ceil_div(groups, n) * col_tiles,)](
        x,
        out,
        plain,
        *_signs(rule, sign_draw),
        rows,
        cols,
        *x.stride(),
        col_tiles,
        RULE=rule,
        PLAIN=plain is not None,
        N=n,
        C=c,
        num_warps=COL_TILE[2],
        enable_fp_fusion=False,
    )
