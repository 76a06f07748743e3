"""Which kernel multiplies, with which tile and splits, and why (docs/internals/gemm.md, docs/internals/grouped.md).

`DENSE` is the table of one product, `INVARIANT` of one whose rows are summed alike in every batch, `ROWS` that of
tokens in groups with experts, `SPLIT` that of products over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.gemm.row_route import RowTile, row_choice, row_problem
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import Target, target_of
from halfbyte.layout import GROUP_COLUMNS, ceil_div, padded_groups

Variant = Literal["auto", "tma", "pointer"]

GROUP = 8  # rows of tiles that share b's tiles in L2
TMA_ALIGNMENT = 16  # bytes, of the base and of every row
EPILOGUE_BYTES = 32 << 10  # of shared memory for a part of the output tile
MAX_SPLITS = 16
MIN_SPLIT_STEPS = 4  # contraction steps below which a split costs more than the programs it fills
MAX_CHAIN = 8192  # products summed in one go for an fp32 output: tensor cores truncate, the error grows with the length
TILE_OVERHEAD = 64  # prologue and epilogue of a tile, in columns of the contraction
LAUNCH_COST = 8e6  # of combine_kernel, and COMBINE_COST per partial sum: in multiply-adds of one multiprocessor
COMBINE_COST = 300
WAVES = 320, 760, 1.1
"""TILE_OVERHEAD, COMBINE_COST and a margin where the parts of a product fill several waves and their sums not L2."""


@dataclass(frozen=True)
class GemmTile:
    """Block shape and launch options of one configuration; cost: measured time of a product, relative to the best."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int
    cost: float = 1.0

    @property
    def constants(self) -> dict[str, int]:
        """Constexprs and launch options."""
        sizes = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP": GROUP}
        return {**sizes, "num_warps": self.num_warps, "num_stages": self.num_stages}


TMA_TILES = (GemmTile(128, 256, 64, 8, 3), GemmTile(128, 128, 64, 8, 4, 1.1), GemmTile(64, 128, 64, 4, 4, 1.6))
SMALL_TILES = (GemmTile(64, 128, 128, 4, 3, 1.41), GemmTile(64, 64, 128, 4, 4, 2.6), GemmTile(64, 64, 256, 4, 3, 2.5))
"""With deeper steps, for products that fill no more than one wave of programs."""
POINTER_TILES = (GemmTile(128, 128, 32, 8, 4), GemmTile(64, 64, 32, 4, 4, 1.7))
FP32_TILE = GemmTile(64, 64, 16, 4, 2)  # operands that no tensor core multiplies exactly: fp32, or a mixed pair


def describable(x: Tensor) -> bool:
    """Whether a tensor map can describe x: base and row stride are multiples of 16 bytes."""
    row = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and x.data_ptr() % TMA_ALIGNMENT == 0 and row % TMA_ALIGNMENT == 0 and row > 0


def is_turned(x: Tensor) -> bool:
    """Whether the columns of an operand are contiguous in place of its rows."""
    return x.stride(0) == 1 and x.stride(1) != 1


def mapped(x: Tensor) -> Tensor:
    """Return an operand as a tensor map describes it: x, or x.T if it is turned."""
    return x.T if is_turned(x) else x


def epilogue_parts(tile: GemmTile, dtype: torch.dtype) -> int:
    """Return how many column ranges of the tile are finished one after another: at most 32 KiB each."""
    return 4 if tile.bm * tile.bn // 2 * dtype.itemsize > EPILOGUE_BYTES else 2


def tma_tiles(target: Target) -> tuple[GemmTile, ...]:
    """Return the tiles that the TMA kernel may use, none where there is none.

    On sm_100, where this GEMM only stands in for the native one, the largest tile spills registers.
    """
    if not target.tma:
        return ()
    return TMA_TILES if target.capability < 100 else TMA_TILES[1:]


def small_tiles(target: Target) -> tuple[GemmTile, ...]:
    """Return the tiles with deeper steps that the TMA kernel may use; on sm_100 those of 64 x 64 spill registers."""
    return SMALL_TILES if target.capability < 100 else SMALL_TILES[:1]


def _exact(a: Tensor, b: Tensor) -> bool:
    return a.dtype != b.dtype or a.dtype == torch.float32


def _exact_problem(a: Tensor, b: Tensor) -> Reason | None:
    if _exact(a, b):
        return Reason("no tensor core multiplies {} by {} exactly", (str(a.dtype)[6:], str(b.dtype)[6:]))
    return None


