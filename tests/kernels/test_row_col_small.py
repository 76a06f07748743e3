"""Both orientations of a small tensor without a workspace: bit for bit, in Triton's interpreter."""

import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import layout
from halfbyte.kernels import backend
from halfbyte.kernels.quantize import both, both_route, both_small
from halfbyte.layout import Operand
from halfbyte.sides import both_sides

SR = {"rounding": "stochastic"}
PAIRS = (
    (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(**SR), hb.NVFP4(**SR, rotation=hb.Hadamard(signs="fresh"))),
    (hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256), hb.NVFP4(rotation=hb.Hadamard(), rounding="toward_zero")),
)


@pytest.mark.parametrize(("pair", "kind"), tuple(zip(PAIRS, ("heavy", "nonfinite", "tiny"), strict=True)))
def test_bytes_are_those_of_the_reference(pair, kind, monkeypatch):
    monkeypatch.setattr(both, "launch_both", None)
    x = checks.sample(kind, (128, 256), torch.bfloat16, "cpu")
    x[:, 7] *= 3  # neither the first nor the last program finds the maximum
    checks.check_row_col(x, pair, layout.LINEAR)


def test_few_programs_take_many_strips_and_groups(monkeypatch):
    monkeypatch.setattr(both, "launch_both", None)
    monkeypatch.setattr(both_route, "MAX_PROGRAMS", 4)
    x = checks.sample("ties", (128, 768), torch.bfloat16, "cpu")
    x[127, 767] = 1000.0
    checks.check_row_col(x, PAIRS[0], layout.LINEAR)


@pytest.mark.parametrize("transient", ((True, False), (True, True)))
def test_decoded_operands_hold_the_codes(transient, monkeypatch):
    monkeypatch.setattr(both, "launch_both", None)
    x = checks.sample("nonfinite", (64, 256), torch.bfloat16, "cpu")
    codes = backend.quantize_row_col(x, *both_sides(*PAIRS[1], **checks.draws("cpu")))
    sides = backend.quantize_row_col(x, *both_sides(*PAIRS[1], **checks.draws("cpu"), transient=transient))
    for i, (stored, side, spec, decoded) in enumerate(zip(codes, sides, PAIRS[1], transient, strict=True)):
        if decoded:
            stored = stored._replace(qdata=backend.decode(Operand(stored, spec, x.shape[1 - i])).values)
            stored = stored._replace(block_scale=side.block_scale)
            assert side.block_scale.numel() == 0
        checks.same_blocks(side, stored)


def test_a_given_amax_is_used(monkeypatch):
    monkeypatch.setattr(both_small, "quantize_both_small", None)
    x, given = checks.sample("heavy", (64, 256), torch.bfloat16, "cpu"), torch.tensor(3.0)
    row, _ = backend.quantize_row_col(x, *both_sides(*PAIRS[0], row_amax=given))
    assert row is not None and row.amax is given


def fits(x, row, col, scale_layout):
    choice = both_route.choose_pair(both_route.Pair(x, *both_sides(row, col, scale_layout=scale_layout)))
    return choice.kernel == "quantize_row_col_small_kernel"


def test_what_fits():
    x = torch.ones(64, 256, dtype=torch.bfloat16)
    assert fits(x, *PAIRS[0], layout.LINEAR)
    assert not fits(x, *PAIRS[0], layout.SWIZZLED_32_4_4)
    assert not fits(x[:48], *PAIRS[0], layout.LINEAR), "its last column tile is ragged"
    assert not fits(x[:, :240], *PAIRS[0], layout.LINEAR)
    assert not fits(x.float(), *PAIRS[0], layout.LINEAR)
    assert not fits(x.T, *PAIRS[0], layout.LINEAR)
    assert not fits(x, hb.NVFP4(), hb.NVFP4(), layout.LINEAR), "one amax serves both"
    assert not fits(x, hb.NVFP4(), hb.MXFP8(), layout.LINEAR)
    assert not fits(x, hb.NVFP4(outer="row"), PAIRS[0][1], layout.LINEAR)
    assert not fits(x, hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard(size=32)), layout.LINEAR)
    assert not fits(x.new_ones(8192, 1024), *PAIRS[0], layout.LINEAR)
    assert not fits(x.new_ones(0, 256), *PAIRS[0], layout.LINEAR)
