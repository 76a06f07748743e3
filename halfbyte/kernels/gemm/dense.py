"""gemm_nt on decoded operands: which kernel, which tile, and the launch (docs/internals/gemm.md).

The operands hold element * block_scale exactly, so a bf16 GEMM with fp32 accumulation equals the block-scaled product
up to summation order. Nothing here looks at the operands' bytes: `kernels.dequantize.decode` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.formats import FLT_MAX, f32
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.gemm.tile import combine_kernel, gemm_pointer_kernel, gemm_tma_kernel
from halfbyte.kernels.target import Target, target_of
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.layout import ceil_div, round_up

Variant = Literal["auto", "tma", "pointer"]

GROUP = 8  # rows of tiles that share b's tiles in L2
TMA_ALIGNMENT = 16  # bytes, of the base and of every row
EPILOGUE_BYTES = 32 << 10  # of shared memory for a part of the output tile
COMBINE_TILE = (16, 128)
MAX_SPLITS = 16
MIN_SPLIT_STEPS = 4  # contraction steps below which a split costs more than the programs it fills
MAX_CHAIN = 8192  # products summed in one go for an fp32 output: tensor cores truncate, the error grows with the length
TILE_OVERHEAD = 64  # prologue and epilogue of a tile, in columns of the contraction
LAUNCH_COST = 8e6  # of combine_kernel, and COMBINE_COST per partial sum: in multiply-adds of one multiprocessor
COMBINE_COST = 300
WAVES = 320, 760, 1.1
"""TILE_OVERHEAD, COMBINE_COST and a margin where the parts of a product fill several waves and their sums not L2."""


@dataclass(frozen=True)
class Tile:
    """Block shape and launch options of one configuration; cost: measured time of a product, relative to the best."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int
    cost: float = 1.0


TMA_TILES = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4, 1.1), Tile(64, 128, 64, 4, 4, 1.6))
SMALL_TILES = (Tile(64, 128, 128, 4, 3, 1.41), Tile(64, 64, 128, 4, 4, 2.6), Tile(64, 64, 256, 4, 3, 2.5))
"""With deeper steps, for products that fill no more than one wave of programs."""
POINTER_TILES = (Tile(128, 128, 32, 8, 4), Tile(64, 64, 32, 4, 4, 1.7))
FP32_TILE = Tile(64, 64, 16, 4, 2)  # operands that no tensor core multiplies exactly: fp32, or a mixed pair


@dataclass(frozen=True)
class Plan:
    """How one GEMM runs."""

    tma: bool
    tile: Tile
    splits: int
    upcast: bool


Ends = tuple[Tensor, Tensor | None]
"""Of a GEMM: its output and its addend."""


def gemm_nt(
    a: Decoded,
    b: Decoded,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    variant: Variant = "auto",
) -> Tensor:
    """Return a @ b.T with factors, bias and the existing output applied in fp32 before the only rounding.

    Args:
        a: values [M, K], see Decoded; a plain operand is `Decoded(x)`.
        b: values [N, K]. Columns beyond the narrower operand are padding and take no part.
        out_dtype: bf16, fp16 or fp32 of the result if `out` is None.
        bias: [N] of any float dtype, or None.
        out: [M, N] to write into.
        accumulate: add to what `out` holds.
        variant: "tma" and "pointer" force a kernel, "auto" chooses from the device and the strides.

    Returns:
        [M, N], `out` itself if given.

    Raises:
        ValueError: variant "tma" on strides that a tensor map cannot describe.
    """
    y = _output(a, b, out_dtype) if out is None else out
    assert out is not None or not accumulate, "accumulate needs out"
    assert y.shape == (a.values.shape[0], b.values.shape[0]), "out has another shape"
    return _into(y, a, b, bias, y if accumulate else None, variant)


def gemm_nt_add(
    a: Decoded, b: Decoded, addend: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, variant: Variant = "auto"
) -> Tensor:
    """Return a @ b.T + addend, the addend [M, N] of any float dtype added in fp32 before the only rounding."""
    return _into(_output(a, b, out_dtype), a, b, None, addend, variant)


def _output(a: Decoded, b: Decoded, dtype: torch.dtype) -> Tensor:
    return torch.empty(a.values.shape[0], b.values.shape[0], dtype=dtype, device=a.values.device)


