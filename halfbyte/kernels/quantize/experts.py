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
from halfbyte.kernels.device.operands import Places, Pointers, Sizes, StridedMatrix, WrittenOperand
from halfbyte.kernels.device.tiles import quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import strips
from halfbyte.kernels.route import Choice
from halfbyte.layout import Blocks, row_bytes
from halfbyte.sides import Side
from halfbyte.spec import NVFP4, Spec


@jit(do_not_specialize=("col_tiles", "row_tiles"))
def quantize_experts_kernel(
    x_ptr, to, sizes, constants, col_tiles, row_tiles, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    """One program quantizes N groups of R rows; row_tiles.count tiles are an expert."""
    x = StridedMatrix(x_ptr, sizes.rows, sizes.cols, sizes.stride_r, sizes.stride_c)
    out = WrittenOperand(to, sizes.blocks, Places(), constants)
    line = pm.divide(tl.program_id(0), col_tiles)
    i_row, i_group = line * R, (tl.program_id(0) - line * col_tiles.count) * N
    loaded = read_row_tile(i_row, i_group, x, RULE, R, N)
    expert = pm.divide(line, row_tiles)
    p_amax = out.to.amax_ptr if RULE.row_amax else out.to.amax_ptr + expert
    factors = sc.operand_factors(p_amax, out.constants, RULE)
    quantize_row_tile(i_row, i_group, x, out, RULE, False, R, N, factors, loaded)


def quantize_experts(choice: Choice, w: Tensor, side: Side) -> Blocks:
    """Quantize experts along their rows.

    Args:
        choice: of `grouped_route.choose_grouped`, of strips or of this kernel.
        w: [E, N, K].
        side: what is asked for; its amax is fp32 [E] or [E, N].

    Returns:
        Blocks of [E, N, K]; transient: bf16 element * block_scale as qdata, and no scales.
    """
    spec, amax, decoded = side.spec, side.amax, side.transient
    if not spec.format.has_amax:
        amax = w.new_empty(0, dtype=torch.float32)
    elif amax is None:
        amax = experts_amax(w, spec)
    if choice.kernel == "quantize_tiles_kernel":
        return strips.quantize_tiles(choice, w, spec, amax, decoded=decoded)
    experts, rows, cols = w.shape
    blocks = cols // spec.block_length
    size = cols if decoded else row_bytes(cols, spec)
    qdata = w.new_empty((experts, rows, size), dtype=torch.bfloat16 if decoded else torch.uint8)
    scale = w.new_empty(0 if decoded else (experts, rows, blocks), dtype=torch.uint8)
    quantize_experts_kernel[choice.grid](
        w,
        Pointers(qdata if decoded else qdata.view(torch.int64), scale, amax.contiguous()),
        Sizes(experts * rows, cols, blocks, cols, 1),
        sc.constants_of(spec),
        pm.Divisor.of(choice.facts),
        pm.Divisor.of(rows // choice.constants["R"]),
        **choice.constants,
        enable_fp_fusion=False,
    )
    return Blocks(qdata, scale, amax)


def experts_amax(w: Tensor, spec: Spec) -> Tensor:
    """Return the amax of every expert [E], or of its rows [E, N]: to the kernel of one tensor, long rows."""
    by_row = NVFP4(outer="row")
    if spec.has_row_amax:
        return operand_amax(w.view(-1, w.shape[-1]), by_row, None).view(w.shape[:2])
    return operand_amax(w.view(w.shape[0], -1), by_row, None)
