"""The calls whose launches are recorded: what `ops` asks of the backend, over specs, inputs and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from halfbyte.arithmetic import FUNCTIONS, Normed, residual_dtype
from halfbyte.kernels import backend, fused, scenarios_grouped
from halfbyte.kernels.amax import plain
from halfbyte.kernels.device import hardware_cast
from halfbyte.kernels.gemm import native, native_route
from halfbyte.kernels.master_cast import launch
from halfbyte.kernels.scenario_values import (
    BF16,
    EVERY_KIND,
    FP16,
    FP32,
    KINDS,
    OTHER_PAIRS,
    OTHERS,
    PLAIN,
    RHT,
    ROW,
    TILE,
    TUNED,
    TUNED_PAIRS,
    WHOLE,
    Scenario,
    blocks,
    places,
    rotated_spec,
    tensor,
    whole_and_ragged,
)
from halfbyte.kernels.target import Target
from halfbyte.kernels.unpack import swizzle
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, SWIZZLED_32_4_4, Operand, round_up, swizzled_numel
from halfbyte.pieces import CastTarget as Weight
from halfbyte.pieces import Piece
from halfbyte.sides import Epilogue, Side, both_sides
from halfbyte.spec import MXFP8, NVFP4, FourOverSix, Hadamard, Spec


def quantize_calls(_: Target) -> Iterator[Scenario]:
    """One orientation: every spec, stored as codes in both layouts, or decoded."""
    for (name, x, whole), spec in product(whole_and_ragged(), (*TUNED, *OTHERS)):
        for kind in ("codes", "swizzled", "decoded") if whole or name in EVERY_KIND else ("codes",):
            layout = SWIZZLED_32_4_4 if kind == "swizzled" else LINEAR
            side = Side(spec, **places(spec), scale_layout=layout, transient=kind == "decoded")
            call = partial(backend.quantize_row_col, x, side, None)
            yield Scenario(f"quantize {spec.key}, {name}, {kind}", call, whole and spec in TUNED)


def row_col_calls(_: Target) -> Iterator[Scenario]:
    """Both orientations from one read; decoded for a GEMM at once."""
    for (name, x, whole), pair in product(whole_and_ragged(), (*TUNED_PAIRS, *OTHER_PAIRS)):
        for layout, transient in KINDS if whole or name in EVERY_KIND else KINDS[:1]:
            options = {"scale_layout": layout, "transient": transient}
            call = partial(backend.quantize_row_col, x, *both_sides(*pair, **places(*pair), **options))
            keys = " + ".join(spec.key if spec else "none" for spec in pair)
            kind = f"{layout}, transient {transient}"
            yield Scenario(f"row and column {keys}, {name}, {kind}", call, whole and pair in TUNED_PAIRS)


def amax_calls(_: Target) -> Iterator[Scenario]:
    """amax of tensors and of rows, rotated or not."""
    for name, x, whole in whole_and_ragged():
        yield Scenario(f"amax, {name}", partial(backend.finite_amax, x), whole)
        yield Scenario(f"amax of rows, {name}", partial(backend.finite_amax, x, -1), whole)
        if name not in ("8192x8192", "8192x8192 by columns", "300x88, rows of 88", *EVERY_KIND):
            continue
        for size, signs, outer in product((16, 32, 64, 128), ("fixed", "fresh"), ("tensor", "row")):
            spec = NVFP4(rotation=Hadamard(size=size, signs=signs), outer=outer)
            for row in (PLAIN, None):
                call = partial(plain.row_col_amax, x, row, spec, places(spec)["sign_draw"])
                yield Scenario(f"amax of {row and row.key} and of {spec.key}, {name}", call, whole)
    for sizes, dtype in product(((384, 128, 128), (512, 512), (24,)), (BF16, FP32)):
        call = partial(backend.greatest_amax, [tensor(rows, 384, dtype=dtype) for rows in sizes])
        yield Scenario(f"amax of all of {sizes} x 384 {dtype}", call, tuned=True)
    for rows, dtype in ((8192, FP32), (16, FP32), (16, BF16)):
        x = tensor(rows, 65536, dtype=dtype)
        yield Scenario(f"amax of rows, {rows}x65536 {dtype}", partial(backend.finite_amax, x, -1), tuned=True)


def bytes_to_values(_: Target) -> Iterator[Scenario]:
    """dequantize and decode, transposes of tiles, scales from one layout to the other."""
    specs = (PLAIN, ROW, MXFP8(), MXFP8(element="e5m2"))
    for shape, spec, layout in product(
        (*WHOLE.values(), (3, 512), (300, 1100), (300, 83), (37, 40)), specs, SCALE_LAYOUTS
    ):
        stored, what = Operand(blocks(*shape, spec, layout), spec, shape[1], layout), f"{spec.key}, {shape}, {layout}"
        whole = shape in WHOLE.values()
        yield Scenario(f"decode {what}", partial(backend.decode, stored), whole)
        for dtype in (BF16, FP16, FP32):
            call = partial(backend.dequantize, stored, dtype)
            yield Scenario(f"dequantize {what} to {dtype}", call, whole and dtype == BF16)
    for rows, cols in ((512, 48), (300, 6)):
        scale, buffer = tensor(rows, cols, dtype=torch.uint8), tensor(swizzled_numel(rows, cols), dtype=torch.uint8)
        yield Scenario(f"swizzle {rows}x{cols}", partial(swizzle.swizzle, scale), tuned=True)
        yield Scenario(f"unswizzle {rows}x{cols}", partial(swizzle.unswizzle, buffer, rows, cols), tuned=True)
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


def gemm_calls(_: Target) -> Iterator[Scenario]:
    """gemm_nt: factors of tensors and of rows, bias, accumulation, every output dtype, ragged and plain operands."""
    for (M, N, K), dtype in product(
        (*GEMM_SHAPES, (256, 256, 16384), (37, 53, 83), (300, 200, 88)), (BF16, FP16, FP32)
    ):
        for kind in ("plain", "tensor", "row"):
            a, b = (_decoded(n, K, kind) for n in (M, N))
            for extra in (False, True):
                epilogue = _accumulated(M, N, dtype) if extra else Epilogue(dtype)
                name = f"gemm {M}x{N}x{K} to {dtype}, {kind} factors{', bias, accumulated' if extra else ''}"
                yield Scenario(name, partial(backend.gemm_nt, a, b, epilogue), K % 64 == 0 and dtype != FP16)
    for dtype in (FP16, FP32):
        a, b = Decoded(tensor(512, 768, dtype=dtype)), Decoded(tensor(256, 768, dtype=dtype))
        for out in (BF16, FP32):
            call = partial(backend.gemm_nt, a, b, Epilogue(out))
            yield Scenario(f"gemm of {dtype} to {out}", call, tuned=dtype == out == FP32)
    for (M, N, K), out in product((*GEMM_SHAPES, (16, 4096, 4096)), (BF16, FP32)):
        a, b = _decoded(M, K, "row"), _decoded(N, K, "tensor")
        call = partial(backend.gemm_nt, a, b, Epilogue(out, tensor(N, dtype=FP32), batch_invariant=True))
        yield Scenario(f"gemm {M}x{N}x{K} to {out}, batch-invariant", call, tuned=True)
    for (M, N, K), out in product((*GEMM_SHAPES, (37, 53, 83)), (BF16, FP32)):
        a, b, outer = *(_decoded(n, K, "tensor") for n in (M, N)), (tensor(M, dtype=FP32), tensor(N, dtype=BF16))
        for name, epilogue in (("", Epilogue(out, outer=outer)), (", accumulated", _accumulated(M, N, out, outer))):
            call = partial(backend.gemm_nt, a, b, epilogue)
            yield Scenario(f"gemm {M}x{N}x{K} to {out}, outer product{name}", call, K % 64 == 0)
    yield from _products_of_views()
    yield from _products_of_one_row()


def _products_of_one_row() -> Iterator[Scenario]:
    """A mean or a token alone: every tile, everything that may follow, other dtypes, rows that are not aligned."""
    shapes = (14336, 4096), (4096, 14336), (512, 2048), (53, 83)
    for (N, K), kind, dtype in product(shapes, ("plain", "tensor", "row"), (BF16, FP32)):
        a, b, outer = _decoded(1, K, kind), _decoded(N, K, kind), (tensor(1, dtype=FP32), tensor(N, dtype=BF16))
        for name, epilogue in (("bias", Epilogue(dtype, tensor(N))), ("all added", _accumulated(1, N, dtype, outer))):
            call = partial(backend.gemm_nt, a, b, epilogue)
            yield Scenario(f"gemm 1x{N}x{K} to {dtype}, {kind} factors, {name}", call, K % 64 == 0)
    for a_dtype, b_dtype in product((BF16, FP16, FP32), (BF16, FP16, FP32)):
        a, b = Decoded(tensor(1, 4096, dtype=a_dtype)), Decoded(tensor(14336, 4096, dtype=b_dtype))
        name = f"gemm of one row of {a_dtype} and {b_dtype}"
        yield Scenario(name, partial(backend.gemm_nt, a, b, Epilogue(FP32)), a_dtype == b_dtype)
        cut = b._replace(values=tensor(14336, 4097, dtype=b_dtype)[:, 1:])
        yield Scenario(f"{name} without alignment", partial(backend.gemm_nt, a, cut, Epilogue(FP32)), tuned=False)


def _products_of_views() -> Iterator[Scenario]:
    """Operands and outputs that a tensor map cannot describe, and fp32 operands with everything that may follow."""
    for M, N, K in GEMM_SHAPES:
        for kind, dtype in (("tensor", BF16), ("row", FP32)):
            a, b = (_decoded(n, K, kind) for n in (M, N))
            cut = a._replace(values=tensor(M, K + 1)[:, :K])
            epilogue = _accumulated(M, N, FP32) if kind == "row" else Epilogue(dtype)
            name = f"{M}x{N}x{K} to {dtype}, {kind} factors"
            call = partial(backend.gemm_nt, cut, b, epilogue)
            yield Scenario(f"gemm of rows without alignment, {name}", call, tuned=True)
            out = tensor(M, N + 1, dtype=dtype)[:, :N]
            addend = None if epilogue.addend is None else out
            call = partial(backend.gemm_nt, a, b, epilogue._replace(addend=addend, out=out))
            # Plain stores of an fp32 tile with all that may follow spill up to 72 bytes.
            yield Scenario(f"gemm into rows without alignment, {name}", call, tuned=kind == "tensor")
    a, b = (_decoded(n, 768, "row")._replace(values=tensor(n, 768, dtype=FP32)) for n in (512, 256))
    call = partial(backend.gemm_nt, a, b, _accumulated(512, 256, FP32))
    yield Scenario("gemm of fp32 with factors, bias, accumulated", call, tuned=True)


def _accumulated(M: int, N: int, dtype: torch.dtype, outer: tuple | None = None) -> Epilogue:
    out = tensor(M, N, dtype=dtype)
    return Epilogue(bias=tensor(N, dtype=dtype), addend=out, out=out, outer=outer)


def _decoded(rows: int, cols: int, kind: str) -> Decoded:
    if kind == "plain":
        return Decoded(tensor(rows, cols))
    amax = tensor(*((rows,) if kind == "row" else ()), dtype=FP32)
    return Decoded(tensor(rows, cols), amax, PLAIN.e4m3_max * PLAIN.fp4_max)


def native_products(target: Target) -> Iterator[Scenario]:
    """What surrounds scaled_mm on FP4 and FP8 tensor cores: swizzled scales, and what it cannot finish."""
    if native_route.unsupported(PLAIN, PLAIN, target):
        return
    for (M, N, K), (a, b) in product(
        ((512, 768, 768), (37, 53, 83)), ((PLAIN, TILE), (ROW, PLAIN), (MXFP8(), MXFP8()))
    ):
        for layout, extra in product(SCALE_LAYOUTS, (False, True)):
            sides = [Operand(blocks(n, K, spec, layout), spec, K, layout) for n, spec in ((M, a), (N, b))]
            call = partial(native.native_gemm_nt, *sides, _accumulated(M, N, FP32) if extra else Epilogue())
            yield Scenario(f"native gemm {a.key} x {b.key}, {M}x{N}x{K}, {layout}, {extra}", call, M == 512)


FOLLOWING: dict[str, tuple[str, NVFP4 | None]] = {
    "no amax": ("", None),
    "amax of x alone": ("tensor", None),
    "amaxes": ("tensor", PLAIN),
    "rotated column": ("tensor", RHT),
    "amax of rows": ("row", rotated_spec(32)),
}
"""(row, col) of the amaxes that a norm or an activation collects."""


def layers(_: Target) -> Iterator[Scenario]:
    """Norms and activations with their gradients."""
    whole_ones = ((4096, 4096), (4096, 8192), (4096, 512), (4096, 1024), (4096, 768), (4096, 1408), (2048, 2880))
    sizes = (*((shape, BF16) for shape in whole_ones), ((37, 83), BF16), ((37, 83), FP32))
    for (shape, dtype), (what, (row, col)) in product(sizes, FOLLOWING.items()):
        x, weight, sign = tensor(*shape, dtype=dtype), tensor(shape[1], dtype=dtype), places(col)["sign_draw"]
        whole = shape[1] % 512 == 0 and what != "amax of rows"
        for centered in (False, True):
            arguments = x, (weight, weight if centered else None), (1e-5, centered, dtype), row, col, sign
            name = f"norm {centered}, {shape} {dtype}, {what}"
            yield Scenario(name, partial(fused.norm_with_amaxes, *arguments), whole)
            yield Scenario(f"{name}, residual", partial(fused.norm_with_amaxes, *arguments, x), whole)
        for function, up in product(FUNCTIONS if what == "no amax" else ("silu",), (None, x)):
            name = f"{function}, {shape} {dtype}, {what}, gated {up is not None}"
            call = partial(fused.activation_with_amaxes, x, up, function, row, col, sign)
            yield Scenario(name, call, whole and up is not None)
            call = partial(fused.activation_backward_with_amaxes, (x, x, up), function, row, col, sign)
            yield Scenario(f"gradient of {name}", call, whole and up is not None)
    for (shape, dtype), centered in product(sizes, (False, True)):
        x, weight = tensor(*shape, dtype=dtype), tensor(shape[1], dtype=dtype)
        statistics = tensor(shape[0], dtype=FP32), tensor(shape[0], dtype=FP32)
        call = partial(fused.norm_backward, x, Normed(x, weight, statistics, centered, centered))
        name = f"gradient of a norm {centered}, {shape} {dtype}"
        yield Scenario(name, call, shape[1] % 512 == 0)
        yield Scenario(f"{name}, residual", partial(call, x), shape[1] % 512 == 0)
        stream = tensor(*shape, dtype=FP32)  # of a model under autocast
        call = partial(fused.norm_backward, x, Normed(stream, weight, statistics, centered, centered), stream)
        yield Scenario(f"{name}, stream of fp32", call, shape[1] % 512 == 0)


def means(_: Target) -> Iterator[Scenario]:
    """Sums and means over tokens, both orientations of x without its mean, and of dy with its sum."""
    for name, x, whole in whole_and_ragged():
        if x.dim() != 2:
            continue
        yield Scenario(f"sum over tokens, {name}", partial(backend.token_sum, x), whole)
        yield Scenario(f"mean over tokens, {name}", partial(backend.token_mean, x), whole)
        mean = tensor(x.shape[1], dtype=residual_dtype(x.dtype))
        yield Scenario(f"amax and product of a row, {name}", partial(backend.amax_with_product, x, mean), whole)
        for pair in TUNED_PAIRS:
            call = partial(backend.quantize_residual, x, mean, *both_sides(*pair, **places(*pair)))
            keys = " + ".join(spec.key if spec else "none" for spec in pair)
            yield Scenario(f"without its mean, {keys}, {name}", call, whole)
            call = partial(backend.quantize_with_sum, x, *both_sides(*pair, **places(*pair)))
            yield Scenario(f"with its sum, {keys}, {name}", call, whole)


SUMMED: tuple[tuple[Spec, int], ...] = (
    *((NVFP4(), size) for size in (0, 16, 32, 128)),
    (ROW, 0),
    (ROW, 16),
    *((MXFP8(element=element), 0) for element in ("e4m3", "e5m2")),
)
"""Of statistics' sums, with the size of the rotation, 0 for none."""


