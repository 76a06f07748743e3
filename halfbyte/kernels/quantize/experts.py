"""Quantize the weights of experts along their rows.

Experts of equal size need no plan: they are one tall matrix whose rows know their expert by a division.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.tiles import quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import strips
from halfbyte.kernels.quantize.grouped_route import Grouped
from halfbyte.kernels.quantize.lines import divisor
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks
from halfbyte.spec import MXFP8, NVFP4


@jit(do_not_specialize=("col_tiles", "magic", "shift", "row_tiles", "row_magic", "row_shift"))
def quantize_experts_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    cols,
    blocks,
    stride_r,
    span,
    floor,
    inverse,
    unit,
    col_tiles,
    magic,
    shift,
    row_tiles,
    row_magic,
    row_shift,
    RULE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
):
    """One program quantizes N groups of R rows; row_tiles tiles are an expert."""
    constants = (span, floor, inverse, unit)
    line = pm.divide(tl.program_id(0), magic, shift)
    i_row, i_group = line * R, (tl.program_id(0) - line * col_tiles) * N
    loaded = read_row_tile(i_row, i_group, x_ptr, rows, cols, stride_r, 1, RULE, R, N)
    expert = pm.divide(line, row_magic, row_shift)
    if not RULE.row_amax:
        amax_ptr += expert
    factors = sc.operand_factors(amax_ptr, constants, RULE)
    quantize_row_tile(
        i_row, i_group, x_ptr, q_ptr, scale_ptr, amax_ptr, None, None, rows, cols, blocks, stride_r, 1, 0, 0, 0, 0,
        constants, RULE, False, R, N, factors, loaded,
    )  # fmt: skip


def quantize_experts(choice: Choice, amax: Tensor | None) -> Blocks:
    """Quantize experts along their rows.

    Args:
        choice: of `grouped_route.grouped`, of strips or of this kernel.
        amax: fp32 [E] or [E, N], used instead of the computed one.

    Returns:
        Blocks of [E, N, K]; decoded: bf16 element * block_scale as qdata, and no scales.
    """
    call: Grouped = choice.request
    w, spec, decoded = call.x, call.row, call.decoded
    assert spec is not None, "the rows are wanted"
    if isinstance(spec, MXFP8):
        amax = w.new_empty(0, dtype=torch.float32)
    elif amax is None:
        amax = experts_amax(w, spec)
    if choice.kernel == "quantize_tiles_kernel":
        assert isinstance(spec, NVFP4), "strips are of NVFP4"
        return strips.quantize_tiles(choice, w, spec, amax, decoded=decoded)
    experts, rows, cols = w.shape
    blocks = cols // spec.block_length
    size = cols if decoded else blocks * (8 if isinstance(spec, NVFP4) else spec.block_length)
    qdata = w.new_empty((experts, rows, size), dtype=torch.bfloat16 if decoded else torch.uint8)
    scale = w.new_empty(0 if decoded else (experts, rows, blocks), dtype=torch.uint8)
    quantize_experts_kernel[choice.grid](
        w,
        qdata if decoded else qdata.view(torch.int64),
        scale,
        amax.contiguous(),
        experts * rows,
        cols,
        blocks,
        cols,
        *sc.constants_of(spec),
        *divisor(choice.facts),
        *divisor(rows // choice.constants["R"]),
        **choice.constants,
        enable_fp_fusion=False,
    )
    return Blocks(qdata, scale, amax)


def experts_amax(w: Tensor, spec: NVFP4) -> Tensor:
    """Return the amax of every expert [E], or of its rows [E, N]: to the kernel of one tensor, long rows."""
    by_row = NVFP4(outer="row")
    if spec.outer == "row":
        return operand_amax(w.view(-1, w.shape[-1]), by_row, None).view(w.shape[:2])
    return operand_amax(w.view(w.shape[0], -1), by_row, None)
