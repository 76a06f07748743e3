"""4over6: the chosen candidate has the least error, computed again with numpy fp32 and the casts of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import STANDARD, TILE, assert_same_bytes, fourosix, make

import halfbyte as hb
from halfbyte import layout

F = np.float32
FLT_MAX = np.finfo(F).max


def casts(values: np.ndarray, dtype, largest: float) -> np.ndarray:
    return np.clip(values, -largest, largest).astype(dtype)


def candidate(x: np.ndarray, top: np.ndarray, amax: F, ratio: float, spec: hb.NVFP4):
    """Codes [blocks, 16], scale bytes [blocks] and errors [blocks] of one ratio; x [blocks, 16]."""
    six_m8 = F(6 * spec.e4m3_max)
    s = six_m8 / amax
    scale = casts((top / F(6)) * s * F(ratio), ml_dtypes.float8_e4m3fn, 448.0)
    with np.errstate(divide="ignore"):
        enc = np.minimum(F(1) / (scale.astype(F) * (F(1) / s)), FLT_MAX)
    codes = casts(x * enc[:, None], ml_dtypes.float4_e2m1fn, 6.0)
    decoded = codes.astype(F) * scale.astype(F)[:, None]
    d = decoded * amax / six_m8 - x if spec.scaling.error_math == "exact" else decoded - x * s
    terms = np.abs(d) if spec.scaling.error == "mae" else d * d
    error = terms[:, 0]
    for i in range(1, 16):
        error = error + terms[:, i]
    return codes.view(np.uint8), scale.view(np.uint8), error


def best(x: torch.Tensor, spec: hb.NVFP4):
    """Return codes and scale bytes of a 1×16 operand [rows, cols], cols a multiple of 16."""
    blocks = x.float().numpy().reshape(-1, 16)
    top, amax = np.abs(blocks).max(1), np.abs(blocks).max()
    tried = [candidate(blocks, top, amax, ratio, spec) for ratio in spec.scaling.candidates]
    errors = np.stack([error for *_, error in tried])
    chosen = errors.argmin(0)  # the first of equal errors; candidates are in the order that decides ties
    index = np.arange(len(blocks))
    codes, scales = (np.stack([entry[i] for entry in tried])[chosen, index] for i in (0, 1))
    return codes.reshape(x.shape), scales.reshape(x.shape[0], -1)


@settings(max_examples=80)
@given(
    scaling=fourosix,
    e4m3_max=st.sampled_from((448.0, 256.0)),
    pattern=st.sampled_from(("normal", "heavy", "ties", "spread")),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
def test_the_least_error_is_chosen(scaling, e4m3_max, pattern, seed, dtype):
    spec = hb.NVFP4(scaling=scaling, e4m3_max=e4m3_max)
    x = make(pattern, (12, 64), dtype, seed)
    codes, scales = best(x, spec)
    q = hb.quantize(x, spec)
    np.testing.assert_array_equal(q.block_scale.view(torch.uint8).numpy(), scales)
    np.testing.assert_array_equal(layout.unpack(q.qdata).numpy(), codes)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("error", ["mae", "mse"])
def test_no_block_is_worse_than_with_one_candidate(block, error):
    """In fp64, block by block: at most the error of the standard choice with the same e4m3_max, and often less."""
    x = make("normal", (64, 256), torch.bfloat16, 3)
    one, many = (
        hb.NVFP4(block=block, scaling=hb.FourOverSix(error=error, candidates=c), e4m3_max=256.0)
        for c in ((1.0,), (1.0, 1.5, 0.875))
    )

    def errors(spec):
        d = (hb.quantize(x, spec).dequantize(torch.float32).double() - x.double()).abs()
        d = d if error == "mae" else d * d
        sums = d.unflatten(1, (-1, 16)).sum(-1)
        return sums if block[0] == 1 else sums.unflatten(0, (-1, 16)).sum(1)

    base, chosen = errors(one), errors(many)
    assert (chosen <= base * (1 + 1e-5)).all()
    assert (chosen < base * 0.99).float().mean() > 0.3


@pytest.mark.parametrize("spec", [STANDARD, TILE], ids=["1x16", "16x16"])
def test_one_candidate_is_nearly_the_standard_choice(spec):
    """Section 5 divides by 6 where section 3 multiplies by f(1/6): the candidate 1 may differ, but seldom does."""
    x = make("normal", (64, 256), torch.float32, 3)
    q = hb.quantize(x, hb.NVFP4(block=spec.block, scaling=hb.FourOverSix(candidates=(1.0,))))
    same = q.block_scale.float() == hb.quantize(x, spec).block_scale.float()
    assert same.float().mean() > 0.99


def test_one_wins_ties():
    """Zeros, and values that both candidates hold exactly, keep candidate 1."""
    x = torch.zeros(1, 32)
    x[0, 16], x[0, 17] = 6.0, 3.0
    spec = hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0)
    q = hb.quantize(x, spec, amax=torch.tensor(1536.0))  # S = 1
    assert q.block_scale.float().tolist() == [[0.0, 1.0]]
    assert layout.unpack(q.qdata)[0, 16:18].tolist() == [7, 5]


def test_one_wins_where_errors_are_nan():
    """fp32 errors overflow near FLT_MAX; candidate 1 stays."""
    x = make("huge", (4, 64), torch.float32, 1)
    many = hb.NVFP4(scaling=hb.FourOverSix(error="mse"))
    one = hb.NVFP4(scaling=hb.FourOverSix(error="mse", candidates=(1.0,)))
    a, b = hb.quantize(x, many), hb.quantize(x, one)
    assert torch.equal(a.qdata, b.qdata) and torch.equal(a.block_scale.float(), b.block_scale.float())


def test_one_decision_for_a_tile():
    x = make("heavy", (32, 64), torch.bfloat16, 5)
    q = hb.quantize(x, hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix()))
    scale = q.block_scale.view(torch.uint8)
    assert (scale.unflatten(0, (2, 16)) == scale[::16][:, None]).all()


def test_a_ragged_tile_counts_the_rows_it_has():
    x = make("normal", (19, 40), torch.bfloat16, 5)
    spec = hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(error="mse"))
    padded = torch.nn.functional.pad(x, (0, 0, 0, 13))
    q, whole = hb.quantize(x, spec), hb.quantize(padded, spec)
    assert torch.equal(q.qdata, whole.qdata[:19])
    assert_same_bytes(q.transpose().transpose(), q)
