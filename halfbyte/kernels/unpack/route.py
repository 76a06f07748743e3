"""How stored operands become values: which pieces a program writes, and why; `DEQUANTIZE` is the table."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from halfbyte.formats import SWIZZLE_ROWS
from halfbyte.kernels.route import Candidate, Choice, Reason, choose, fits_all
from halfbyte.layout import ceil_div

TILES = ((128, 4), (64, 2), (32, 1))
"""(words, warps) of a piece, a word a thread: the widest of which a row fills two."""
LONGEST_ROW = 1024  # words
LINEAR_STEPS = 2  # pieces of a program: side by side, one where it covers a row
SWIZZLED_STEPS = 4  # 32 rows apart, where scales lie together


class Stored(NamedTuple):
    """Write words [rows, words] of codes with their scales as values [rows, cols].

    by_row: whether every row has a factor of its own.
    """

    words: Tensor
    scale: Tensor
    values: Tensor
    swizzled: bool
    by_row: bool


def _pieces(stored: Stored) -> Choice:
    """Plan pieces of rows."""
    (rows, words), cols = stored.words.shape, stored.values.shape[1]
    width, warps = next((tile for tile in TILES if 2 * tile[0] <= words), TILES[-1])
    steps, rows_of_tile = (SWIZZLED_STEPS, SWIZZLE_ROWS) if stored.swizzled else (LINEAR_STEPS, 1)
    steps = 1 if not stored.swizzled and words <= width else steps
    apart = SWIZZLE_ROWS // steps
    row_tiles = rows // SWIZZLE_ROWS * apart + min(rows % SWIZZLE_ROWS, apart) if stored.swizzled else rows
    tile_words = width if stored.swizzled else width * steps
    full = rows % rows_of_tile == words % tile_words == 0 and cols == 8 * words
    constants = {"SWIZZLED": stored.swizzled, "BLOCK_WORDS": width, "STEPS": steps, "FULL": full, "num_warps": warps}
    tensors = stored.words, stored.scale, stored.values
    return Choice("dequantize_kernel", (row_tiles * ceil_div(words, tile_words),), constants, tensors)


def _long_problem(stored: Stored) -> Reason | None:
    words = stored.words
    if stored.swizzled:
        return Reason("swizzled scales lie together by rows")
    if stored.by_row:
        return Reason("every row has a factor of its own")
    if stored.values.shape[1] != 8 * words.shape[1]:
        return Reason("{} columns end inside a row's last word", (stored.values.shape[1],))
    width = min(words.numel() & -words.numel(), LONGEST_ROW)
    if width <= words.shape[1] & -words.shape[1]:
        return Reason("rows of {} words have whole tiles of {} already", (words.shape[1], width))
    if not (words.is_contiguous() and stored.scale.is_contiguous()):
        return Reason("rows do not follow each other in memory")
    return None


def _long(stored: Stored) -> Choice:
    """Plan the same blocks, one after another in memory, in rows of a power of two."""
    width = min(stored.words.numel() & -stored.words.numel(), LONGEST_ROW)
    rows = stored.words.numel() // width
    words, scale, values = (t.view(rows, -1) for t in (stored.words, stored.scale, stored.values))
    return _pieces(Stored(words, scale, values, False, False))


LONG = "dequantize_kernel in long rows"

DEQUANTIZE = (
    Candidate(LONG, _long_problem, _long, "rows of a power of two: whole tiles where the operand's own are narrower"),
    Candidate("dequantize_kernel", fits_all, _pieces, "any width, factors of rows, both layouts of scales"),
)


def dequantize(request: Stored) -> Choice:
    """Choose for an operand with values."""
    return choose(DEQUANTIZE, request)
