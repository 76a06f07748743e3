"""Grouped GEMM on decoded operands: the launches of what `gemm.route` plans (docs/internals/grouped.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.gemm import route
from halfbyte.kernels.gemm.grouped_tile import (
    Groups,
    GroupStrides,
    Steps,
    clear_tail_kernel,
    grouped_pointer_kernel,
    rows_tma_kernel,
    split_tma_kernel,
)
from halfbyte.kernels.gemm.route import NO_LIMIT, Variant, epilogue_parts
from halfbyte.kernels.gemm.tile import Applied, FactorKinds, Products, Rows, divisors
from halfbyte.kernels.groups import GroupPlan, plan_of_products
from halfbyte.kernels.unpack.grouped_dequantize import grouped_values
from halfbyte.layout import (
    GROUP_COLUMNS,
    EndsOfGroups,
    Operand,
    as_offsets,
    ceil_div,
    group_alignment,
    padded_groups,
)

CLEAR_TILE = (32, 512)


@dataclass(frozen=True)
class DecodedGroups:
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
    a: Operand | Tensor,
    b: Operand | Tensor,
    offsets: EndsOfGroups,
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
    left, right = (decoded(side, as_offsets(offsets), K, split=split) for side in (a, b))
    target = out if out.stride(-1) == 1 and (not split or out.stride(0) == out.shape[1] * out.stride(1)) else None
    y = out.contiguous() if target is None else target
    run = _run_split if split else _run_rows
    run(left, right, offsets, K, y, accumulate, variant)
    return out if y is out else out.copy_(y)


def grouped_gemm_nt_batch_invariant(
    a: Operand | Tensor, b: Operand | Tensor, offsets: EndsOfGroups, K: int, out: Tensor
) -> Tensor:
    """Do what `grouped_gemm_nt` does: kernels of groups have one step and no split, whatever the groups are."""
    return grouped_gemm_nt(a, b, offsets, K, out)


def decoded(operand: Operand | Tensor, offsets: Tensor, K: int, *, split: bool) -> DecodedGroups:
    """Return element * block_scale in bf16 and what the factor needs; plain operands as they are."""
    if isinstance(operand, Tensor):
        return DecodedGroups(operand)
    blocks, spec, _, scale_layout = operand
    values = blocks.qdata
    if not values.is_floating_point():
        values = grouped_values(blocks, spec, offsets, K, scale_layout, split=split)
    amax, stored = blocks.amax if spec.format.has_amax else None, group_alignment(spec) if split else 0
    return DecodedGroups(values, amax, spec.divisor, spec.has_row_amax, stored, True)


def _run_rows(
    a: DecodedGroups, b: DecodedGroups, ends: EndsOfGroups, K: int, out: Tensor, accumulate: bool, variant: Variant
) -> None:
    (M, N), groups = out.shape, b.values.shape[0]
    columns = a.values.shape[1], b.values.shape[2]
    K = min(columns) if a.quantized and b.quantized else min(K, *columns)
    choice = route.choose_rows(route.GroupProducts(a.values, b.values, out, groups, K, accumulate, variant))
    how: route.GroupedPlan = choice.facts
    tile, (b_matrix, b_by_rows) = how.tile, how.matrix
    plan = plan_of_products(ends, groups, M, tile.bm, out.device)
    options = {"FACTORS": _kinds(a, b), "ACCUMULATE": accumulate, **choice.constants}
    if not how.tma:
        _launch_pointer(choice.grid, (a, b), plan, out, K, options)
        return
    parts = epilogue_parts(tile, out.dtype)
    rows_tma_kernel[choice.grid](
        TensorDescriptor.from_tensor(a.values[:, :K], [tile.bm, tile.bk]),
        TensorDescriptor.from_tensor(b_matrix, [tile.bk, tile.bn] if b_by_rows else [tile.bn, tile.bk]),
        TensorDescriptor.from_tensor(out, [tile.bm, tile.bn // parts]) if how.out_tma else None,
        Rows(out, out.stride(0)),
        Applied(a.amax, b.amax),
        Groups(plan.table, plan.tile_group, groups),
        Products(M, N, K),
        divisors(a.divisor, b.divisor),
        OUT_TMA=how.out_tma,
        B_BY_ROWS=b_by_rows,
        PARTS=parts,
        PROGRAMS=choice.grid[0],
        **options,
    )


def _run_split(
    a: DecodedGroups, b: DecodedGroups, ends: EndsOfGroups, K: int, out: Tensor, accumulate: bool, variant: Variant
) -> None:
    groups, M, N = out.shape
    stored = max(a.stored, b.stored) or GROUP_COLUMNS
    assert not (a.stored and b.stored) or a.stored == b.stored, "operands are padded differently"
    plan = plan_of_products(ends, groups, K, stored, out.device)
    padded = bool(a.stored and b.stored), stored
    choice = route.choose_split(route.GroupProducts(a.values, b.values, out, groups, K, accumulate, variant, padded))
    how: route.GroupedPlan = choice.facts
    tile, chain = how.tile, how.chain
    longest = padded_groups(K, 1, stored)
    for first in range(0, max(longest, 1), min(chain * tile.bk, longest + 1)):
        later = first > 0
        options = {"FACTORS": _kinds(a, b), "ACCUMULATE": accumulate or later, **choice.constants}
        options |= {"first_step": first // tile.bk, "STEPS": Steps(stored, chain, later)}
        if not how.tma:
            _launch_pointer(choice.grid, (a, b), plan, out, K, options)
            continue
        parts = epilogue_parts(tile, out.dtype)
        split_tma_kernel[choice.grid](
            TensorDescriptor.from_tensor(a.values, [tile.bm, tile.bk]),
            TensorDescriptor.from_tensor(b.values, [tile.bn, tile.bk]),
            TensorDescriptor.from_tensor(out, [1, tile.bm, tile.bn // parts]) if how.out_tma else None,
            Rows(out, out.stride(1)),
            Applied(a.amax, b.amax),
            Groups(plan.table, None, groups),
            Products(M, N),
            by=divisors(a.divisor, b.divisor),
            OUT_TMA=how.out_tma,
            PARTS=parts,
            PROGRAMS=choice.grid[0],
            **options,
        )


def _launch_pointer(
    grid: tuple[int, ...],
    sides: tuple[DecodedGroups, DecodedGroups],
    plan: GroupPlan,
    out: Tensor,
    K: int,
    options: dict[str, Any],
) -> None:
    a, b = sides
    split, b_strides = out.dim() == 3, b.values.stride()
    grouped_pointer_kernel[grid](
        a.values,
        b.values,
        out,
        GroupStrides(
            *a.values.stride(),
            *((0, *b_strides) if split else b_strides),
            out.stride(0) if split else 0,
            out.stride(-2),
        ),
        Applied(a.amax, b.amax),
        Groups(plan.table, plan.tile_group, plan.groups),
        Products(*out.shape[-2:], K),
        by=divisors(a.divisor, b.divisor),
        SPLIT=split,
        A_STORED=a.stored > 0,
        B_STORED=b.stored > 0,
        **({"first_step": 0, "STEPS": Steps(GROUP_COLUMNS, NO_LIMIT)} | options),
    )


def _kinds(a: DecodedGroups, b: DecodedGroups) -> FactorKinds:
    return FactorKinds(*(_factor_kind(side).value for side in (a, b)))


def _factor_kind(side: DecodedGroups) -> Any:
    return dc.NO_FACTOR if side.amax is None else dc.ROW_FACTOR if side.by_row else dc.TENSOR_FACTOR


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
