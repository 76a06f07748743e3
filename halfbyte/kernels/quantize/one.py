"""Quantize one matrix along its rows: what `route.one` chooses is launched."""

from __future__ import annotations

from halfbyte.kernels.quantize import lines, small, strips
from halfbyte.kernels.quantize.route import One, one
from halfbyte.layout import Blocks

LAUNCHERS = {"quantize_small_kernel": small.quantize, "quantize_tiles_kernel": strips.quantize}


def quantize(request: One) -> Blocks:
    """Return the operand that is asked for; nothing is launched for a tensor without values."""
    if not request.x.numel():
        return lines.nothing(request)
    choice = one(request)
    return LAUNCHERS.get(choice.kernel, lines.quantize)(choice)
