"""Quantization: amax, quantize and quantize_row_col, amax given unless the case is about amax.

Before timing, three comparisons with the reference: a small ragged matrix on the CPU, a slice of the timed matrix on
the CPU, and the whole timed matrix with the reference run on the same device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bench import peer_libraries, peers, plain
from bench.measure import CPU, bandwidth, matrices, over, random_matrix, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape
from halfbyte import ops, recipes, reference
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4, Blocks, Operand
from halfbyte.rng import Draw, Philox
from halfbyte.sides import Side, Sides, both_sides
from halfbyte.spec import MXFP8, NVFP4, FourOverSix, Hadamard, Spec
from halfbyte.verify.timing import measure

SHAPES: tuple[Shape, ...] = ((8192, 8192), (16384, 8192))
SMALL, RAGGED = (256, 512), (333, 1001)
SLICE = 256  # rows, a multiple of 128: a prefix of the swizzled scale buffer


class Given(NamedTuple):
    """What a call is given beside x, made once: drawing it again would be timed."""

    row_amax: Tensor | None
    col_amax: Tensor | None
    draw: Draw | None
    sign_draw: Draw | None

    def on(self, device: torch.device) -> Given:
        """Return the same on another device."""
        return Given(
            None if self.row_amax is None else self.row_amax.to(device),
            None if self.col_amax is None else self.col_amax.to(device),
            _draw_on(self.draw, device),
            _draw_on(self.sign_draw, device),
        )

    def head(self, col: bool) -> Given:
        """Return what a slice is given that holds the first rows of the row or of the col orientation."""
        if col:
            return self._replace(col_amax=_head(self.col_amax))
        return self._replace(row_amax=_head(self.row_amax))


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One operation: the specs of both orientations (None leaves one out) and the layout of the scales.

    as_layer: one orientation asked for as a forward without gradients asks, by quantize_row_col.
    turned: x.T is quantized, of an x that is contiguous.
    transient: which orientations are stored as the values that GEMMs multiply.
    """

    row: Spec
    col: Spec | None = None
    scale_layout: str = LINEAR
    as_layer: bool = False
    turned: bool = False
    transient: tuple[bool, bool] = (False, False)
    peer: str = ""
    graph: bool = False

    def __call__(self, setting: Setting, shape: Shape) -> Outcome:
        """Check, then time."""
        xs = [self._turned(x) for x in matrices(setting, shape)]
        given = self.given(xs[0])
        checked = self._check(setting, xs[0], given)
        calls = over(xs, lambda x: self.run(x, given, setting.backend))
        outputs = [t for t in calls[0]() if t is not None]
        moved = xs[0].numel() * xs[0].element_size() + sum(t.nbytes for t in outputs)
        torch_calls = partial(plain.compiled, lambda x: self._run(reference, x, given), xs)
        outcome = bandwidth(setting, calls, moved, checked, torch_calls, self.graph)
        return self._with_peers(setting, xs, given, outcome) if setting.peers and self.peer else outcome

    def _turned(self, x: Tensor) -> Tensor:
        return x.T if self.turned else x

    def given(self, x: Tensor) -> Given:
        """Return amaxes, by the reference, and draws for `x`."""
        specs = [s for s in (self.row, self.col) if s is not None]
        draw = Philox(7, 11).on(x.device) if any(s.needs_rng for s in specs) else None
        sign_draw = Philox(8, 13).on(x.device) if any(s.needs_sign_rng for s in specs) else None
        if self.col is None:
            row, col = ops.quantize(x, Side(self.row, draw=draw, sign_draw=sign_draw), backend="reference"), None
        else:
            draws = {"draw": draw, "sign_draw": sign_draw}
            row, col = ops.quantize_row_col(x, *both_sides(self.row, self.col, **draws), backend="reference")
        return Given(_amax(row), _amax(col), draw, sign_draw)

    def run(self, x: Tensor, given: Given, backend: str) -> tuple[Tensor, ...]:
        """Return codes and scales, or values, of each orientation, amax left out."""
        return self._run(ops, x, given, backend=backend)

    def _run(self, module: ModuleType, x: Tensor, given: Given, **backend: str) -> tuple[Tensor, ...]:
        """Run `ops`, or `reference` itself, which a compiler can look into."""
        if module is reference:
            both = reference.quantize_row_col(x, *self._sides(given, self.scale_layout))
            return tuple(t for blocks in both if blocks is not None for t in blocks[:2])
        row, col = self._sides(given, self.scale_layout)
        if self.col is None and not self.as_layer:
            assert row is not None, "a case has a row"
            return ops.quantize(x, row, **backend)[:2]
        both = ops.quantize_row_col(x, row, col, **backend)
        return tuple(t for blocks in both if blocks is not None for t in blocks[:2])

    def _check(self, setting: Setting, x: Tensor, given: Given) -> list[str]:
        """Compare with the reference, see the module's docstring."""
        ragged = self._turned(random_matrix(RAGGED, CPU, seed=99))
        own = self.given(ragged)
        actual = _wide(self.run(ragged.to(setting.device), own.on(setting.device), setting.backend))
        require_equal(actual, self.run(ragged, own, "reference"), f"ragged {RAGGED}")
        actual = _wide(self.run(x, given, setting.backend))
        self._check_slice(x, given, actual)
        checked = [
            f"{RAGGED[0]}x{RAGGED[1]} with the reference on the CPU",
            f"{SLICE} rows of each output with the reference on the CPU",
        ]
        if setting.on_gpu:
            require_equal(actual, self.run(x, given, "reference"), "whole")
            checked.append("all of it with the reference on the same device")
        return checked

    def _check_slice(self, x: Tensor, given: Given, actual: tuple[Tensor, ...]) -> None:
        """Compare the first rows of each orientation, which are those of a slice of x along its rows or columns."""
        for first, part in zip(range(0, len(actual), 2), (x[:SLICE], x[:, :SLICE]), strict=False):
            cut = given.head(col=first > 0).on(CPU)
            expected = self.run(part.cpu(), cut, "reference")[first : first + 2]
            prefix = [t.flatten()[: e.numel()] for t, e in zip(actual[first : first + 2], expected, strict=True)]
            require_equal(prefix, [e.flatten() for e in expected], f"slice of orientation {first // 2}")

    def _with_peers(self, setting: Setting, xs: list[Tensor], given: Given, outcome: Outcome) -> Outcome:
        """Add other libraries; they compute the amax too, so they are compared with our whole operation."""
        amaxless = given._replace(row_amax=None, col_amax=None)
        targets = self.targets(xs[0])
        pairs = zip(self.decoded(xs[0], amaxless), targets, strict=True)
        errors = [peers.relative_error(values, target) for values, target in pairs]
        task = peers.Task(kind=self.peer, xs=xs, targets=targets, errors=errors)
        whole = measure(over(xs, lambda x: self.run(x, amaxless, setting.backend)), setting.device).seconds
        found = peers.time_all(task, setting, peer_libraries.LIBRARIES)
        return replace(
            outcome,
            rivals={**outcome.rivals, **{name: seconds / whole for name, seconds in found.seconds.items()}},
            left_out={**outcome.left_out, **found.left_out},
            facts={**outcome.facts, "us_with_amax": whole * 1e6},
        )

    def targets(self, x: Tensor) -> list[Tensor]:
        """Return what each orientation quantizes: x and x.T, rotated where the spec says so."""
        sides = [(x, self.row)] if self.col is None else [(x, self.row), (x.T, self.col)]
        rotations = [spec.rotation if isinstance(spec, NVFP4) else None for _, spec in sides]
        return [t if r is None else reference.rotate(t, r) for (t, _), r in zip(sides, rotations, strict=True)]

    def decoded(self, x: Tensor, given: Given) -> list[Tensor]:
        """Return the fp32 values of each orientation by the reference, rotated where they are."""
        both = reference.quantize_row_col(x, *self._sides(given, LINEAR))
        lengths = x.shape[1], x.shape[0]
        return [
            reference.dequantize(Operand(blocks, spec, cols))
            for blocks, spec, cols in zip(both, (self.row, self.col), lengths, strict=True)
            if blocks is not None and spec is not None
        ]

    def _sides(self, given: Given, scale_layout: str) -> Sides:
        amaxes = {"row_amax": given.row_amax, "col_amax": given.col_amax}
        draw, sign_draw = given.draw, given.sign_draw
        options = {"scale_layout": scale_layout, "transient": self.transient}
        return both_sides(self.row, self.col, draw=draw, sign_draw=sign_draw, **options, **amaxes)


