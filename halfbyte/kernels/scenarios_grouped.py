"""The recorded calls of grouped operands: tokens in groups, experts, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from halfbyte.kernels import backend
from halfbyte.kernels.gemm import grouped, grouped_native, native_route
from halfbyte.kernels.scenario_values import (
    BF16,
    FOUR,
    FP16,
    FP32,
    FRESH,
    KINDS,
    OTHER_PAIRS,
    PLAIN,
    RHT,
    ROW,
    SR,
    TILE,
    TUNED_PAIRS,
    Scenario,
    blocks,
    places,
    rotated_spec,
    tensor,
)
from halfbyte.kernels.target import Target
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, SWIZZLED_32_4_4, Blocks, GroupEnds, Operand, grouped_shapes
from halfbyte.sides import both_sides
from halfbyte.spec import MXFP8, NVFP4, FourOverSix, Hadamard, Spec

TOKENS = {
    "2048x4096 in 8": (2048, 4096, 8),
    "4096x2880 in 64": (4096, 2880, 64),
    "16384x8192 in 64": (16384, 8192, 64),
}
EXPERTS = {"8 of 2048x1024": (8, 2048, 1024), "64 of 768x2880": (64, 768, 2880), "64 of 768x4096": (64, 768, 4096)}


def tokens_and_experts() -> Iterator[tuple[str, Tensor, Tensor | None, bool]]:
    """Return (name, x, offsets, whether it is tuned for)."""
    for name, (rows, cols, groups) in TOKENS.items():
        yield name, tensor(rows, cols), offsets_of(groups), True
    for name, shape in EXPERTS.items():
        yield f"experts, {name}", tensor(*shape), None, True
    yield "70x96 in 4", tensor(70, 96), offsets_of(4, torch.int64), False
    yield "70x83 in 4", tensor(70, 83), offsets_of(4), False
    yield "every second column in 4", tensor(70, 192)[:, ::2], offsets_of(4), False
    yield "fp32 in 4", tensor(256, 512, dtype=FP32), offsets_of(4), False
    yield "fp16 in 4", tensor(256, 512, dtype=FP16), offsets_of(4), False
    yield "experts, 4 of 80x96", tensor(4, 80, 96), None, False
    yield "experts, 4 of 83x45 in fp32", tensor(4, 83, 45, dtype=FP32), None, False


def offsets_of(groups: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return where groups of tokens end."""
    return tensor(groups, dtype=dtype)


TILE_FOUR = NVFP4(block=(16, 16), scaling=FourOverSix(), e4m3_max=256.0)

GROUPED_PAIRS: tuple[tuple[Spec | None, Spec | None], ...] = (
    *((spec, None) for spec in (PLAIN, TILE, TILE_FOUR, ROW, MXFP8(), FOUR)),
    *(
        (None, spec)
        for spec in (RHT, MXFP8(), NVFP4(rotation=Hadamard(size=32)), rotated_spec(64, rounding="stochastic"))
    ),
    *((rotated_spec(size, rounding="stochastic"),) * 2 for size in (32, 128)),
    (PLAIN, rotated_spec(32)),
    (PLAIN, NVFP4(rotation=Hadamard(), outer="row")),
    (ROW, NVFP4(rotation=Hadamard(), outer="row")),
    (NVFP4(rotation=Hadamard(size=128), outer="row"), rotated_spec(32)),
)