def _maps_problem(variant: Variant, target: Target, *maps: Tensor) -> Reason | None:
    """Say why tensor maps do not serve."""
    if variant == "pointer":
        return Reason("variant='pointer' is asked for")
    if variant != "tma" and not tma_tiles(target):
        return Reason("{} has no tensor maps, or no shared memory for their tiles", (target.name,))
    for x in maps:
        if not describable(x):
            return Reason("a tensor map cannot describe strides {}: rows start at 16 bytes", (tuple(x.stride()),))
    return None


# One product.


@dataclass(frozen=True)
class GemmPlan:
    """How one GEMM runs."""

    tma: bool
    tile: GemmTile
    splits: int
    upcast: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs and launch options that the plan decides."""
        return {**self.tile.constants, "SPLITS": self.splits, "UPCAST": self.upcast}

    def programs(self, M: int, N: int, target: Target) -> int:
        """Return how many programs run: of tensor maps no more than there are multiprocessors."""
        work = ceil_div(M, self.tile.bm) * ceil_div(N, self.tile.bn) * self.splits
        return min(work, target.multiprocessors) if self.tma else work


Ends = tuple[Tensor, Tensor | None]
"""Of a GEMM: its output and its addend."""


def all_describable(ends: Ends) -> bool:
    """Whether tensor maps can describe the output, and the addend if there is one."""
    return all(end is None or describable(end) for end in ends)


class Product(NamedTuple):
    """Multiply a [M, >=K] and b [N, >=K] to ends [M, N]."""

    a: Tensor
    b: Tensor
    ends: Ends
    K: int
    variant: Variant


def _tma_problem(product: Product) -> Reason | None:
    reason = _exact_problem(product.a, product.b)
    return reason or _maps_problem(product.variant, target_of(product.a.device), mapped(product.a), mapped(product.b))


@lru_cache(maxsize=4096)
def choose_tile(tiles: tuple[GemmTile, ...], M: int, N: int, K: int, programs: int) -> tuple[GemmTile, int]:
    """Return the tile, and the number of contraction splits, of least estimated time.

    Programs run in waves; each costs its tile's multiply-adds times what the tile was measured to cost.
    """
    best = None
    for tile in tiles:
        count = ceil_div(M, tile.bm) * ceil_div(N, tile.bn)
        steps = ceil_div(K, tile.bk)
        for splits in range(1, min(MAX_SPLITS, max(1, steps // MIN_SPLIT_STEPS)) + 1):
            waves = ceil_div(count * splits, programs)
            several = splits > 1 and waves > 1
            overhead, combining, factor = WAVES if several else (TILE_OVERHEAD, COMBINE_COST, 1.0)
            time = waves * (ceil_div(steps, splits) * tile.bk + overhead) * tile.bm * tile.bn * tile.cost
            if splits > 1:
                time += combining * splits * M * N / programs + LAUNCH_COST
            time *= factor
            if best is None or time < best[0]:
                best = (time, tile, splits)
    assert best is not None
    return best[1], best[2]


def _planned(kernel: str, product: Product, plan: GemmPlan) -> Choice:
    grid = (plan.programs(*product.ends[0].shape, target_of(product.a.device)),)
    return Choice(kernel, grid, plan.constants, plan)


def _split(product: Product, tiles: tuple[GemmTile, ...], *, tma: bool) -> GemmPlan:
    (M, N), target = product.ends[0].shape, target_of(product.a.device)
    tile, splits = choose_tile(tiles, M, N, product.K, target.multiprocessors)
    if splits > 1 and product.ends[0].dtype == torch.float32:
        splits = min(MAX_SPLITS, max(splits, ceil_div(product.K, MAX_CHAIN)))
    return GemmPlan(tma, tile, splits, target.interpreter)


def _tma(product: Product) -> Choice:
    (M, N), target = product.ends[0].shape, target_of(product.a.device)
    tiles = tma_tiles(target) or TMA_TILES[1:]
    # Plain stores of the largest tile's output spill registers.
    tiles = tuple(tile for tile in tiles if all_describable(product.ends) or tile.bn < 256)
    if ceil_div(M, SMALL_TILES[0].bm) * ceil_div(N, SMALL_TILES[0].bn) <= target.multiprocessors:
        tiles += small_tiles(target)
    return _planned("gemm_tma_kernel", product, _split(product, tiles, tma=True))


def _pointer(product: Product) -> Choice:
    if _exact(product.a, product.b):
        return _planned("gemm_pointer_kernel", product, GemmPlan(False, FP32_TILE, 1, True))
    return _planned("gemm_pointer_kernel", product, _split(product, POINTER_TILES, tma=False))


LIBRARY = "torch.mm"
LIBRARY_CAPABILITY = 90  # where it was timed beside our kernels
LIBRARY_ROWS, LIBRARY_COLUMNS = 512, 8192  # of both operands, and of the contraction, from where it was
LIBRARY_OUTPUT = 1 << 22  # elements: its sums are written and read in fp32, which costs larger ones more than it saves
LIBRARY_SHARE, LIBRARY_SPLITS = 0.9, 5
"""Where large tiles of ours fill less of the GPU, or take that many parts, cuBLAS is the faster one."""


def _library_problem(product: Product) -> Reason | None:
    """Say why cuBLAS, whose tiles lie between ours, does not make the sums that `combine_kernel` then ends."""
    (M, N), target = product.ends[0].shape, target_of(product.a.device)
    if product.variant != "auto":
        return Reason("variant={!r} is asked for", (product.variant,))
    if target.capability != LIBRARY_CAPABILITY:
        return Reason("cuBLAS was not timed on {}", (target.name,))
    if product.ends[0].dtype == torch.float32:
        return Reason("an fp32 sum is made of chains of at most {} products", (MAX_CHAIN,))
    if min(M, N) < LIBRARY_ROWS or product.K < LIBRARY_COLUMNS or M * N > LIBRARY_OUTPUT:
        return Reason("{}x{}x{} has few products, or many sums", (M, N, product.K))
    reason = _tma_problem(product)
    if reason is not None:
        return reason
    plan: GemmPlan = _tma(product).facts
    work = ceil_div(M, plan.tile.bm) * ceil_div(N, plan.tile.bn) * plan.splits
    share = work / (ceil_div(work, target.multiprocessors) * target.multiprocessors)
    if plan.splits < LIBRARY_SPLITS and share >= LIBRARY_SHARE and plan.tile == TMA_TILES[0]:
        return Reason("large tiles of ours fill {:.0%} of the GPU", (share,))
    return None


def _library(_: Product) -> Choice:
    return Choice(LIBRARY)


DENSE = (
    Candidate("row_product_kernel", row_problem, row_choice, "reads b once, in one launch, whatever its shape"),
    Candidate(LIBRARY, _library_problem, _library, "cuBLAS has tiles that fill the GPU; one pass then scales its sums"),
    Candidate(
        "gemm_tma_kernel", _tma_problem, _tma, "tensor maps, persistent programs; tile and splits by a cost model"
    ),
    Candidate("gemm_pointer_kernel", fits_all, _pointer, "plain loads: any GPU, strides and dtypes"),
)


# Products of which each row is summed alike in every batch.

NARROW_TILE = GemmTile(64, 64, 64, 4, 6, 2.6)  # for few rows: as many programs as there are without splits
BATCH_INVARIANT = "no splits, one step for all tiles: M chooses which elements a program has, not the order of a sum"


def _unsplit(product: Product, tiles: tuple[GemmTile, ...], *, tma: bool) -> GemmPlan:
    """Return the tile of least estimated time, see `choose_tile`; all of `tiles` have one step and 64 rows or more."""
    (M, N), target = product.ends[0].shape, target_of(product.a.device)
    assert len({tile.bk for tile in tiles}) == 1, "the step would depend on M"

    def time(tile: GemmTile) -> float:
        waves = ceil_div(ceil_div(M, tile.bm) * ceil_div(N, tile.bn), target.multiprocessors)
        return waves * (product.K + TILE_OVERHEAD) * tile.bm * tile.bn * tile.cost

    return GemmPlan(tma, min(tiles, key=time), 1, target.interpreter)


def _invariant_tma(product: Product) -> Choice:
    target = target_of(product.a.device)
    tiles = tma_tiles(target) or TMA_TILES[1:]
    if target.capability < 100:
        tiles += (NARROW_TILE,)
    tiles = tuple(tile for tile in tiles if all_describable(product.ends) or tile.bn < 256)
    return _planned("gemm_tma_kernel", product, _unsplit(product, tiles, tma=True))


def _invariant_pointer(product: Product) -> Choice:
    assert not _exact(product.a, product.b), "quantized operands are decoded to bf16"
    return _planned("gemm_pointer_kernel", product, _unsplit(product, POINTER_TILES, tma=False))


INVARIANT = (
    Candidate("gemm_tma_kernel", _tma_problem, _invariant_tma, BATCH_INVARIANT),
    Candidate("gemm_pointer_kernel", fits_all, _invariant_pointer, BATCH_INVARIANT),
)


def gemm_plan(
    a: Tensor, b: Tensor, ends: Ends, K: int, variant: Variant = "auto", batch_invariant: bool = False
) -> GemmPlan | RowTile | None:
    """Choose kernel, tile and number of splits for a [M, >=K], b [N, >=K] and ends [M, N]; None: torch.mm multiplies.

    Raises:
        ValueError: variant "tma" on strides that a tensor map cannot describe.
    """
    if variant == "tma" and not (describable(mapped(a)) and describable(mapped(b))):
        raise ValueError(
            f"variant='tma': operands with strides {a.stride()} and {b.stride()} are not {TMA_ALIGNMENT}-byte aligned; "
            "use 'auto'"
        )
    return choose_from(INVARIANT if batch_invariant else DENSE, Product(a, b, ends, K, variant)).facts


# Products of groups.

NO_LIMIT = 1 << 30
LARGE_TILE = GemmTile(128, 256, 64, 8, 4)
PAIRED_TILE = GemmTile(128, 128, 64, 4, 3, 1.25)  # two programs a multiprocessor: one stores while the other multiplies
OVERHEAD, PAIRED_OVERHEAD = 345, 140  # of a tile, in columns of the contraction; measured on an H200


class GroupProducts(NamedTuple):
    """Multiply decoded operands of groups into out.

    a: tokens [M, K]; of products over tokens [R, columns].
    b: experts [E, N, >=K]; or [C, columns].
    groups: how many there are.
    stored: what groups along the contraction are padded to in storage: in both operands, and for steps.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    groups: int
    K: int
    accumulate: bool
    variant: Variant
    stored: tuple[bool, int] = (False, GROUP_COLUMNS)