def statistics(_: Target) -> Iterator[Scenario]:
    """Sums of what operands along rows and columns and products lost, and outliers of columns."""
    for (spec, size), turned, dtype in product(SUMMED, (False, True), (BF16, FP32)):
        cols = 4096 if dtype == BF16 else 4000
        x = tensor(cols, 2048, dtype=dtype).T if turned else tensor(2048, cols, dtype=dtype)
        wide = round_up(cols, max(size, spec.block_length))
        given = x, Operand(blocks(2048, wide, spec), spec, wide), tensor(size, dtype=FP32) if size else None
        name = f"{spec.key}, rotation {size}, turned {turned}, {dtype}"
        tuned = dtype == BF16 and size <= 16 and spec == PLAIN
        yield Scenario(f"sums of an operand, {name}", partial(backend.operand_sums, *given, size == 0), tuned)
        if isinstance(spec, NVFP4):
            yield Scenario(f"noise of an operand, {name}", partial(backend.operand_noise, *given), tuned)
    for dtype in (BF16, FP16, FP32):
        x = tensor(2048, 4096, dtype=dtype)
        yield Scenario(f"sums of errors, {dtype}", partial(backend.error_sums, x.float(), x), True)
        yield Scenario(f"sum of squares, {dtype}", partial(backend.square_sum, x), True)
        call = partial(backend.column_outliers, x, tensor(dtype=torch.float64))
        yield Scenario(f"outliers of columns, {dtype}", call, True)


