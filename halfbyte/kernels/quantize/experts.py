"""Quantize the weights of experts along their rows.

Experts of equal size need no plan: they are one tall matrix whose rows know their expert by a division.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax.plain import operand_amax
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.tiles import quantize_row_tile, read_row_tile
from halfbyte.kernels.launch import jit
from halfbyte.kernels.quantize import strips
from halfbyte.kernels.quantize.lines import divisor, is_packed
from halfbyte.layout import Blocks, row_bytes
from halfbyte.spec import NVFP4, Spec


class ExpertsTile(NamedTuple):
    """Rows, columns and warps of a program."""

    rows: int
    cols: int
    num_warps: int


TILE = ExpertsTile(16, 256, 4)


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


def fits(w: Tensor, spec: Spec) -> bool:
    """Say whether whole tiles cover experts [E, N, K] and `spec` neither rotates nor draws."""
    if isinstance(spec, NVFP4) and strips.fits(w, spec):
        return True
    if spec.needs_rng or (isinstance(spec, NVFP4) and spec.rotation) or w.numel() == 0 or not w.is_contiguous():
        return False
    _, rows, cols = w.shape
    return is_packed(w.view(-1, cols)) and rows % TILE.rows == 0 and cols % TILE.cols == 0


def quantize_experts(w: Tensor, spec: Spec, amax: Tensor | None, *, decoded: bool) -> Blocks:
    """Quantize experts that fit.

    Args:
        w: bf16 [E, N, K].
        amax: fp32 [E] or [E, N], used instead of the computed one.
        decoded: return element * block_scale, bf16 [E, N, K], as qdata, and no scales.

    Returns:
        Blocks of [E, N, K].
    """
    if strips.fits(w, spec):
        return strips.quantize_tiles(w, spec, experts_amax(w, spec) if amax is None else amax, decoded=decoded)
    experts, rows, cols = w.shape
    if not spec.format.has_amax:
        amax = w.new_empty(0, dtype=torch.float32)
    elif amax is None:
        amax = experts_amax(w, spec)
    blocks = cols // spec.block_length
    size = cols if decoded else row_bytes(cols, spec)
    qdata = w.new_empty((experts, rows, size), dtype=torch.bfloat16 if decoded else torch.uint8)
    scale = w.new_empty(0 if decoded else (experts, rows, blocks), dtype=torch.uint8)
    rule = sc.rule_of(spec, sc.hardware_of(w.device))._replace(packed=True, full=True, decoded=decoded)
    col_tiles, row_tiles = cols // TILE.cols, rows // TILE.rows
    quantize_experts_kernel[(experts * row_tiles * col_tiles,)](
        w,
        qdata if decoded else qdata.view(torch.int64),
        scale,
        amax.contiguous(),
        experts * rows,
        cols,
        blocks,
        cols,
        *sc.constants_of(spec),
        *divisor(col_tiles),
        *divisor(row_tiles),
        RULE=rule,
        R=TILE.rows,
        N=TILE.cols // rule.group,
        num_warps=TILE.num_warps,
        enable_fp_fusion=False,
    )
    return Blocks(qdata, scale, amax)


def experts_amax(w: Tensor, spec: Spec) -> Tensor:
    """Return the amax of every expert [E], or of its rows [E, N]: to the kernel of one tensor, long rows."""
    by_row = NVFP4(outer="row")
    if spec.has_row_amax:
        return operand_amax(w.view(-1, w.shape[-1]), by_row, None).view(w.shape[:2])
    return operand_amax(w.view(w.shape[0], -1), by_row, None)
