"""Section 12 of docs/numerics.md: where TransformerEngine's bytes differ, and that they are ours elsewhere.

Its side is computed here in numpy from its definition, one fp32 operation after the other, with ml_dtypes' casts.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb

F = np.float32
FLT_MAX = np.finfo(F).max
TOP = F(6)


def e4m3(t):
    """Round to E4M3, saturating; what is returned is fp32."""
    return np.minimum(t, F(448)).astype(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1(t):
    """cvt.rn.satfinite: NaN becomes +6."""
    bounded = np.clip(np.where(np.isnan(t), TOP, t), -TOP, TOP)
    return bounded.astype(ml_dtypes.float4_e2m1fn).astype(F)


def outer(amax, m8):
    """The tensor's encode scale; 1 for an amax of 0 or Inf."""
    with np.errstate(all="ignore"):
        scale = np.minimum(F(m8 * 6) / amax, FLT_MAX)
    return F(1) if amax == 0 or scale == 0 else F(scale)


def te_standard(x):
    """fp32 [rows, blocks, 16] -> values of scales and codes, and amax; maxima pass NaN over, as fmaxf does."""
    amax = F(np.nanmax(np.abs(x)))
    encode = outer(amax, 448)
    with np.errstate(all="ignore"):
        scale = e4m3(np.minimum(np.nanmax(np.abs(x), -1) * (encode * (F(1) / TOP)), FLT_MAX))
        inverse = np.minimum(F(1) / (scale * (F(1) / encode)), FLT_MAX)
        return scale, e2m1(x * inverse[..., None]), amax


def te_candidates(x, amax, m8, block_amax, axis=-1):
    """Return scales and codes of both candidates and their summed errors along one axis of the tile."""
    encode = outer(amax, m8)
    decode = F(1) / encode
    found = []
    for expand in (F(1), F(1.5)):
        scale = e4m3(block_amax / TOP * encode * expand)
        with np.errstate(all="ignore"):
            inverse = np.minimum(F(1) / (scale * decode), FLT_MAX)
        q = e2m1(x * inverse)
        error = np.abs(q * scale * amax / F(6 * m8) - x)
        found.append((scale, q, np.add.accumulate(error, axis, dtype=F).take(-1, axis)))
    return found


def te_four_over_six(x, m8):
    """fp32 [rows, blocks, 16], exact MAE."""
    block_amax = np.abs(x).max(-1, keepdims=True)
    (scale6, q6, error6), (scale4, q4, error4) = te_candidates(x, F(np.abs(x).max()), m8, block_amax)
    four = (error4 < error6)[..., None]
    return np.where(four, scale4, scale6)[..., 0], np.where(four, q4, q6)


def tree(sums):
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def ours(x, spec):
    """Return block scales and codes as values, [rows, blocks] and [rows, blocks, 16]."""
    q = hb.quantize(torch.from_numpy(x.reshape(len(x), -1)), spec)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return q.block_scale.float().numpy(), values[hb.layout.unpack(q.qdata).long()].reshape(x.shape).numpy()


def data(scale=1.0, rows=64, seed=0):
    x = np.random.default_rng(seed).standard_t(4, (rows, 8, 16)).astype(ml_dtypes.bfloat16).astype(F)
    return (x * F(scale)).astype(F)


def same(a, b):
    return all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


def test_finite_input_is_the_same():
    for scale in (1.0, 2.0**-100, 2.0**90):
        assert same(ours(data(scale), hb.NVFP4()), te_standard(data(scale))[:2])


def test_nan_is_six_there_and_its_block_here():
    x = data()
    clean = ours(x, hb.NVFP4())
    x[3, 2, 5] = np.nan
    scale, codes, _ = te_standard(x)
    assert codes[3, 2, 5] == 6 and np.isfinite(scale).all()
    mine, own = ours(x, hb.NVFP4())
    assert np.isnan(mine[3, 2]) and (own[3, 2] == 0).all()
    mine[3, 2], own[3, 2] = clean[0][3, 2], clean[1][3, 2]
    assert same((mine, own), clean)


def test_inf_takes_the_outer_scale_from_all_there_and_from_none_here():
    x = data()
    clean = ours(x, hb.NVFP4())
    x[3, 2, 5] = -np.inf
    scale, codes, amax = te_standard(x)
    assert np.isinf(amax) and scale[3, 2] == 448 and codes[3, 2, 5] == -6
    others = np.ones_like(scale, dtype=bool)
    others[3, 2] = False
    assert np.array_equal(scale[others], e4m3(np.abs(x).max(-1) * (F(1) / TOP))[others])
    mine, own = ours(x, hb.NVFP4())
    assert np.isnan(mine[3, 2]) and np.array_equal(mine[others], clean[0][others])
    assert np.array_equal(own[others], clean[1][others])


