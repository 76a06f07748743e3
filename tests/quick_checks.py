"""What decides between nearly equal errors: operands whose scales quick errors choose, beside the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels.quantize import both, both_route, grouped, one, route
from halfbyte.kernels.unpack.dequantize import decode
from halfbyte.layout import Operand
from halfbyte.sides import Side, both_sides

FOUR = 0.875, 1.0, 1.25, 1.5
SPECS = {
    f"{name}-{error}": hb.NVFP4(scaling=hb.FourOverSix(candidates=candidates, error=error), **options)
    for error in ("mae", "mse")
    for name, candidates, options in (
        ("four", FOUR, {}),
        ("two", (1.0, 1.5), {"e4m3_max": 256.0}),
        ("three", (0.75, 1.0, 1.5), {"e4m3_max": 256.0}),
        ("above", (1.0, 1.25, 1.5), {"outer": "row"}),
        ("rotated", FOUR, {"rotation": hb.Hadamard()}),
        ("tiles", FOUR, {"block": (16, 16)}),
    )
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def inputs(shape: tuple[int, int], device: torch.device) -> dict[str, tuple[Tensor, float | None]]:
    """Return fp32 matrices by what is hard about them, and what their amax is said to be in place of the true one."""
    generator = torch.Generator(device).manual_seed(shape[0])

    def normal() -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator).float()

    blocks = torch.exp2(whole(-24, 1)[:, ::16]).repeat_interleave(16, 1)[:, : shape[1]]
    special = torch.where(whole(0, 500) == 0, float("nan"), torch.where(whole(0, 500) == 0, float("inf"), normal()))
    return {
        "normal": (normal(), None),
        "heavy tails": (normal() * torch.exp(2 * normal()), None),
        "exact ties": (whole(-8, 9), None),
        "powers of two": (whole(0, 2) * torch.exp2(whole(-6, 3)), None),
        "scales down to 0": (normal() * blocks, None),
        "mostly zeros": (torch.where(whole(0, 10) > 0, 0.0, normal()), None),
        "values beyond the amax": (normal(), 0.25),
        "an amax far away": (normal(), 3e4),
        "squares underflow": (normal() * 2.0**-70, None),
        "no simple division": (normal(), 3e38),
        "no power of two moves them": (normal() * 2.0**104, None),
        "NaN and Inf": (special, None),
        "zeros": (whole(0, 1), None),
    }


def check_bytes(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (48, 1072)) -> None:
    """Check the operands of all `inputs`, be they as small as they may."""
    with patch.dict(route.QUICK_BLOCKS, {2: 0}), patch.dict(route.QUICK_TILE_BLOCKS, {4: 0}):
        _check_bytes(name, dtype, device, shape)


def check_tiles_together(name: str, device: torch.device, shape: tuple[int, int] = (48, 256)) -> None:
    """Check programs of four whole tiles beside each other, whose scales are stored at once."""
    few = patch.multiple(route, LOOP_PROGRAMS=1, INTERPRETED_BLOCKS=32)
    with few, patch.dict(route.QUICK_TILE_BLOCKS, {4: 0}):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        side = Side(SPECS[name], amax=torch.ones((), device=device))
        constants = route.choose_one_side(route.OneSide(x, side, route.ALONE)).constants
        assert constants["LOOP"] == 4 and constants["RULE"].full and not constants["DOWN"], "another way was taken"
        check_bytes(name, torch.bfloat16, device, shape)


def check_neighbours(name: str, device: torch.device, shape: tuple[int, int], four: int, two: int) -> None:
    """Check whole tiles of which a lane has two neighbours; four, two: programs of so many steps, in waves of four."""
    by_length = route.shares_by_length
    short = {"shares_by_length": lambda count, in_row, _: by_length(count, in_row, 4), "LEAST_WAVES": 0}
    few = patch.multiple(route, INTERPRETED_BLOCKS=32, **short)
    with few, patch.dict(route.QUICK_TILE_BLOCKS, {4: 0}):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        side = Side(SPECS[name], amax=torch.ones((), device=device))
        choice = route.choose_one_side(route.OneSide(x, side, route.ALONE))
        assert choice.kernel == "quantize_neighbours_kernel", "another way was taken"
        assert choice.grid == (shape[0] // 16 * (shape[1] // 64) - 3 * four - two,)
        assert choice.facts.shares == (four, two)
        check_bytes(name, torch.bfloat16, device, shape)


def _check_bytes(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> None:
    spec = SPECS[name]
    for what, (x, amax) in inputs(shape, device).items():
        values = x.to(dtype)
        rows = torch.full((shape[0],) if spec.has_row_amax else (), amax, device=device) if amax else None
        want = reference.quantize(values, spec, amax=rows)
        choice = route.choose_one_side(route.OneSide(values, Side(spec, amax=want.amax), route.ALONE))
        assert choice.constants["RULE"].errors == "quick", "another way was taken"
        got = one.quantize_side(values, Side(spec, amax=want.amax))
        for field in ("qdata", "block_scale"):
            a, b = (getattr(blocks, field).view(torch.uint8).cpu() for blocks in (got, want))
            assert torch.equal(a, b), f"{what}: {int((a != b).sum())} bytes of {field} differ"


PAIRS = {  # rows, columns, and which of them are wanted as values
    "two": (SPECS["two-mae"], replace(SPECS["two-mae"], rotation=hb.Hadamard()), (True, False)),
    "codes": (SPECS["two-mse"], replace(SPECS["four-mae"], rotation=hb.Hadamard()), (False, False)),
    "plain": (SPECS["above-mse"], SPECS["above-mae"], (True, False)),
    "values": (SPECS["two-mse"], replace(SPECS["two-mae"], rotation=hb.Hadamard()), (True, True)),
    "rows": (SPECS["four-mae"], hb.NVFP4(rotation=hb.Hadamard()), (False, False)),
    "columns": (hb.NVFP4(), SPECS["two-mse"], (False, False)),
}
HARD = "heavy tails", "exact ties", "scales down to 0", "an amax far away", "NaN and Inf"


def check_pair(name: str, device: torch.device, shape: tuple[int, int], hard: Sequence[str] = HARD) -> None:
    """Check both orientations of some `inputs` in bf16 from one read of them."""
    row, col, transient = PAIRS[name]
    for what in hard:
        x, amax = inputs(shape, device)[what]
        x = x.bfloat16()
        wants = [
            reference.quantize(t, spec, amax=torch.full(t.shape[:1] if spec.has_row_amax else (), amax, device=device))
            if amax
            else reference.quantize(t, spec)
            for t, spec in ((x, row), (x.T, col))
        ]
        both_ways = both_sides(row, col, row_amax=wants[0].amax, col_amax=wants[1].amax, transient=transient)
        with patch.dict(route.QUICK_BLOCKS, {2: 0}):
            rules = both_route.choose_pair(both_route.Pair(x, *both_ways)).constants
            got = both.quantize_row_col(x, *both_ways)
        quick = {side for side, spec in (("ROW", row), ("COL", col)) if spec.tries_candidates}
        assert quick == {side for side in ("ROW", "COL") if rules[side].errors == "quick"}, "another way was taken"
        for found, want, spec, values, length in zip(got, wants, (row, col), transient, shape[::-1], strict=True):
            if values:
                want = want._replace(qdata=decode(Operand(want, spec, length)).values)
            for field in ("qdata",) if values else ("qdata", "block_scale"):
                a, b = (getattr(blocks, field).contiguous().view(torch.uint8).cpu() for blocks in (found, want))
                assert torch.equal(a, b), f"{what}: {int((a != b).sum())} bytes of {field} differ"


def check_groups(name: str, device: torch.device, shape: tuple[int, int], ends: Sequence[int]) -> None:
    """Check groups of tokens beside those whose candidates are all judged by the defined errors."""
    row, col, (values, _) = PAIRS[name]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    for what in ("heavy tails", "exact ties"):
        x = inputs(shape, device)[what][0].bfloat16()
        sides = both_sides(row, col, transient=(values, False))
        found = []
        for quick in ({2: 0}, dict.fromkeys(route.QUICK_BLOCKS, 1 << 40)):
            with patch.dict(route.QUICK_BLOCKS, quick):
                found.append(grouped.grouped_quantize_row_col(x, offsets, *sides))
        for got, want in zip(*found, strict=True):
            assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8)), what
            assert torch.equal(got.block_scale.view(torch.uint8), want.block_scale.view(torch.uint8)), what
