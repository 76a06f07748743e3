"""Stochastic rounding: where its bits come from, exactly. What they do on average is in test_error_figures.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import OFFSETS, SEEDS, SR, SR_TILE, STANDARD, assert_same_bytes, make, matrices, same_bytes

import halfbyte as hb
from halfbyte import layout

X = make("normal", (33, 80), torch.bfloat16, 9)


def sr(x: torch.Tensor, seed: int = 1, offset: int = 0, spec=SR, **options) -> hb.QuantTensor:
    return hb.quantize(x, spec, rng=hb.Philox(seed, offset), **options)


def codes(q: hb.QuantTensor) -> torch.Tensor:
    return layout.unpack(q.qdata)


@settings(max_examples=40)
@given(x=matrices(), seed=SEEDS, offset=OFFSETS)
def test_the_same_place_gives_the_same_bytes(x, seed, offset):
    assert_same_bytes(sr(x, seed, offset), sr(x.clone(), seed, offset))


PLACES = [(1, 0), (1, 1), (1, 1 << 32), (2, 0), (1 | 1 << 32, 0), (1, (1 << 63) - 1), ((1 << 64) - 1, 0)]


def test_every_word_of_seed_and_offset_counts():
    drawn = [codes(sr(X, *place)) for place in PLACES]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert 0.1 < (a != b).float().mean() < 0.6


def test_the_scales_are_those_of_nearest():
    q, nearest = sr(X), hb.quantize(X, STANDARD)
    assert torch.equal(q.block_scale.float(), nearest.block_scale.float()) and q.amax == nearest.amax


@settings(max_examples=40)
@given(x=matrices(patterns=("normal", "heavy", "ties", "sparse")), seed=SEEDS)
def test_a_value_goes_to_one_of_its_two_neighbours(x, seed):
    """Truncation is below every draw, and no draw is more than one code above it; the sign always stays."""
    down = codes(hb.quantize(x, hb.NVFP4(rounding="toward_zero")))
    drawn = codes(sr(x, seed))
    assert torch.equal(drawn & 8, down & 8)
    step = (drawn & 7).int() - (down & 7).int()
    assert ((step == 0) | (step == 1)).all()


def test_values_on_the_grid_stay():
    grid = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    x = torch.cat([grid, -grid])[None].expand(50, 16)
    drawn = codes(sr(x, amax=torch.tensor(2688.0)))
    assert (drawn == torch.arange(16, dtype=torch.uint8)).all()


def test_no_two_blocks_share_their_bits():
    """One value in every element: what rounds up differs from block to block, row to row, tile to tile."""
    x = torch.full((64, 256), 1.25)
    x[:, ::16] = 6.0
    for spec in (SR, SR_TILE):
        up = (codes(sr(x, spec=spec, amax=torch.tensor(2688.0))) > 2).view(-1, 16)
        assert len({tuple(block.tolist()) for block in up}) > 0.98 * len(up)


@pytest.mark.parametrize("parts", [(33,), (1, 32), (16, 17), (5, 5, 5, 5, 5, 8), (1,) * 33])
def test_bits_do_not_depend_on_how_rows_are_split(parts):
    whole = sr(X, 5, 6)
    per_row = whole.block_scale.shape[1]
    start, pieces = 0, []
    for rows in parts:
        place = hb.Philox(5, 6, first_block=start * per_row, blocks_per_row=per_row)
        pieces.append(hb.quantize(X[start : start + rows], SR, rng=place, amax=whole.amax).qdata)
        start += rows
    assert torch.equal(torch.cat(pieces), whole.qdata)


def test_bits_do_not_depend_on_batching():
    x = make("normal", (2, 3, 5, 40), torch.bfloat16, 1)
    assert torch.equal(sr(x).qdata, sr(x.view(30, 40)).qdata)
    assert torch.equal(sr(x).qdata, sr(x.view(6, 5, 40)).qdata)


def test_rows_of_a_batch_draw_different_bits():
    rows = codes(sr(X[:1].expand(200, 80)))
    assert len({tuple(row.tolist()) for row in rows}) == 200


def test_quantize_row_col_takes_two_offsets():
    row, col = hb.quantize_row_col(X, SR, SR, rng=hb.Philox(3, 10))
    assert_same_bytes(row, sr(X, 3, 10))
    assert_same_bytes(col, sr(X.T, 3, 11))
    none, col = hb.quantize_row_col(X, None, SR, rng=hb.Philox(3, 10))
    assert none is None
    assert_same_bytes(col, sr(X.T, 3, 11))
    row, col = hb.quantize_row_col(X, SR_TILE, SR_TILE, rng=hb.Philox(3, 10))
    assert_same_bytes(row, sr(X, 3, 10, SR_TILE))
    assert_same_bytes(col, row.transpose())
    row, col = hb.quantize_row_col(X, SR, SR_TILE, rng=hb.Philox(3, 10))
    assert_same_bytes(col, sr(X.T, 3, 11, SR_TILE))


def test_philox_is_a_value():
    place = hb.Philox(3, 4)
    a, b = hb.quantize(X, SR, rng=place), hb.quantize(X, SR, rng=place)
    assert place == hb.Philox(3, 4)
    assert_same_bytes(a, b)
    assert not same_bytes(a, hb.quantize(X, SR, rng=place.at(1)))


def test_the_global_generator_plays_no_part():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a = sr(X)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert_same_bytes(a, sr(X))


@settings(max_examples=30)
@given(seed=SEEDS, limit=st.sampled_from((6.0, 6 * 16 / 17)))
def test_headroom_leaves_room_above_the_block_maximum(seed, limit):
    """With fp4_max 6 the maximum of a block saturates; with 6 * 16/17 a scale rounded down by 1/17 still holds it."""
    spec = hb.NVFP4(rounding="stochastic", fp4_max=limit)
    x = make("normal", (20, 64), torch.bfloat16, seed % 1000)
    q = hb.quantize(x, spec, rng=hb.Philox(seed))
    unit = q.block_scale.double() * q.amax.double() / (448 * limit)
    largest = x.double().abs().unflatten(1, (4, 16)).amax(-1) / unit
    assert (largest <= limit * 17 / 16 * (1 + 1e-6)).all()
    assert (largest > limit).any()