def _wide(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return outputs with values in fp32, as the reference has them: bf16 holds each exactly."""
    return tuple(t.float() if t.is_floating_point() else t for t in outputs)


def _draw_on(draw: Draw | None, device: torch.device) -> Draw | None:
    return None if draw is None else draw._replace(base=draw.base.to(device))


def _head(amax: Tensor | None) -> Tensor | None:
    return amax if amax is None or amax.dim() == 0 else amax[:SLICE]


def _amax(blocks: Blocks | None) -> Tensor | None:
    return None if blocks is None or blocks.amax.numel() == 0 else blocks.amax


def _case(name: str, about: str, operation: Quantization, least: float | None = None, aim: float = 0.0) -> Case:
    bar = None if least is None else Bar(least=least, aim=aim)
    return Case(name=name, about=about, shapes=dict.fromkeys(SHAPES, bar), small=SMALL, run=operation)


def _four_over_six(error_math: Literal["exact", "scaled"]) -> NVFP4:
    return NVFP4(scaling=FourOverSix(error="mae", error_math=error_math), e4m3_max=256.0)


def _tiles(spec: NVFP4) -> NVFP4:
    return replace(spec, block=(16, 16))


def _rotated(size: int) -> NVFP4:
    return NVFP4(rotation=Hadamard(size=size))


def eden(size: int | None) -> NVFP4:
    """Return a gradient's spec of `quartet2`, rotated by `size`, or not at all."""
    rotation = None if size is None else Hadamard(size=size, signs="fresh")
    spec = recipes.quartet2(hadamard=rotation).dgrad
    assert spec is not None and isinstance(spec.a, NVFP4), "the recipe quantizes gradients"
    return spec.a


def amax(setting: Setting, shape: Shape) -> Outcome:
    """Check and time max |x|."""
    xs = matrices(setting, shape)
    mine, theirs = ops.amax(xs[0], backend=setting.backend), ops.amax(xs[0].cpu(), backend="reference")
    require_equal([mine], [theirs], "amax")
    calls = over(xs, lambda x: ops.amax(x, backend=setting.backend))
    torch_calls = partial(plain.compiled, lambda x: x.abs().amax(), xs)
    moved = xs[0].numel() * xs[0].element_size()
    return bandwidth(setting, calls, moved, ["all of it with the reference on the CPU"], torch_calls)


def amax_row_col(setting: Setting, shape: Shape) -> Outcome:
    """Check and time the amax of x and that of x.T rotated, together: what a gradient's two operands need first."""
    xs = matrices(setting, shape)
    function = _row_col_amax(setting.backend)
    head = xs[0][:, :SLICE].contiguous()
    require_equal(function(head), _row_col_amax("reference")(head.cpu()), "slice")
    require_equal(function(xs[0]), _row_col_amax("reference")(xs[0]), "whole")
    torch_calls = partial(plain.compiled, _row_col_amax("reference"), xs)
    checked = [f"{SLICE} columns with the reference on the CPU", "all of it with the reference on the same device"]
    return bandwidth(setting, over(xs, function), 2 * xs[0].numel(), checked, torch_calls)


def _row_col_amax(backend: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return x -> (amax of x, amax of x.T after its rotation); no op of its own, quantize_row_col does it inside."""
    if backend != "triton":
        rotation = Hadamard()
        return lambda x: (reference.finite_amax(x), reference.finite_amax(reference.rotate(x.T, rotation)))
    kernel = importlib.import_module("halfbyte.kernels.amax.plain").row_col_amax
    return lambda x: kernel(x, NEAREST, _rotated(16), None)


NEAREST, STOCHASTIC = NVFP4(), NVFP4(rounding="stochastic")
STOCHASTIC_ROTATED = NVFP4(rounding="stochastic", rotation=Hadamard())
SEARCH = NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)), e4m3_max=256.0)
ROW_SCALED = NVFP4(outer="row")

CASES = (
    Case(
        name="amax/tensor",
        about="max |x| over the finite elements",
        shapes=dict.fromkeys(SHAPES, Bar(least=0.90, aim=0.95)),
        small=SMALL,
        run=amax,
    ),
    Case(
        name="amax/tensor+rht",
        about="of x, and of x.T rotated, in one pass",
        shapes=dict.fromkeys(SHAPES, Bar(least=0.75, aim=0.90)),
        small=SMALL,
        run=amax_row_col,
    ),
    _case("quantize/1x16", "nearest", Quantization(row=NEAREST, peer="1x16"), 0.80, 0.92),
    _case(
        "quantize/1x16-swizzled",
        "nearest, scales written in cuBLAS's layout",
        Quantization(row=NEAREST, scale_layout=SWIZZLED_32_4_4),
        0.80,
        0.92,
    ),
    _case("quantize/16x16", "nearest", Quantization(row=NVFP4(block=(16, 16)), peer="16x16"), 0.80, 0.92),
    _case("quantize/mxfp8", "E4M3 elements", Quantization(row=MXFP8(), peer="mxfp8"), 0.80, 0.92),
    _case("quantize/1x16-sr", "stochastic rounding", Quantization(row=STOCHASTIC, peer="1x16-sr"), 0.65, 0.85),
    _case("quantize/1x16-row-scaled", "one amax a row", Quantization(row=NVFP4(outer="row"))),
    _case("quantize/4over6", "MAE, exact", Quantization(row=_four_over_six("exact"), peer="4over6"), 0.50, 0.80),
    _case("quantize/4over6-scaled", "MAE, scaled", Quantization(row=_four_over_six("scaled")), 0.60, 0.80),
    _case("quantize/4over6-16x16", "tiles, MAE, exact", Quantization(row=_tiles(_four_over_six("exact"))), 0.40, 0.80),
    _case("quantize/search", "four candidates, MAE, exact", Quantization(row=SEARCH), 0.40, 0.80),
    _case("quantize/search-16x16", "tiles, four candidates", Quantization(row=_tiles(SEARCH)), 0.40, 0.80),
    _case("quantize/rht16", "rotated", Quantization(row=_rotated(16))),
    *(
        _case(f"quantize/rht{size}", "rotated", Quantization(row=_rotated(size)), least, 0.80)
        for size, least in ((32, 0.66), (64, 0.66), (128, 0.60))
    ),
    _case("quantize/eden", "MS-EDEN, unrotated", Quantization(row=eden(None)), 0.40, 0.60),
    _case("quantize/eden-rht128", "MS-EDEN as in quartet2", Quantization(row=eden(128)), 0.40, 0.60),
    _case("quantize/eden-rht128-col", "the same of x.T", Quantization(row=eden(128), turned=True), 0.40, 0.60),
    _case(
        "row_col/eden+eden-rht", "MS-EDEN, col rotated by 16", Quantization(row=eden(None), col=eden(16)), 0.40, 0.60
    ),
    _case("row_col/eden-rht128", "quartet2's gradient", Quantization(row=eden(128), col=eden(128)), 0.40, 0.60),
    _case("row_col/1x16+rht", "row, rotated col", Quantization(row=NEAREST, col=_rotated(16)), 0.60, 0.80),
    _case(
        "row_col/sr+sr-rht",
        "both stochastic: an output gradient",
        Quantization(row=STOCHASTIC, col=STOCHASTIC_ROTATED, peer="row_col-sr"),
        0.55,
        0.80,
    ),
    _case(
        "row_col/1x16+rht-values",
        "a layer's x: rows as values, rotated col",
        Quantization(row=NEAREST, col=_rotated(16), transient=(True, False)),
    ),
    _case(
        "row_col/sr+sr-rht-values",
        "an output gradient as both GEMMs read it",
        Quantization(row=STOCHASTIC, col=STOCHASTIC_ROTATED, transient=(True, True)),
    ),
    _case(
        "row_col/1x16+sr-rht", "x, stochastic if saved", Quantization(row=NEAREST, col=STOCHASTIC_ROTATED), 0.40, 0.80
    ),
    _case("row_col/row-scaled", "an amax a row and a column", Quantization(row=ROW_SCALED, col=ROW_SCALED)),
    _case("row_col/1x16+mxfp8", "NVFP4 row, MXFP8 col", Quantization(row=NEAREST, col=MXFP8()), 0.80, 0.90),
    _case(
        "row_col/16x16",
        "a weight in both orientations",
        Quantization(row=NVFP4(block=(16, 16)), col=NVFP4(block=(16, 16))),
    ),
    Case(
        name="eval/16x16",
        about="a weight in one orientation, as a forward without gradients asks for it",
        shapes={(8192, 8192): Bar(least=0.91, aim=0.93), (16384, 2880): Bar(least=0.85, aim=0.90)},
        small=SMALL,
        run=Quantization(row=NVFP4(block=(16, 16)), as_layer=True),
    ),
    Case(
        name="quantize/1x16-small",
        about="launch-bound, under a CUDA graph",
        shapes={(512, 1024): None},
        small=(64, 128),
        run=Quantization(row=NEAREST, graph=True),
    ),
)
