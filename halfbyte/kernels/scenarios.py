"""The calls whose launches are recorded: what `ops` asks of the backend, over specs, inputs and shapes.

Tensors lie on the device "meta": a launcher sees their shapes, strides, dtypes and alignment, and nobody their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from halfbyte.arithmetic import FUNCTIONS
from halfbyte.kernels import backend, fused, grouped_native, hardware_cast, native, primary
from halfbyte.kernels.dequantize import Decoded
from halfbyte.kernels.target import Target
from halfbyte.layout import (
    LINEAR,
    SCALE_LAYOUTS,
    SWIZZLED_32_4_4,
    Blocks,
    GroupedOperand,
    ceil_div,
    grouped_shapes,
    round_up,
    swizzled_numel,
)
from halfbyte.pieces import Piece
from halfbyte.pieces import Target as Weight
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, FourOverSix, Hadamard, Spec

META = torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PLAIN, TILE, SR, ROW = NVFP4(), NVFP4(block=(16, 16)), NVFP4(rounding="stochastic"), NVFP4(outer="row")
RHT, SR_RHT = NVFP4(rotation=Hadamard()), NVFP4(rounding="stochastic", rotation=Hadamard())
FRESH = NVFP4(rounding="stochastic", rotation=Hadamard(signs="fresh"))
FOUR = NVFP4(scaling=FourOverSix(), e4m3_max=256.0)
FOUR_RHT = NVFP4(scaling=FourOverSix(), e4m3_max=256.0, rotation=Hadamard())


def rotated(size: int, **options: Any) -> NVFP4:
    """Return the spec of a rotation with fresh signs."""
    return NVFP4(rotation=Hadamard(size=size, signs="fresh"), **options)


TUNED = (PLAIN, TILE, SR, FOUR, RHT, SR_RHT, MXFP8(), rotated(32, outer="row"))
"""Specs of the presets, and what else must not spill on bf16 of whole blocks."""

OTHERS = (
    ROW,
    FRESH,
    NVFP4(rotation=Hadamard(size=32)),
    NVFP4(rotation=Hadamard(size=64), outer="row"),
    NVFP4(rotation=Hadamard(size=128)),
    rotated(64, outer="row", rounding="stochastic"),
    rotated(128, rounding="stochastic"),
    NVFP4(block=(16, 16), rounding="stochastic"),
    NVFP4(rounding="stochastic", fp4_max=6 * 16 / 17),
    NVFP4(rounding="toward_zero"),
    NVFP4(scaling=FourOverSix(error_math="scaled"), e4m3_max=256.0),
    NVFP4(scaling=FourOverSix(error="mse"), e4m3_max=256.0),
    FOUR_RHT,
    NVFP4(block=(16, 16), scaling=FourOverSix(), e4m3_max=256.0),
    NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5))),
    MXFP8(element="e5m2"),
)

TUNED_PAIRS = ((PLAIN, RHT), (SR, SR_RHT), (PLAIN, MXFP8()), (TILE, TILE))
"""(row, col) of the presets' activations, gradients and weights."""

OTHER_PAIRS: tuple[tuple[Spec | None, Spec | None], ...] = (
    (SR, FRESH),
    (PLAIN, PLAIN),
    (MXFP8(), MXFP8()),
    (ROW, RHT),
    (FOUR, FOUR_RHT),
    (None, rotated(32, rounding="stochastic")),
    (MXFP8(element="e5m2"), None),
    (PLAIN, rotated(128, rounding="stochastic")),
)


