"""Checks of norms and activations against the reference on the CPU: every bit of outputs, gradients and amaxes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte.arithmetic import FUNCTIONS, Normed
from halfbyte.ops import fused as ops
from halfbyte.rng import Philox
from halfbyte.spec import NVFP4, Hadamard
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED
from halfbyte.verify.record import Finding

GROUP = "norms and activations"
SHAPES = ((256, 512), (37, 83), (33, 1536), (0, 64))
NON_FINITE = SHAPES[2]
"""Only this one: a NaN of one row makes every element of the weight's gradient NaN."""
WIDE = (17, 4104)  # rows that no program holds whole
DTYPES = (torch.bfloat16, torch.float32)
NEXT: dict[str, tuple[NVFP4 | None, NVFP4 | None]] = {
    "no amax": (None, None),
    "amaxes": (NVFP4(), NVFP4()),
    "rotated column": (NVFP4(), NVFP4(rotation=Hadamard())),
    "row-scaled": (NVFP4(outer="row"), NVFP4(rotation=Hadamard(size=32, signs="fresh"))),
}
"""How the output is quantized next, which says the amaxes that come with it."""


def fused(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """norm, norm of a sum, activation and their gradients, in two dtypes, whole and ragged, with every kind of amax."""
    for shape in SHAPES:
        for name in NEXT:
            for dtype in DTYPES if shape == SHAPES[1] else DTYPES[:1]:
                what = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}, {name}"
                arguments = device, backend, shape, dtype, name
                for centered in (False, True):
                    kind = "LayerNorm" if centered else "RMSNorm"
                    yield GROUP, f"{kind}, {what}", lambda a=arguments, c=centered: _norm(*a, c)
                    yield GROUP, f"{kind} of a sum, {what}", lambda a=arguments, c=centered: _add_norm(*a, c)
                yield GROUP, f"silu gated, {what}", lambda a=arguments: _activation(*a, "silu", True)
    arguments = device, backend, WIDE, torch.bfloat16, "amaxes"
    for centered in (False, True):
        what = f"{'LayerNorm' if centered else 'RMSNorm'} of a sum, {'x'.join(map(str, WIDE))}"
        yield GROUP, what, lambda a=arguments, c=centered: _add_norm(*a, c)
    for function in FUNCTIONS:
        for gated in (False, True):
            arguments = device, backend, SHAPES[1], torch.bfloat16, "rotated column", function, gated
            yield GROUP, f"{function}{' gated' if gated else ''}", lambda a=arguments: _activation(*a)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Return normal values with outliers, and a NaN and an Inf in one of the shapes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed), dtype=torch.float32) * scale
    flat = x.view(-1)
    flat[:: max(1, x.numel() // 5)] *= 20
    if shape == NON_FINITE:
        flat[x.numel() // 2], flat[x.numel() // 3] = float("nan"), float("inf")
    return x.to(dtype)


def _following(name: str, device: torch.device) -> ops.Following:
    return ops.Following(*NEXT[name], Philox(SEED, 9).on(device))


def _first(names: tuple[str, ...], actual: list[Tensor | None], expected: list[Tensor | None]) -> str | None:
    """Say what differs first."""
    for name, mine, theirs in zip(names, actual, expected, strict=True):
        if mine is None or theirs is None:
            problem = None if mine is theirs else "one of them is missing"
        else:
            problem = difference(mine, theirs)
        if problem:
            return f"{name}: {problem}"
    return None


def _norm(device, backend, shape, dtype, name: str, centered: bool) -> str | None:
    x, dy = _normal(shape, dtype, 0, 3), _normal(shape, dtype, 1)
    weight, bias = _normal(shape[1:], dtype, 2), _normal(shape[1:], dtype, 3) if centered else None
    kind = ops.NormKind(1e-5, centered)
    results: list[list[Tensor | None]] = []
    for place, which in ((device, backend), (CPU, "reference")):
        xs, ws, bs, dys = (None if t is None else t.to(place) for t in (x, weight, bias, dy))
        assert xs is not None and ws is not None and dys is not None
        y, statistics, amaxes = ops.norm(xs, ws, bs, kind, dtype, _following(name, place), which)
        gradients = ops.norm_backward(dys, Normed(xs, ws, statistics, centered, centered), None, which)
        results.append([y, *statistics, *amaxes, *gradients])
    return _first(("y", "mean", "rstd", "row amax", "column amax", "dx", "dweight", "dbias"), *results)


def _add_norm(device, backend, shape, dtype, name: str, centered: bool) -> str | None:
    x, residual, dy, dtotal = (_normal(shape, dtype, seed, 3) for seed in (0, 7, 1, 8))
    weight, bias = _normal(shape[1:], dtype, 2), _normal(shape[1:], dtype, 3) if centered else None
    kind = ops.NormKind(1e-5, centered)
    results: list[list[Tensor | None]] = []
    for place, which in ((device, backend), (CPU, "reference")):
        xs, rs, dys, dts, ws = (t.to(place) for t in (x, residual, dy, dtotal, weight))
        parameters = ws, None if bias is None else bias.to(place)
        y, total, statistics, amaxes = ops.add_norm(xs, rs, parameters, kind, dtype, _following(name, place), which)
        gradients = ops.norm_backward(dys, Normed(total, ws, statistics, centered, centered), dts, which)
        results.append([y, total, *statistics, *amaxes, *gradients])
    names = ("y", "sum", "mean", "rstd", "row amax", "column amax", "dx", "dweight", "dbias")
    return _first(names, *results)


def _activation(device, backend, shape, dtype, name: str, function: str, gated: bool) -> str | None:
    x, dh = _normal(shape, dtype, 4, 6), _normal(shape, dtype, 5)
    up = _normal(shape, dtype, 6) if gated else None
    results: list[list[Tensor | None]] = []
    for place, which in ((device, backend), (CPU, "reference")):
        xs, ups, dhs = (None if t is None else t.to(place) for t in (x, up, dh))
        assert xs is not None and dhs is not None
        following = _following(name, place)
        h, amaxes = ops.activation(xs, ups, function, following, which)
        gradients, both = ops.activation_backward(dhs, xs, ups, function, following, which)
        of_up = both[1] if gated else (None, None)
        results.append([h, *amaxes, *gradients, *both[0], *of_up])
    names = ("h", "row amax", "column amax", "dx", "dup")
    return _first((*names, *(f"{side} amax of {of}" for of in ("dx", "dup") for side in ("row", "column"))), *results)
