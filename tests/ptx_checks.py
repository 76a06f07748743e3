"""Quantize kernels as a GPU would run them, beside the reference: `python tests/ptx_checks.py TARGET CASE ...`.

Run without TRITON_INTERPRET. Prints a line for each case: "equal" or what differs. Memory that nobody writes holds
0xFF and NaN, so that what a kernel leaves out differs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import eden_checks
import logit_checks
import quick_checks
import row_checks
import sums_checks
import torch
from ptx_emulator import emulated
from torch import Tensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import BlockFormat
from halfbyte.kernels import backend
from halfbyte.kernels.quantize import both_route, grouped_route, one
from halfbyte.kernels.quantize import route as one_route
from halfbyte.kernels.record import TARGETS
from halfbyte.layout import Blocks
from halfbyte.sides import Side, both_sides

SR, RHT, SIX = {"rounding": "stochastic"}, {"rotation": hb.Hadamard()}, {"scaling": hb.FourOverSix(), "e4m3_max": 256.0}
FOUR = 0.875, 1, 1.25, 1.5
EDEN = hb.NVFP4(scaling=hb.Eden(), fp4_max=hb.recipes.EDEN_FP4_MAX, e4m3_max=hb.recipes.EDEN_E4M3_MAX)
SPECS = {
    "nearest": hb.NVFP4(),
    "rows": hb.NVFP4(outer="row"),
    "tiles": hb.NVFP4(block=(16, 16)),
    "toward_zero": hb.NVFP4(rounding="toward_zero"),
    "stochastic": hb.NVFP4(**SR),
    "six": hb.NVFP4(**SIX),
    "six_squares": hb.NVFP4(scaling=hb.FourOverSix(error="mse"), outer="row"),
    "six_scaled": hb.NVFP4(scaling=hb.FourOverSix(error_math="scaled"), e4m3_max=256),
    "six_tiles": hb.NVFP4(**SIX, block=(16, 16)),
    "six_rotated": hb.NVFP4(**SIX, **RHT),
    "four_candidates": hb.NVFP4(scaling=hb.FourOverSix(error="mse", error_math="scaled", candidates=FOUR)),
    "four_exact": hb.NVFP4(scaling=hb.FourOverSix(candidates=FOUR)),
    "four_squares": hb.NVFP4(scaling=hb.FourOverSix(error="mse", candidates=FOUR), outer="row"),
    "four_rotated": hb.NVFP4(scaling=hb.FourOverSix(candidates=FOUR), **RHT),
    "four_tiles": hb.NVFP4(scaling=hb.FourOverSix(error="mse", candidates=FOUR), block=(16, 16)),
    "rotated": hb.NVFP4(**RHT),
    "rotated_32_fresh": hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh")),
    "rotated_64_rows": hb.NVFP4(rotation=hb.Hadamard(size=64, signs="-+++"), outer="row"),
    "rotated_128": hb.NVFP4(rotation=hb.Hadamard(size=128)),
    "rotated_stochastic": hb.NVFP4(**SR, **RHT),
    "mxfp8": hb.MXFP8(),
    "eden": EDEN,
    "eden_128": replace(EDEN, rotation=hb.Hadamard(size=128, signs="fresh")),
    "stochastic_128": hb.NVFP4(**SR, rotation=hb.Hadamard(size=128, signs="fresh")),
}
PAIRS = {
    "activation": (SPECS["nearest"], SPECS["rotated"]),
    "gradient": (SPECS["stochastic"], SPECS["rotated_stochastic"]),
    "six_pair": (SPECS["six"], SPECS["six_rotated"]),
    "unrotated": (SPECS["nearest"], SPECS["nearest"]),
    "rows_pair": (SPECS["rows"], hb.NVFP4(**RHT, outer="row")),
    "backward": (SPECS["nearest"], SPECS["mxfp8"]),
    "eden_pair": (EDEN, replace(EDEN, **RHT)),
    "eden_fresh_pair": (EDEN, replace(EDEN, rotation=hb.Hadamard(signs="fresh"))),
    "toward_zero_pair": (SPECS["toward_zero"], SPECS["rotated"]),
}
TRANSIENT = {"": (False, False), "/values": (True, True), "/row_values": (True, False)}
GROUPED = ("grouped/activation", "grouped/gradient", "grouped/gradient/loops", "grouped/six_pair")
"""Tokens in groups."""
LARGE = ("eden/large", "eden_pair/large", "eden_fresh_pair/large")
"""In tiles of large tensors."""
LOOPS = ((1, 4),)  # in cases of that name: a program has four tiles, as those of large tensors have
CASES = tuple(
    [f"{name}{how}" for name in SPECS for how in ("", "/turned")]
    + [f"{n}{how}" for n in PAIRS for how in TRANSIENT]
    + [
        *GROUPED,
        *LARGE,
        "gradient/loops",
        "gradient/places",
        "sums",
        "logits",
        "row",
        "near",
        "eden_scales",
        "eden_magnitudes",
    ]
)
PLACES = (9, 2**32 - 3000, 2**32, 2**40 + 5)
"""Of an operand's first block among random numbers, in cases of that name: counters whose second word changes."""
SHAPES = {"whole": (128, 256), "ragged": (133, 248), "odd": (37, 90)}
SIZES = (70, 0, 64, 1, 40)  # of groups, with 23 rows behind the last
AMAXES = (None, 1e-3, 1e3, 0.0, 3e38, 1e-38, float("inf"), float("nan"))
"""What x is said not to exceed: the truth, less, and what no division is simple for."""
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def matrix(shape: tuple[int, int], finite: bool = True) -> Tensor:
    """Return bf16 whose 16x16 tiles are each of another kind: normal, tiny, zeros of both signs, ties, outliers."""
    generator = torch.Generator().manual_seed(shape[0])
    tiles = [-(-n // 16) for n in shape]

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(16, 0).repeat_interleave(16, 1)

    full = [16 * n for n in tiles]
    normal = torch.randn(full, generator=generator)
    exponents = torch.randint(-40, 20, tiles, generator=generator).float()
    kinds = (
        normal,
        normal * spread(torch.exp2(exponents)),
        torch.zeros(full),
        -torch.zeros(full),
        torch.exp2(torch.randint(-133, -118, full, generator=generator).float()) * normal.sign(),
        torch.randint(-12, 13, full, generator=generator) / 4,
        torch.where(torch.rand(full, generator=generator) < 0.1, normal * 100, normal * 1e-3),
    )
    kind = spread(torch.randint(0, len(kinds), tiles, generator=generator))
    x = torch.stack(kinds).gather(0, kind[None])[0].bfloat16()[: shape[0], : shape[1]].contiguous()
    if not finite:
        x[3, 5], x[20, 33], x[-1, -1] = float("nan"), float("inf"), float("-inf")
    return x


def beyond_the_last(shape: tuple[int, int]) -> Tensor:
    """Return bf16 whose blocks have the least scale, and reach 7.5 times it: with m8 = 448, in the lower half with 256.

    Nearly all of them: threads decide together whether one is beyond what rounds to the last code.
    """
    unit = torch.tensor([2**-9 / (m8 * 6) for m8 in (448, 256)]).repeat_interleave(shape[0] // 2)[:, None]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 15 - 7.5
    x[:, ::16] = 7.5
    x[0, 0] = 1 / unit[0, 0]
    return (x * unit).bfloat16()


def decoded(blocks: Blocks, fmt: BlockFormat, cols: int) -> Tensor:
    """Return what codes and the scales of their blocks stand for, in bf16."""
    if fmt.element.name == "e2m1":
        codes = torch.stack([blocks.qdata & 15, blocks.qdata >> 4], -1).reshape(len(blocks.qdata), -1).long()
        values = E2M1[codes].double()
    else:
        values = blocks.qdata.view(FP8[fmt.element.name]).double()
    if fmt.scale.name == "e8m0":
        scales = torch.exp2(blocks.block_scale.double() - 127).where(blocks.block_scale != 255, torch.nan)
    else:
        scales = blocks.block_scale.view(FP8[fmt.scale.name]).double()
    return (values * scales.repeat_interleave(fmt.length, 1)).bfloat16()[:, :cols]


def differ(actual: Tensor, expected: Tensor) -> int:
    """Return how many bytes or values differ; NaN is NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.dtype == torch.bfloat16:
        bits = actual.contiguous().view(torch.int16) != expected.contiguous().view(torch.int16)
        return int((bits & ~(actual.isnan() & expected.isnan())).sum())
    return int((actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())


def inputs() -> Iterator[tuple[str, Tensor, float | None]]:
    for name, shape in SHAPES.items():
        yield name, matrix(shape), None
    yield "not finite", matrix(SHAPES["whole"], finite=False), None
    yield "beyond the last code", beyond_the_last(SHAPES["whole"]), None
    yield "large", matrix(SHAPES["whole"]) * 2.0**104, None  # with its own amax, that is not regular
    for amax in AMAXES[1:]:
        yield f"amax={amax}", matrix(SHAPES["whole"]), amax


def given(amaxes: Tensor, amax: float | None) -> Tensor:
    return amaxes if amax is None or not amaxes.numel() else torch.full_like(amaxes, amax)


def single(spec: hb.NVFP4 | hb.MXFP8, turned: bool, target: str) -> Iterator[str]:
    """Yield what differs, of one orientation."""
    place = {"draw": hb.Philox(7, 11), "sign_draw": hb.Philox(99, 3)}
    for name, x, amax in inputs():
        x = x.T if turned else x
        draws = {key: value.on(x.device) for key, value in place.items()}
        side = Side(spec, **draws)
        expected = ops.quantize(x, side, backend="reference")
        if amax is not None:
            side = side._replace(amax=given(expected.amax, amax))
            expected = ops.quantize(x, side, backend="reference")
        with emulated(TARGETS[target]) as kernels:
            actual = one.quantize_side(x, side._replace(amax=given(expected.amax, amax)))
        wrong = sum(differ(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))
        if wrong or not kernels:
            yield f"{name}: {wrong if kernels else 'no kernel was launched'}"


def pair(specs: tuple, transient: tuple[bool, bool], target: str) -> Iterator[str]:
    """Yield what differs, of both orientations."""
    for name, x, amax in inputs():
        draws = {"draw": hb.Philox(7, 11).on(x.device), "sign_draw": hb.Philox(99, 3).on(x.device)}
        sides = both_sides(*specs, **draws)
        expected = ops.quantize_row_col(x, *sides, backend="reference")
        amaxes = [given(blocks.amax, amax) for blocks in expected]
        sides = [side._replace(amax=new if new.numel() else None) for side, new in zip(sides, amaxes, strict=True)]
        if amax is not None:
            expected = ops.quantize_row_col(x, *sides, backend="reference")
        asked = [side._replace(transient=new) for side, new in zip(sides, transient, strict=True)]
        with emulated(TARGETS[target]) as kernels:
            actual = backend.quantize_row_col(x, *asked)
        for way, got, want, values, spec, cols in zip(
            ("row", "col"), actual, expected, transient, specs, x.T.shape, strict=True
        ):
            if values:
                wrong = differ(got.qdata[:, :cols], decoded(want, spec.format, cols))
            else:
                wrong = sum(differ(a, b) for a, b in zip(got[:2], want[:2], strict=True))
            if wrong or not kernels:
                yield f"{name}, {way}: {wrong if kernels else 'no kernel was launched'}"


def places(specs: tuple, target: str) -> Iterator[str]:
    """Yield what differs, of both orientations whose random numbers begin at each of `PLACES`."""
    x = matrix(SHAPES["whole"])
    drawn = both_sides(*specs, draw=hb.Philox(7, 11).on(x.device))
    for place in PLACES:
        sides = [side._replace(draw=side.draw._replace(first_block=place)) for side in drawn]
        expected = [ops.quantize(m, side, backend="reference") for m, side in zip((x, x.T), sides, strict=True)]
        given = [side._replace(amax=blocks.amax) for side, blocks in zip(sides, expected, strict=True)]
        with emulated(TARGETS[target]) as kernels:
            actual = backend.quantize_row_col(x, *given)
        for way, got, want in zip(("row", "col"), actual, expected, strict=True):
            wrong = sum(differ(a, b) for a, b in zip(got[:2], want[:2], strict=True))
            if wrong or not kernels:
                yield f"from block {place}, {way}: {wrong if kernels else 'no kernel was launched'}"


def groups(specs: tuple, target: str) -> Iterator[str]:
    """Yield what differs, of both orientations of tokens in groups."""
    offsets = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    for finite, cols, amax in [(True, 512, None), (True, 248, None), *((False, 256, amax) for amax in AMAXES)]:
        x, draw = matrix((sum(SIZES) + 23, cols), finite), hb.Philox(7, 11)
        sides = both_sides(*specs, draw=draw.on(x.device), sign_draw=draw.on(x.device))
        expected = ops.grouped_quantize_row_col(x, offsets, *sides, backend="reference")
        # One group alone has the amax that is wrong: neighbours in a launch go different ways.
        of_last = [torch.cat((blocks.amax[:-1], given(blocks.amax[-1:], amax))) for blocks in expected]
        sides = [side._replace(amax=new) for side, new in zip(sides, of_last, strict=True)]
        expected = ops.grouped_quantize_row_col(x, offsets, *sides, backend="reference")
        with emulated(TARGETS[target]) as kernels:
            actual = backend.grouped_quantize_row_col(x, offsets, *sides)
        for way, got, want in zip(("row", "col"), actual, expected, strict=True):
            wrong = sum(differ(a, b) for a, b in zip(got[:2], want[:2], strict=True))
            if wrong or not kernels:
                yield f"{cols} columns, amax={amax}, {way}: {wrong if kernels else 'no kernel was launched'}"


def sums(target: str) -> Iterator[str]:
    """Yield which sums of statistics differ from numpy's."""
    checks = {str(case): (lambda case=case: sums_checks.check_operand_sums(case, "cpu")) for case in sums_checks.CASES}
    for dtype in (torch.float32, torch.bfloat16):
        dtypes = dtype, torch.bfloat16
        checks[f"products, {dtype}"] = lambda dtypes=dtypes: sums_checks.check_error_sums((37, 600), dtypes, "cpu")
    checks["not finite"] = lambda: sums_checks.check_not_finite("cpu")
    checks["columns"] = lambda: sums_checks.check_columns((300, 70), "cpu")
    yield from failing(checks, target)


def logits(target: str) -> Iterator[str]:
    """Yield which parts of shared logits differ from numpy's, or by how columns are cut."""
    checks = {str(case): (lambda case=case: logit_checks.check_case(case, "cpu")) for case in logit_checks.CASES}
    for check in (logit_checks.check_exact, logit_checks.check_rounding, logit_checks.check_not_finite):
        checks[check.__name__] = lambda check=check: check("cpu")
    checks["parts"] = lambda: logit_checks.check_parts(4, 41, torch.bfloat16, "cpu", 1)
    yield from failing(checks, target)


def row(target: str) -> Iterator[str]:
    """Yield which products of one row differ from sums in the order that is said."""
    cases, others = row_checks.CASES[3:10:2], (row_checks.check_tiles, row_checks.check_not_finite)
    checks = {str(case): (lambda case=case: row_checks.check_order(case, "cpu")) for case in cases}
    checks |= {check.__name__: (lambda check=check: check("cpu")) for check in others}
    yield from failing(checks, target)


def near(target: str) -> Iterator[str]:
    """Yield of which operands scales are not the reference's, where errors lie close and where they are equal."""
    shape, cpu = (18, 144), torch.device("cpu")
    checks = {
        name: (lambda name=name: quick_checks.check_bytes(name, torch.bfloat16, cpu, shape))
        for name in ("above-mse", "rotated-mae")
    }
    checks["neighbours"] = lambda: quick_checks.check_neighbours("tiles-mae", cpu, (48, 512), 3, 4)
    checks["pair"] = lambda: quick_checks.check_pair("two", cpu, (64, 64), ("exact ties",))
    checks["pair of codes"] = lambda: quick_checks.check_pair("plain", cpu, (64, 64), ("exact ties",))
    yield from failing(checks, target)


def eden_scales(target: str) -> Iterator[str]:
    """Yield which corrected scales of MS-EDEN are not those of the definition, alone and with their blocks."""
    checks = (eden_checks.check_stored_codes, eden_checks.check_blocks)
    yield from failing({check.__name__: (lambda check=check: check("cpu")) for check in checks}, target)


def eden_magnitudes(target: str) -> Iterator[str]:
    """Yield what differs of MS-EDEN, of blocks of each power of two beside amaxes far off: scales of 0 and the last."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.arange(-133, 123)[:, None].double()
    smaller = torch.randint(0, 40, (256, 64), generator=generator) * torch.randint(0, 2, (256, 64), generator=generator)
    x = (torch.randn(256, 64, generator=generator).double() * torch.exp2(exponents - smaller)).float().bfloat16()
    for amax in (1.0, 1e-3, 2.0**-100, 2.0**-50, 2.0**60, 2.0**100):
        side = Side(EDEN, draw=hb.Philox(7, 11).on(x.device), amax=torch.tensor(amax))
        expected = ops.quantize(x, side, backend="reference")
        with emulated(TARGETS[target]) as kernels:
            actual = one.quantize_side(x, side)
        wrong = sum(differ(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))
        if wrong or not kernels:
            yield f"amax={amax}: {wrong if kernels else 'no kernel was launched'}"


def failing(checks: dict[str, Callable], target: str) -> Iterator[str]:
    """Yield what each of some checks asserts in vain, run as a target runs it."""
    for name, run in checks.items():
        with emulated(TARGETS[target]) as kernels:
            try:
                run()
            except AssertionError as error:
                yield f"{name}: {error}"
        if not kernels:
            yield f"{name}: no kernel was launched"


def check(case: str, target: str) -> list[str]:
    """Return what differs."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    one_route.QUICK_TILE_BLOCKS = dict.fromkeys(one_route.QUICK_TILE_BLOCKS, 0)
    name, _, how = case.partition("/")
    if case == "sums":
        return list(sums(target))
    if case == "logits":
        return list(logits(target))
    if case == "row":
        return list(row(target))
    if case == "near":
        return list(near(target))
    if case == "eden_scales":
        return list(eden_scales(target))
    if case == "eden_magnitudes":
        return list(eden_magnitudes(target))
    if case in LARGE:
        both_route.EDEN_VALUES = one_route.EDEN_BLOCKS = 0
    if how == "places":
        return list(places(PAIRS[name], target))
    if case.endswith("/loops"):
        both_route.LOOPS = grouped_route.LOOPS = LOOPS
    if case in GROUPED:
        return list(groups(PAIRS[how.removesuffix("/loops")], target))
    case = case.removesuffix("/loops").removesuffix("/large")
    if name in PAIRS:
        return list(pair(PAIRS[name], TRANSIENT[case.removeprefix(name)], target))
    return list(single(SPECS[name], how == "turned", target))


def sample(count: int, seed: int) -> list[str]:
    """Return `count` cases."""
    return random.Random(seed).sample(CASES, count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[2:]:
        print(f"{asked} on {sys.argv[1]}: {'; '.join(check(asked, sys.argv[1])) or 'equal'}", flush=True)
