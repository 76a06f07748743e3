"""How FSDP2 splits the rows of a weight over ranks, and which blocks begin in each rank's."""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import ceil_div


class RowShards(NamedTuple):
    """How FSDP2 splits the rows of a weight [rows, cols] over `world` ranks, of which this is `rank`.

    height: rows of a block, 16 or 1; blocks are called tiles here.
    """

    rows: int
    cols: int
    world: int
    rank: int
    height: int = NVFP4_BLOCK

    @property
    def chunk(self) -> int:
        """Rows of rank 0, the most that any rank has."""
        return ceil_div(self.rows, self.world)

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return ceil_div(self.rows, self.height), ceil_div(self.cols, NVFP4_BLOCK)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes, padded to whole blocks."""
        return self.tiles[1] * NVFP4_BLOCK // 2

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank and the one past its last."""
        return min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows)

    def tile_rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of tiles that begins in a rank's rows and the one past the last."""
        start, stop = self.rows_of(rank)
        return ceil_div(start, self.height), ceil_div(stop, self.height)

    @property
    def sent_tile_rows(self) -> int:
        """Rows of tiles in everybody's message: the most that any rank has."""
        return ceil_div(self.chunk, self.height)  # rank 0's, whose rows are the most and begin with a tile

    @property
    def message_bytes(self) -> int:
        """What every rank sends."""
        return self.chunk * self.row_bytes + self.sent_tile_rows * self.tiles[1]

    def order(self) -> list[int]:
        """Return where the scales of each row lie in the messages of all ranks, one after another."""
        spans = [(rank, *self.tile_rows_of(rank)) for rank in range(self.world)]
        tiles = [rank * self.sent_tile_rows + i for rank, start, stop in spans for i in range(stop - start)]
        return [tile for tile in tiles for _ in range(self.height)][: self.rows]
