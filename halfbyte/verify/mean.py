"""Checks of sums and means over tokens, and of what is quantized without its mean, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import Blocks
from halfbyte.rng import Philox
from halfbyte.sides import both_sides
from halfbyte.spec import MXFP8, NVFP4, Hadamard, Spec
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED, named
from halfbyte.verify.record import Finding

GROUP = "means over tokens"
SHAPES = ((256, 512), (37, 83), (520, 1536))
DTYPES = (torch.bfloat16, torch.float32)
RHT = NVFP4(rotation=Hadamard())
STOCHASTIC = NVFP4(rounding="stochastic", rotation=Hadamard())
PAIRS: dict[str, tuple[Spec, Spec]] = {"nvfp4": (NVFP4(), RHT), "mxfp8 column": (NVFP4(), MXFP8())}
"""How x is quantized without its mean."""


def mean(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """token_sum, token_mean, quantize_residual, quantize_with_sum, amax_with_product and grouped_token_sum."""
    for what, shape, dtype in named(SHAPES, DTYPES):
        where = device, backend, shape, dtype
        yield GROUP, f"token_sum and token_mean, {what}", lambda w=where: _sums(*w)
        for name, pair in PAIRS.items():
            yield GROUP, f"quantize_residual, {what}, {name}", lambda w=where, p=pair: _residual(*w, p)
        yield GROUP, f"quantize_with_sum, {what}", lambda w=where: _with_sum(*w)
        yield GROUP, f"amax_with_product, {what}", lambda w=where: _amax_with_product(*w)
        yield GROUP, f"grouped_token_sum, {what}", lambda w=where: _sums_of_groups(*w)


def _x(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return values whose columns have means of their own, and outliers."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(shape, generator=generator, dtype=torch.float32) + 4 * torch.randn(
        shape[1], generator=generator, dtype=torch.float32
    )
    x.view(-1)[:: max(1, x.numel() // 5)] *= 20
    return x.to(dtype)


def _first(actual: list[Tensor], expected: list[Tensor]) -> str | None:
    """Say what differs first, by its place."""
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if problem := difference(mine, theirs):
            return f"result {i}: {problem}"
    return None


def _tensors(*both: Blocks | None) -> list[Tensor]:
    return [t for blocks in both if blocks is not None for t in blocks]


def _sums(device, backend, shape, dtype) -> str | None:
    x = _x(shape, dtype)
    results = [
        [f(x.to(place), which) for f in (ops.token_sum, ops.token_mean)]
        for place, which in ((device, backend), (CPU, "reference"))
    ]
    return _first(*results)


def _residual(device, backend, shape, dtype, pair: tuple[Spec, Spec]) -> str | None:
    x = _x(shape, dtype)
    mean_K, sides = ops.token_mean(x, "reference"), both_sides(*pair)
    results = [
        _tensors(*ops.quantize_residual(x.to(place), mean_K.to(place), *sides, backend=which))
        for place, which in ((device, backend), (CPU, "reference"))
    ]
    return _first(*results)


def _with_sum(device, backend, shape, dtype) -> str | None:
    x = _x(shape, dtype)
    results = []
    for place, which in ((device, backend), (CPU, "reference")):
        sides = both_sides(NVFP4(rounding="stochastic"), STOCHASTIC, draw=Philox(SEED, 5).on(place))
        *operands, total = ops.quantize_with_sum(x.to(place), *sides, backend=which)
        results.append((_tensors(*operands), total))
    (mine, total), (theirs, _) = results
    return _first(mine, theirs) or sum_problem(total, x)


def _amax_with_product(device, backend, shape, dtype) -> str | None:
    w, bias = _x(shape, dtype), torch.arange(shape[0], dtype=torch.float32)
    a = _x((1, shape[1]), dtype)[0]
    amax, product = ops.amax_with_product(w.to(device), a.to(device), bias.to(device), backend)
    expected, _ = ops.amax_with_product(w, a, None, "reference")
    terms = torch.cat((w.double() * a.double(), bias.double()[:, None]), dim=1)
    return _first([amax], [expected]) or sum_problem(product, terms.T)


def sum_problem(total: Tensor, x: Tensor) -> str | None:
    """Say where `total` cannot be the fp32 sum of the columns of x in any order, which s of section 2 may have."""
    exact, most = x.double().sum(0), x.double().abs().sum(0) * x.shape[0] * 2.0**-24
    error = (total.cpu().double() - exact).abs()
    wrong = ~(error <= most)
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0])
    first = f"the first at [{at}]: {total[at].item()}, exactly {exact[at].item()}"
    return f"sum: {int(wrong.sum())} of {len(wrong)} beyond rounding, {first}"


def _sums_of_groups(device, backend, shape, dtype) -> str | None:
    x, rows = _x(shape, dtype), shape[0]
    offsets = torch.tensor([rows // 3, rows // 3, rows - 2], dtype=torch.int32)
    results = [
        [ops.grouped_token_sum(x.to(place), offsets.to(place), which)]
        for place, which in ((device, backend), (CPU, "reference"))
    ]
    return _first(*results)
