"""Quantize to NVFP4 or MXFP8 in one read of the input: scales, codes and layout in one kernel (docs/numerics.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_col_tile, quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import wide
from halfbyte.kernels.quantize.route import Lines, One
from halfbyte.kernels.route import Choice
from halfbyte.layout import LINEAR, Blocks, ceil_div, round_up, swizzled_numel
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, Spec

# Numbers that differ from call to call and decide no addressing: one compilation serves all.
VARYING = ("stream", "first_block", "sign_stream", "tiles", "magic", "shift")


@jit(do_not_specialize=VARYING)
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
    tiles,
    magic,
    shift,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    LOOP: tl.constexpr,
    DOWN: tl.constexpr,
):
    """One program quantizes LOOP tiles of R rows and N groups, beside each other or, DOWN, below each other."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    constants = (span, floor, inverse, unit)
    NEXT_ROW: tl.constexpr = R if DOWN else 0
    NEXT_GROUP: tl.constexpr = 0 if DOWN else N
    outer = pm.divide(tl.program_id(0), magic, shift)
    i_row = outer * (R + (LOOP - 1) * NEXT_ROW)
    i_group = (tl.program_id(0) - outer * tiles) * (N + (LOOP - 1) * NEXT_GROUP)
    loaded = read_row_tile(i_row, i_group, x_ptr, rows, cols, stride_r, stride_c, RULE, R, N)
    factors = sc.operand_factors(amax_ptr, constants, RULE)
    for step in range(LOOP):
        here = loaded
        if LOOP > 1:
            # The next tile is read before this one is quantized; the last reads itself again, from the cache.
            i_next = tl.minimum(step + 1, LOOP - 1)
            i_next_row, i_next_group = i_row + i_next * NEXT_ROW, i_group + i_next * NEXT_GROUP
            loaded = read_row_tile(i_next_row, i_next_group, x_ptr, rows, cols, stride_r, stride_c, RULE, R, N)
        quantize_row_tile(
            i_row + step * NEXT_ROW,
            i_group + step * NEXT_GROUP,
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
            constants,
            RULE,
            SWIZZLED,
            R,
            N,
            factors,
            here,
        )