class GroupedPlan(NamedTuple):
    """How a grouped GEMM runs.

    out_tma: whether the output is stored by a tensor map.
    matrix: experts below each other as a tensor map sees them, and whether the map's columns are N.
    chain: steps summed in one go.
    """

    tma: bool
    tile: GemmTile
    out_tma: bool
    matrix: tuple[Tensor | None, bool] = (None, False)
    chain: int = NO_LIMIT


def _stacked(b: Tensor, K: int) -> tuple[Tensor | None, bool]:
    """Return experts [E, N, >=K] below each other as a tensor map sees them, and whether the map's columns are N."""
    groups, N, _ = b.shape
    if b.stride(2) == 1 and b.stride(0) == N * b.stride(1):
        return b[:, :, :K].as_strided((groups * N, K), (b.stride(1), 1)), False
    if b.stride(1) == 1 and b.shape[2] == K and b.stride(0) == K * b.stride(2) and K % GROUP_COLUMNS == 0:
        return b.as_strided((groups * K, N), (b.stride(2), 1)), True
    return None, False


def _map_tiles(groups: GroupProducts, *, plain_stores: bool) -> tuple[GemmTile, ...]:
    """Return the tiles of tensor-map kernels: on sm_90 with more stages than a dense GEMM affords, unless for fp32."""
    tiles = tma_tiles(target_of(groups.out.device))
    if TMA_TILES[0] in tiles and groups.out.dtype != torch.float32:
        tiles = (LARGE_TILE, PAIRED_TILE, *tiles[1:])
    tiles = tiles or TMA_TILES[1:]
    # Plain stores of the largest tile spill registers.
    return tuple(tile for tile in tiles if tile.bn < 256) if plain_stores else tiles


