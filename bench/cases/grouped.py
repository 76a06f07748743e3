"""Mixtures of experts: quantization per group as a share of copy bandwidth, grouped GEMMs and layers beside torch's.

Groups are uneven: the largest of 64 holds about ten times the tokens of the smallest. Before timing, bytes are compared
with the reference: a small ragged case on the CPU and, on a GPU, the timed case with the reference on the same device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import halfbyte as hb
from bench.cases.quantize import eden
from bench.measure import CPU, against_bf16, bandwidth, random_matrix, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import layout, ops, recipes
from halfbyte.functional.weights import cacheable, quantize_weight
from halfbyte.layout import Blocks, group_alignment, padded_groups
from halfbyte.rng import Philox, StreamPhilox
from halfbyte.sides import both_sides
from halfbyte.spec import NVFP4, Hadamard, Spec
from halfbyte.verify.compare import relative_error

TOKENS, IN, OUT = 32768, 7168, 2048
SHAPES: tuple[Shape, ...] = ((8, TOKENS, IN, OUT), (64, TOKENS, IN, OUT))
"""E experts, M tokens, K in_features, N out_features."""
SMALL_GROUPS: Shape = (60, 8192, 2048, 1408)
"""Groups of 30 to 266 tokens: in tiles of 64 rows, 18 % of what is quantized is padding."""

SMALL, RAGGED = (3, 40, 64, 48), (5, 301, 144, 96)
LAYER_TOLERANCE = 3e-3  # two roundings to bf16, of equal operands summed in another order
SR, RHT, TILE = NVFP4(rounding="stochastic"), Hadamard(), NVFP4(block=(16, 16))


def ends(experts: int, tokens: int, device: torch.device) -> Tensor:
    """Return the cumulative ends of uneven groups that hold all tokens."""
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.1
    offsets = (share.cumsum(0) / share.sum() * tokens).round().to(torch.int32)
    offsets[-1] = tokens
    return offsets.to(device)


class Inputs(NamedTuple):
    """Tokens with the ends of their groups, or the weights of experts."""

    x: Tensor
    offsets: Tensor | None

    def on(self, device: torch.device) -> Inputs:
        """Return the same on another device."""
        return Inputs(self.x.to(device), None if self.offsets is None else self.offsets.to(device))


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Both orientations of tokens, or of experts, amax given.

    operand: "tokens" or "gradient", [M, K] or [M, N], or "experts", [E, N, K].
    """

    row: Spec
    col: Spec
    operand: str

    def __call__(self, setting: Setting, shape: Shape) -> Outcome:
        """Check, then time."""
        ragged = self._inputs(RAGGED, CPU)
        moved = ragged.on(setting.device)
        require_equal(self._run(moved, setting.backend), self._run(ragged, "reference"), f"ragged {RAGGED}")
        checked = [f"ragged {RAGGED} with the reference on the CPU"]
        inputs = self._inputs(shape, setting.device)
        amaxes = self._amaxes(inputs, setting.backend)
        actual = self._run(inputs, setting.backend, amaxes)
        if setting.on_gpu:
            require_equal(actual, self._run(inputs, "reference", amaxes), "whole")
            checked.append("all of it with the reference on the same device")
        bytes_moved = sum(t.numel() * t.element_size() for t in (inputs.x, *actual))
        return bandwidth(setting, [lambda: self._run(inputs, setting.backend, amaxes)], bytes_moved, checked)

    def _inputs(self, shape: Shape, device: torch.device) -> Inputs:
        E, M, K, N = shape
        if self.operand == "experts":
            return Inputs(random_matrix((E, N, K), device, 1), None)
        return Inputs(random_matrix((M, K if self.operand == "tokens" else N), device, 1), ends(E, M, device))

    def _quantize(self, inputs: Inputs, backend: str, amaxes: dict[str, Tensor]) -> tuple[Blocks, Blocks]:
        draw = Philox(7, 11).on(inputs.x.device) if self.row.needs_rng else None
        signs = Philox(8, 13).on(inputs.x.device) if self.row.needs_sign_rng else None
        given = amaxes.get("row_amax"), amaxes.get("col_amax")
        sides = both_sides(self.row, self.col, draw=draw, sign_draw=signs, row_amax=given[0], col_amax=given[1])
        row, col = ops.grouped_quantize_row_col(*inputs, *sides, backend=backend)
        assert row is not None and col is not None, "both orientations have a spec"
        return row, col

    def _amaxes(self, inputs: Inputs, backend: str) -> dict[str, Tensor]:
        row, col = self._quantize(inputs, backend, {})
        shared = self.row == self.col and self.row.is_tile
        return {"row_amax": row.amax} if shared else {"row_amax": row.amax, "col_amax": col.amax}

    def _run(self, inputs: Inputs, backend: str, amaxes: dict | None = None) -> tuple[Tensor, ...]:
        row, col = self._quantize(inputs, backend, amaxes or {})
        return *row[:2], *col[:2]


