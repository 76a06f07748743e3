"""Quantize a small tensor in one launch: a single program finds the amax, and then quantizes what it has just read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.loads import load_row_groups
from halfbyte.kernels.device.magnitudes import finite_max
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_row_tile, rotate_group
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.lines import allocate, operand_arguments
from halfbyte.kernels.quantize.wide import WIDE
from halfbyte.layout import LINEAR, Blocks, ceil_div, check_scale_layout, matrix_shape, round_up
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec

MAX_VALUES = 16384  # 64 a thread: more take longer in one program than a second launch does
NUM_WARPS = 8


@jit(do_not_specialize=("stream", "first_block", "sign_stream"))
def quantize_small_kernel(
    x_ptr, q_ptr, scale_ptr, amax_ptr, draw_ptr, sign_ptr, rows, cols, blocks, stride_r, stride_c, stream, first_block,
    blocks_per_row, sign_stream, span, floor, inverse, unit,
    RULE: tl.constexpr, SWIZZLED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the amax of x [rows, cols] and its codes and scales [rows, blocks]; one program covers everything."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    row, group = tl.arange(0, R), tl.arange(0, N)
    in_row = row < rows
    row64 = row.to(tl.int64)
    xs = load_row_groups(x_ptr, row64 * stride_r, in_row, group * RULE.group, cols, stride_c, RULE.group)
    if RULE.norm != 0.0:
        pairs = rotate_group(xs, sign_ptr, sign_stream, x_ptr.dtype.element_ty == tl.bfloat16, RULE)
        xs = pm.unpack_pairs(pairs, 0, RULE.group)
    m = tl.max(finite_max(xs).to(tl.float32, bitcast=True), axis=1)
    if RULE.row_amax:
        tl.store(amax_ptr + row64, m, mask=in_row)
    else:
        tl.store(amax_ptr, tl.max(m, axis=0))
    tl.debug_barrier()  # every thread reads the amax below
    constants = (span, floor, inverse, unit)
    quantize_row_tile(
        0, 0, x_ptr, q_ptr, scale_ptr, amax_ptr, draw_ptr, sign_ptr, rows, cols, blocks, stride_r, stride_c, stream,
        first_block, blocks_per_row, sign_stream, constants, RULE, SWIZZLED, R, N,
    )  # fmt: skip


def tile(shape: tuple[int, int], spec: Spec, scale_layout: str) -> tuple[int, int]:
    """Return rows and groups of a tile that covers an operand, the padding of swizzled scales included."""
    rows, cols = shape
    blocks = round_up(cols, spec.alignment) // spec.block_length
    if scale_layout != LINEAR:
        rows, blocks = round_up(rows, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLS)
    groups = ceil_div(blocks * spec.block_length, spec.alignment)
    least = 16 if isinstance(spec, NVFP4) and spec.is_tile else 1
    return max(least, int(triton.next_power_of_2(rows))), int(triton.next_power_of_2(groups))


def fits(x: Tensor, spec: Spec, scale_layout: str) -> bool:
    """Say whether `quantize` here takes x [..., K] with an amax of its own."""
    if not isinstance(spec, NVFP4) or spec.alignment >= WIDE or not 0 < x.numel() <= MAX_VALUES:
        return False
    r, n = tile(matrix_shape(x.shape), spec, scale_layout)
    return r * n * spec.alignment <= MAX_VALUES


def quantize(
    x: Tensor,
    spec: NVFP4,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    scale_layout: str = LINEAR,
    decoded: bool = False,
) -> Blocks:
    """Quantize an operand for which `fits` holds; the same bytes as `halfbyte.kernels.quantize.lines.quantize`.

    Args:
        x: bf16, fp16 or fp32 [..., K], any strides.
        spec: NVFP4.
        draw, sign_draw: as there.
        scale_layout: "linear" or "swizzled_32_4_4".
        decoded: as there.
    """
    check_scale_layout(scale_layout)
    x = x.reshape(matrix_shape(x.shape))
    amax = torch.empty((x.shape[0],) if spec.outer == "row" else (), dtype=torch.float32, device=x.device)
    out = allocate(x.shape, spec, scale_layout, x.device, decoded)
    pointers, numbers, constants = operand_arguments(spec, out, amax, draw, sign_draw)
    r, n = tile(x.shape, spec, scale_layout)
    rule = sc.rule_of(spec, sc.hardware_of(x.device))._replace(decoded=decoded)
    quantize_small_kernel[(1,)](
        x,
        *pointers,
        *x.shape,
        out.blocks,
        *x.stride(),
        *numbers,
        *constants,
        RULE=rule,
        SWIZZLED=out.swizzled,
        R=r,
        N=n,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **placed_early(rule.hardware),
    )
    return Blocks(out.qdata, out.block_scale, amax)
