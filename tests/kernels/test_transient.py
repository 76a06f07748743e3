"""Transient operands hold exactly what decoding the codes gives, in bf16."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte.kernels import backend, record
from halfbyte.kernels.quantize import both, both_small, lines
from halfbyte.kernels.quantize.both_route import Pair, choose_pair
from halfbyte.kernels.target import assumed
from halfbyte.layout import Operand
from halfbyte.sides import both_sides

SR, RHT = {"rounding": "stochastic"}, {"rotation": hb.Hadamard()}
PAIRS = {
    "activation": (hb.NVFP4(), hb.NVFP4(**RHT)),
    "gradient": (hb.NVFP4(**SR), hb.NVFP4(**SR, **RHT)),
    "weight": (checks.TILE, checks.TILE),
    "nearest": (hb.NVFP4(), hb.NVFP4()),
    "toward_zero": (hb.NVFP4(rounding="toward_zero"), hb.NVFP4(rounding="toward_zero", **RHT)),
    "columns": (hb.NVFP4(rounding="toward_zero"), hb.NVFP4(**RHT)),  # these alone without codes
    "row_scaled": (checks.ROW, hb.NVFP4(rotation=hb.Hadamard(size=32))),
    "mixed": (hb.NVFP4(scaling=hb.FourOverSix()), hb.MXFP8()),
    "mxfp8": (hb.MXFP8(), hb.MXFP8(element="e5m2")),
    "eden": (hb.recipes.quartet2().dgrad.a, hb.recipes.quartet2(hadamard=hb.Hadamard()).wgrad.a),
}


WORDS = (48, 160)
"""Read in words of two values: no code is packed on the way, and columns lie as x does where they can."""

AS_X = ("activation", "gradient", "columns", "row_scaled", "nearest")


SHAPES = [(name, shape) for name in PAIRS for shape in ((40, 70), WORDS)] + [(name, (37, 88)) for name in AS_X]


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_values_are_the_decoded_codes(name, shape):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    specs = PAIRS[name]
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
    lies = shape[1] % 8 == 0 and name in AS_X
    rows, padded = shape[1], values[1].qdata.shape[1]
    assert values[1].qdata.stride() == ((1, rows) if lies else (padded, 1))


def of_values(x, specs, draw):
    return backend.quantize_row_col(x, *both_sides(*specs, draw=draw, transient=(True, True)))


@pytest.mark.parametrize("name", ["activation", "gradient"])
def test_where_x_lies_does_not_count(name):
    x = torch.randn(WORDS, generator=torch.Generator().manual_seed(2)).bfloat16()
    draw, (rows, cols) = hb.Philox(7, 3).on(x.device), WORDS
    expected = of_values(x, PAIRS[name], draw)
    moved = torch.zeros(rows * cols + 1).bfloat16()[1:].view(rows, cols).copy_(x)  # 2 bytes from where words begin
    by_columns = x.T.contiguous().T
    with_gaps = torch.zeros(rows, cols + 3).bfloat16()[:, :cols].copy_(x)
    for same in (moved, by_columns, with_gaps):
        for mine, theirs in zip(of_values(same, PAIRS[name], draw), expected, strict=True):
            checks.same(mine.qdata, theirs.qdata)
            assert mine.qdata.stride() == theirs.qdata.stride()


@pytest.mark.parametrize("shape", [(37, 88), WORDS], ids=str)
@pytest.mark.parametrize("name", AS_X)
def test_nothing_is_written_beyond_the_values(name, shape, monkeypatch):
    beyond, output_of = [], lines.output_of

    def with_memory_behind(*args, **options):
        out = output_of(*args, **options)
        count, stride = out.qdata.numel(), out.qdata.stride()
        memory = torch.full((2 * count,), 7.0, dtype=torch.bfloat16)
        beyond.append(memory[count:])
        return out._replace(qdata=memory[:count].as_strided(out.qdata.shape, stride))

    for module in (both, both_small):
        monkeypatch.setattr(module, "output_of", with_memory_behind)
    of_values(torch.randn(shape).bfloat16(), PAIRS[name], hb.Philox(7, 3).on(torch.device("cpu")))
    assert len(beyond) == 2 and all((rest == 7).all() for rest in beyond)


def test_large_pairs_have_no_small_kernel():
    with assumed(record.TARGETS["sm_90"]):
        x = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
        choice = choose_pair(Pair(x, *both_sides(*PAIRS["activation"], transient=(True, False))))
    assert choice.kernel == "quantize_row_col_kernel" and (choice.constants["TR"], choice.constants["TC"]) == (64, 64)