def operands(_: Target) -> Iterator[Scenario]:
    """grouped_quantize_row_col of tokens and of experts, and back."""
    pairs = (*TUNED_PAIRS, *OTHER_PAIRS, *GROUPED_PAIRS)
    for (name, x, offsets, whole), pair in product(tokens_and_experts(), pairs):
        for layout, transient in KINDS if whole or name == "70x83 in 4" else KINDS[:1]:
            options = {"scale_layout": layout, "transient": transient}
            call = partial(backend.grouped_quantize_row_col, x, offsets, *both_sides(*pair, **places(*pair), **options))
            keys = " + ".join(spec.key if spec else "none" for spec in pair)
            tuned = whole and pair in (*TUNED_PAIRS, (TILE, None))
            yield Scenario(f"grouped {keys}, {name}, {layout}, transient {transient}", call, tuned)
    for groups in (8, 64):
        given = {"row_amax": tensor(groups, dtype=FP32), "col_amax": tensor(groups, dtype=FP32)}
        pair, x = (SR, FRESH), tensor(4096, 2880)
        call = partial(
            backend.grouped_quantize_row_col, x, offsets_of(groups), *both_sides(*pair, **places(*pair), **given)
        )
        yield Scenario(f"grouped with amaxes that are given, {groups} groups", call, tuned=True)
        sides = both_sides(*pair, **places(*pair))
        call = partial(backend.grouped_quantize_row_col, x, GroupEnds(offsets_of(groups)), *sides)
        yield Scenario(f"grouped before products of the same pass, {groups} groups", call, tuned=True)
    for (name, (rows, cols, groups)), spec, layout in product(TOKENS.items(), (PLAIN, ROW, MXFP8()), SCALE_LAYOUTS):
        operand = Operand(grouped_blocks((rows, cols), groups, spec, layout), spec, cols, layout)
        call = partial(backend.grouped_dequantize, operand, offsets_of(groups))
        yield Scenario(f"grouped dequantize {spec.key}, {name}, {layout}", call, tuned=False)


def sums(_: Target) -> Iterator[Scenario]:
    """The sums over the tokens of each group."""
    for name, x, offsets, whole in tokens_and_experts():
        if offsets is not None:
            yield Scenario(f"sums over tokens, {name}", partial(backend.grouped_token_sum, x, offsets), whole)


def grouped_blocks(
    shape: tuple[int, int], groups: int, spec: Spec, layout: str = LINEAR, contraction: bool = False
) -> Blocks:
    """Return quantized tokens."""
    shapes, kinds = grouped_shapes(shape, groups, spec, layout, contraction=contraction), (torch.uint8,) * 2 + (FP32,)
    q, scale, amax = (tensor(*size, dtype=kind) for size, kind in zip(shapes, kinds, strict=True))
    return Blocks(q, scale, amax)


def blocks_of_experts(groups: int, rows: int, cols: int, spec: Spec, layout: str = LINEAR) -> Blocks:
    """Return quantized experts."""
    one = blocks(rows, cols, spec, layout)
    amax = (groups, *one.amax.shape) if spec.format.has_amax else (0,)
    return Blocks(*(tensor(groups, *t.shape, dtype=torch.uint8) for t in one[:2]), tensor(*amax, dtype=FP32))


ROWS_SHAPES = ((4, 64, 128, 256), (4, 384, 4096, 512), (4, 768, 4096, 512), (8, 16384, 2048, 2048), (4, 70, 83, 45))
"""(groups, tokens, N, K): but for the last, together they take every tile on every target."""

SPLIT_SHAPES = (
    (4, 1024, 128, 256),
    (4, 2048, 96, 4096),
    (4, 2048, 192, 4096),
    (8, 16384, 2048, 2048),
    (64, 4096, 768, 2880),
    (4, 70, 83, 45),
)
"""(groups, tokens, R, C) of products over tokens, likewise."""


def grouped_gemm_calls(target: Target) -> Iterator[Scenario]:
    """grouped_gemm_nt along the rows and over the tokens, of codes, values and plain operands; torch's and native."""
    for (shape, dtype), accumulate in product(product(ROWS_SHAPES, (BF16, FP32)), (False, True)):
        whole = shape[2] % 128 == 0
        for what, sides in _rows_operands(*shape):
            call = partial(_rows_product, shape, sides, dtype, accumulate)
            tuned = whole and what in ("codes", "values", "by rows", "MXFP8")
            yield Scenario(f"grouped gemm, {what}, {shape} to {dtype}, accumulate {accumulate}", call, tuned)
    for (shape, dtype), accumulate in product(product(SPLIT_SHAPES, (BF16, FP32)), (False, True)):
        whole = shape[3] % 128 == 0
        for what, sides in _split_operands(*shape):
            call = partial(_split_product, shape, sides, dtype, accumulate)
            tuned = whole and what in ("codes", "MXFP8")
            yield Scenario(f"grouped gemm over tokens, {what}, {shape} to {dtype}, {accumulate}", call, tuned)
    for groups, M, N, K in ROWS_SHAPES:
        call = partial(_plain, tensor(M, K), tensor(groups, N, K), offsets_of(groups))
        yield Scenario(f"torch's grouped gemm, {groups} groups, {M}x{N}x{K}", call, tuned=True)
    yield from _native_products(target)