def _into(y: Tensor, a: Decoded, b: Decoded, bias: Tensor | None, addend: Tensor | None, variant: Variant) -> Tensor:
    """Write a @ b.T with its ends into y; the addend may be y itself."""
    a, b = (side._replace(values=_row_major(side.values)) for side in (a, b))
    if y.numel() == 0:
        return y
    K = min(a.values.shape[1], b.values.shape[1])
    target = y if y.stride(1) == 1 else y.contiguous()
    addend = target if addend is y else None if addend is None else _row_major(addend)
    if K == 0:
        return bias_only(y, bias, addend)
    plan = make_plan(a.values, b.values, (target, addend), K, variant)
    _run(plan, a, b, target, bias, addend, K)
    if target is not y:
        y.copy_(target)
    return y


def make_plan(a: Tensor, b: Tensor, ends: Ends, K: int, variant: Variant = "auto") -> Plan:
    """Choose kernel, tile and number of splits for a [M, >=K], b [N, >=K] and ends [M, N]."""
    out, _ = ends
    exact = a.dtype != b.dtype or a.dtype == torch.float32
    mappable = describable(a) and describable(b)
    if variant == "tma" and not mappable:
        raise ValueError(
            f"variant='tma': operands with strides {a.stride()} and {b.stride()} are not {TMA_ALIGNMENT}-byte aligned; "
            "use 'auto'"
        )
    target = target_of(a.device)
    tiles = tma_tiles(target)
    tma = variant == "tma" or (variant == "auto" and mappable and not exact and bool(tiles))
    programs = target.multiprocessors
    M, N = out.shape
    if exact:
        return Plan(False, FP32_TILE, 1, True)
    if tma:  # plain stores of the largest tile's output spill registers
        tiles = tuple(t for t in tiles or TMA_TILES[1:] if all_describable(ends) or t.bn < 256)
        if ceil_div(M, SMALL_TILES[0].bm) * ceil_div(N, SMALL_TILES[0].bn) <= programs:
            tiles += SMALL_TILES
    tile, splits = choose_tile(tiles if tma else POINTER_TILES, M, N, K, programs)
    if splits > 1 and out.dtype == torch.float32:
        splits = min(MAX_SPLITS, max(splits, ceil_div(K, MAX_CHAIN)))
    return Plan(tma, tile, splits, target.interpreter)


@lru_cache(maxsize=4096)
def choose_tile(tiles: tuple[Tile, ...], M: int, N: int, K: int, programs: int) -> tuple[Tile, int]:
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


