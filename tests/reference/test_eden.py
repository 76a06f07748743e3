"""MS-EDEN: which scales it stores and where its random bits come from. Its error is in test_error_figures.py."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EDEN, SEEDS, make, same_bytes

import halfbyte as hb
from halfbyte import layout, ops
from halfbyte.reference import cast, philox
from halfbyte.reference import eden as eden_scales
from halfbyte.sides import Side

X = make("normal", (33, 80), torch.bfloat16, 9)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
UNIT = torch.tensor(EDEN.fp4_max * EDEN.e4m3_max)  # as amax: makes S = 1


def eden(x: torch.Tensor, seed: int = 1, offset: int = 0, spec=EDEN, **options) -> hb.QuantTensor:
    return hb.quantize(x, spec, rng=hb.Philox(seed, offset), **options)


def scales(q: hb.QuantTensor) -> torch.Tensor:
    return q.block_scale.view(torch.float8_e4m3fn).double()


@settings(max_examples=30)
@given(seed=SEEDS, pattern=st.sampled_from(("normal", "heavy", "ties", "sparse", "spread")))
def test_scales_are_neighbours_of_the_projection(seed, pattern):
    """The stored scale s encloses x.x / x.q: with it, S * x.x lies between s * x.q of one neighbour and the other."""
    x = make(pattern, (12, 64), torch.float32, seed)
    q = eden(x, seed)
    amax = x.abs().max().double()
    blocks = x.double().unflatten(1, (-1, 16)) * (UNIT.double() / max(amax, 1e-30))
    codes = layout.unpack(q.qdata)
    values = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6) * 2, dtype=torch.float64)[codes.long()]
    products = (blocks.abs() * values.unflatten(1, (-1, 16))).sum(2)
    target = (blocks.square().sum(2) / products).clamp(max=448.0)
    stored = scales(q)
    index = torch.searchsorted(E4M3, stored)
    below, above = E4M3[(index - 1).clamp(min=0)], E4M3[(index + 1).clamp(max=126)]
    some = products > 0
    assert (stored[~some] == 0).all()
    assert ((target > below - 1e-4 * target) & (target < above + 1e-4 * target))[some].all()


def test_the_probability_of_the_upper_neighbour_is_exact():
    """Of 2^24 numbers those below (t - low) / step * 2^24 go up; every product and sum is rounded, in order."""
    g = torch.Generator().manual_seed(0)
    y = torch.randn(500, 1, 16, generator=g) * 2.5
    magnitude = cast.round_nearest(y)
    scale = torch.exp2(torch.randint(-4, 8, (500, 1), generator=g).float()) * 1.125
    expected = []
    for row, codes, one in zip(y[:, 0].numpy(), magnitude[:, 0].numpy(), scale[:, 0].numpy(), strict=True):
        squares = products = np.float32(0)
        for a, q in zip(row, codes, strict=True):
            squares, products = squares + a * a, products + abs(a) * q
        expected.append(one * (squares / products))
    t = torch.tensor(np.array(expected))[:, None].double()
    low = E4M3[torch.searchsorted(E4M3, t, right=True) - 1]
    high = E4M3[torch.searchsorted(E4M3, low) + 1]
    threshold = (t - low) / (high - low) * 2**24
    assert (threshold == threshold.round()).all() and (threshold > 0).sum() > 490
    for below, side in ((1, high), (0, low)):
        stored = eden_scales.stored_scale(y, magnitude, scale, (threshold - below).clamp(min=0).float()).double()
        assert torch.equal(stored[threshold > 0], side[threshold > 0])


def test_the_codes_are_those_of_nearest():
    same = hb.NVFP4(fp4_max=6.0, e4m3_max=EDEN.e4m3_max)
    drawn = eden(X, spec=hb.NVFP4(scaling=hb.Eden(), fp4_max=6.0, e4m3_max=EDEN.e4m3_max))
    assert torch.equal(drawn.qdata, hb.quantize(X, same).qdata) and drawn.amax == X.float().abs().max()


def test_a_block_on_the_grid_keeps_its_scale():
    """n / d is 1 then, and a scale that is a value of E4M3 is rounded nowhere."""
    grid = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)).repeat(2)
    steps = torch.tensor((2.0**-9, 2.0**-6, 1.0, 1.125, 240.0, 256.0))
    spec = hb.NVFP4(scaling=hb.Eden(), e4m3_max=256.0)
    q = eden(steps[:, None] * grid, spec=spec, amax=torch.tensor(6 * 256.0))
    assert torch.equal(scales(q).flatten(), steps.double())
    assert torch.equal(q.dequantize(torch.float32), steps[:, None] * grid)


def test_small_blocks_and_zeros():
    """No block is lost whose maximum gives a code: a scale that would be 0 is 2^-9 before it is corrected."""
    x = torch.zeros(4, 16)
    x[1, 0], x[2, 0], x[3] = 2.0**-11 * 1.03, 2.0**-11 * 0.99, -(2.0**-9)
    x = x.repeat_interleave(4000, 0)
    values = eden(x, amax=UNIT).dequantize(torch.float32).double()
    assert (values[:4000] == 0).all() and (values[8000:12000] == 0).all()  # zeros; codes of 0
    for start in (4000, 12000):
        block, drawn = x[start].double(), values[start : start + 4000]
        error = drawn.std(0).max() / 4000**0.5
        assert (drawn.mean(0) - block).abs().max() < 4 * error + 1e-9, start
    stored = scales(eden(x[:1], amax=UNIT))
    assert stored.item() == 0 and not math.copysign(1, stored.item()) < 0


def test_the_corrected_scale_saturates():
    """Data far beyond the amax handed in: codes 7 and scale 448, also where squares overflow."""
    q = eden(torch.full((1, 16), -3e38), amax=torch.tensor(1e-30))
    assert scales(q).item() == 448 and (layout.unpack(q.qdata) == 15).all()


# Random bits


def up(q: hb.QuantTensor) -> torch.Tensor:
    return scales(q) > scales(q).min()


def halfway(rows: int, cols: int) -> torch.Tensor:
    """Equal blocks whose corrected scale lies between two values of E4M3: 1.058."""
    block = torch.tensor((1.0,) * 4 + (6.0,) * 12) * 1.0625
    return block.repeat(rows, cols // 16)


def test_no_two_blocks_rows_offsets_or_seeds_share_their_bits():
    x = halfway(64, 1024)
    drawn = [up(eden(x, *place, amax=UNIT)) for place in ((1, 0), (1, 1), (1, 1 << 32), (2, 0), (1 | 1 << 32, 0))]
    for i, a in enumerate(drawn):
        assert 0.05 < a.double().mean() < 0.95
        assert len({tuple(row.tolist()) for row in a}) == 64
        assert len({tuple(column.tolist()) for column in a.T}) == 64
        for b in drawn[:i]:
            assert 0.05 < (a != b).double().mean() < 0.6


@pytest.mark.parametrize("parts", [(33,), (1, 32), (5, 5, 5, 5, 5, 8), (1,) * 33])
def test_bits_do_not_depend_on_how_rows_are_split(parts):
    whole = eden(X, 5, 6)
    per_row, start, pieces = whole.block_scale.shape[1], 0, []
    for rows in parts:
        place = hb.Philox(5, 6, first_block=start * per_row, blocks_per_row=per_row)
        pieces.append(hb.quantize(X[start : start + rows], EDEN, rng=place, amax=whole.amax).block_scale)
        start += rows
    assert torch.equal(scales(whole), torch.cat([p.view(torch.float8_e4m3fn) for p in pieces]).double())


def test_row_and_col_draw_at_two_offsets():
    row, col = hb.quantize_row_col(X, EDEN, EDEN, rng=hb.Philox(3, 10))
    assert same_bytes(row, eden(X, 3, 10)) and same_bytes(col, eden(X.T, 3, 11))


def test_no_draw_of_a_training_step_is_made_twice(monkeypatch):
    """Every key and counter of two steps of two layers, but for signs, which both operands of a GEMM share."""
    drawn, original = [], philox.philox4x32

    def record(counter, key):
        words = torch.broadcast_tensors(*counter, *key)
        drawn.append(torch.stack([w.flatten() for w in words], 1))
        return original(counter, key)

    monkeypatch.setattr(philox, "philox4x32", record)
    state = hb.RunState(3)
    layers = [hb.nn.Linear(48, 48, recipe="quartet2", state=state) for _ in range(2)]
    for _ in range(2):
        layers[1](layers[0](torch.randn(20, 48))).square().sum().backward()
        state.advance()
    places = torch.cat(drawn)
    signs = places[:, 3] >= 1 << 31
    rounding = places[~signs]
    # x.T and w.T once, dy and dy.T: blocks of 128 padded columns, per layer and step; the first layer has no dx.
    per_step = 2 * (48 + 48) * 8 + (48 + 20) * 8
    assert len(rounding) == 2 * per_step
    assert len(rounding.unique(dim=0)) == len(rounding)
    gemms = 2 * 3
    assert signs.sum() == 2 * gemms and len(places[signs].unique(dim=0)) == gemms


# What has no kernel is refused by name


@pytest.mark.parametrize(
    "call",
    [
        lambda: eden(X),
        lambda: hb.quantize_row_col(X, None, EDEN, rng=hb.Philox(1)),
        lambda: hb.grouped_quantize_row_col(X, torch.tensor([33], dtype=torch.int32), EDEN, None, rng=hb.Philox(1)),
        lambda: hb.linear(X, X, None, hb.Recipe(fprop=hb.GemmSpec(a=EDEN)), rng=hb.Philox(1)),
    ],
)
def test_what_a_backend_has_no_kernel_for_is_refused(monkeypatch, call):
    call()
    backends = sys.modules["halfbyte.ops.backends"]
    monkeypatch.setattr(backends, "choose", lambda device, backend: "triton")
    monkeypatch.setattr(backends, "without_kernel", lambda spec: "scaling=Eden()" if spec == EDEN else None)
    with pytest.raises(ValueError, match=r"scaling=Eden\(\) has no kernel on backend 'triton'.*backend='reference'"):
        call()


def test_every_spec_has_a_kernel():
    given = hb.NVFP4(rotation=hb.Hadamard(signs="+-"))
    for spec in (None, EDEN, given, *hb.recipes.quartet2().specs):
        assert sys.modules["halfbyte.ops.backends"].without_kernel(spec) is None


def test_a_draw_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"rng=None: .*rng=hb\.Philox"):
        ops.quantize(X, Side(EDEN))