@pytest.mark.parametrize("m8", [256.0, 448.0])
def test_four_over_six_differs_below_a_tiny_amax_alone(m8):
    spec = hb.NVFP4(scaling=hb.FourOverSix(error="mae", error_math="exact"), e4m3_max=m8)
    bound = m8 * 6 / FLT_MAX
    assert f"{bound:.1e}" in ("4.5e-36", "7.9e-36")
    x = data()
    top = float(np.abs(x).max())
    above, below = (data(bound * factor / top) for factor in (1.05, 1e-2))
    assert same(ours(x, spec), te_four_over_six(x, m8)) and same(ours(above, spec), te_four_over_six(above, m8))
    mine, theirs = ours(below, spec), te_four_over_six(below, m8)
    differ = (mine[0] != theirs[0]).mean()
    assert differ > 0.02


def decisions(x):
    """Whether the second candidate is taken for a tile, by sums along its rows and along its columns."""
    amax = F(np.abs(x).max())
    sums = ([tree(errors) for _, _, errors in te_candidates(x, amax, 256.0, amax, axis)] for axis in (1, 0))
    return [bool(four < six) for six, four in sums]


def near_ties(rng):
    """Yield tiles on the way from one that the second candidate holds exactly to one that the first does."""
    grid = np.array([0.5, 1, 1.5, 2, 3, 4], F)
    four, six = (F(10) / F(top) * rng.choice(grid, (16, 16)) for top in (4, 6))
    four[0, 0] = six[0, 0] = 10  # the largest stays where it is

    def between(t):
        return (four + (six - four) * F(t)).astype(F)

    low, high = 0.0, 1.0
    assert decisions(between(low))[0] and not decisions(between(high))[0]
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if decisions(between(middle))[0] else (low, middle)
    yield from (between(low + k * 2e-8) for k in range(-10, 11))


def test_columns_of_tiles_are_decided_anew_there():
    """Of tiles whose errors nearly tie, some take one candidate along rows, the other along columns; here none does."""
    rng = np.random.default_rng(1)
    spec = hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(error="mae", error_math="exact"), e4m3_max=256.0)
    disagree = 0
    for _ in range(8):
        for x in near_ties(rng):
            by_row, by_column = decisions(x)
            mine = hb.quantize(torch.from_numpy(x), spec)
            scale = te_candidates(x, F(10), 256.0, F(10))[by_row][0]
            assert (mine.block_scale.float() == float(scale)).all()
            assert (mine.transpose().block_scale.float() == float(scale)).all()
            disagree += by_row != by_column
    assert disagree > 3


def test_the_factors_of_a_gemm_are_multiplied_in_another_order():
    """g of each operand, then their product, here; the product of both amaxes first there."""
    rng = np.random.default_rng(0)
    eye = torch.eye(16) * 6  # codes 6 and 0, block scale 448: a product of one term
    differ = 0
    for amax_a, amax_b in rng.uniform(0.5, 8, (64, 2)).astype(F):
        a, b = (
            hb.quantize(eye * float(amax / TOP), hb.NVFP4(), amax=torch.tensor(float(amax)))
            for amax in (amax_a, amax_b)
        )
        y = hb.gemm_nt(a, b, out_dtype=torch.float32)[0, 0].item()
        exact = F(6 * 448) * F(6 * 448)
        g = F(1 / 2688)
        here = exact * ((amax_a * g) * (amax_b * g))
        there = exact * ((amax_a * amax_b) * F(1 / (36 * 448 * 448)))
        assert y == here and abs(here - there) <= 4 * np.spacing(here)
        differ += here != there
    assert differ > 5
    big = hb.quantize(torch.full((1, 16), 1e25), hb.NVFP4())
    small = hb.quantize(torch.full((1, 16), 1e-5), hb.NVFP4())
    assert torch.isfinite(hb.gemm_nt(big, small, out_dtype=torch.float32)).all()
    with np.errstate(over="ignore"):
        assert np.isinf(F(1e25) * F(1e25))
        both = hb.gemm_nt(big, hb.quantize(torch.full((1, 16), 1e14), hb.NVFP4()), out_dtype=torch.float32)
    assert torch.isinf(both).all()  # 1.6e40 is no fp32 number in either order