def logit_calls(_: Target) -> Iterator[Scenario]:
    """Parts of the cross entropy of logits whose columns ranks share."""
    for cols, dtype in product((64128, 10667), (BF16, FP16, FP32)):
        logits, each, targets = tensor(64, cols, dtype=dtype), tensor(64, dtype=FP32), tensor(64, dtype=torch.int32)
        name = f"of shared logits, {cols} columns, {dtype}"
        yield Scenario(f"peaks {name}", partial(backend.logit_peak, logits), True)
        yield Scenario(f"sums {name}", partial(backend.logit_sums, logits, each, targets, cols, 45), True)
        call = partial(backend.logit_gradient_, logits, each, targets, each, cols)
        yield Scenario(f"gradient {name}", call, True)


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
    caster, finisher = launch.Caster(pieces, tiles), launch.Finisher([piece.target for piece in pieces], tiles)
    caster.amax(amaxes)
    caster.choose(amaxes, scales)
    finisher.scale(amaxes, scales)
    finisher.scale(amaxes, scales, expand=True)
    caster.cast(amaxes, scales)
    finisher.expand(amaxes, scales)
    finisher.transpose()


def conversion_calls(target: Target) -> Iterator[Scenario]:
    """The self-test of the target's own conversions to E2M1."""
    for name, found in (
        ("nearest", target.e2m1),
        ("stochastic", target.stochastic_e2m1),
    ):
        if found:
            x, random = tensor(hardware_cast.COUNT, dtype=FP32), tensor(hardware_cast.COUNT // 4, dtype=torch.int32)
            yield Scenario(f"{name} conversion", partial(hardware_cast.convert, x, random, name), tuned=True)


FAMILIES = (
    quantize_calls,
    row_col_calls,
    amax_calls,
    bytes_to_values,
    gemm_calls,
    native_products,
    scenarios_grouped.operands,
    scenarios_grouped.sums,
    scenarios_grouped.grouped_gemm_calls,
    layers,
    means,
    statistics,
    logit_calls,
    primary_casts,
    conversion_calls,
)


def scenarios(target: Target) -> Iterator[Scenario]:
    """Return every call that is recorded for a target."""
    for family in FAMILIES:
        yield from family(target)
