"""Checks of the kernels on a device against the reference on the CPU: bytes exactly, GEMMs against fp64.

Every function yields findings (record.Finding). Inputs and specs are in matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from halfbyte import ops, reference
from halfbyte.formats import NVFP4_E2M1
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, SWIZZLED_32_4_4, Blocks, amax_shape, matrix_shape
from halfbyte.sides import Side, both_sides
from halfbyte.spec import MXFP8, NVFP4, Hadamard, Spec
from halfbyte.verify.compare import difference, relative_error
from halfbyte.verify.matrix import (
    ALL_SPECS,
    FEW,
    FOUR_TILES,
    LONG_PAIRS,
    MAIN_SPECS,
    MANY,
    PAIRS,
    SEED,
    draws,
    inputs,
)
from halfbyte.verify.record import GEMM, NATIVE_GEMM, Finding

CPU = torch.device("cpu")
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
"""Relative Frobenius error against fp64: one rounding to bf16 gives 1.65e-3."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x and keep its strides, which `.to` does not promise."""
    base = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return base.copy_(x)


def same_blocks(actual: Blocks | None, expected: Blocks | None) -> str | None:
    """Compare codes, scales and amax; None equals None."""
    if actual is None or expected is None:
        return None if actual is expected else f"{actual}, expected {expected}"
    for name, mine, theirs in zip(Blocks._fields, actual, expected, strict=True):
        problem = difference(mine, theirs)
        if problem:
            return f"{name}: {problem}"
    return None


def _pairs(full: bool) -> Iterator[tuple[str, Spec, str, Tensor]]:
    values = inputs()
    first = next(iter(MAIN_SPECS))
    for spec_name, spec in ALL_SPECS.items():
        wanted = values if full or spec_name == first else MANY if spec_name in MAIN_SPECS else FEW
        for name in wanted:
            yield spec_name, spec, name, values[name]


def quantization(device: torch.device, backend: str | None, full: bool) -> Iterator[Finding]:
    """quantize: every spec on its inputs, both scale layouts, and a given amax."""
    for spec_name, spec, name, x in _pairs(full):
        kernel = "quantize NVFP4" if spec.format is NVFP4_E2M1 else "quantize MXFP8"

        def check(x=x, spec=spec, layout: str = LINEAR, given: float | None = None) -> str | None:
            amax = _given_amax(x, spec, given)
            expected = ops.quantize(
                x, Side(spec, **draws(spec, None, CPU), amax=amax, scale_layout=layout), backend="reference"
            )
            actual = ops.quantize(
                to_device(x, device),
                Side(
                    spec,
                    **draws(spec, None, device),
                    amax=None if amax is None else amax.to(device),
                    scale_layout=layout,
                ),
                backend=backend,
            )
            return same_blocks(actual, expected)

        yield kernel, f"{spec_name}, {name}", check
        if name == "ragged" or (name == "regular" and (full or spec_name in MAIN_SPECS)):
            yield kernel, f"{spec_name}, {name}, swizzled", lambda check=check: check(layout=SWIZZLED_32_4_4)
        if name == "regular" and spec.format.has_amax:
            yield kernel, f"{spec_name}, {name}, given amax", lambda check=check: check(given=3.5)
            yield kernel, f"{spec_name}, {name}, NaN as amax", lambda check=check: check(given=float("nan"))


LARGE = (4096, 4096)
"""From three waves of 16x64 values on, tiles of four candidates have a kernel of their own: 13M on an H200."""


