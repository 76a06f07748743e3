"""What the cast of primary weights works on: whole weights of 16x16 tiles, and flat pieces of their fp32 masters.

The elements of a weight [N, K] are numbered row by row, `pitch` numbers to a row: K of them for masters without padding
(docs/numerics.md section 9), K rounded up to 16 in buffers whose rows are padded like the packed codes. A piece is a
run of these numbers: it may start and end anywhere. All tiles of a list of weights are numbered one after another, row
of tiles by row of tiles; a compact buffer holds one scale byte for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import Blocks, ceil_div
from halfbyte.spec import NVFP4


class CastTarget(NamedTuple):
    """One weight that a list of casts fills.

    rows, cols: N and K.
    spec: NVFP4 in 16x16 tiles.
    dtype: what master values are rounded to before they are quantized.
    blocks: qdata uint8 [N, ceil(K/16) * 8], block_scale uint8 LINEAR or swizzled, amax fp32 [].
    swizzled: whether block_scale is in SWIZZLED_32_4_4 layout.
    first_tile: the number of its first tile.
    slot: which of the list's amaxes is its own; weights that share an amax have the same.
    turned: the blocks of its transpose, LINEAR; None if nobody wants them.
    """

    rows: int
    cols: int
    spec: NVFP4
    dtype: torch.dtype
    blocks: Blocks
    swizzled: bool
    first_tile: int
    slot: int
    turned: Blocks | None = None

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return ceil_div(self.rows, NVFP4_BLOCK), ceil_div(self.cols, NVFP4_BLOCK)

    @property
    def tile_count(self) -> int:
        rows, cols = self.tiles
        return rows * cols


class Piece(NamedTuple):
    """A run of a weight's elements: master values and the bytes that their codes go to.

    target: the weight.
    values: fp32, bf16 or fp16 [n], contiguous.
    start: the number of its first element.
    pitch: element numbers to a row, at least target.cols; those beyond the columns are padding.
    codes: uint8, 1-D and contiguous, the packed bytes of the weight from byte `first_byte` on.
    """

    target: CastTarget
    values: Tensor
    start: int
    pitch: int
    codes: Tensor
    first_byte: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    def whole_tile_rows(self) -> tuple[int, int]:
        """Return the first and one past the last row of tiles that lies in the piece entirely."""
        stripe = NVFP4_BLOCK * self.pitch
        ends = self.stop == self.target.rows * self.pitch
        stop = self.target.tiles[0] if ends else self.stop // stripe
        return ceil_div(self.start, stripe), stop

    def from_whole_tiles(self) -> tuple[int, Tensor]:
        """Return the first row of the whole tile rows and their values [rows, cols]; no rows if there are none."""
        first, last = self.whole_tile_rows()
        row, end = first * NVFP4_BLOCK, min(last * NVFP4_BLOCK, self.target.rows)
        if end <= row:
            return row, self.values.new_empty(0, self.target.cols)
        inside = self.values[row * self.pitch - self.start : end * self.pitch - self.start]
        return row, inside.view(end - row, self.pitch)[:, : self.target.cols]


def code_bytes(cols: int, pitch: int, start: int, stop: int) -> tuple[int, int]:
    """Return the range of packed bytes that hold the elements start to stop - 1, both borders included in part.

    Args:
        cols: K.
        pitch: element numbers to a row, at least K.
        start, stop: element numbers.

    Returns:
        first and one past the last byte of the flattened qdata; the padding behind a row's last element belongs to it.
    """
    row_bytes = ceil_div(cols, NVFP4_BLOCK) * NVFP4_BLOCK // 2
    if stop <= start:
        return (at := start // pitch * row_bytes + start % pitch // 2), at
    last_row, last_col = divmod(stop - 1, pitch)
    end = row_bytes if last_col >= cols - 1 else last_col // 2 + 1
    return start // pitch * row_bytes + start % pitch // 2, last_row * row_bytes + end


def cut_tile_rows(pitch: int, rows: int, borders: list[int]) -> list[int]:
    """Return the rows of tiles that a border between two shards cuts, ascending.

    Args:
        pitch, rows: of the weight.
        borders: element numbers where a shard starts or ends.
    """
    stripe = NVFP4_BLOCK * pitch
    return sorted({border // stripe for border in borders if border % stripe and 0 < border < rows * pitch})


def tiles_before(tile_cols: int, element: int) -> int:
    """Return how many tiles start before an element in rows padded to whole blocks: the tiles of those who hold them.

    Args:
        tile_cols: columns of tiles; a row has 16 * tile_cols elements.
        element: a multiple of 16.
    """
    if tile_cols == 0:
        return 0
    block = element // NVFP4_BLOCK
    rows, rest = divmod(block, NVFP4_BLOCK * tile_cols)
    return rows * tile_cols + min(rest, tile_cols)