@jit(do_not_specialize=VARYING)
def quantize_cols_kernel(
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
    tiles,
    magic,
    shift,
    RULE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    constants = (span, floor, inverse, unit)
    tile = tl.program_id(0)
    outer = pm.divide(tile, magic, shift)
    quantize_col_tile(
        outer * N,
        (tile - outer * tiles) * C,
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
        constants,
        RULE,
        SWIZZLED,
        N,
        C,
    )


def divisor(n: int) -> tuple[int, int, int]:
    """Return n with (magic, shift) for `primitives.divide`: Granlund and Montgomery's multiplication, 30 bits wide."""
    bits = (n - 1).bit_length()
    return n, ceil_div(1 << (30 + bits), n), 30 + bits


class Output(NamedTuple):
    """The tensors that a kernel fills, [rows, blocks] blocks; decoded: qdata is bf16 values, without scales."""

    qdata: Tensor
    block_scale: Tensor
    rows: int
    blocks: int
    swizzled: bool
    decoded: bool


def allocate(
    shape: tuple[int, int], spec: Spec, scale_layout: str, device: torch.device, decoded: bool = False
) -> Output:
    """Return unwritten qdata and block_scale of an operand of `shape`."""
    rows, cols = shape
    blocks = round_up(cols, spec.alignment) // spec.block_length
    if decoded:
        values = torch.empty(rows, blocks * spec.block_length, dtype=torch.bfloat16, device=device)
        return Output(values, torch.empty(0, dtype=torch.uint8, device=device), rows, blocks, False, True)
    bytes_per_block = 8 if isinstance(spec, NVFP4) else spec.block_length
    qdata = torch.empty(rows, blocks * bytes_per_block, dtype=torch.uint8, device=device)
    swizzled = scale_layout != LINEAR
    size = (swizzled_numel(rows, blocks),) if swizzled else (rows, blocks)
    return Output(qdata, torch.empty(size, dtype=torch.uint8, device=device), rows, blocks, swizzled, False)


def operand_arguments(spec: Spec, out: Output, amax: Tensor, draw: Draw | None, sign_draw: Draw | None) -> tuple:
    """Return the kernels' arguments of one operand in three runs: pointers, numbers, constants."""
    base = sign_base = None
    stream = first_block = blocks_per_row = sign_stream = 0
    if spec.needs_rng:
        assert draw is not None, "stochastic rounding needs a draw"
        base, stream, first_block, blocks_per_row = draw
        blocks_per_row = out.blocks if blocks_per_row is None else blocks_per_row
    if spec.needs_sign_rng:
        assert sign_draw is not None, "fresh signs need a draw"
        sign_base, sign_stream = sign_draw.base, sign_draw.stream
    qdata = out.qdata if out.decoded else out.qdata.view(torch.int64)
    pointers = (qdata, out.block_scale, amax, base, sign_base)
    return pointers, (stream, first_block, blocks_per_row, sign_stream), sc.constants_of(spec)


def quantize(choice: Choice) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        choice: of rows, columns or a wide rotation.

    Returns:
        Blocks of the [rows, K] matrix; MXFP8 has an empty amax.
    """
    one: One = choice.request
    amax = one.amax
    if isinstance(one.spec, MXFP8):
        amax = torch.empty(0, dtype=torch.float32, device=one.x.device)
    elif amax is None:
        amax = operand_amax(one.x, one.spec, one.sign_draw)
    out = allocate(one.x.shape, one.spec, one.scale_layout, one.x.device, one.decoded)
    lines: Lines = choice.facts
    long = _in_rows_of(lines, out)
    arguments = operand_arguments(one.spec, long, amax, lines.draw, one.sign_draw)
    launch = LAUNCHES[choice.kernel]
    launch(choice, arguments)
    return Blocks(out.qdata, out.block_scale, amax)


def nothing(one: One) -> Blocks:
    """Return the operand of a tensor without values."""
    amax = torch.empty(0, dtype=torch.float32, device=one.x.device)
    if not isinstance(one.spec, MXFP8):
        amax = operand_amax(one.x, one.spec, one.sign_draw) if one.amax is None else one.amax
    out = allocate(one.x.shape, one.spec, one.scale_layout, one.x.device, one.decoded)
    return Blocks(out.qdata, out.block_scale, amax)


def _in_rows_of(lines: Lines, out: Output) -> Output:
    """Return the same memory in rows as `lines` has them."""
    if lines.rows == out.rows:
        return out
    qdata, scale = (t.view(lines.rows, -1) if t.numel() else t for t in (out.qdata, out.block_scale))
    return Output(qdata, scale, lines.rows, lines.blocks, False, out.decoded)


def _launch_rows(choice: Choice, arguments: tuple) -> None:
    lines: Lines = choice.facts
    pointers, numbers, constants = arguments
    quantize_rows_kernel[choice.grid](
        lines.x,
        *pointers,
        *lines.x.shape,
        lines.blocks,
        *lines.x.stride(),
        *numbers,
        *constants,
        *divisor(lines.beside),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )


def _launch_cols(choice: Choice, arguments: tuple) -> None:
    lines: Lines = choice.facts
    pointers, numbers, constants = arguments
    quantize_cols_kernel[choice.grid](
        lines.x,
        *pointers,
        *lines.x.shape,
        lines.blocks,
        *lines.x.stride(),
        *numbers,
        *constants,
        *divisor(lines.beside),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )


LAUNCHES = {
    "quantize_rows_kernel": _launch_rows,
    "quantize_cols_kernel": _launch_cols,
    "quantize_wide_kernel": wide.launch,
}
