"""When a product of one row has a kernel of its own, and with which tile: the first candidate of `route.DENSE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfbyte.kernels.route import Choice, Reason
from halfbyte.kernels.target import target_of
from halfbyte.layout import ceil_div

if TYPE_CHECKING:
    from halfbyte.kernels.gemm.route import Product

ROW_LANES = 1024  # sums that an element is made of: with K all that decides the order; 16 bytes of bf16 for 128 threads
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # whose values fp32 holds


@dataclass(frozen=True)
class RowTile:
    """Rows of b that a program multiplies, its warps, and steps of ROW_LANES columns loaded before the first is added.

    None of them decides an order of summation.
    """

    rows: int
    num_warps: int
    ahead: int

    @property
    def constants(self) -> dict[str, int]:
        """Constexprs and launch options."""
        return {"R": self.rows, "LANES": ROW_LANES, "AHEAD": self.ahead, "num_warps": self.num_warps}


ROW_TILE = RowTile(1, 4, 4)  # of 18 that were timed, for every shape within 4 % of the best
INTERPRETED_TILE = RowTile(64, 1, 1)  # the interpreter pays by the operation


def row_problem(product: Product) -> Reason | None:
    """Say why `row_product_kernel` does not multiply."""
    rows, dtypes = product.ends[0].shape[0], (product.a.dtype, product.b.dtype)
    if product.variant != "auto":
        return Reason("variant={!r} is asked for", (product.variant,))
    if rows != 1:
        return Reason("it multiplies one row, not {}", (rows,))
    if product.b.stride(1) != 1:
        return Reason("it reads rows of b, and those of strides {} do not lie together", (tuple(product.b.stride()),))
    if not set(ROW_DTYPES).issuperset(dtypes):
        return Reason("fp32 does not hold {} times {}", tuple(str(dtype)[6:] for dtype in dtypes))
    return None


def row_choice(product: Product) -> Choice:
    """Return how `row_product_kernel` multiplies."""
    N = product.ends[0].shape[1]
    tile = INTERPRETED_TILE if target_of(product.a.device).interpreter else ROW_TILE
    return Choice("row_product_kernel", (ceil_div(N, tile.rows),), tile.constants, tile)
