"""A few speeds beside the ceilings; `python -m bench` in a checkout measures everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from halfbyte import ops
from halfbyte.layout import Blocks
from halfbyte.rng import Philox
from halfbyte.sides import Side, both_sides
from halfbyte.spec import NVFP4, Hadamard
from halfbyte.verify.record import Speed
from halfbyte.verify.timing import Ceilings, input_sets, measure, measure_alternately

SIZE = 8192
BUDGET = 0.15


def speeds(device: torch.device, limits: Ceilings, backend: str | None = None, size: int = SIZE) -> Iterator[Speed]:
    """Measure the main kernels on a [size, size] bf16 matrix.

    Args:
        device: a CUDA device.
        limits: the ceilings of the same process.
        backend: whose kernels; None for those that run there.
        size: a smaller one for tests.
    """
    draw = Philox(1, 2).on(device)
    xs = [
        torch.randn(size, size, device=device, dtype=torch.float32).bfloat16()
        for _ in range(input_sets(device, 2 * size * size))
    ]
    amax = ops.amax(xs[0], backend)
    stochastic, rotated = NVFP4(rounding="stochastic"), NVFP4(rounding="stochastic", rotation=Hadamard())
    codes = [ops.quantize(x, Side(NVFP4(), amax=amax), backend=backend) for x in xs]
    one = sum(t.numel() for t in codes[0][:2])
    read = 2 * size * size
    cases: tuple[tuple[str, int, Callable], ...] = (
        ("amax", read, lambda x, q: ops.amax(x, backend)),
        ("quantize 1x16", read + one, lambda x, q: ops.quantize(x, Side(NVFP4(), amax=amax), backend=backend)),
        (
            "quantize 1x16 SR",
            read + one,
            lambda x, q: ops.quantize(x, Side(stochastic, draw=draw, amax=amax), backend=backend),
        ),
        (
            "row SR + col SR RHT16",
            read + 2 * one,
            lambda x, q: ops.quantize_row_col(
                x, *both_sides(stochastic, rotated, draw=draw, row_amax=amax, col_amax=amax), backend=backend
            ),
        ),
        (
            "dequantize to bf16",
            read + one,
            lambda x, q: ops.dequantize(ops.Operand(q, NVFP4(), size), torch.bfloat16, backend=backend),
        ),
    )
    for name, moved, function in cases:
        calls = [lambda x=x, q=q, function=function: function(x, q) for x, q in zip(xs, codes, strict=True)]
        seconds = measure(calls, device, budget=BUDGET).seconds
        rate = moved / seconds
        yield Speed(name=name, microseconds=seconds * 1e6, rate=rate / 1e12, unit="TB/s", share=rate / limits.copy)
    yield _product(device, xs, codes, backend)


def _product(device: torch.device, xs: list[torch.Tensor], codes: list[Blocks], backend: str | None) -> Speed:
    """gemm_nt of quantized operands, decoding included, beside the same product in bf16 by torch."""
    size = xs[0].shape[0]
    sides = [ops.Operand(blocks, NVFP4(), size) for blocks in codes[:2]]
    variants = {
        "ours": [lambda: ops.gemm_nt(sides[0], sides[-1], backend=backend)],
        "bf16": [lambda: xs[0] @ xs[-1].T],
    }
    times = measure_alternately(variants, device, budget=BUDGET)
    ours, theirs = times["ours"].seconds, times["bf16"].seconds
    rate = 2 * size**3 / ours / 1e12
    return Speed(name="gemm_nt from codes", microseconds=ours * 1e6, rate=rate, unit="TFLOP/s", share=theirs / ours)
