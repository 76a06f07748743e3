"""Grouped GEMM on decoded operands: the launches of what `gemm.route` plans (docs/internals/grouped.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.gemm import route
from halfbyte.kernels.gemm.grouped_tile import (
    clear_tail_kernel,
    grouped_pointer_kernel,
    rows_tma_kernel,
    split_tma_kernel,
)
from halfbyte.kernels.gemm.route import NO_LIMIT, Variant, epilogue_parts
from halfbyte.kernels.groups import Plan, make_plan
from halfbyte.kernels.unpack.dequantize import decode, dequantize
from halfbyte.kernels.unpack.grouped_swizzle import grouped_unswizzle
from halfbyte.layout import (
    GROUP_COLUMNS,
    LINEAR,
    Blocks,
    GroupedOperand,
    ceil_div,
    group_alignment,
    padded_groups,
)
from halfbyte.spec import NVFP4, Spec

CLEAR_TILE = (32, 512)


@dataclass(frozen=True)
class Side:
    """A decoded operand.

    values: tokens [M, K] or experts [E, N, K]; with the groups along the contraction [rows, columns].
    amax: fp32 [E], or one per row ([M], [E, N]); None means a factor of 1.
    stored: what groups along the contraction are padded to in values; 0 where they follow each other directly.
    quantized: whether padding columns of values are the operand's own.
    """

    values: Tensor
    amax: Tensor | None = None
    divisor: float = 1.0
    by_row: bool = False
    stored: int = 0
    quantized: bool = False


def grouped_gemm_nt(
    a: GroupedOperand,
    b: GroupedOperand,
    offsets: Tensor,
    K: int,
    out: Tensor,
    *,
    accumulate: bool = False,
    variant: Variant = "auto",
) -> Tensor:
    """Write a_g @ b_g.T of every group to `out`: factors and what `out` holds in fp32, before the only rounding.

    Args:
        a: tokens [M, K]; or, groups along the contraction, [R, K].
        b: experts [E, N, K]; or [C, K].
        offsets: integer [E], cumulative ends along M or, of the contraction, along K.
        K: the logical contraction length, of all groups together if they split it.
        out: [M, N] or [E, R, C]; without `accumulate`, rows behind the last group become zero.
        accumulate: add to what `out` holds.
        variant: "tma" and "pointer" force a kernel, "auto" chooses from the device and the strides.
    """
    split = out.dim() == 3
    if out.numel() == 0:
        return out
    left, right = (decoded(side, offsets, K, split=split) for side in (a, b))
    target = out if out.stride(-1) == 1 and (not split or out.stride(0) == out.shape[1] * out.stride(1)) else None
    y = out.contiguous() if target is None else target
    run = _run_split if split else _run_rows
    run(left, right, offsets, K, y, accumulate, variant)
    return out if y is out else out.copy_(y)


def decoded(operand: GroupedOperand, offsets: Tensor, K: int, *, split: bool) -> Side:
    """Return element * block_scale in bf16 and what the factor needs; plain operands as they are."""
    data, spec, scale_layout = operand
    if isinstance(data, Tensor):
        return Side(data)
    assert spec is not None, "blocks have a spec"
    values = data.qdata
    if not values.is_floating_point():
        values = grouped_values(data, spec, offsets, K, scale_layout, split=split)
    stored = group_alignment(spec) if split else 0
    if not isinstance(spec, NVFP4):
        return Side(values, stored=stored, quantized=True)
    return Side(values, data.amax, spec.e4m3_max * spec.fp4_max, spec.outer == "row", stored, True)


def grouped_values(
    blocks: Blocks, spec: Spec, offsets: Tensor | None, K: int, scale_layout: str = LINEAR, *, split: bool = False
) -> Tensor:
    """Return element * block_scale of codes, bf16, with all the padding of the storage.

    Args:
        blocks: tokens, or the experts' [E, N, bytes].
        offsets: None for experts.
        K: logical columns.
        split: whether the groups split the columns.
    """
    qdata = blocks.qdata.flatten(0, -2)
    scale = linear_scale(blocks, spec, offsets, K, scale_layout, split=split).flatten(0, -2)
    cols = qdata.shape[1] * (2 if isinstance(spec, NVFP4) else 1)
    values = decode(Blocks(qdata, scale, blocks.amax), spec, cols if split else K).values
    return values.view(*blocks.qdata.shape[:-1], -1)


def linear_scale(
    blocks: Blocks, spec: Spec, offsets: Tensor | None, K: int, scale_layout: str, *, split: bool = False
) -> Tensor:
    """Return LINEAR block scales."""
    if scale_layout == LINEAR:
        return blocks.block_scale
    cols = blocks.qdata.shape[-1] * (2 if isinstance(spec, NVFP4) else 1)
    shape = (*blocks.qdata.shape[:-1], cols // spec.block_length)
    own = None if blocks.qdata.dim() == 3 else offsets
    return grouped_unswizzle(blocks.block_scale, shape, spec, own, contraction=split, total=K)


def grouped_dequantize(
    operand: GroupedOperand, offsets: Tensor | None, cols: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values of tokens in groups along the rows, zeros behind the last, or of expert weights (offsets None).

    Args:
        operand: quantized.
        cols: logical columns.

    Returns:
        dtype [M, cols] or [E, N, cols].
    """
    blocks, spec, scale_layout = operand
    assert isinstance(blocks, Blocks) and spec is not None, "only a quantized operand is dequantized"
    scale = linear_scale(blocks, spec, offsets, cols, scale_layout).flatten(0, -2)
    qdata = blocks.qdata.flatten(0, -2)
    if not isinstance(spec, NVFP4):
        return dequantize(Blocks(qdata, scale, blocks.amax), spec, cols, dtype).view(*blocks.qdata.shape[:-1], cols)
    amax = blocks.amax.flatten()
    if spec.outer != "row":  # the factor of its group for every row
        rows = torch.arange(qdata.shape[0], device=qdata.device)
        if offsets is None:
            amax = amax[rows // blocks.qdata.shape[1]]
        else:
            amax = torch.cat((amax, amax.new_zeros(1)))[torch.bucketize(rows, offsets, right=True)]
    by_row = replace(spec, block=(1, 16), outer="row")
    return dequantize(Blocks(qdata, scale, amax), by_row, cols, dtype).view(*blocks.qdata.shape[:-1], cols)


def _run_rows(a: Side, b: Side, offsets: Tensor, K: int, out: Tensor, accumulate: bool, variant: Variant) -> None:
    (M, N), groups = out.shape, b.values.shape[0]
    columns = a.values.shape[1], b.values.shape[2]
    K = min(columns) if a.quantized and b.quantized else min(K, *columns)
    choice = route.rows(route.Groups(a.values, b.values, out, groups, K, accumulate, variant))
    how: route.GroupedPlan = choice.facts
    tile, (b_matrix, b_by_rows) = how.tile, how.matrix
    plan = make_plan(offsets, groups, M, tile.bm, out.device)
    options = {**_factors(a, b), **choice.constants}
    if not how.tma:
        _launch_pointer(choice.grid, (a, b), plan, out, (M, N, K), options, accumulate=accumulate)
        return
    parts = epilogue_parts(tile, out.dtype)
    rows_tma_kernel[choice.grid](
        TensorDescriptor.from_tensor(a.values[:, :K], [tile.bm, tile.bk]),
        TensorDescriptor.from_tensor(b_matrix, [tile.bk, tile.bn] if b_by_rows else [tile.bn, tile.bk]),
        TensorDescriptor.from_tensor(out, [tile.bm, tile.bn // parts]) if how.out_tma else None,
        out,
        out.stride(0),
        table_ptr=plan.table,
        tile_group_ptr=plan.tile_group,
        groups=groups,
        M=M,
        N=N,
        K=K,
        ACCUMULATE=accumulate,
        OUT_TMA=how.out_tma,
        B_BY_ROWS=b_by_rows,
        PARTS=parts,
        PROGRAMS=choice.grid[0],
        **options,
    )


def _run_split(a: Side, b: Side, offsets: Tensor, K: int, out: Tensor, accumulate: bool, variant: Variant) -> None:
    groups, M, N = out.shape
    stored = max(a.stored, b.stored) or GROUP_COLUMNS
    assert not (a.stored and b.stored) or a.stored == b.stored, "operands are padded differently"
    plan = make_plan(offsets, groups, K, stored, out.device)
    padded = bool(a.stored and b.stored), stored
    choice = route.split(route.Groups(a.values, b.values, out, groups, K, accumulate, variant, padded))
    how: route.GroupedPlan = choice.facts
    tile, chain = how.tile, how.chain
    options = {**_factors(a, b), **choice.constants}
    longest = padded_groups(K, 1, stored)
    for first in range(0, max(longest, 1), min(chain * tile.bk, longest + 1)):
        later = first > 0
        common = {"first_step": first // tile.bk, "LATER": later, "MOST": chain, "STORED": stored}
        if not how.tma:
            _launch_pointer(choice.grid, (a, b), plan, out, (M, N, K), options | common, accumulate=accumulate or later)
            continue
        parts = epilogue_parts(tile, out.dtype)
        split_tma_kernel[choice.grid](
            TensorDescriptor.from_tensor(a.values, [tile.bm, tile.bk]),
            TensorDescriptor.from_tensor(b.values, [tile.bn, tile.bk]),
            TensorDescriptor.from_tensor(out, [1, tile.bm, tile.bn // parts]) if how.out_tma else None,
            out,
            out.stride(1),
            table_ptr=plan.table,
            groups=groups,
            M=M,
            N=N,
            ACCUMULATE=accumulate or later,
            OUT_TMA=how.out_tma,
            PARTS=parts,
            PROGRAMS=choice.grid[0],
            **options,
            **common,
        )


def _launch_pointer(
    grid: tuple[int, ...],
    sides: tuple[Side, Side],
    plan: Plan,
    out: Tensor,
    shape: tuple,
    options: dict,
    *,
    accumulate: bool,
) -> None:
    a, b = sides
    split = out.dim() == 3
    (M, N, K), b_strides = shape, b.values.stride()
    defaults = {"first_step": 0, "LATER": False, "MOST": NO_LIMIT, "STORED": GROUP_COLUMNS}
    grouped_pointer_kernel[grid](
        a.values,
        b.values,
        out,
        *a.values.stride(),
        *((0, *b_strides) if split else b_strides),
        out.stride(0) if split else 0,
        out.stride(-2),
        table_ptr=plan.table,
        tile_group_ptr=plan.tile_group,
        groups=plan.groups,
        M=M,
        N=N,
        K=K,
        ACCUMULATE=accumulate,
        SPLIT=split,
        A_STORED=a.stored > 0,
        B_STORED=b.stored > 0,
        **(defaults | options),
    )


def _factors(a: Side, b: Side) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, side in (("a", a), ("b", b)):
        kind = dc.NO_FACTOR if side.amax is None else dc.ROW_FACTOR if side.by_row else dc.TENSOR_FACTOR
        arguments[f"{name}_amax_ptr"] = side.amax
        arguments[f"{name}_floor"] = f32(side.divisor / FLT_MAX)
        arguments[f"{name}_inverse"] = f32(1 / side.divisor)
        arguments[f"{name.upper()}_FACTOR"] = kind.value
    return arguments


def plain_grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return torch's grouped GEMM of plain bf16 operands, for which `gemm.route` chose it.

    Args:
        a, b: as for `grouped_gemm_nt`.
        offsets: integer [E].
    """
    out = torch._grouped_mm(a, b.mT, offs=offsets.to(torch.int32))
    return clear_tail(out, offsets) if b.dim() == 3 else out


def clear_tail(out: Tensor, offsets: Tensor) -> Tensor:
    """Write zeros to the rows of out [M, N] behind the last group."""
    rows, cols = CLEAR_TILE
    clear_tail_kernel[(ceil_div(out.shape[0], rows),)](
        out, offsets, out.stride(0), offsets.shape[0], *out.shape, ROWS=rows, COLS=cols
    )
    return out
