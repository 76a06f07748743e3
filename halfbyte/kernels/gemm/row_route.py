"""When a product of one row has a kernel of its own, and with which tile: the first candidate of `route.DENSE`.

`WITH_AMAX` is the table of such a product and the amax of what is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.device.magnitudes import parts_of
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
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
    per_sm: programs of a multiprocessor, where these take many rows each.
    """

    rows: int
    num_warps: int
    ahead: int
    per_sm: int = 0

    @property
    def constants(self) -> dict[str, int]:
        """Constexprs and launch options."""
        return {"R": self.rows, "LANES": ROW_LANES, "AHEAD": self.ahead, "num_warps": self.num_warps}


ROW_TILE = RowTile(1, 4, 4)  # of 18 that were timed, for every shape within 4 % of the best
AMAX_TILE = RowTile(1, 4, 4, 8)
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


class RowOfWeight(NamedTuple):
    """Find the amax of w [N, K], and its product with a [K]."""

    w: Tensor
    a: Tensor


def _with_amax_problem(one: RowOfWeight) -> Reason | None:
    """Say why `row_product_amax_kernel` does not read w once for both."""
    w, dtypes = one.w, (one.a.dtype, one.w.dtype)
    if w.stride(1) != 1:
        return Reason("it reads rows of w, and those of strides {} do not lie together", (tuple(w.stride()),))
    if not set(ROW_DTYPES).issuperset(dtypes):
        return Reason("fp32 does not hold {} times {}", tuple(str(dtype)[6:] for dtype in dtypes))
    return None if w.numel() else Reason("w has no values")


def _with_amax(one: RowOfWeight) -> Choice:
    interpreted = target_of(one.w.device).interpreter
    tile = INTERPRETED_TILE if interpreted else AMAX_TILE
    programs = parts_of(ceil_div(one.w.shape[0], tile.rows), 1, AMAX_TILE.per_sm, one.w.device)
    return Choice("row_product_amax_kernel", (programs,), tile.constants, tile)


APART = "the amax, then the product"

WITH_AMAX = (
    Candidate(
        "row_product_amax_kernel", _with_amax_problem, _with_amax, "reads w once, as many rows a program as meet"
    ),
    Candidate(APART, fits_all, lambda _: Choice(APART), "any strides and dtypes"),
)


def choose_row_of_weight(request: RowOfWeight) -> Choice:
    """Choose for an amax and a product of one row."""
    return choose_from(WITH_AMAX, request)