@dataclass(frozen=True)
class Scenario:
    """One call.

    Args:
        name: what it is, for messages.
        call: makes the launches.
        tuned: whether none of its launches may spill: bf16 of whole blocks, as training has it.
    """

    name: str
    call: Callable[[], object]
    tuned: bool


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def misaligned(rows: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a matrix that starts one element behind an aligned address."""
    return tensor(rows * cols + 1, dtype=dtype)[1:].view(rows, cols)


def draws() -> dict[str, Draw]:
    """Return the random bits and fresh signs that a call may use."""
    return {"draw": Draw(tensor(2, dtype=torch.int64), 17), "sign_draw": Draw(tensor(2, dtype=torch.int64), 3)}


WHOLE = {"8192x8192": (8192, 8192), "512x768": (512, 768), "2048x2880": (2048, 2880)}
"""Shapes of bf16 inputs that training meets: one takes the small kernels, one is no multiple of the largest tiles."""


def ragged() -> dict[str, Tensor]:
    """Return what nothing is tuned for: other dtypes, strides, alignments, and edges that cut blocks."""
    return {
        "300x83": tensor(300, 83),
        "300x88, rows of 88": tensor(300, 88),
        "a column of 83": tensor(300, 83).T,
        "misaligned": misaligned(256, 512),
        "every second column": tensor(256, 1024)[:, ::2],
        "fp16": tensor(256, 512, dtype=FP16),
        "fp32": tensor(256, 512, dtype=FP32),
        "fp32 ragged": tensor(300, 83, dtype=FP32),
        "4-D": tensor(2, 3, 5, 48),
        "1-D": tensor(45),
    }


def inputs() -> Iterator[tuple[str, Tensor, bool]]:
    """Return (name, x, whether it is tuned for)."""
    for name, shape in WHOLE.items():
        yield name, tensor(*shape), True
        yield f"{name} by columns", tensor(*reversed(shape)).T, True
    for name, x in ragged().items():
        yield name, x, False


def quantize(_: Target) -> Iterator[Scenario]:
    """One orientation: every spec, stored as codes in both layouts, or decoded."""
    for (name, x, whole), spec in product(inputs(), (*TUNED, *OTHERS)):
        for kind in ("codes", "swizzled", "decoded"):
            options = {"scale_layout": SWIZZLED_32_4_4 if kind == "swizzled" else LINEAR, "decoded": kind == "decoded"}
            call = partial(backend.quantize, x, spec, **draws(), **options)
            yield Scenario(f"quantize {spec.key}, {name}, {kind}", call, whole and spec in TUNED)


def quantize_row_col(_: Target) -> Iterator[Scenario]:
    """Both orientations from one read; decoded for a GEMM at once."""
    for (name, x, whole), pair in product(inputs(), (*TUNED_PAIRS, *OTHER_PAIRS)):
        kinds = product(SCALE_LAYOUTS, ((False, False), (True, True), (True, False)))
        for layout, transient in kinds:
            if layout != LINEAR and any(transient):
                continue
            options = {"scale_layout": layout, "transient": transient}
            call = partial(backend.quantize_row_col, x, *pair, **draws(), **options)
            keys = " + ".join(spec.key if spec else "none" for spec in pair)
            kind = f"{layout}, transient {transient}"
            yield Scenario(f"row and column {keys}, {name}, {kind}", call, whole and pair in TUNED_PAIRS)


def maxima(_: Target) -> Iterator[Scenario]:
    """amax of tensors and of rows, rotated or not."""
    from halfbyte.kernels import amax

    for name, x, whole in inputs():
        yield Scenario(f"amax, {name}", partial(backend.finite_amax, x), whole)
        yield Scenario(f"amax of rows, {name}", partial(backend.finite_amax, x, -1), whole)
        if x.dim() != 2:
            continue
        for size, signs, outer in product((16, 32, 64, 128), ("fixed", "fresh"), ("tensor", "row")):
            spec = NVFP4(rotation=Hadamard(size=size, signs=signs), outer=outer)
            call = partial(amax.row_col_amax, x, PLAIN, spec, draws()["sign_draw"])
            yield Scenario(f"amax of a row and of {spec.key}, {name}", call, whole)


def blocks(rows: int, cols: int, spec: Spec, layout: str = LINEAR) -> Blocks:
    """Return a quantized matrix."""
    count = round_up(cols, spec.alignment) // spec.block_length
    width = count * (8 if isinstance(spec, NVFP4) else spec.block_length)
    shape = (rows, count) if layout == LINEAR else (swizzled_numel(rows, count),)
    amax = (0,) if isinstance(spec, MXFP8) else (rows,) if spec.outer == "row" else ()
    return Blocks(tensor(rows, width, dtype=torch.uint8), tensor(*shape, dtype=torch.uint8), tensor(*amax, dtype=FP32))


def bytes_to_values(_: Target) -> Iterator[Scenario]:
    """dequantize and decode, transposes of tiles, both layouts."""
    specs = (PLAIN, ROW, MXFP8(), MXFP8(element="e5m2"))
    for shape, spec, layout in product((*WHOLE.values(), (300, 83), (37, 40)), specs, SCALE_LAYOUTS):
        stored, what = blocks(*shape, spec, layout), f"{spec.key}, {shape}, {layout}"
        whole = shape in WHOLE.values()
        yield Scenario(f"decode {what}", partial(backend.decode, stored, spec, shape[1], layout), whole)
        for dtype in (BF16, FP16, FP32):
            call = partial(backend.dequantize, stored, spec, shape[1], dtype, layout)
            yield Scenario(f"dequantize {what} to {dtype}", call, whole and dtype == BF16)
    for rows, cols in (*WHOLE.values(), (4096, 4096), (300, 83), (48, 32)):
        stored, whole = blocks(rows, cols, TILE), rows % 128 == 0
        call = partial(backend.transpose, stored.qdata, stored.block_scale, rows, cols)
        yield Scenario(f"transpose {rows}x{cols}", call, whole)
        stack = [torch.stack([t] * 4) for t in stored[:2]]
        yield Scenario(f"transpose 4x{rows}x{cols}", partial(backend.transpose, *stack, rows, cols), whole)


GEMM_SHAPES = (
    (4096, 4096, 4096),
    (2048, 1024, 1024),
    (1024, 768, 768),
    (512, 768, 768),
    (512, 512, 4096),
    (64, 96, 8192),
    (64, 64, 64),
    (16, 64, 128),
)
"""Together they take every tile on every target, and split contractions."""


def products(_: Target) -> Iterator[Scenario]:
    """gemm_nt: factors of tensors and of rows, bias, accumulation, every output dtype, ragged and plain operands."""
    for (M, N, K), dtype in product((*GEMM_SHAPES, (256, 256, 16384), (37, 53, 83), (300, 200, 88)), (BF16, FP16, FP32)):
        for kind in ("plain", "tensor", "row"):
            a, b = (_decoded(n, K, kind) for n in (M, N))
            for extra in (False, True):
                options: dict[str, Any] = {"out_dtype": dtype}
                if extra:
                    options |= {"bias": tensor(N, dtype=dtype), "out": tensor(M, N, dtype=dtype), "accumulate": True}
                name = f"gemm {M}x{N}x{K} to {dtype}, {kind} factors{', bias, accumulated' if extra else ''}"
                yield Scenario(name, partial(backend.gemm_nt, a, b, **options), K % 64 == 0 and dtype != FP16)
    for dtype in (FP16, FP32):
        a, b = Decoded(tensor(512, 768, dtype=dtype)), Decoded(tensor(256, 768, dtype=dtype))
        for out in (BF16, FP32):
            call = partial(backend.gemm_nt, a, b, out_dtype=out)
            yield Scenario(f"gemm of {dtype} to {out}", call, tuned=dtype == out == FP32)
    whole, cut = Decoded(tensor(512, 768)), Decoded(tensor(512, 2048)[:, :768])
    out = tensor(512, 1025)[:, :512]
    yield Scenario("gemm of a view", partial(backend.gemm_nt, whole, cut), tuned=True)
    yield Scenario("gemm into rows without alignment", partial(backend.gemm_nt, whole, cut, out=out), tuned=False)


def _decoded(rows: int, cols: int, kind: str) -> Decoded:
    if kind == "plain":
        return Decoded(tensor(rows, cols))
    amax = tensor(*((rows,) if kind == "row" else ()), dtype=FP32)
    return Decoded(tensor(rows, cols), amax, 2688.0)


def native_products(target: Target) -> Iterator[Scenario]:
    """What surrounds scaled_mm on FP4 and FP8 tensor cores: swizzled scales, and what it cannot finish."""
    if native.unsupported(PLAIN, PLAIN, divmod(target.capability, 10)):
        return
    for (M, N, K), (a, b) in product(((512, 768, 768), (37, 53, 83)), ((PLAIN, TILE), (ROW, PLAIN), (MXFP8(), MXFP8()))):
        for layout, extra in product(SCALE_LAYOUTS, (False, True)):
            sides = [native.Packed(blocks(n, K, spec, layout), spec, K, layout) for n, spec in ((M, a), (N, b))]
            out = tensor(M, N, dtype=FP32)
            options = {"bias": tensor(N, dtype=FP32), "out": out, "accumulate": True} if extra else {}
            call = partial(native.gemm_nt, *sides, **options)
            yield Scenario(f"native gemm {a.key} x {b.key}, {M}x{N}x{K}, {layout}, {extra}", call, M == 512)


TOKENS = {"2048x4096 in 8": (2048, 4096, 8), "4096x2880 in 64": (4096, 2880, 64)}
EXPERTS = {"8 of 2048x1024": (8, 2048, 1024), "64 of 768x2880": (64, 768, 2880)}


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


GROUPED_PAIRS: tuple[tuple[Spec | None, Spec | None], ...] = (
    *((spec, None) for spec in (PLAIN, TILE, ROW, MXFP8(), FOUR, rotated(128))),
    *((None, spec) for spec in (RHT, MXFP8(), NVFP4(rotation=Hadamard(size=32)), rotated(64, rounding="stochastic"))),
    (NVFP4(outer="row"), NVFP4(rotation=Hadamard(), outer="row")),
    (NVFP4(rotation=Hadamard(size=128), outer="row"), rotated(32)),
)


def grouped_operands(_: Target) -> Iterator[Scenario]:
    """grouped_quantize_row_col of tokens and of experts, and back."""
    pairs = (*TUNED_PAIRS, *OTHER_PAIRS, *GROUPED_PAIRS)
    for (name, x, offsets, whole), pair in product(tokens_and_experts(), pairs):
        for layout, transient in product(SCALE_LAYOUTS, ((False, False), (True, True), (True, False))):
            if layout != LINEAR and any(transient):
                continue
            options = {"scale_layout": layout, "transient": transient}
            call = partial(backend.grouped_quantize_row_col, x, offsets, *pair, **draws(), **options)
            keys = " + ".join(spec.key if spec else "none" for spec in pair)
            tuned = whole and pair in (*TUNED_PAIRS, (TILE, None))
            yield Scenario(f"grouped {keys}, {name}, {layout}, transient {transient}", call, tuned)
    for (name, (rows, cols, groups)), spec, layout in product(TOKENS.items(), (PLAIN, ROW, MXFP8()), SCALE_LAYOUTS):
        operand = GroupedOperand(grouped_blocks((rows, cols), groups, spec, layout), spec, layout)
        call = partial(backend.grouped_dequantize, operand, offsets_of(groups), cols)
        yield Scenario(f"grouped dequantize {spec.key}, {name}, {layout}", call, tuned=False)


def grouped_blocks(shape: tuple[int, int], groups: int, spec: Spec, layout: str, contraction: bool = False) -> Blocks:
    """Return quantized tokens."""
    shapes = grouped_shapes(shape, groups, spec, layout, contraction=contraction)
    q, scale, amax = (tensor(*size, dtype=kind) for size, kind in zip(shapes, (torch.uint8, torch.uint8, FP32)))
    return Blocks(q, scale, amax)


def expert_blocks(groups: int, rows: int, cols: int, spec: Spec, layout: str = LINEAR) -> Blocks:
    """Return quantized experts."""
    one = blocks(rows, cols, spec, layout)
    amax = (0,) if isinstance(spec, MXFP8) else (groups, *one.amax.shape)
    return Blocks(*(tensor(groups, *t.shape, dtype=torch.uint8) for t in one[:2]), tensor(*amax, dtype=FP32))


GROUPED_SHAPES = ((4, 64, 128, 256), (4, 384, 4096, 512), (4, 768, 4096, 512), (8, 16384, 2048, 2048))
"""(groups, tokens, N, K): together they take every tile on every target."""


def grouped_products(target: Target) -> Iterator[Scenario]:
    """grouped_gemm_nt along the rows and along the contraction; plain operands too."""
    sizes = (*GROUPED_SHAPES, (4, 70, 80, 96), (4, 70, 83, 45))
    for (groups, M, N, K), dtype in product(sizes, (BF16, FP32)):
        whole, offsets = N % 128 == 0, offsets_of(groups)
        for a, b in ((PLAIN, TILE), (ROW, ROW), (MXFP8(), MXFP8()), (None, None)):
            name = f"{groups} groups, {M}x{N}x{K}, {a.key if a else 'plain'} to {dtype}"
            for accumulate in (False, True):
                rows = partial(_rows_product, (groups, M, N, K), (a, b), offsets, dtype, accumulate)
                yield Scenario(f"grouped gemm, {name}, {accumulate}", rows, whole and a in (PLAIN, MXFP8()))
            tuned = whole and a in (PLAIN, MXFP8())
            both = RHT if a == PLAIN else None if a is None else a
            for accumulate in (False, True):
                split = partial(_split_product, (groups, M, N, K), both, offsets, dtype, accumulate)
                yield Scenario(f"grouped gemm over tokens, {name}, {accumulate}", split, tuned)
        for kind in (BF16, FP32):
            call = partial(backend.plain_grouped_gemm, tensor(M, K, dtype=kind), tensor(groups, N, K, dtype=kind), offsets, dtype)
            yield Scenario(f"torch's grouped gemm, {groups} groups, {M}x{N}x{K} {kind}", call, whole)


def _rows_product(sizes, specs, offsets: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
    groups, M, N, K = sizes
    sides = []
    for spec, shape in zip(specs, ((M, K), (groups, N, K))):
        if spec is None:
            sides.append(GroupedOperand(tensor(*shape)))
        elif len(shape) == 2:
            sides.append(GroupedOperand(grouped_blocks(shape, groups, spec, LINEAR), spec))
        else:
            sides.append(GroupedOperand(expert_blocks(*shape, spec), spec))
    backend.grouped_gemm_nt(*sides, offsets, K, tensor(M, N, dtype=dtype), accumulate=accumulate)


def _split_product(sizes, spec, offsets: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
    groups, M, N, K = sizes
    sides = [
        GroupedOperand(tensor(M, n).T) if spec is None
        else GroupedOperand(grouped_blocks((n, M), groups, spec, LINEAR, contraction=True), spec)
        for n in (N, K)
    ]
    backend.grouped_gemm_nt(*sides, offsets, M, tensor(groups, N, K, dtype=dtype), accumulate=accumulate)


FOLLOWING: dict[str, tuple[str, NVFP4 | None]] = {
    "no amax": ("", None),
    "amaxes": ("tensor", PLAIN),
    "rotated column": ("tensor", RHT),
    "amax of rows": ("row", rotated(32)),
}
"""(row, col) of the amaxes that a norm or an activation collects."""


def layers(_: Target) -> Iterator[Scenario]:
    """Norms and activations with their gradients."""
    sizes = (((4096, 4096), BF16), ((4096, 8192), BF16), ((2048, 2880), BF16), ((37, 83), BF16), ((37, 83), FP32))
    for (shape, dtype), (what, (row, col)) in product(sizes, FOLLOWING.items()):
        x, weight, sign = tensor(*shape, dtype=dtype), tensor(shape[1], dtype=dtype), draws()["sign_draw"]
        whole = shape[1] % 512 == 0 and what != "amax of rows"
        for centered in (False, True):
            arguments = x, (weight, weight if centered else None), (1e-5, centered, dtype), row, col, sign
            yield Scenario(f"norm {centered}, {shape} {dtype}, {what}", partial(fused.norm_with_amaxes, *arguments), whole)
        for function, up in product(FUNCTIONS, (None, x)):
            name = f"{function}, {shape} {dtype}, {what}, gated {up is not None}"
            call = partial(fused.activation_with_amaxes, x, up, function, row, col, sign)
            yield Scenario(name, call, whole and up is not None)
            call = partial(fused.activation_backward_with_amaxes, (x, x, up), function, row, col, sign)
            yield Scenario(f"gradient of {name}", call, whole and up is not None)
    for (shape, dtype), centered in product(sizes, (False, True)):
        x, weight = tensor(*shape, dtype=dtype), tensor(shape[1], dtype=dtype)
        statistics = tensor(shape[0], dtype=FP32), tensor(shape[0], dtype=FP32)
        call = partial(fused.norm_backward, x, x, weight, statistics, centered, centered)
        yield Scenario(f"gradient of a norm {centered}, {shape} {dtype}", call, shape[1] % 512 == 0)


def primary_casts(_: Target) -> Iterator[Scenario]:
    """Every stage of the cast of primary weights: whole masters and parts of them."""
    four = NVFP4(block=(16, 16), scaling=FourOverSix(), e4m3_max=256.0)
    for spec, dtype, rounded, layout, part in product(
        (TILE, four), (FP32, BF16, FP16), (BF16, FP16, FP32), SCALE_LAYOUTS, ("whole", "from 16", "from 1")
    ):
        call = partial(_cast, spec, dtype, rounded, layout == SWIZZLED_32_4_4, part)
        tuned = dtype == FP32 and rounded == BF16
        yield Scenario(f"primary {spec.key}, {dtype} to {rounded}, {layout}, {part}", call, tuned)


def _cast(spec: NVFP4, dtype: torch.dtype, rounded: torch.dtype, swizzled: bool, part: str) -> None:
    pieces, tiles = [], 0
    for slot, (rows, cols) in enumerate(((256, 512), (33, 48), (7, 300)) if part == "from 1" else ((256, 512),)):
        stored = blocks(rows, cols, spec, SWIZZLED_32_4_4 if swizzled else LINEAR)
        turned = blocks(cols, rows, spec)
        weight = Weight(rows, cols, spec, rounded, stored, swizzled, tiles, slot, turned)
        tiles += weight.tile_count
        start = {"whole": 0, "from 16": 16, "from 1": 1}[part]
        values = tensor(rows * cols, dtype=dtype)[start:]
        pieces.append(Piece(weight, values, start, cols, stored.qdata.view(-1)))
    amaxes, scales = tensor(tiles + len(pieces), dtype=FP32), tensor(tiles, dtype=torch.uint8)
    caster, finisher = primary.Caster(pieces, tiles), primary.Finisher([piece.target for piece in pieces], tiles)
    caster.amax(amaxes)
    caster.choose(amaxes, scales)
    finisher.scale(amaxes, scales)
    finisher.scale(amaxes, scales, expand=True)
    caster.cast(amaxes, scales)
    finisher.expand(amaxes, scales)
    finisher.transpose()


def conversions(target: Target) -> Iterator[Scenario]:
    """The self-test of the target's own conversions to E2M1."""
    for name, capabilities in (
        ("nearest", hardware_cast.NEAREST_CAPABILITIES),
        ("stochastic", hardware_cast.STOCHASTIC_CAPABILITIES),
    ):
        if target.capability in capabilities:
            x, random = tensor(hardware_cast.COUNT, dtype=FP32), tensor(hardware_cast.COUNT // 4, dtype=torch.int32)
            yield Scenario(f"{name} conversion", partial(hardware_cast.convert, x, random, name), tuned=True)