def large_tiles(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """quantize: many 16x16 tiles by four candidates, on a GPU, where the reference takes no time either."""
    if device.type == "cuda":
        yield "quantize NVFP4", "16x16 four candidates, large", lambda: large_tiles_differ(device, backend, LARGE)


def large_tiles_differ(device: torch.device, backend: str | None, shape: tuple[int, int]) -> str | None:
    """Compare tiles by four candidates with the reference on the same device."""
    spec, generator = FOUR_TILES, torch.Generator().manual_seed(SEED)
    normal, other = (torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(2))
    x = (normal * other.exp_()).bfloat16().to(device)
    return same_blocks(ops.quantize(x, Side(spec), backend=backend), ops.quantize(x, Side(spec), backend="reference"))


def _given_amax(x: Tensor, spec: Spec, value: float | None) -> Tensor | None:
    if value is None:
        return None
    return torch.full(amax_shape(matrix_shape(x.shape)[0], spec), value, dtype=torch.float32)


def row_col(device: torch.device, backend: str | None, full: bool) -> Iterator[Finding]:
    """quantize_row_col: both orientations from one call."""
    values = inputs()
    for pair_name, (row, col) in (PAIRS | LONG_PAIRS).items():
        for name, x in values.items():
            if not (full or name in (*FEW, "zeros", "no rows")):
                continue

            def check(x=x, row=row, col=col, layout: str = LINEAR) -> str | None:
                expected, actual = (
                    ops.quantize_row_col(
                        to_device(x, place),
                        *both_sides(row, col, **draws(row, col, place), scale_layout=layout),
                        backend=which,
                    )
                    for place, which in ((CPU, "reference"), (device, backend))
                )
                for side, mine, theirs in zip(("row", "col"), actual, expected, strict=True):
                    problem = same_blocks(mine, theirs)
                    if problem:
                        return f"{side} {problem}"
                return None

            yield "quantize_row_col", f"{pair_name}, {name}", check
            if name == "ragged":
                yield "quantize_row_col", f"{pair_name}, {name}, swizzled", lambda c=check: c(layout=SWIZZLED_32_4_4)


def transient(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """quantize_row_col for one GEMM at once: decoded values in place of codes."""
    x = inputs()["ragged"]
    for pair_name, specs in PAIRS.items():

        def check(row=specs[0], col=specs[1]) -> str | None:
            codes = ops.quantize_row_col(x, *both_sides(row, col, **draws(row, col, CPU)), backend="reference")
            values = ops.quantize_row_col(
                to_device(x, device),
                *both_sides(row, col, **draws(row, col, device), transient=(True, True)),
                backend=backend,
            )
            for side, spec in enumerate((row, col)):
                mine, stored = values[side], codes[side]
                if spec is None or mine is None or stored is None or not mine.qdata.is_floating_point():
                    continue  # this backend multiplies codes
                decoded = reference.decode(ops.Operand(stored, spec, x.shape[1 - side])).values.to(mine.qdata.dtype)
                problem = difference(mine.qdata, decoded) or difference(mine.amax, stored.amax)
                if problem:
                    return f"{('row', 'col')[side]} {problem}"
            return None

        yield "transient operands", pair_name, check


def maxima(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """amax: the largest finite magnitude."""
    for name, x in inputs().items():
        yield (
            "amax",
            name,
            lambda x=x: difference(ops.amax(to_device(x, device), backend=backend), ops.amax(x, backend="reference")),
        )
    bad_values = {"finite": 1.0, "with NaN": float("nan"), "with infinity": float("inf")}
    for (name, bad), dtype in product(bad_values.items(), (torch.bfloat16, torch.float32)):
        regular = inputs()["regular"].to(dtype)
        siblings = [regular, (2 * regular[:16]).contiguous(), regular[:5].clone().fill_(bad)]

        def together(xs=siblings) -> str | None:
            found = ops.amax_of_all([to_device(x, device) for x in xs], backend=backend)
            return difference(found, torch.stack([ops.amax(x, backend="reference") for x in xs]).amax())

        yield "amax", f"of siblings, {name}, {str(dtype).removeprefix('torch.')}", together


def decoding(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """dequantize: the reference's bytes decoded on the device, every layout and dtype."""
    values = inputs()
    for spec_name, spec in MAIN_SPECS.items():
        for name in (*FEW, "no rows", "subnormal", "huge"):
            x = values[name]
            cols = x.shape[-1]
            for layout in SCALE_LAYOUTS:
                for dtype in VALUE_DTYPES:

                    def check(x=x, spec=spec, layout=layout, dtype=dtype, cols=cols) -> str | None:
                        blocks = ops.quantize(
                            x, Side(spec, **draws(spec, None, CPU), scale_layout=layout), backend="reference"
                        )
                        stored = ops.Operand(blocks, spec, cols, layout)
                        expected = ops.dequantize(stored, dtype, backend="reference")
                        moved = stored._replace(blocks=Blocks(*(tensor.to(device) for tensor in blocks)))
                        return difference(ops.dequantize(moved, dtype, backend=backend), expected)

                    yield "dequantize", f"{spec_name}, {name}, {layout} to {_short(dtype)}", check


def transposition(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """transpose: packed 16x16 tiles."""
    spec = NVFP4(block=(16, 16))
    for name, x in inputs().items():
        if x.dim() != 2:
            continue

        def check(x=x) -> str | None:
            blocks = ops.quantize(x, Side(spec), backend="reference")
            expected = ops.transpose(blocks.qdata, blocks.block_scale, *x.shape, backend="reference")
            actual = ops.transpose(blocks.qdata.to(device), blocks.block_scale.to(device), *x.shape, backend=backend)
            return difference(actual[0], expected[0]) or difference(actual[1], expected[1])

        yield "transpose", name, check


GEMM_SPECS: dict[str, tuple[Spec | None, Spec | None]] = {
    "1x16 x 16x16": (NVFP4(), NVFP4(block=(16, 16))),
    "row-scaled x row-scaled": (NVFP4(outer="row"), NVFP4(outer="row")),
    "RHT16 x RHT16": (NVFP4(rotation=Hadamard()), NVFP4(rotation=Hadamard())),
    "MXFP8 x MXFP8": (MXFP8(element="e5m2"), MXFP8()),
    "1x16 x plain": (NVFP4(), None),
    "plain x plain": (None, None),
}
ALL_SHAPES = ("1x16 x 16x16", "row-scaled x row-scaled")
"""Run on every shape, with bias and accumulation; the others on the first two shapes."""

GEMM_SHAPES = ((256, 384, 512), (37, 53, 83), (1, 200, 4160), (64, 96, 8192), (24, 16, 0), (0, 16, 32))
"""The third is a row with a step that is not whole; the fourth has a long contraction, which several programs share."""


def products(device: torch.device, backend: str | None, group: str = GEMM) -> Iterator[Finding]:
    """gemm_nt: relative Frobenius error against fp64 of the dequantized operands, bias and accumulation included."""
    for pair_name, specs in GEMM_SPECS.items():
        if group == NATIVE_GEMM and None in specs:
            continue
        all_of_it = pair_name in ALL_SHAPES
        for shape in GEMM_SHAPES if all_of_it else GEMM_SHAPES[:2]:
            for dtype in TOLERANCE:
                for extra in ("", ", bias", ", accumulated") if all_of_it else ("",):
                    if extra == ", accumulated" and dtype is not torch.float32:
                        continue

                    def check(specs=specs, shape=shape, dtype=dtype, extra=extra) -> str | None:
                        error = _product_error(device, backend, specs, shape, dtype, extra)
                        limit = TOLERANCE[dtype]
                        return None if error <= limit else f"relative error {error:.2e}, at most {limit:g}"

                    name = f"{pair_name}, {'x'.join(map(str, shape))} to {_short(dtype)}{extra}"
                    yield group, name, check


def _product_error(device, backend, specs, shape, dtype, extra: str) -> float:
    M, N, K = shape
    generator = torch.Generator().manual_seed(SEED)
    sides, exact = [], []
    for rows, spec in ((M, specs[0]), (N, specs[1])):
        x = torch.randn(rows, K, generator=generator, dtype=torch.float32).bfloat16()
        if spec is None:
            sides.append(x.to(device))
            exact.append(x.double())
            continue
        blocks = ops.quantize(x, Side(spec), backend="reference")
        sides.append(ops.Operand(Blocks(*(t.to(device) for t in blocks)), spec, K))
        decoded = reference.decode(ops.Operand(blocks, spec, K))
        values = decoded.values.double()
        factor = decoded.factor
        exact.append(values if factor is None else values * factor.double().reshape(-1, 1))
    columns = min(side.shape[1] for side in exact)
    expected = exact[0][:, :columns] @ exact[1][:, :columns].T
    bias = torch.randn(N, generator=generator, dtype=torch.float32) if extra == ", bias" else None
    out = torch.randn(M, N, generator=generator, dtype=torch.float32) if extra == ", accumulated" else None
    for added in (bias, out):
        expected = expected if added is None else expected + added.double()
    actual = ops.gemm_nt(
        *sides,
        out_dtype=dtype,
        bias=None if bias is None else bias.to(device),
        out=None if out is None else out.to(device),
        accumulate=out is not None,
        backend=backend,
    )
    if actual.dtype != dtype or actual.shape != expected.shape:
        return float("inf")
    return relative_error(actual, expected)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
