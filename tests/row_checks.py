"""What the tests of products of one row share, on the CPU (interpreter, emulated PTX) and on a GPU alike: bits.

Values are such that their products are exact in fp32, so that it does not matter whether a product and a sum are one
operation.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from kernel_checks import same
from torch import Tensor

from halfbyte.kernels import launch
from halfbyte.kernels.gemm import dense, row_amax, row_route
from halfbyte.kernels.gemm.row_route import ROW_LANES, RowTile
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.sides import Epilogue

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNEL = "row_product_kernel"
TILES = (row_route.ROW_TILE, RowTile(4, 4, 2), RowTile(8, 4, 1), RowTile(2, 2, 3), RowTile(1, 1, 1))
"""Those that are chosen, and others."""

CASES = (
    # rows of b, columns, dtypes of a and b, columns before and behind b in memory
    (1, 1, (BF16, BF16), (0, 0)),
    (5, 33, (BF16, BF16), (0, 0)),
    (37, 1023, (FP16, FP16), (1, 2)),
    (16, 1024, (BF16, BF16), (0, 0)),
    (7, 2048, (FP32, FP32), (8, 24)),
    (70, 1025, (BF16, BF16), (0, 7)),
    (3, 10_000, (BF16, BF16), (0, 0)),
    (6, 5 * 1024, (BF16, FP32), (3, 0)),
    (9, 4113, (FP32, BF16), (0, 15)),
    (4, 4097, (FP16, BF16), (16, 16)),
)


def values(rows: int, cols: int, dtype: torch.dtype, around: tuple[int, int] = (0, 0), seed: int = 0) -> Tensor:
    """Return values of at most 12 significant bits, between columns of NaN that take no part."""
    g = torch.Generator().manual_seed(1000 * rows + cols + seed)
    x = (torch.randn(rows, cols, generator=g).view(torch.int32) & -4096).view(FP32)
    whole = torch.full((rows, around[0] + cols + around[1]), float("nan"), dtype=dtype)
    whole[:, around[0] : around[0] + cols] = x
    return whole[:, around[0] : around[0] + cols]


def on(device: str, x: Tensor) -> Tensor:
    """Return x on a device, between the columns that it lies between."""
    whole = x.as_strided((x.shape[0], x.stride(0)), x.stride(), 0) if x.shape[0] > 1 else x
    first = x.storage_offset() if x.shape[0] > 1 else 0
    return whole.to(device)[:, first : first + x.shape[1]]


def in_order(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T, fp32 [1, N], summed as `row_product_kernel` says."""
    steps = -(-a.shape[1] // ROW_LANES)
    products = torch.zeros(b.shape[0], steps * ROW_LANES, device=b.device)
    products[:, : a.shape[1]] = a.float() * b.float()
    total = torch.zeros(b.shape[0], ROW_LANES, device=b.device)
    for step in products.view(b.shape[0], steps, ROW_LANES).unbind(1):
        total = total + step
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total.T


class Names:
    """Of the kernels that are launched."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def launched(self, launched: launch.Launched) -> None:
        self.found.append(launched.kernel.__name__)


def multiplied(a: Decoded, b: Decoded, epilogue: Epilogue) -> Tensor:
    """Return the product, which one kernel makes."""
    seen = Names()
    with launch.watching(seen):
        y = dense.gemm_nt(a, b, epilogue)
    assert set(seen.found) <= {KERNEL} and len(seen.found) <= 1, seen.found
    return y


def check_order(case: tuple, device: str) -> None:
    """Any sizes, dtypes and distances of rows."""
    N, K, (a_dtype, b_dtype), around = case
    a, b = values(1, K, a_dtype, seed=1), values(N, K, b_dtype, around)
    y = multiplied(Decoded(on(device, a)), Decoded(on(device, b)), Epilogue(FP32))
    same(y, in_order(a, b))


def check_tiles(device: str) -> None:
    """What a program multiplies decides no bit."""
    N, K = 37, 9 * ROW_LANES + 40
    a, b = values(1, K, BF16), values(N, K, BF16)
    for tile in TILES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_route, "ROW_TILE", tile)
            patch.setattr(row_route, "INTERPRETED_TILE", tile)
            same(multiplied(Decoded(a.to(device)), Decoded(b.to(device)), Epilogue(FP32)), in_order(a, b))


def check_ends(device: str) -> None:
    """Factors, bias, outer product and addend, all of them and alone, rounded once: numbers that fp32 holds."""
    g = torch.Generator().manual_seed(3)
    N, K = 21, 1500

    def integers(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=g).float()

    a, b = (torch.randint(-3, 4, (rows, K), generator=g).to(BF16) for rows in (1, N))
    amaxes = (None, torch.tensor(8.0)), (None, torch.tensor(16.0), 2.0 ** torch.randint(2, 5, (N,), generator=g))
    bias, outer, addend = integers(N), (integers(1) / 4, integers(N)), 1000 * integers(1, N) + 0.25
    extras = (
        {},
        {"bias": bias.to(BF16)},
        {"outer": (outer[0], outer[1].to(BF16))},
        {"addend": addend},
        {"bias": bias, "outer": outer, "addend": addend},
    )
    exact = a.double() @ b.double().T
    # Every extra to every dtype, of all pairs of factors: each is compiled by itself.
    for (extra, dtype), factors in zip(product(extras, (FP32, BF16, FP16)), cycle(product(*amaxes)), strict=False):
        expected = exact
        for amax in factors:
            expected = expected if amax is None else expected * (amax.double() / 4)
        expected = expected + extra["bias"].double() if "bias" in extra else expected
        if "outer" in extra:
            expected = expected + outer[0].double()[:, None] * outer[1].double()
        expected = expected + extra["addend"].double() if "addend" in extra else expected
        mine = {
            name: tuple(t.to(device) for t in found) if isinstance(found, tuple) else found.to(device)
            for name, found in extra.items()
        }
        sides = (
            Decoded(x.to(device), None if amax is None else amax.to(device), 4.0)
            for x, amax in zip((a, b), factors, strict=True)
        )
        y = multiplied(*sides, Epilogue(dtype, **mine))
        same(y, expected.float().to(dtype))


def check_outputs(device: str) -> None:
    """Written into rows and to places that lie apart; added to what is there."""
    a, b = values(1, 1100, BF16), values(12, 1100, BF16)
    sides = Decoded(a.to(device)), Decoded(b.to(device))
    wide = torch.ones(3, 40, device=device)
    for out in (wide[1:2, 5:17], torch.ones(1, 24, device=device)[:, ::2], torch.ones(12, 1, device=device).T):
        assert multiplied(*sides, Epilogue(addend=out, out=out)) is out
        same(out, in_order(a, b) + 1)
    wide[1, 5:17] = 1
    assert wide.eq(1).all(), "beyond its row"


def check_rows_that_lie_apart(device: str) -> None:
    """A row of a whose columns lie apart, and b of one row."""
    a, b = values(1, 1100, BF16), values(12, 1100, BF16)
    apart = torch.zeros(1100, 3, dtype=BF16, device=device)
    apart[:, 1] = a[0]
    for mine in (apart[:, 1:2].T, apart.view(1, -1)[:, 1::3], apart[:, 1][None]):
        same(multiplied(Decoded(mine), Decoded(b.to(device)), Epilogue(FP32)), in_order(a, b))
    same(multiplied(Decoded(apart[:, 1:2].T), Decoded(b[:1].to(device)), Epilogue(FP32)), in_order(a, b[:1]))


def check_widths(device: str) -> None:
    """Columns beyond the narrower operand are padding."""
    a, b = values(1, 1100, BF16), values(12, 1100, BF16)
    wide_a, wide_b = (torch.cat((x, torch.full((x.shape[0], 52), 3e38, dtype=BF16)), dim=1) for x in (a, b))
    for mine, theirs in ((wide_a, b), (a, wide_b)):
        same(multiplied(Decoded(mine.to(device)), Decoded(theirs.to(device)), Epilogue(FP32)), in_order(a, b))


def check_not_finite(device: str) -> None:
    """NaN and Inf reach what they belong to, also from columns behind the last whole step."""
    a, b = values(1, 2500, BF16), values(9, 2500, BF16)
    a[0, 7] = 0
    b[1, 3], b[2, 2499], b[4, 1030], b[6, 7] = (float(word) for word in ("nan", "nan", "inf", "-inf"))
    expected = in_order(a, b)
    y = multiplied(Decoded(a.to(device)), Decoded(b.to(device)), Epilogue(FP32))
    same(y, expected)
    assert y[0].isnan().nonzero().flatten().tolist() == [1, 2, 6] and y[0, 4].isinf()
    a[0, 2499] = float("nan")
    assert multiplied(Decoded(a.to(device)), Decoded(b.to(device)), Epilogue(FP32)).isnan().all()


def check_nothing(device: str) -> None:
    """No rows of b, no columns."""
    for N, K in ((0, 16), (5, 0)):
        a, b = torch.zeros(1, K, dtype=BF16, device=device), torch.zeros(N, K, dtype=BF16, device=device)
        bias = torch.arange(N, device=device).to(FP32)
        same(multiplied(Decoded(a), Decoded(b), Epilogue(FP32, bias)), bias[None])


def with_amax(w: Tensor, a: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, list[str]]:
    """Return what `amax_with_product` does, and the kernels that did it."""
    seen = Names()
    with launch.watching(seen):
        found = row_amax.amax_with_product(w, a, bias)
    return *found, seen.found


def check_amax_too(device: str) -> None:
    """Amax and product of one read: bits of a plain maximum, and of the product alone; any sizes and dtypes."""
    for N, K, (a_dtype, w_dtype), around in CASES:
        a, w, bias = values(1, K, a_dtype, seed=1)[0], values(N, K, w_dtype, around), torch.arange(N) / 4
        for extra in (None, bias, bias.to(BF16)):
            mine = None if extra is None else extra.to(device)
            amax, y, names = with_amax(on(device, w), a.to(device), mine)
            assert names == ["row_product_amax_kernel"]
            same(amax, w.float().abs().max())
            same(y, in_order(a[None], w)[0] + (0 if extra is None else extra.float()))


def check_amax_of_programs_with_many_rows(device: str) -> None:
    """What a program reads at once decides nothing, nor how many rows it goes through; the largest is in any place."""
    N, K = 150, 2 * ROW_LANES + 40
    a, w = values(1, K, BF16)[0].to(device), values(N, K, BF16).to(device)
    expected = in_order(a[None], w)[0]
    for tile in (RowTile(1, 4, 4, 1), RowTile(2, 4, 1, 2), RowTile(4, 4, 2, 1)):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("AMAX_TILE", "INTERPRETED_TILE"):
                patch.setattr(row_route, name, tile)
            patch.setattr(row_route, "parts_of", lambda units, beside, per_sm, device: min(units, 3 * per_sm))
            for row, col in ((0, 0), (N - 1, K - 1), (N - 2, 1030), (77, 5)):
                largest = w.clone()
                largest[row, col] = -300.0
                amax, y, _ = with_amax(largest, a)
                same(amax, torch.tensor(300.0))
                others = torch.arange(N, device=device) != row
                same(y[others], expected[others])


def check_amax_not_finite(device: str) -> None:
    """NaN and Inf are left out of the amax, and reach the rows that they belong to."""
    a, w = values(1, 2500, BF16)[0].to(device), values(9, 2500, BF16)
    w[1, 3], w[2, 2499], w[4, 1030] = (float(word) for word in ("nan", "nan", "inf"))
    amax, y, _ = with_amax(w.to(device), a)
    same(amax, w.float().nan_to_num(0, 0, 0).abs().max())
    same(y.isfinite(), torch.tensor([True, False, False, True, False, True, True, True, True], device=device))
    same(with_amax(torch.full_like(w, float("nan")).to(device), a)[0], torch.tensor(0.0))


def check_amax_apart(device: str) -> None:
    """Columns that do not lie together, and no values: the amax and the product apart, as they are elsewhere."""
    a, w = torch.arange(40.0) - 9, (torch.arange(960.0) % 37 - 20).view(40, 24)  # whole numbers, which no order changes
    amax, y, names = with_amax(w.to(device).T, a.to(device))
    assert "row_product_amax_kernel" not in names
    same(amax, w.abs().max())
    same(y, (a.double() @ w.double()).float())
    for N, K in ((0, 16), (5, 0)):
        nothing, ones = torch.zeros(N, K, device=device), torch.ones(N, device=device)
        amax, y, _ = with_amax(nothing, torch.zeros(K, device=device), ones)
        same(amax, torch.tensor(0.0))
        same(y, torch.ones(N))


AMAX_CHECKS = (check_amax_too, check_amax_of_programs_with_many_rows, check_amax_not_finite, check_amax_apart)
CHECKS = (
    *AMAX_CHECKS,
    check_tiles,
    check_ends,
    check_outputs,
    check_rows_that_lie_apart,
    check_widths,
    check_not_finite,
    check_nothing,
)