def swizzle(setting: Setting, shape: Shape, *, along: str) -> Outcome:
    """Check and time the rearrangement of block scales into a region per group, along M, K or for experts."""
    E, M, K, N = shape
    offsets = ends(E, M, setting.device)
    columns = padded_groups(M, E, group_alignment(NVFP4())) // 16
    size = {"rows": (M, K // 16), "contraction": (K, columns), "experts": (E, N, K // 16)}[along]
    scale = torch.randint(1, 120, size, dtype=torch.uint8, device=setting.device)
    slow = partial(_region_by_region, scale, offsets, along)
    if setting.backend == "reference":
        return bandwidth(setting, [slow], 2 * scale.numel(), ["its own definition"])
    own, split = None if along == "experts" else offsets, along == "contraction"
    kernel = importlib.import_module("halfbyte.kernels.unpack.swizzle").grouped_swizzle
    run = partial(kernel, scale, NVFP4(), own, contraction=split, total=M)
    expected = slow()
    require_equal([run().flatten()[: expected.numel()]], [expected], "whole")
    return bandwidth(setting, [run], 2 * scale.numel(), ["all of it, group by group"])


def _region_by_region(scale: Tensor, offsets: Tensor, along: str) -> Tensor:
    """Return the regions of all groups, one after another."""
    if along == "experts":
        parts = scale.unbind(0)
    elif along == "rows":
        parts = scale[: int(offsets[-1])].split(offsets.diff(prepend=offsets.new_zeros(1)).tolist())
    else:
        stops = padded_ends(offsets) // 16
        parts = scale[:, : int(stops[-1])].split(stops.diff(prepend=stops.new_zeros(1)).tolist(), dim=1)
    return torch.cat([layout.swizzle(part) for part in parts])


def padded_ends(offsets: Tensor) -> Tensor:
    """Return where groups along the contraction end in storage."""
    return layout.group_ends(offsets, group_alignment(NVFP4()))


def product(setting: Setting, shape: Shape, *, gemm: str) -> Outcome:
    """Check and time one of the three GEMMs on decoded operands beside torch's grouped GEMM of the same values."""
    E, M, K, N = shape
    offsets, device = ends(E, M, setting.device), setting.device
    x, w, dy = (random_matrix(s, device, i) for i, s in enumerate(((M, K), (E, N, K), (M, N))))
    spec, tensors = NVFP4(), {"fprop": (x, w), "dgrad": (dy, w.mT), "wgrad": (dy, x)}[gemm]
    asked = both_sides(*((None, spec) if gemm == "wgrad" else (spec, None)), transient=(True, True))
    left = ops.grouped_quantize_row_col(tensors[0], offsets, *asked, backend=setting.backend)
    right = ops.grouped_quantize_row_col(
        tensors[1], offsets if gemm == "wgrad" else None, *asked, backend=setting.backend
    )
    i = int(gemm == "wgrad")
    sides = [_operand(s[i], spec, M if i else t.shape[-1]) for s, t in zip((left, right), tensors, strict=True)]
    run = partial(ops.grouped_gemm_nt, sides[0], sides[1], offsets, backend=setting.backend)
    a, b = (_multiplied(side, t, offsets, i) for side, t in zip(sides, tensors, strict=True))
    baseline = partial(F.grouped_mm, a, b.mT, offs=offsets)
    actual = run()
    error = max(_errors(actual, (a, b), sides, offsets, gemm))
    if not error <= 4e-3:
        raise Unequal(f"relative error {error:.2e} to bf16, at most 4e-3")
    checked = [f"relative error {error:.1e} of a group, at most 4e-3"]
    return against_bf16(setting, [run], [baseline], 2.0 * M * N * K, checked, "of bf16")


def _operand(blocks: Blocks | None, spec: Spec, cols: int) -> ops.Operand:
    assert blocks is not None, "the orientation has a spec"
    return ops.Operand(blocks, spec, cols)


def _multiplied(side: ops.Operand, t: Tensor, offsets: Tensor, split: int) -> Tensor:
    """Return the values that an operand stands for, as torch's grouped GEMM takes them: nothing between the groups."""
    values = side.blocks.qdata
    if not values.is_floating_point():
        return t if not split else t.mT
    if not split:
        return values[..., : t.shape[-1]]
    stops, starts = offsets.tolist(), [0, *padded_ends(offsets).tolist()]
    parts = [
        values[:, start : start + stop - begin]
        for begin, stop, start in zip([0, *stops[:-1]], stops, starts[:-1], strict=True)
    ]
    return torch.cat(parts, dim=1).mT.contiguous().mT


def _errors(y: Tensor, values: tuple[Tensor, Tensor], sides: list, offsets: Tensor, gemm: str):
    """Yield the relative error of the first and of the last group."""
    stops = offsets.tolist()
    for g in (0, len(stops) - 1):
        rows = slice(stops[g - 1] if g else 0, stops[g])
        a, b = values
        if not sides[0].blocks.qdata.is_floating_point():  # codes: the reference's own product
            yield 0.0
            continue
        pair = (a[:, rows], b[:, rows]) if gemm == "wgrad" else (a[rows], b[g])
        exact = pair[0].double() @ pair[1].double().T
        for side in sides:
            exact *= side.blocks.amax[g].double() / (side.spec.e4m3_max * side.spec.fp4_max)
        yield relative_error(y[g] if gemm == "wgrad" else y[rows], exact)


def linear(setting: Setting, shape: Shape, *, recipe: str, cached: bool = False) -> Outcome:
    """Check, then time forward plus backward of a grouped linear layer."""
    E, M, K, N = shape
    checked = _check_layer(setting, recipe)
    x, w, dy = (random_matrix(s, setting.device, i) for i, s in enumerate(((M, K), (E, N, K), (M, N))))
    w *= K**-0.5
    offsets = ends(E, M, setting.device)
    kept = quantize_weight(w, cacheable(recipes.get(recipe)), w.dtype) if cached else None
    forwards = _grouped(recipe, setting.device, kept), lambda x, w, offsets: F.grouped_mm(x, w.mT, offs=offsets)
    ours, bf16 = (partial(_forward_backward, forward, x, w, dy, offsets) for forward in forwards)
    return against_bf16(setting, [ours], [bf16], 6.0 * M * N * K, checked, "x bf16")


def _grouped(recipe: str, device: torch.device, kept=None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    values, place = recipes.get(recipe), StreamPhilox(hb.Philox(5).on(device).base, 0)
    return lambda x, w, offsets: hb.grouped_linear(x, w, offsets, values, rng=place, cached_weight=kept)


def _forward_backward(forward: Callable, x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = forward(x, w, offsets)
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


def _check_layer(setting: Setting, recipe: str) -> list[str]:
    E, M, K, N = RAGGED
    tensors = [random_matrix(s, CPU, i) for i, s in enumerate(((M, K), (E, N, K), (M, N)))]
    results = []
    for device in (CPU, setting.device):
        moved = [t.to(device) for t in (*tensors, ends(E, M, CPU))]
        results.append(_forward_backward(_grouped(recipe, device), *moved))
    checked = []
    for name, expected, actual in zip(("y", "dx", "dw"), *results, strict=True):
        error = relative_error(actual, expected.double())
        if not error <= LAYER_TOLERANCE:
            raise Unequal(f"{name} of a layer {RAGGED}: relative error {error:.2e}, at most {LAYER_TOLERANCE:g}")
        checked.append(f"{name} of a layer {RAGGED}: {error:.1e} from the reference on the CPU")
    return checked


BANDWIDTH, EDEN_BANDWIDTH = Bar(least=0.50, aim=0.80), Bar(least=0.40, aim=0.60)
OF_SMALL_GROUPS = {SMALL_GROUPS: Bar(least=0.42, aim=0.80)}
QUANTIZED: dict[str, dict[Shape, Bar]] = {
    "tokens": dict.fromkeys(SHAPES, Bar(least=0.60, aim=0.80)) | OF_SMALL_GROUPS,
    "gradient": dict.fromkeys(SHAPES, Bar(least=0.55, aim=0.80)) | OF_SMALL_GROUPS,
    "eden": dict.fromkeys(SHAPES, EDEN_BANDWIDTH),
    "experts": dict.fromkeys(SHAPES, BANDWIDTH),
}
OPERANDS = {
    "tokens": (Quantization(row=NVFP4(), col=NVFP4(rotation=RHT), operand="tokens"), "1x16 and its rotated transpose"),
    "gradient": (
        Quantization(row=SR, col=NVFP4(rounding="stochastic", rotation=RHT), operand="gradient"),
        "stochastic 1x16 and its rotated transpose",
    ),
    "eden": (
        Quantization(row=eden(128), col=eden(128), operand="gradient"),
        "MS-EDEN in both orientations, as in quartet2",
    ),
    "experts": (Quantization(row=TILE, col=TILE, operand="experts"), "16x16 of every expert and its transpose"),
}
LAYERS = {
    "nvfp4": ({SHAPES[0]: Bar(least=1.35, aim=1.2), SHAPES[1]: Bar(least=1.65, aim=1.4)}, False),
    "nvfp4-cached": ({SHAPES[0]: None, SHAPES[1]: Bar(least=1.45, aim=1.3)}, True),
    "nvfp4_mxfp8_bwd": (dict.fromkeys(SHAPES), False),
    "four_over_six": (dict.fromkeys(SHAPES), False),
}

CASES = (
    *(
        Case(
            name=f"grouped/quantize-{name}",
            about=about,
            shapes=QUANTIZED[name],
            small=SMALL,
            run=run,
        )
        for name, (run, about) in OPERANDS.items()
    ),
    *(
        Case(
            name=f"grouped/swizzle-{along}",
            about="block scales into a region per group",
            shapes=dict.fromkeys(SHAPES, BANDWIDTH),
            small=SMALL,
            run=partial(swizzle, along=along),
        )
        for along in ("rows", "contraction", "experts")
    ),
    *(
        Case(
            name=f"grouped/{gemm}",
            about="operands decoded before, beside torch's grouped GEMM",
            shapes=dict.fromkeys(SHAPES, Bar(least=0.90, aim=1.0)),
            small=SMALL,
            run=partial(product, gemm=gemm),
        )
        for gemm in ("fprop", "dgrad", "wgrad")
    ),
    *(
        Case(
            name=f"grouped/linear-{name}",
            about="forward + backward of a grouped linear layer",
            shapes=shapes,
            small=SMALL,
            run=partial(linear, recipe=name.removesuffix("-cached"), cached=cached),
        )
        for name, (shapes, cached) in LAYERS.items()
    ),
)
