"""Quantize a small tensor in one launch: a single program finds the amax, and then quantizes what it has just read."""

from __future__ import annotations

import torch
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.loads import load_row_groups
from halfbyte.kernels.device.magnitudes import finite_max
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_row_tile, rotate_group
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.lines import allocate, operand_arguments
from halfbyte.kernels.quantize.route import One
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks
from halfbyte.spec import NVFP4


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


def quantize(choice: Choice) -> Blocks:
    """Quantize an operand with an amax of its own; the same bytes as `halfbyte.kernels.quantize.lines.quantize`."""
    one: One = choice.request
    x, spec = one.x, one.spec
    by_row = isinstance(spec, NVFP4) and spec.outer == "row"
    amax = torch.empty((x.shape[0],) if by_row else (), dtype=torch.float32, device=x.device)
    out = allocate(x.shape, spec, one.scale_layout, x.device, one.decoded)
    pointers, numbers, constants = operand_arguments(spec, out, amax, one.draw, one.sign_draw)
    quantize_small_kernel[choice.grid](
        x,
        *pointers,
        *x.shape,
        out.blocks,
        *x.stride(),
        *numbers,
        *constants,
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )
    return Blocks(out.qdata, out.block_scale, amax)
