"""Transient operands hold exactly what decoding the codes gives, in bf16."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte.kernels import backend
from halfbyte.layout import Operand
from halfbyte.sides import both_sides

SR, RHT = {"rounding": "stochastic"}, {"rotation": hb.Hadamard()}
PAIRS = {
    "activation": (hb.NVFP4(), hb.NVFP4(**RHT)),
    "gradient": (hb.NVFP4(**SR), hb.NVFP4(**SR, **RHT)),
    "weight": (checks.TILE, checks.TILE),
    "row_scaled": (checks.ROW, hb.NVFP4(rotation=hb.Hadamard(size=32))),
    "mixed": (hb.NVFP4(scaling=hb.FourOverSix()), hb.MXFP8()),
    "mxfp8": (hb.MXFP8(), hb.MXFP8(element="e5m2")),
    "eden": (hb.recipes.quartet2().dgrad.a, hb.recipes.quartet2(hadamard=hb.Hadamard()).wgrad.a),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_the_decoded_codes(name):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    specs, shape = PAIRS[name], (40, 70)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[3, 5] = float("nan")
    draw = {"draw": hb.Philox(7, 3).on(device), "sign_draw": hb.Philox(8, 3).on(device)}
    codes = backend.quantize_row_col(x, *both_sides(*specs, **draw))
    values = backend.quantize_row_col(x, *both_sides(*specs, **draw, transient=(True, True)))
    for side, (stored, transient, spec) in enumerate(zip(codes, values, specs, strict=True)):
        expected = backend.decode(Operand(stored, spec, shape[1 - side]))
        checks.same(transient.qdata, expected.values)
        checks.same(transient.amax, stored.amax)
        assert transient.block_scale.numel() == 0
    mixed = backend.quantize_row_col(x, *both_sides(*specs, **draw, transient=(True, False)))
    checks.same(mixed[0].qdata, values[0].qdata)
    checks.same(mixed[1].qdata, codes[1].qdata)
