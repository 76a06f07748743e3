"""Checks of the grouped operations: tokens in uneven groups, one of them empty, and the weights of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, Blocks
from halfbyte.spec import NVFP4, Spec
from halfbyte.verify.compare import difference, relative_error
from halfbyte.verify.kernels import CPU, TOLERANCE, same_blocks
from halfbyte.verify.matrix import PAIRS, SEED, draws
from halfbyte.verify.record import Finding

GROUP = "grouped operands and GEMMs"
ENDS = (20, 20, 53, 64)
TOKENS, COLS, OUT = 70, 96, 80  # the rows behind the last group belong to none
USED = ("1x16 + RHT16", "SR + SR RHT16", "16x16 + 16x16", "MXFP8 + MXFP8")


def grouped(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """grouped_quantize_row_col and grouped_dequantize byte for byte, grouped_gemm_nt within the GEMM's tolerance."""
    for name in USED:
        row, col = PAIRS[name]
        for what, layout in zip(("tokens", "experts"), SCALE_LAYOUTS, strict=True):
            where = device, backend, what, layout
            yield GROUP, f"{name}, {what}, {layout}", lambda w=where, r=row, c=col: _bytes(*w, (r, c))
    for name in (USED[0], USED[-1]):
        row, _ = PAIRS[name]
        assert row is not None
        for dtype in TOLERANCE:
            what = f"{name}, product to {str(dtype).removeprefix('torch.')}"
            yield GROUP, what, lambda spec=row, dtype=dtype: _product(device, backend, spec, dtype)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).bfloat16()


def _offsets(device: torch.device) -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def _bytes(device, backend, what: str, layout: str, specs: tuple[Spec | None, Spec | None]) -> str | None:
    x = _random(TOKENS, COLS) if what == "tokens" else _random(len(ENDS), OUT, COLS)
    results: list[tuple[Blocks | None, Blocks | None, Tensor]] = []
    for place, which in ((CPU, "reference"), (device, backend)):
        offsets = _offsets(place) if what == "tokens" else None
        pair = ops.grouped_quantize_row_col(
            x.to(place), offsets, *specs, **draws(*specs, place), scale_layout=layout, backend=which
        )
        assert pair[0] is not None and specs[0] is not None
        operand = ops.Operand(pair[0], specs[0], COLS, layout)
        results.append((*pair, ops.grouped_dequantize(operand, offsets, torch.bfloat16, which)))
    expected, actual = results
    problems = {
        "row": same_blocks(actual[0], expected[0]),
        "col": same_blocks(actual[1], expected[1]),
        "dequantized": difference(actual[2], expected[2]),
    }
    return "; ".join(f"{side}: {problem}" for side, problem in problems.items() if problem) or None


def _product(device, backend, spec: Spec, dtype: torch.dtype) -> str | None:
    """Compare with the reference's product in fp32, itself checked by the reference's own tests."""
    weight = spec if not isinstance(spec, NVFP4) else NVFP4(block=(16, 16))
    results = []
    for place, which, out_dtype in ((CPU, "reference", torch.float32), (device, backend, dtype)):
        sides = []
        for x, offsets, each in ((_random(TOKENS, COLS), _offsets(place), spec), (_random(4, OUT, COLS), None, weight)):
            pair = ops.grouped_quantize_row_col(
                x.to(place), offsets, each, None, **draws(each, None, place), backend=which
            )
            assert pair[0] is not None
            sides.append(ops.Operand(pair[0], each, COLS, LINEAR))
        a, b = sides
        results.append(ops.grouped_gemm_nt(a, b, _offsets(place), out_dtype=out_dtype, backend=which))
    error = relative_error(results[1], results[0].double())
    return None if error <= TOLERANCE[dtype] else f"relative error {error:.2e}, at most {TOLERANCE[dtype]:g}"
