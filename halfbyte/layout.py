"""Where bytes lie: packing two codes in a byte, scale layouts, padding (docs/numerics.md sections 2 and 8)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import SWIZZLE_COLS, SWIZZLE_ROWS
from halfbyte.spec import Spec

LINEAR = "linear"
SWIZZLED_32_4_4 = "swizzled_32_4_4"
SCALE_LAYOUTS = (LINEAR, SWIZZLED_32_4_4)

GROUP_COLUMNS = 64
"""Groups along the contraction start at multiples of this in storage: columns that a bf16 GEMM multiplies in one step.

So every step belongs to one group, and the codes of a group start at a multiple of 16 bytes, as FP4 tensor cores
demand.
"""


class Blocks(NamedTuple):
    """The plain tensors of one quantized operand, as backends return them.

    qdata: uint8 [rows, bytes]; MXFP8: the element bytes.
    block_scale: uint8 [rows, blocks] or the swizzled buffer: the raw bytes of E4M3 or E8M0.
    amax: fp32 [] or [rows]; empty ([0]) for MXFP8.
    """

    qdata: Tensor
    block_scale: Tensor
    amax: Tensor

    def decoded(self, values: Tensor) -> Blocks:
        """Return the blocks of a transient operand: `values` in place of the codes, and no scales."""
        return Blocks(values, self.block_scale.new_empty(0), self.amax)


class GroupEnds:
    """The ends of the groups of tokens, for operations of one pass: what kernels plan of them is made once.

    Args:
        offsets: integer [E], cumulative ends.
        base: int64 [2], a place in the random stream that the pass wants copied; None for none.

    Attributes:
        plans: that kernels of the pass have made, as they hold them.
        copied: the copy of `base`, once a plan has brought it.
    """

    def __init__(self, offsets: Tensor, base: Tensor | None = None) -> None:
        self.offsets, self.base = offsets, base
        self.plans: list[Any] = []
        self.copied: Tensor | None = None


EndsOfGroups = Tensor | GroupEnds


def as_offsets(groups: EndsOfGroups) -> Tensor:
    """Return the ends of groups."""
    return groups.offsets if isinstance(groups, GroupEnds) else groups


class Operand(NamedTuple):
    """A quantized GEMM operand: its bytes, spec, logical columns and scale layout; 3-D bytes are a matrix per group."""

    blocks: Blocks
    spec: Spec
    cols: int
    scale_layout: str = LINEAR


def ceil_div(n: int, d: int) -> int:
    """Return n / d rounded up."""
    return -(-n // d)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return ceil_div(n, multiple) * multiple


def check_scale_layout(scale_layout: str) -> None:
    """Raise ValueError unless `scale_layout` names one."""
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout={scale_layout!r}: use one of {', '.join(map(repr, SCALE_LAYOUTS))}")


def matrix_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix that a tensor of `shape` is stored as: leading dimensions are rows.

    Raises:
        ValueError: the shape is that of a scalar.
    """
    if len(shape) == 0:
        raise ValueError("x.shape=(): a 0-D tensor has no dimension for blocks; use x.reshape(1)")
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def from_rows(y: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the rows y [M, N] as [..., N] with the leading dimensions of the `shape` they were flattened from."""
    return y if len(shape) == 2 else y.view(*shape[:-1], y.shape[-1])


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, the even column in the low nibble.

    Args:
        codes: uint8 [..., K] with values 0 to 15 and K even.

    Returns:
        uint8 [..., K / 2].

    Raises:
        TypeError: codes is not uint8.
        ValueError: K is odd or the tensor 0-D.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes.dtype={codes.dtype}: give uint8 codes")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes.shape={tuple(codes.shape)}: the last dimension must be even; pad it with zeros")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(qdata: Tensor) -> Tensor:
    """Return the 4-bit codes of packed bytes, the inverse of `pack`.

    Args:
        qdata: uint8 [..., B].

    Returns:
        uint8 [..., 2 * B] with values 0 to 15.

    Raises:
        TypeError: qdata is not uint8.
        ValueError: qdata is 0-D.
    """
    if qdata.dtype != torch.uint8:
        raise TypeError(f"qdata.dtype={qdata.dtype}: give packed uint8 bytes")
    if qdata.dim() == 0:
        raise ValueError("qdata.shape=(): give at least one dimension")
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


def swizzled_numel(rows: int, cols: int) -> int:
    """Return the number of scales in the SWIZZLED_32_4_4 buffer of a [rows, cols] scale matrix."""
    return round_up(rows, SWIZZLE_ROWS) * round_up(cols, SWIZZLE_COLS)


def _check_scales(block_scale: Tensor, dims: int) -> None:
    if block_scale.element_size() != 1:
        raise TypeError(f"block_scale.dtype={block_scale.dtype}: give one-byte scales (uint8 or float8)")
    if block_scale.dim() != dims:
        raise ValueError(f"block_scale.shape={tuple(block_scale.shape)}: give {dims} dimensions")


def swizzle(block_scale: Tensor) -> Tensor:
    """Rearrange LINEAR block scales into the SWIZZLED_32_4_4 buffer that cuBLAS and `scaled_mm` read.

    Scale (i, j) moves to ((i//128 * Cp/4 + j//4) * 32 + i%32) * 16 + (i%128//32) * 4 + j%4, Cp the padded columns.

    Args:
        block_scale: one-byte dtype [rows, cols].

    Returns:
        Same dtype [round_up(rows, 128) * round_up(cols, 4)], zeros in the padding.
    """
    _check_scales(block_scale, 2)
    rows, cols = block_scale.shape
    rows_p, cols_p = round_up(rows, SWIZZLE_ROWS), round_up(cols, SWIZZLE_COLS)
    padded = torch.zeros(rows_p, cols_p, dtype=torch.uint8, device=block_scale.device)
    padded[:rows, :cols] = block_scale.view(torch.uint8)
    tiles = padded.view(rows_p // 128, 4, 32, cols_p // 4, 4)  # i//128, i%128//32, i%32, j//4, j%4
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(block_scale.dtype)


def unswizzle(block_scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the LINEAR [rows, cols] scales of a SWIZZLED_32_4_4 buffer, the inverse of `swizzle`.

    Args:
        block_scale: one-byte dtype [round_up(rows, 128) * round_up(cols, 4)].
        rows, cols: the logical shape.

    Raises:
        ValueError: the buffer does not have the size of a [rows, cols] matrix.
    """
    _check_scales(block_scale, 1)
    expected = swizzled_numel(rows, cols)
    if block_scale.numel() != expected:
        raise ValueError(f"block_scale has {block_scale.numel()} scales, a swizzled [{rows}, {cols}] has {expected}")
    rows_p, cols_p = round_up(rows, SWIZZLE_ROWS), round_up(cols, SWIZZLE_COLS)
    tiles = block_scale.view(torch.uint8).view(rows_p // 128, cols_p // 4, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(rows_p, cols_p)
    return linear[:rows, :cols].contiguous().view(block_scale.dtype)


def group_alignment(spec: Spec) -> int:
    """Return the number of columns that a group along the contraction is padded to in storage."""
    return max(GROUP_COLUMNS, spec.alignment)


def group_ends(offsets: Tensor, multiple: int) -> Tensor:
    """Return where each group ends once every group is padded to a multiple of `multiple`.

    Args:
        offsets: integer [E], the cumulative ends of the unpadded groups.
        multiple: what each size is rounded up to; an empty group stays empty.

    Returns:
        Integer [E] on the same device, nothing read on the host.
    """
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    padded = (sizes + (multiple - 1)).div(multiple, rounding_mode="floor") * multiple
    return padded.cumsum(0, dtype=offsets.dtype)


def padded_groups(total: int, groups: int, multiple: int) -> int:
    """Return the most that `groups` sizes with a sum of at most `total` take once each is padded to `multiple`."""
    return (total + (multiple - 1) * groups) // multiple * multiple


def row_bytes(cols: int, spec: Spec) -> int:
    """Return how many bytes the codes of `cols` columns take, padding included."""
    return round_up(cols, spec.alignment) // spec.format.codes_per_byte


def blocks_per_row(qdata: Tensor, spec: Spec) -> int:
    """Return how many blocks the rows of qdata [..., bytes] hold."""
    return qdata.shape[-1] // spec.format.block_bytes


def amax_shape(rows: int, spec: Spec) -> tuple[int, ...]:
    """Return the shape of the fp32 amax of an operand with `rows` rows."""
    return (0,) if not spec.format.has_amax else (rows,) if spec.has_row_amax else ()


class StoredShapes(NamedTuple):
    """The shapes of an operand's storage: of a grouped one they never follow from the sizes of its groups."""

    qdata: tuple[int, ...]
    block_scale: tuple[int, ...]
    amax: tuple[int, ...]


def stored_shapes(rows: int, cols: int, spec: Spec, scale_layout: str) -> StoredShapes:
    """Return the shapes of the storage of a [rows, cols] operand: qdata, block_scale, amax."""
    blocks = round_up(cols, spec.alignment) // spec.block_length
    scale = (rows, blocks) if scale_layout == LINEAR else (swizzled_numel(rows, blocks),)
    return StoredShapes((rows, row_bytes(cols, spec)), scale, amax_shape(rows, spec))


def grouped_shapes(
    shape: tuple[int, int], groups: int, spec: Spec, scale_layout: str, *, contraction: bool
) -> StoredShapes:
    """Return the shapes of a [rows, cols] operand's storage whose groups share one of its dimensions.

    Along the rows, group g has the rows offsets[g - 1] to offsets[g], as in the unquantized tensor. Along the
    contraction it starts at column group_ends(offsets, group_alignment(spec))[g - 1], its padding is zeros. Swizzled
    scale regions follow each other without gaps. What lies behind the last group is zeros.

    Args:
        shape: rows and columns, the tokens behind the last group included.
        groups: E.
        spec: how it is quantized.
        scale_layout: "linear" or "swizzled_32_4_4".
        contraction: whether the groups split the columns, not the rows.

    Returns:
        qdata [rows, bytes]; block_scale [rows, blocks] or [bytes of all regions]; amax [E], with outer="row" [rows] or
        along the contraction [E, rows], MXFP8 [0].
    """
    rows, cols = shape
    length = spec.block_length
    if contraction:
        padded = padded_groups(cols, groups, group_alignment(spec))
        region = padded_groups(cols, groups, max(SWIZZLE_COLS * length, spec.alignment)) // length
        swizzled = round_up(rows, SWIZZLE_ROWS) * region
        row_amax = (groups, rows)
    else:
        padded = round_up(cols, spec.alignment)
        swizzled = padded_groups(rows, groups, SWIZZLE_ROWS) * round_up(padded // length, SWIZZLE_COLS)
        row_amax = (rows,)
    amax = (0,) if not spec.format.has_amax else row_amax if spec.has_row_amax else (groups,)
    scale = (rows, padded // length) if scale_layout == LINEAR else (swizzled,)
    return StoredShapes((rows, padded // spec.format.codes_per_byte), scale, amax)