def _programs(tile: GemmTile, work: int, target: Target) -> int:
    """Return how many persistent programs run: two a multiprocessor where registers and shared memory hold them."""
    return min(target.multiprocessors * (2 if tile == PAIRED_TILE else 1), work)


def _cheapest(tiles: tuple[GemmTile, ...], groups: int, shape: tuple[int, int, int], target: Target) -> GemmTile:
    """Return the tile of least estimated time for `groups` products of one shape; see `choose_tile`."""
    programs, (M, N, K) = target.multiprocessors, shape

    def time(tile: GemmTile) -> float:
        count = groups * ceil_div(M, tile.bm) * ceil_div(N, tile.bn)
        beside = 2 if tile == PAIRED_TILE else 1
        overhead = PAIRED_OVERHEAD if tile == PAIRED_TILE else OVERHEAD
        return ceil_div(count, beside * programs) * beside * (K + overhead) * tile.bm * tile.bn * tile.cost

    return min(tiles, key=time)


def _grouped(kernel: str, groups: GroupProducts, work: int, plan: GroupedPlan) -> Choice:
    target = target_of(groups.out.device)
    upcast = _exact(groups.a, groups.b) or target.interpreter
    programs = _programs(plan.tile, work, target) if plan.tma else work
    return Choice(kernel, (programs,), {**plan.tile.constants, "UPCAST": upcast}, plan)