def _run(plan: Plan, a: Decoded, b: Decoded, out: Tensor, bias: Tensor | None, addend: Tensor | None, K: int) -> None:
    M, N = out.shape
    if plan.splits == 1:
        chains = ceil_div(K, MAX_CHAIN) if out.dtype == torch.float32 else 1
        length = round_up(ceil_div(K, chains), plan.tile.bk)
        for start in range(0, K, length):
            columns = slice(start, min(start + length, K))
            factors = _factors(a, b, bias if start == 0 else None)
            sides = a.values[:, columns], b.values[:, columns]
            _multiply(plan, *sides, (out, out if start > 0 else addend), factors)
        return
    width = round_up(N, TMA_ALIGNMENT // 4)
    rows = plan.splits * round_up(M, plan.tile.bm)
    parts = torch.empty(rows, width, dtype=torch.float32, device=out.device)[:, :N]
    raw = _factors(Decoded(a.values), Decoded(b.values), None)
    _multiply(plan, a.values[:, :K], b.values[:, :K], (parts, None), raw)
    combine(parts, plan.splits, a, b, out, bias=bias, addend=addend)


def combine(
    parts: Tensor, splits: int, a: Decoded, b: Decoded, out: Tensor, *, bias: Tensor | None, addend: Tensor | None
) -> None:
    """Sum partial products and finish them as a GEMM would: factors, bias, addend, one rounding.

    Args:
        parts: fp32 [splits * rows, N], rows >= M: one product after another.
        a, b: whose amax and divisor give the factors; of their values only the number of rows counts.
        out, addend: [M, N] with contiguous rows; the addend may be `out`.
    """
    (M, N), (bm, bn) = out.shape, COMBINE_TILE
    combine_kernel[(ceil_div(M, bm) * ceil_div(N, bn),)](
        parts,
        out,
        addend,
        parts.stride(0),
        out.stride(0),
        0 if addend is None else addend.stride(0),
        parts.shape[0] // splits,
        M=M,
        N=N,
        **_factors(a, b, bias),
        ACCUMULATE=addend is not None,
        SPLITS=splits,
        BM=bm,
        BN=bn,
        **overlap.launch_options(out.device),
    )


def _multiply(plan: Plan, a: Tensor, b: Tensor, ends: Ends, factors: dict) -> None:
    """Launch one kernel on a [M, K] and b [N, K]; ends [M, N], or out the partial sums if the plan splits."""
    (M, K), N, (out, addend) = a.shape, b.shape[0], ends
    tile = plan.tile
    work = ceil_div(M, tile.bm) * ceil_div(N, tile.bn) * plan.splits
    options = {
        **factors,
        "ACCUMULATE": addend is not None,
        "SPLITS": plan.splits,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": GROUP,
        "UPCAST": plan.upcast,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **overlap.launch_options(out.device),
    }
    if not plan.tma:
        strides = a.stride(0), b.stride(0), out.stride(0)
        added = addend, 0 if addend is None else addend.stride(0)
        gemm_pointer_kernel[(work,)](a, b, out, *strides, *added, M=M, N=N, K=K, **options)
        return
    programs = min(work, target_of(a.device).multiprocessors)
    tma = all_describable(ends)
    parts = max(epilogue_parts(tile, end.dtype) for end in ends if end is not None)
    part = [tile.bm, tile.bn // parts]
    out_desc, addend_desc = (
        TensorDescriptor.from_tensor(end, part) if tma and end is not None else None for end in ends
    )
    gemm_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [tile.bm, tile.bk]),
        TensorDescriptor.from_tensor(b, [tile.bn, tile.bk]),
        out_desc,
        out,
        out.stride(0),
        addend_desc,
        addend,
        0 if addend is None else addend.stride(0),
        M=M,
        N=N,
        K=K,
        OUT_TMA=tma,
        PARTS=parts,
        PROGRAMS=programs,
        **options,
    )


def epilogue_parts(tile: Tile, dtype: torch.dtype) -> int:
    """Return how many column ranges of the tile are finished one after another: at most 32 KiB each."""
    return 4 if tile.bm * tile.bn // 2 * dtype.itemsize > EPILOGUE_BYTES else 2


def _factors(a: Decoded, b: Decoded, bias: Tensor | None) -> dict:
    """Return the keyword arguments of `finish`."""
    arguments = {"bias_ptr": bias, "HAS_BIAS": bias is not None}
    for name, side in (("a", a), ("b", b)):
        arguments[f"{name}_amax_ptr"] = side.amax
        arguments[f"{name}_floor"] = f32(side.divisor / FLT_MAX)
        arguments[f"{name}_inverse"] = f32(1 / side.divisor)
        arguments[f"{name.upper()}_FACTOR"] = _factor_kind(side)
    return arguments


def _factor_kind(side: Decoded) -> int:
    if side.amax is None:
        return dc.NO_FACTOR.value
    rows = side.values.shape[0]
    assert side.amax.dim() == 0 or side.amax.shape in ((rows,), (1,)), "amax is neither one number nor one per row"
    return dc.ROW_FACTOR.value if side.amax.dim() and side.amax.numel() == rows else dc.TENSOR_FACTOR.value


def bias_only(y: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    """K = 0: the product is zero."""
    total = torch.zeros(y.shape, device=y.device) if addend is None else addend.float()
    return y.copy_(total if bias is None else total + bias.float())


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 0 else x.contiguous()


def describable(x: Tensor) -> bool:
    """Whether a tensor map can describe x: base and row stride are multiples of 16 bytes."""
    row = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and x.data_ptr() % TMA_ALIGNMENT == 0 and row % TMA_ALIGNMENT == 0 and row > 0


def all_describable(ends: Ends) -> bool:
    """Whether tensor maps can describe the output, and the addend if there is one."""
    return all(end is None or describable(end) for end in ends)


def tma_tiles(target: Target) -> tuple[Tile, ...]:
    """Return the tiles that the TMA kernel may use, none where there is none.

    On sm_100, where this GEMM only stands in for the native one, the largest tile spills registers.
    """
    if not target.tma:
        return ()
    return TMA_TILES if target.capability < 100 else TMA_TILES[1:]


def _tile_arguments(tile: Tile) -> dict:
    return {"K": "i32:16", "SPLITS": 1, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP}
