"""Quantize to NVFP4 in one read of the input: scales, codes and layout in one kernel (docs/numerics.md sections 2 to 8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels import primitives as pm
from halfbyte.kernels import scaling as sc
from halfbyte.kernels.decode import INTERPRETED, swizzled_offset
from halfbyte.layout import LINEAR, Blocks, ceil_div, check_scale_layout, matrix_shape, round_up, swizzled_numel
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec


@triton.jit
def load_row_groups(x_ptr, o_row, in_row, o_col, cols, stride_c, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [R, N]: element i of the groups that start in columns o_col [N] of rows o_row [R].

    Each thread loads whole groups in pieces of 16 bytes.
    """
    R: tl.constexpr = o_row.shape[0]
    N: tl.constexpr = o_col.shape[0]
    WIDTH: tl.constexpr = 4 if x_ptr.dtype.element_ty == tl.float32 else 8
    xs = ()
    for piece in tl.static_range(SIZE // WIDTH):
        col = o_col[None, :, None] + (piece * WIDTH + tl.arange(0, WIDTH))[None, None, :]
        pointers = x_ptr + o_row[:, None, None] + col.to(tl.int64) * stride_c
        x = tl.load(pointers, mask=in_row[:, None, None] & (col < cols), other=0.0).to(tl.float32)
        if WIDTH == 8:
            xs = xs + pm.split_eight(x, R, N)
        else:
            xs = xs + pm.split_four(x, R, N)
    return xs


@triton.jit
def load_col_groups(x_ptr, o_group, rows, o_col, in_col, stride_r, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [N, C]: element i of the groups that start in rows o_group [N], in columns o_col [C]."""
    xs = ()
    for i in tl.static_range(SIZE):
        row = o_group + i
        pointers = x_ptr + row.to(tl.int64)[:, None] * stride_r + o_col[None, :]
        x = tl.load(pointers, mask=(row < rows)[:, None] & in_col[None, :], other=0.0)
        xs = xs + (x.to(tl.float32),)
    return xs


@triton.jit
def rotate_group(xs, x_dtype: tl.constexpr, sign_ptr, sign_stream, RULE: tl.constexpr):
    """Round to bf16 and rotate if the rule says so."""
    if RULE.norm == 0.0:
        return xs
    if x_dtype != tl.bfloat16:
        xs = pm.round_bf16(xs)
    if RULE.fresh:
        words = pm.sign_words(pm.draw_words(sign_ptr, sign_stream))
    else:
        words = ()
    return pm.rotate(xs, RULE.norm, RULE.group, RULE.fresh, words)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    draw_ptr,
    sign_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    stride_c,
    stream,
    first_block,
    blocks_per_row,
    sign_stream,
    span,
    floor,
    inverse,
    unit,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
):
    """Quantize R rows of N groups along the rows of x; q int64 [rows, blocks], one word a block."""
    G: tl.constexpr = RULE.group // 16
    col_tiles = tl.cdiv(tl.cdiv(blocks, 4) * 4 if SWIZZLED else blocks, N * G)
    row = tl.program_id(0) // col_tiles * R + tl.arange(0, R)
    block = (tl.program_id(0) % col_tiles * N + tl.arange(0, N)) * G
    in_row = row < rows
    row64 = row.to(tl.int64)
    if RULE.row_amax:
        amax = tl.load(amax_ptr + row64, mask=in_row, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr)
    factors = sc.tensor_factors(amax, span, floor, inverse)
    xs = load_row_groups(x_ptr, row64 * stride_r, in_row, block * 16, cols, stride_c, RULE.group)
    xs = rotate_group(xs, x_ptr.dtype.element_ty, sign_ptr, sign_stream, RULE)
    if RULE.rounding == "stochastic":
        key = pm.draw_words(draw_ptr, stream)
    for g in tl.static_range(G):
        o_block = block + g
        if RULE.rounding == "stochastic":
            random = pm.block_words(first_block + row64[:, None] * blocks_per_row + o_block[None, :], key)
        else:
            random = ()
        codes, scale = sc.quantize_block(xs, g * 16, factors, unit, random, RULE, 0)
        inside = in_row[:, None] & (o_block < blocks)[None, :]
        tl.store(q_ptr + row64[:, None] * blocks + o_block[None, :], codes, mask=inside)
        if SWIZZLED:
            # The kernel covers whole 128x4 tiles of scales: zeros in their padding.
            padded = (o_block < tl.cdiv(blocks, 4) * 4)[None, :] & (row < tl.cdiv(rows, 128) * 128)[:, None]
            p_scale = scale_ptr + swizzled_offset(row[:, None], o_block[None, :], blocks)
            tl.store(p_scale, tl.where(inside, scale, 0), mask=padded)
        else:
            tl.store(scale_ptr + row64[:, None] * blocks + o_block[None, :], scale, mask=inside)


class Tile(NamedTuple):
    """What one program covers: R rows of N groups (or N groups of C columns), and its warps."""

    rows: int
    groups: int
    num_warps: int


def row_tile(rows: int, groups: int, rule: sc.Rule) -> Tile:
    """Return the tile of the row kernel for a [rows, groups] operand."""
    total = 1024 if INTERPRETED else 256 * 16 // rule.group
    least = 16 if rule.tile else 1
    n = min(triton.next_power_of_2(groups), total // least)
    r = max(least, min(total // n, triton.next_power_of_2(rows)))
    return Tile(r, n, 4)


def hardware_fp8(device: torch.device) -> bool:
    """Say whether the device converts to FP8 in hardware: sm_89 on; never in Triton's interpreter."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


class Output(NamedTuple):
    """The tensors a kernel fills, and the sizes it needs."""

    qdata: Tensor
    block_scale: Tensor
    blocks: int


def allocate(rows: int, cols: int, spec: Spec, scale_layout: str, device: torch.device) -> Output:
    """Return unwritten qdata and block_scale of a [rows, cols] operand."""
    blocks = round_up(cols, spec.alignment) // spec.block_length
    bytes_per_block = 8 if isinstance(spec, NVFP4) else spec.block_length
    qdata = torch.empty(rows, blocks * bytes_per_block, dtype=torch.uint8, device=device)
    shape = (rows, blocks) if scale_layout == LINEAR else (swizzled_numel(rows, blocks),)
    return Output(qdata, torch.empty(shape, dtype=torch.uint8, device=device), blocks)


class Place(NamedTuple):
    """The numbers of a Draw as a kernel takes them."""

    base: Tensor | None
    stream: int
    first_block: int
    blocks_per_row: int


def place_of(draw: Draw | None, blocks: int, needed: bool) -> Place:
    if not needed:
        return Place(None, 0, 0, 0)
    assert draw is not None, "this spec needs a draw"
    return Place(draw.base, draw.stream, draw.first_block, blocks if draw.blocks_per_row is None else draw.blocks_per_row)


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        spec: NVFP4 or MXFP8.
        draw: random bytes of stochastic rounding.
        sign_draw: fresh signs of the rotation.
        amax: fp32 [] or [rows], used instead of the computed one.
        scale_layout: "linear" or "swizzled_32_4_4".

    Returns:
        Blocks of the [rows, K] matrix; MXFP8 has an empty amax.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    rows, cols = x.shape
    out = allocate(rows, cols, spec, scale_layout, x.device)
    assert amax is not None
    if out.qdata.numel() == 0:
        return Blocks(out.qdata, out.block_scale, amax)
    launch_rows(x, spec, amax, out, draw, sign_draw, scale_layout)
    return Blocks(out.qdata, out.block_scale, amax)


def launch_rows(x, spec, amax, out, draw, sign_draw, scale_layout) -> None:
    rows, cols = x.shape
    rule = sc.rule_of(spec, hardware_fp8(x.device))
    swizzled = scale_layout != LINEAR
    groups = ceil_div(round_up(out.blocks, SWIZZLE_COLS) if swizzled else out.blocks, rule.group // 16)
    tile = row_tile(rows, groups, rule)
    row_tiles = ceil_div(round_up(rows, SWIZZLE_ROWS) if swizzled else rows, tile.rows)
    grid = (row_tiles * ceil_div(groups, tile.groups),)
    place = place_of(draw, out.blocks, spec.rounding == "stochastic")
    sign_place = place_of(sign_draw, 0, spec.needs_sign_rng)
    quantize_rows_kernel[grid](
        x,
        out.qdata.view(torch.int64),
        out.block_scale,
        amax,
        place.base,
        sign_place.base,
        rows,
        cols,
        out.blocks,
        *x.stride(),
        place.stream,
        place.first_block,
        place.blocks_per_row,
        sign_place.stream,
        *sc.constants_of(spec),
        RULE=rule,
        SWIZZLED=swizzled,
        R=tile.rows,
        N=tile.groups,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
