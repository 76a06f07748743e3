"""What kernels that quantize take, grouped: a matrix that they read, and operands that they write.

Heads take Pointers, Sizes, Places and constants; of these kernels make the StridedMatrix and the WrittenOperand that
device functions take. They do it in place: what a device function returns is no constant any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from halfbyte.kernels.device.scales import Constants


class StridedMatrix(NamedTuple):
    """What a kernel reads: [rows, cols] at `ptr`, strides in elements, less the mean of each column if any."""

    ptr: Any
    rows: Any
    cols: Any
    stride_r: Any
    stride_c: Any
    mean_ptr: Any = None


class Pointers(NamedTuple):
    """Where a kernel writes an operand, and what it reads for that.

    q_ptr: codes in words of int64, or bf16 values.
    scale_ptr: block scales, where codes are written.
    amax_ptr: one number or, by the spec, one for each line.
    draw_ptr, sign_ptr: bases of Draws, int64 [2], of stochastic rounding and of fresh signs.
    """

    q_ptr: Any
    scale_ptr: Any
    amax_ptr: Any
    draw_ptr: Any = None
    sign_ptr: Any = None


class Places(NamedTuple):
    """Where an operand's random bits lie: what its Draws say beside their bases."""

    stream: Any = None
    first_block: Any = None
    blocks_per_row: Any = None
    sign_stream: Any = None


class WrittenOperand(NamedTuple):
    """An operand that a kernel writes, in lines of `blocks`."""

    to: Pointers
    blocks: Any
    places: Places
    constants: Constants


class Sizes(NamedTuple):
    """Of x [rows, cols], strides in elements, and the blocks of a line of its operand, or Both."""

    rows: Any
    cols: Any
    blocks: Any
    stride_r: Any
    stride_c: Any


class Both(NamedTuple):
    """Something of both orientations."""

    row: Any
    col: Any


def arguments_of(x: Tensor, out: WrittenOperand) -> tuple[Tensor, Pointers, Sizes, Places, Constants]:
    """Return the first arguments of a kernel that writes one operand of x [rows, cols].

    Numbers keep the order in which kernels were tuned: the assembler allots registers by it.
    """
    return x, out.to, Sizes(*x.shape, out.blocks, *x.stride()), out.places, out.constants


def arguments_of_both(
    x: Tensor, row: WrittenOperand | None, col: WrittenOperand | None
) -> tuple[Tensor, Both, Sizes, Both, Both]:
    """Return those of a kernel that writes both, or one of them."""
    nothing = WrittenOperand(None, None, None, None)
    to, blocks, places, constants = map(Both, row or nothing, col or nothing)
    return x, to, Sizes(*x.shape, blocks, *x.stride()), places, constants


def varying(*places: str) -> tuple[str, ...]:
    """Return the parts of Places that differ from call to call and decide no address: one compilation serves all."""
    return tuple(f"{name}.{part}" for name in places for part in ("stream", "first_block", "sign_stream"))
