"""Which kernels quantize one orientation alone, those of `quantize`, and which a pair, and the bytes of both."""

from __future__ import annotations

import pytest
import quantize_checks as checks
import torch
from triton.runtime.interpreter import InterpretedFunction

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import backend
from halfbyte.layout import Operand
from halfbyte.sides import both_sides

TILE, RHT, SR = hb.NVFP4(block=(16, 16)), {"rotation": hb.Hadamard()}, {"rounding": "stochastic"}
LARGE, SMALL = (16, 1040), (32, 64)  # more than the 16,384 values of one launch, and fewer

ROUTES = {
    # spec, shape: kernels of the row alone, of the column alone
    ("1x16", LARGE): (["amax_rows", "quantize_rows"], ["amax_rows", "quantize_cols"]),
    ("16x16", LARGE): (["amax_rows", "quantize_tiles"], ["amax_rows", "quantize_cols"]),
    ("RHT", LARGE): (["amax_rotated_rows", "quantize_rows"], ["amax_rotated", "quantize_cols"]),
    ("SR RHT", LARGE): (["amax_rotated_rows", "quantize_rows"], ["amax_rotated", "quantize_cols"]),
    ("4over6", LARGE): (["amax_rows", "quantize_rows"], ["amax_rows", "quantize_cols"]),
    ("row-scaled", LARGE): (["amax_rows", "quantize_rows"], ["amax_rows", "quantize_cols"]),
    ("MXFP8", LARGE): (["quantize_rows"], ["quantize_cols"]),
    **{(name, SMALL): (["quantize_small"],) * 2 for name in ("1x16", "16x16", "RHT", "SR RHT", "4over6", "row-scaled")},
    ("MXFP8", SMALL): (["quantize_rows"], ["quantize_cols"]),
}
SPECS = {
    "1x16": hb.NVFP4(),
    "16x16": TILE,
    "RHT": hb.NVFP4(**RHT),
    "SR RHT": hb.NVFP4(**SR, **RHT),
    "4over6": hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0),
    "row-scaled": hb.NVFP4(outer="row"),
    "MXFP8": hb.MXFP8(),
}


@pytest.fixture
def launched(monkeypatch):
    """Record the names of the kernels that run."""
    names, run = [], InterpretedFunction.run

    def recorded(self, *args, **options):
        names.append(self.fn.__name__.removesuffix("_kernel"))
        return run(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return names


@pytest.mark.parametrize("side", (0, 1), ids=("row", "col"))
@pytest.mark.parametrize("transient", (False, True), ids=("codes", "values"))
@pytest.mark.parametrize("name, shape", ROUTES, ids=str)
def test_route_and_bytes_of_one_orientation(name, shape, transient, side, launched):
    spec = SPECS[name]
    x = checks.sample("heavy", shape, torch.bfloat16, "cpu")
    specs = (spec, None) if side == 0 else (None, spec)
    draw = checks.draws("cpu")["draw"]
    options = {"draw": draw} if spec.needs_rng else {}
    sides = backend.quantize_row_col(x, *both_sides(*specs, **options, transient=(transient, transient)))
    assert sides[1 - side] is None and launched == ROUTES[name, shape][side]
    own = {"draw": draw.next() if side else draw} if spec.needs_rng else {}
    expected = reference.quantize(x.T if side else x, spec, **own)
    if transient:
        values = reference.decode(Operand(expected, spec, shape[1 - side])).values.bfloat16()
        assert torch.equal(sides[side].qdata, values) and torch.equal(sides[side].amax, expected.amax)
        assert sides[side].block_scale.numel() == 0
    else:
        checks.same_blocks(sides[side], expected)


PAIRS = {
    ("1x16", "RHT", LARGE): ["amax_rotated", "quantize_row_col"],
    ("1x16", "SR RHT", LARGE): ["amax_rotated", "quantize_row_col"],
    ("1x16", "RHT", (64, 256)): ["amax_rotated", "quantize_row_col_small"],
    ("16x16", "16x16", LARGE): ["amax_rows", "quantize_tiles", "transpose"],
    ("1x16", "MXFP8", LARGE): ["amax_rows", "quantize_row_col"],
    ("row-scaled", "RHT", LARGE): ["amax_rows", "amax_rotated", "quantize_row_col"],
    ("MXFP8", "MXFP8", LARGE): ["quantize_row_col"],
}


@pytest.mark.parametrize("row, col, shape", PAIRS, ids=str)
def test_route_and_bytes_of_pairs(row, col, shape, launched):
    specs = SPECS[row], SPECS[col]
    x = checks.sample("heavy", shape, torch.bfloat16, "cpu")
    draw = checks.draws("cpu")["draw"]
    sides = backend.quantize_row_col(x, *both_sides(*specs, draw=draw))
    assert launched == PAIRS[row, col, shape]
    for side, (spec, matrix) in enumerate(zip(specs, (x, x.T), strict=True)):
        own = {"draw": draw.next() if side else draw} if spec.needs_rng else {}
        checks.same_blocks(sides[side], reference.quantize(matrix, spec, **own))
