"""Checks of the grouped operations: tokens in uneven groups, one of them empty, and the weights of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, Blocks
from halfbyte.sides import both_sides
from halfbyte.spec import MXFP8, NVFP4, Spec
from halfbyte.verify.compare import difference, relative_error
from halfbyte.verify.kernels import CPU, TOLERANCE, same_blocks, to_device
from halfbyte.verify.matrix import LONG_PAIRS, PAIRS, SEED, draws
from halfbyte.verify.record import Finding

GROUP = "grouped operands and GEMMs"
ENDS = (20, 20, 53, 64)
TOKENS, COLS, OUT = 70, 96, 80  # the rows behind the last group belong to none
USED = ("1x16 + RHT16", "SR + SR RHT16", "16x16 + 16x16", "MXFP8 + MXFP8", "row-scaled + RHT16", "e5m2 + none")
LONG = ("none + SR RHT32 fresh", "1x16 + SR RHT128 fresh", "EDEN + EDEN RHT16 fresh", "EDEN RHT128 fresh, both")
"""Rotations that kernels of their own turn, and scales that are drawn."""
EXPERTS = (3, 128, 256)
"""Whole tiles, which the kernel of stacked experts wants."""
STACKED: dict[str, Spec] = {"1x16": NVFP4(), "row-scaled": NVFP4(outer="row"), "MXFP8": MXFP8()}


def grouped(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """grouped_quantize_row_col and grouped_dequantize byte for byte, grouped_gemm_nt within the GEMM's tolerance."""
    pairs = PAIRS | LONG_PAIRS
    for name in (*USED, *LONG):
        for what, layout in zip(("tokens", "experts"), SCALE_LAYOUTS, strict=True):
            x = _random(TOKENS, COLS) if what == "tokens" else _random(len(ENDS), OUT, COLS)
            where = device, backend, x, layout
            yield GROUP, f"{name}, {what}, {layout}", lambda w=where, p=pairs[name]: _bytes(*w, p)
    strided = _random(TOKENS, 2 * COLS)[:, ::2]
    yield GROUP, "every second column", lambda: _bytes(device, backend, strided, LINEAR, PAIRS[USED[0]])
    for name, spec in STACKED.items():
        x = _random(*EXPERTS)
        yield (
            GROUP,
            f"{name}, whole tiles of experts",
            lambda x=x, s=spec: _bytes(device, backend, x, LINEAR, (s, None)),
        )
    for name in (USED[0], USED[-2], USED[3]):
        row, col = pairs[name]
        assert row is not None and col is not None
        for dtype in TOLERANCE:
            to = f"product to {str(dtype).removeprefix('torch.')}"
            yield GROUP, f"{name}, {to}", lambda spec=row, dtype=dtype: _product(device, backend, spec, dtype)
            what = f"{name}, {to} over tokens"
            yield GROUP, what, lambda spec=col, dtype=dtype: _split_product(device, backend, spec, dtype)
    for dtype in TOLERANCE:
        for over in ("", " over tokens"):
            what = f"plain {str(dtype).removeprefix('torch.')}, product{over}"
            yield GROUP, what, lambda dtype=dtype, over=over: _plain_product(device, backend, dtype, bool(over))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32).bfloat16()


def _offsets(device: torch.device) -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def _bytes(device, backend, x: Tensor, layout: str, specs: tuple[Spec | None, Spec | None]) -> str | None:
    ends = x.dim() == 2
    results: list[tuple[Blocks | None, Blocks | None, Tensor | None]] = []
    for place, which in ((CPU, "reference"), (device, backend)):
        offsets = _offsets(place) if ends else None
        pair = ops.grouped_quantize_row_col(
            to_device(x, place),
            offsets,
            *both_sides(*specs, **draws(*specs, place), scale_layout=layout),
            backend=which,
        )
        decoded = None
        if pair[0] is not None and specs[0] is not None:
            operand = ops.Operand(pair[0], specs[0], x.shape[-1], layout)
            decoded = ops.grouped_dequantize(operand, offsets, torch.bfloat16, which)
        results.append((*pair, decoded))
    expected, actual = results
    problems = {"row": same_blocks(actual[0], expected[0]), "col": same_blocks(actual[1], expected[1])}
    if actual[2] is not None and expected[2] is not None:
        problems["dequantized"] = difference(actual[2], expected[2])
    return "; ".join(f"{side}: {problem}" for side, problem in problems.items() if problem) or None


def _product(device, backend, spec: Spec, dtype: torch.dtype) -> str | None:
    """Compare with the reference's product in fp32, itself checked by the reference's own tests."""
    weight = NVFP4(block=(16, 16)) if spec.format.has_amax else spec
    results = []
    for place, which, out_dtype in ((CPU, "reference", torch.float32), (device, backend, dtype)):
        sides = []
        for x, offsets, each in ((_random(TOKENS, COLS), _offsets(place), spec), (_random(4, OUT, COLS), None, weight)):
            pair = ops.grouped_quantize_row_col(
                x.to(place), offsets, *both_sides(each, None, **draws(each, None, place)), backend=which
            )
            assert pair[0] is not None
            sides.append(ops.Operand(pair[0], each, COLS, LINEAR))
        a, b = sides
        results.append(ops.grouped_gemm_nt(a, b, _offsets(place), out_dtype=out_dtype, backend=which))
    return _within(results[1], results[0].double(), dtype)


def _split_product(device, backend, spec: Spec, dtype: torch.dtype) -> str | None:
    """Compare dy_g.T @ x_g of every group, whose contraction runs over its tokens."""
    results = []
    for place, which, out_dtype in ((CPU, "reference", torch.float32), (device, backend, dtype)):
        sides, offsets = [], _offsets(place)
        for columns in (OUT, COLS):
            pair = ops.grouped_quantize_row_col(
                _random(TOKENS, columns).to(place),
                offsets,
                *both_sides(None, spec, **draws(None, spec, place)),
                backend=which,
            )
            assert pair[1] is not None
            sides.append(ops.Operand(pair[1], spec, TOKENS, LINEAR))
        a, b = sides
        results.append(ops.grouped_gemm_nt(a, b, offsets, out_dtype=out_dtype, backend=which))
    return _within(results[1], results[0].double(), dtype)


def _plain_product(device, backend, dtype: torch.dtype, over_tokens: bool) -> str | None:
    """Compare the product of unquantized operands with fp64, group by group."""
    x = _random(TOKENS, COLS).to(dtype)
    other = _random(TOKENS, OUT).to(dtype).T if over_tokens else _random(len(ENDS), OUT, COLS).to(dtype)
    exact = torch.zeros((len(ENDS), OUT, COLS) if over_tokens else (TOKENS, OUT), dtype=torch.float64)
    for group, (start, stop) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        if over_tokens:
            exact[group] = other[:, start:stop].double() @ x[start:stop].double()
        else:
            exact[start:stop] = x[start:stop].double() @ other[group].double().T
    sides = (to_device(other, device), to_device(x.T, device)) if over_tokens else (x.to(device), other.to(device))
    return _within(ops.grouped_gemm_nt(*sides, _offsets(device), out_dtype=dtype, backend=backend), exact, dtype)


def _within(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> str | None:
    error = relative_error(actual, exact)
    return None if error <= TOLERANCE[dtype] else f"relative error {error:.2e}, at most {TOLERANCE[dtype]:g}"