def _rows_tma_problem(groups: GroupProducts) -> Reason | None:
    reason = _exact_problem(groups.a, groups.b)
    if reason is not None:
        return reason
    if groups.K == 0:
        return Reason("there is nothing to sum")
    matrix, _ = _stacked(groups.b, groups.K)
    if matrix is None:
        return Reason("experts of strides {} are no matrix", (tuple(groups.b.stride()),))
    return _maps_problem(groups.variant, target_of(groups.out.device), groups.a, matrix)


def _rows_work(groups: GroupProducts, tile: GemmTile) -> int:
    M, N = groups.out.shape
    return (padded_groups(M, groups.groups, tile.bm) // tile.bm + 1) * ceil_div(N, tile.bn)


def _rows_tma(groups: GroupProducts) -> Choice:
    (M, N), count = groups.out.shape, groups.groups
    out_tma = describable(groups.out) and not groups.accumulate
    tiles = _map_tiles(groups, plain_stores=not out_tma)
    if groups.accumulate:  # what it adds to takes registers that the paired tile does not have
        tiles = tuple(tile for tile in tiles if tile != PAIRED_TILE)
    tile = _cheapest(tiles, count, (ceil_div(M, count), N, groups.K), target_of(groups.out.device))
    plan = GroupedPlan(True, tile, out_tma, _stacked(groups.b, groups.K))
    return _grouped("rows_tma_kernel", groups, _rows_work(groups, tile), plan)


def _rows_pointer(groups: GroupProducts) -> Choice:
    (M, N), count, tile = groups.out.shape, groups.groups, FP32_TILE
    if not _exact(groups.a, groups.b):
        tile = _cheapest(POINTER_TILES, count, (ceil_div(M, count), N, groups.K), target_of(groups.out.device))
    return _grouped("grouped_pointer_kernel", groups, _rows_work(groups, tile), GroupedPlan(False, tile, False))


POINTERS = "plain loads: any GPU, strides, storage and dtypes"

ROWS = (
    Candidate("rows_tma_kernel", _rows_tma_problem, _rows_tma, "tensor maps, programs that walk over all groups"),
    Candidate("grouped_pointer_kernel", fits_all, _rows_pointer, POINTERS),
)


def choose_rows(request: GroupProducts) -> Choice:
    """Choose for tokens in groups with experts."""
    return choose_from(ROWS, request)


def _split_tma_problem(groups: GroupProducts) -> Reason | None:
    if not groups.stored[0]:
        return Reason("groups follow each other without the padding in which a step meets one group")
    reason = _exact_problem(groups.a, groups.b)
    return reason or _maps_problem(groups.variant, target_of(groups.out.device), groups.a, groups.b)


def _chain(groups: GroupProducts, tile: GemmTile) -> int:
    return MAX_CHAIN // tile.bk if groups.out.dtype == torch.float32 else NO_LIMIT


def _split_work(groups: GroupProducts, tile: GemmTile) -> int:
    count, M, N = groups.out.shape
    return count * ceil_div(M, tile.bm) * ceil_div(N, tile.bn)


def _split_tma(groups: GroupProducts) -> Choice:
    out = groups.out
    out_tma = describable(out[0]) and describable(out[:, 0])
    tiles = _map_tiles(groups, plain_stores=not out_tma)
    shape = (*out.shape[1:], ceil_div(groups.K, groups.groups))
    tile = _cheapest(tiles, groups.groups, shape, target_of(out.device))
    plan = GroupedPlan(True, tile, out_tma, chain=_chain(groups, tile))
    return _grouped("split_tma_kernel", groups, _split_work(groups, tile), plan)


def _split_pointer(groups: GroupProducts) -> Choice:
    tile = FP32_TILE if _exact(groups.a, groups.b) else POINTER_TILES[0]
    plan = GroupedPlan(False, tile, False, chain=_chain(groups, tile))
    return _grouped("grouped_pointer_kernel", groups, _split_work(groups, tile), plan)


SPLIT = (
    Candidate("split_tma_kernel", _split_tma_problem, _split_tma, "tensor maps; storage keeps groups apart"),
    Candidate("grouped_pointer_kernel", fits_all, _split_pointer, POINTERS),
)


def choose_split(request: GroupProducts) -> Choice:
    """Choose for products over the tokens of each group."""
    return choose_from(SPLIT, request)
