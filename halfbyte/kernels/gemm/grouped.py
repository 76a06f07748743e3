"""Grouped GEMM on decoded operands: which kernel, which tile, and the launch (docs/internals/grouped.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.gemm.dense import (
    FP32_TILE,
    GROUP,
    MAX_CHAIN,
    POINTER_TILES,
    TMA_TILES,
    Tile,
    describable,
    epilogue_parts,
    tma_tiles,
)
from halfbyte.kernels.gemm.grouped_tile import (
    clear_tail_kernel,
    grouped_pointer_kernel,
    rows_tma_kernel,
    split_tma_kernel,
)
from halfbyte.kernels.groups import Plan, make_plan
from halfbyte.kernels.target import target_of
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

Variant = Literal["auto", "tma", "pointer"]
NO_LIMIT = 1 << 30
LARGE_TILE = Tile(128, 256, 64, 8, 4)
PAIRED_TILE = Tile(128, 128, 64, 4, 3, 1.25)  # two programs a multiprocessor: one stores while the other multiplies
OVERHEAD, PAIRED_OVERHEAD = 345, 140  # of a tile, in columns of the contraction; measured on an H200
CLEAR_TILE = (32, 512)
MIN_TORCH_CAPABILITY = 90  # below, torch's grouped GEMM reads the offsets on the host


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
    exact = a.values.dtype != b.values.dtype or a.values.dtype == torch.float32
    tiles = _map_tiles(out.device, out.dtype)
    b_matrix, b_by_rows = _stacked(b.values, K)
    tma = not exact and b_matrix is not None and describable(a.values) and describable(b_matrix)
    tma = tma and variant != "pointer" and (bool(tiles) or variant == "tma") and K > 0
    if tma and (accumulate or not describable(out)):  # plain stores of the largest tile's output spill registers
        tiles = tuple(tile for tile in tiles or TMA_TILES[1:] if tile.bn < 256)
    usable = (tiles or TMA_TILES[1:]) if tma else POINTER_TILES
    tile = FP32_TILE if exact else _choose(usable, groups, (ceil_div(M, groups), N, K), out.device)
    plan = make_plan(offsets, groups, M, tile.bm, out.device)
    options = {**_factors(a, b), **_tile_arguments(tile), "UPCAST": exact or target_of(out.device).interpreter}
    if not tma:
        grid = (plan.tiles * ceil_div(N, tile.bn),)
        _launch_pointer(grid, (a, b), plan, out, (M, N, K), options, accumulate=accumulate)
        return
    programs = min(_programs(tile, out.device), plan.tiles * ceil_div(N, tile.bn))
    parts = epilogue_parts(tile, out.dtype)
    out_tma = describable(out) and not accumulate
    rows_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(a.values[:, :K], [tile.bm, tile.bk]),
        TensorDescriptor.from_tensor(b_matrix, [tile.bk, tile.bn] if b_by_rows else [tile.bn, tile.bk]),
        TensorDescriptor.from_tensor(out, [tile.bm, tile.bn // parts]) if out_tma else None,
        out,
        out.stride(0),
        table_ptr=plan.table,
        tile_group_ptr=plan.tile_group,
        groups=groups,
        M=M,
        N=N,
        K=K,
        ACCUMULATE=accumulate,
        OUT_TMA=out_tma,
        B_BY_ROWS=b_by_rows,
        PARTS=parts,
        PROGRAMS=programs,
        **options,
    )


def _stacked(b: Tensor, K: int) -> tuple[Tensor | None, bool]:
    """Return experts [E, N, >=K] below each other as a tensor map sees them, and whether the map's columns are N."""
    groups, N, _ = b.shape
    if b.stride(2) == 1 and b.stride(0) == N * b.stride(1):
        return b[:, :, :K].as_strided((groups * N, K), (b.stride(1), 1)), False
    if b.stride(1) == 1 and b.shape[2] == K and b.stride(0) == K * b.stride(2) and K % GROUP_COLUMNS == 0:
        return b.as_strided((groups * K, N), (b.stride(2), 1)), True
    return None, False


