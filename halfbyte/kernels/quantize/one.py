"""Quantize one matrix along its rows: what `route.choose_one_side` chooses is launched."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.quantize import lines, small, strips
from halfbyte.kernels.quantize.route import ALONE, OneSide, choose_one_side
from halfbyte.layout import Blocks, check_scale_layout, matrix_shape
from halfbyte.sides import Side

LAUNCHERS = {"quantize_small_kernel": small.quantize_small, "quantize_tiles_kernel": strips.quantize_strips}


def quantize_side(x: Tensor, side: Side, of: str = ALONE) -> Blocks:
    """Quantize along the last dimension; the same bytes as `halfbyte.reference.quantize`.

    Args:
        x: bf16, fp16 or fp32 [..., K], at least 1-D, any strides; leading dimensions are rows.
        side: what is asked for; a transient one is element * block_scale in bf16 [rows, padded K], without scales.
        of: as in `OneSide`.
    """
    check_scale_layout(side.scale_layout)
    request = OneSide(x.reshape(matrix_shape(x.shape)), side, of)
    if not request.x.numel():
        return lines.without_values(request)
    choice = choose_one_side(request)
    return LAUNCHERS.get(choice.kernel, lines.quantize_any)(choice)