def _plain(a: Tensor, b: Tensor, offsets: Tensor) -> None:
    way = native_route.choose_grouped_way(a, b, offsets, BF16)
    if way.kernel == native_route.GROUPED_TORCH:
        grouped.plain_grouped_gemm(a, b, offsets)


def _rows_operands(groups: int, M: int, N: int, K: int) -> Iterator[tuple[str, tuple]]:
    def values(data: Tensor, spec: Spec) -> Operand:
        return Operand(Blocks(data, tensor(0, dtype=torch.uint8), tensor(groups, dtype=FP32)), spec, K)

    for what, (a, b) in {"codes": (PLAIN, TILE), "row-scaled": (ROW, ROW), "MXFP8": (MXFP8(), MXFP8())}.items():
        tokens, experts = grouped_blocks((M, K), groups, a), blocks_of_experts(groups, N, K, b)
        yield what, (Operand(tokens, a, K), Operand(experts, b, K))
    experts = values(tensor(groups, N, K), TILE)
    yield "values", (values(tensor(M, K), PLAIN), experts)
    yield "by rows", (values(tensor(M, K), PLAIN), values(tensor(groups, K, N).mT, TILE))
    yield "rows without alignment", (values(tensor(M, K + 1)[:, :K], PLAIN), experts)
    yield "plain", (tensor(M, K), tensor(groups, N, K))
    yield "plain fp32", (tensor(M, K, dtype=FP32), tensor(groups, N, K, dtype=FP32))


def _rows_product(shape: tuple, sides: tuple, dtype: torch.dtype, accumulate: bool) -> None:
    groups, M, N, K = shape
    backend.grouped_gemm_nt(*sides, offsets_of(groups), K, tensor(M, N, dtype=dtype), accumulate=accumulate)


def _split_operands(groups: int, M: int, R: int, C: int) -> Iterator[tuple[str, tuple]]:
    for what, spec, layout in (
        ("codes", RHT, LINEAR),
        ("MXFP8", MXFP8(), LINEAR),
        ("row-scaled", NVFP4(outer="row"), LINEAR),
        ("swizzled MXFP8", MXFP8(), SWIZZLED_32_4_4),
        ("swizzled codes", RHT, SWIZZLED_32_4_4),
    ):
        sides = (grouped_blocks((n, M), groups, spec, layout, contraction=True) for n in (R, C))
        a, b = (Operand(side, spec, M, layout) for side in sides)
        yield what, (a, b)
        if what == "codes":
            cut = tensor(C, 2 * b.blocks.qdata.shape[1] + 1)[:, :-1]  # values, in rows without alignment
            yield "rows without alignment", (a, Operand(b.blocks._replace(qdata=cut), spec, M))
            yield "codes and plain", (a, tensor(M, C).T)
    yield "plain", (tensor(M, R).T, tensor(M, C).T)
    yield "plain fp32", (tensor(M, R, dtype=FP32).T, tensor(M, C, dtype=FP32).T)


def _split_product(shape: tuple, sides: tuple, dtype: torch.dtype, accumulate: bool) -> None:
    groups, M, R, C = shape
    backend.grouped_gemm_nt(*sides, offsets_of(groups), M, tensor(groups, R, C, dtype=dtype), accumulate=accumulate)


def _native_products(target: Target) -> Iterator[Scenario]:
    """What surrounds scaled_grouped_mm, which has no meta function: scales in its layout."""
    groups, M, N, K = 8, 2048, 1024, 512
    for a, b in ((PLAIN, TILE), (MXFP8(), MXFP8())):
        rows = Operand(grouped_blocks((M, K), groups, a), a, K), Operand(blocks_of_experts(groups, N, K, b), b, K)
        both = RHT if a == PLAIN else a
        split = (Operand(grouped_blocks((n, M), groups, both, LINEAR, contraction=True), both, M) for n in (N, K))
        for what, sides, contraction in (("", rows, K), (" over tokens", tuple(split), M)):
            if native_route.grouped_unsupported(*sides, BF16, False, target):
                continue
            call = partial(grouped_native.scaled_grouped_mm_arguments, *sides, offsets_of(groups), contraction)
            yield Scenario(f"native grouped gemm{what}, {a.key} x {b.key}", call, tuned=True)