def _run_split(a: Side, b: Side, offsets: Tensor, K: int, out: Tensor, accumulate: bool, variant: Variant) -> None:
    groups, M, N = out.shape
    exact = a.values.dtype != b.values.dtype or a.values.dtype == torch.float32
    stored = max(a.stored, b.stored) or GROUP_COLUMNS
    assert not (a.stored and b.stored) or a.stored == b.stored, "operands are padded differently"
    plan = make_plan(offsets, groups, K, stored, out.device)
    tiles = _map_tiles(out.device, out.dtype)
    tma = bool(a.stored and b.stored) and not exact and describable(a.values) and describable(b.values)
    tma = tma and variant != "pointer" and (bool(tiles) or variant == "tma")
    out_tma = tma and describable(out[0]) and describable(out[:, 0])
    tile = FP32_TILE if exact else POINTER_TILES[0]
    if tma:
        tiles = tiles or TMA_TILES[1:]
        if not out_tma:  # plain stores of the largest tile spill registers
            tiles = tuple(t for t in tiles if t.bn < 256)
        tile = _choose(tiles, groups, (M, N, ceil_div(K, groups)), out.device)
    chain = MAX_CHAIN // tile.bk if out.dtype == torch.float32 else NO_LIMIT
    options = {**_factors(a, b), **_tile_arguments(tile), "UPCAST": exact or target_of(out.device).interpreter}
    longest = padded_groups(K, 1, stored)
    for first in range(0, max(longest, 1), min(chain * tile.bk, longest + 1)):
        later = first > 0
        common = {"first_step": first // tile.bk, "LATER": later, "MOST": chain, "STORED": stored}
        work = groups * ceil_div(M, tile.bm) * ceil_div(N, tile.bn)
        if not tma:
            _launch_pointer((work,), (a, b), plan, out, (M, N, K), options | common, accumulate=accumulate or later)
            continue
        programs = min(_programs(tile, out.device), work)
        parts = epilogue_parts(tile, out.dtype)
        split_tma_kernel[(programs,)](
            TensorDescriptor.from_tensor(a.values, [tile.bm, tile.bk]),
            TensorDescriptor.from_tensor(b.values, [tile.bn, tile.bk]),
            TensorDescriptor.from_tensor(out, [1, tile.bm, tile.bn // parts]) if out_tma else None,
            out,
            out.stride(1),
            table_ptr=plan.table,
            groups=groups,
            M=M,
            N=N,
            ACCUMULATE=accumulate or later,
            OUT_TMA=out_tma,
            PARTS=parts,
            PROGRAMS=programs,
            **options,
            **common,
        )


def _launch_pointer(
    grid: tuple[int],
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


def _map_tiles(device: torch.device, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles of tensor-map kernels: on sm_90 with more stages than a dense GEMM affords, unless for fp32."""
    tiles = tma_tiles(target_of(device))
    if TMA_TILES[0] not in tiles or dtype == torch.float32:
        return tiles
    return (LARGE_TILE, PAIRED_TILE, *tiles[1:])


def _programs(tile: Tile, device: torch.device) -> int:
    """Return how many persistent programs run: two a multiprocessor where registers and shared memory hold them."""
    return target_of(device).multiprocessors * (2 if tile == PAIRED_TILE else 1)


def _choose(tiles: tuple[Tile, ...], groups: int, shape: tuple[int, int, int], device: torch.device) -> Tile:
    """Return the tile of least estimated time for `groups` products of one shape; see `gemm.choose_tile`."""
    programs, (M, N, K) = target_of(device).multiprocessors, shape

    def time(tile: Tile) -> float:
        count = groups * ceil_div(M, tile.bm) * ceil_div(N, tile.bn)
        beside = 2 if tile == PAIRED_TILE else 1
        overhead = PAIRED_OVERHEAD if tile == PAIRED_TILE else OVERHEAD
        return ceil_div(count, beside * programs) * beside * (K + overhead) * tile.bm * tile.bn * tile.cost

    return min(tiles, key=time)


def _factors(a: Side, b: Side) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, side in (("a", a), ("b", b)):
        kind = dc.NO_FACTOR if side.amax is None else dc.ROW_FACTOR if side.by_row else dc.TENSOR_FACTOR
        arguments[f"{name}_amax_ptr"] = side.amax
        arguments[f"{name}_floor"] = f32(side.divisor / FLT_MAX)
        arguments[f"{name}_inverse"] = f32(1 / side.divisor)
        arguments[f"{name.upper()}_FACTOR"] = kind.value
    return arguments


def _tile_arguments(tile: Tile) -> dict[str, int]:
    sizes = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP}
    return {**sizes, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def plain_grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor | None:
    """Return torch's grouped GEMM of plain operands where it computes the same and reads nothing on the host, or None.

    Args:
        a, b: as for `grouped_gemm_nt`.
        offsets: integer [E].
        out_dtype: of the result.
    """
    if target_of(a.device).capability < MIN_TORCH_CAPABILITY or out_dtype != torch.bfloat16:
        return None
    if any(t.dtype != torch.bfloat16 or t.numel() == 0 for t in (a, b)) or b.shape[-2] % 8:
        return None
    if b.dim() == 2 and 1 in (a.stride(1), b.stride(1)):  # groups would have to start at multiples of 16 bytes
        return None
    if not all(_torch_describes(t) for t in (a, b)):
        return None
    out = torch._grouped_mm(a, b.mT, offs=offsets.to(torch.int32))
    return clear_tail(out, offsets) if b.dim() == 3 else out


def _torch_describes(t: Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and every other stride is a multiple of 16 bytes."""
    rows, cols = t.stride()[-2:]
    other = rows if cols == 1 else cols
    outer = t.stride(0) if t.dim() == 3 else 0
    return 1 in (rows, cols) and other * 2 % 16 == outer * 2 % 16 == t.data_ptr() % 16 == 0


def clear_tail(out: Tensor, offsets: Tensor) -> Tensor:
    """Write zeros to the rows of out [M, N] behind the last group."""
    rows, cols = CLEAR_TILE
    clear_tail_kernel[(ceil_div(out.shape[0], rows),)](
        out, offsets, out.stride(0), offsets.shape[0], *out.shape, ROWS=rows, COLS=cols
    )
    return out
