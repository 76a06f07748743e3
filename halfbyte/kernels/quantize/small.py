"""Quantize a small tensor in one launch: a single program finds the amax, and then quantizes what it has just read."""

from __future__ import annotations

import torch
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.loads import load_row_groups
from halfbyte.kernels.device.magnitudes import finite_max
from halfbyte.kernels.device.operands import StridedMatrix, WrittenOperand, arguments_of, varying
from halfbyte.kernels.device.overlap import OVERLAP_CAPABILITY, begin, placed_early
from halfbyte.kernels.device.tiles import quantize_row_tile, rotate_group
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize.lines import output_of, written
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks, amax_shape


@jit(do_not_specialize=varying("places"))
def quantize_small_kernel(
    x_ptr, to, sizes, places, constants, RULE: tl.constexpr, SWIZZLED: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    """Write the amax of a StridedMatrix and its codes and scales, a WrittenOperand; one program covers everything."""
    begin(RULE.hardware >= OVERLAP_CAPABILITY)
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, places, constants)
    row, group = tl.arange(0, R), tl.arange(0, N)
    in_row = row < x.rows
    row64 = row.to(tl.int64)
    xs = load_row_groups(x.ptr, row64 * x.stride_r, in_row, group * RULE.group, x.cols, x.stride_c, RULE.group)
    if RULE.norm != 0.0:
        pairs = rotate_group(xs, out.to.sign_ptr, out.places.sign_stream, x.ptr.dtype.element_ty == tl.bfloat16, RULE)
        xs = pm.unpack_pairs(pairs, 0, RULE.group)
    m = tl.max(finite_max(xs).to(tl.float32, bitcast=True), axis=1)
    if RULE.row_amax:
        tl.store(out.to.amax_ptr + row64, m, mask=in_row)
    else:
        tl.store(out.to.amax_ptr, tl.max(m, axis=0))
    tl.debug_barrier()  # every thread reads the amax below
    quantize_row_tile(0, 0, x, out, RULE, SWIZZLED, R, N)


def quantize_small(choice: Choice) -> Blocks:
    """Quantize an operand with an amax of its own; the same bytes as `halfbyte.kernels.quantize.lines.quantize_any`."""
    x, side, _ = choice.request
    amax = torch.empty(amax_shape(x.shape[0], side.spec), dtype=torch.float32, device=x.device)
    out = output_of(x, side)
    quantize_small_kernel[choice.grid](
        *arguments_of(x, written(side, out, amax)),
        **choice.constants,
        enable_fp_fusion=False,
        **placed_early(choice.constants["RULE"].hardware),
    )
    return Blocks(out.qdata, out.block_scale, amax)
