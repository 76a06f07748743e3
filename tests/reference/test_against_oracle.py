"""The package against tests/oracle.py, element by element: random specs, shapes and values, every bit."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, OFFSETS, SEEDS, SIGNS, eden_specs, make, matrices, nvfp4_specs

import halfbyte as hb
from halfbyte import layout, reference

# Random123's known answers for philox4x32-10.
PHILOX_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def as_bytes(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


def assert_equal(q: hb.QuantTensor, expected: oracle.Result, cols: int) -> None:
    rows, blocks = q.block_scale.shape
    codes = np.array(expected.codes, dtype=np.uint8).reshape(rows, blocks * q.spec.block_length)
    scales = np.array(expected.scales, dtype=np.uint8).reshape(rows, blocks)
    got = layout.unpack(q.qdata).numpy() if q.spec.format.codes_per_byte == 2 else as_bytes(q.qdata)
    np.testing.assert_array_equal(as_bytes(q.block_scale), scales, "block_scale")
    np.testing.assert_array_equal(got, codes, "codes")
    if expected.amax is not None:
        amax = np.array(expected.amax, dtype=np.float32).reshape(q.amax.shape)
        np.testing.assert_array_equal(q.amax.numpy().view(np.uint32), amax.view(np.uint32), "amax")
        values = oracle.dequantize(expected, q.spec)[:, :cols].reshape(rows, cols)
        np.testing.assert_array_equal(q.dequantize(torch.float32).reshape(rows, cols).numpy(), values, "values")


places = st.builds(
    oracle.Place,
    seed=SEEDS,
    offset=OFFSETS,
    first_block=st.sampled_from((0, 7, 2**32 - 3, 2**40 + 1)),
    blocks_per_row=st.none() | st.sampled_from((11, 2**33)),
)


@settings(max_examples=200)
@given(x=matrices(), spec=nvfp4_specs(), place=places, sign_place=places)
def test_nvfp4(x, spec, place, sign_place):
    q = hb.quantize(x, spec, rng=hb.Philox(*place), sign_rng=hb.Philox(*sign_place))
    assert_equal(q, oracle.quantize(x.float().numpy(), spec, place, sign_place), x.shape[1])


@settings(max_examples=100)
@given(x=matrices(max_cols=24), spec=eden_specs(), place=places)
def test_eden(x, spec, place):
    """More of what `test_nvfp4` tries, with blocks whose scale would be 0 and blocks of zeros among them."""
    q = hb.quantize(x, spec, rng=hb.Philox(*place), sign_rng=hb.Philox(1))
    assert_equal(q, oracle.quantize(x.float().numpy(), spec, place, oracle.Place(1)), x.shape[1])


GIVEN = (0.0, -0.0, 1e-45, 1e-30, 0.01, 1.0, 3.0, 1e30, 3.4028234663852886e38, float("nan"), float("inf"), -1.0)


@settings(max_examples=120)
@given(x=matrices(max_rows=6), spec=nvfp4_specs(), data=st.data())
def test_nvfp4_with_a_given_amax(x, spec, data):
    rows = x.shape[0]
    if spec.outer == "row":
        amax = data.draw(st.lists(st.sampled_from(GIVEN), min_size=rows, max_size=rows))
        given_amax = torch.tensor(amax, dtype=torch.float32)
    else:
        amax = [data.draw(st.sampled_from(GIVEN))]
        given_amax = torch.tensor(amax[0])
    place = oracle.Place(seed=data.draw(SEEDS))
    q = hb.quantize(x, spec, rng=hb.Philox(*place), sign_rng=hb.Philox(*place), amax=given_amax)
    expected = oracle.quantize(x.float().numpy(), spec, place, place, amax=amax)
    nans = np.isnan(expected.amax).any()
    assert_equal(q, expected._replace(amax=None) if nans else expected, x.shape[1])


@settings(max_examples=80)
@given(x=matrices(max_rows=6), element=st.sampled_from(("e4m3", "e5m2")))
def test_mxfp8(x, element):
    q = hb.quantize(x, hb.MXFP8(element=element))
    assert_equal(q, oracle.quantize_mxfp8(x.float().numpy(), element), x.shape[1])


@settings(max_examples=60)
@given(
    x=matrices(max_cols=40), row=st.none() | nvfp4_specs(), col=st.none() | nvfp4_specs(), seed=SEEDS, offset=OFFSETS
)
@example(x=make("normal", (18, 35), torch.bfloat16, 1), row=None, col=hb.NVFP4(rounding="stochastic"), seed=1, offset=2)
def test_quantize_row_col(x, row, col, seed, offset):
    place = oracle.Place(seed, offset)
    q_row, q_col = hb.quantize_row_col(x, row, col, rng=hb.Philox(seed, offset), sign_rng=hb.Philox(seed, offset))
    values = x.float().numpy()
    assert (q_row is None) == (row is None) and (q_col is None) == (col is None)
    if row is not None:
        assert_equal(q_row, oracle.quantize(values, row, place, place), x.shape[1])
    if col is not None and not (row == col and row.is_tile):
        assert_equal(q_col, oracle.quantize(values.T, col, place._replace(offset=offset + 1), place), x.shape[0])
    elif col is not None:
        codes, scales, amax = oracle.quantize(values, row, place)
        assert_equal(q_col, _transposed(codes, scales, amax, x.shape), x.shape[0])


def _transposed(codes, scales, amax, shape) -> oracle.Result:
    """Move the codes of whole tiles, element by element."""
    rows, cols = shape
    padded = -(-rows // 16) * 16
    t_codes = [[codes[r][c] if r < rows else 0 for r in range(padded)] for c in range(cols)]
    t_scales = [[scales[16 * tile][c // 16] for tile in range(padded // 16)] for c in range(cols)]
    return oracle.Result(t_codes, t_scales, amax)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(x=matrices(max_rows=5), spec=nvfp4_specs())
def test_dequantize_rounds_fp32_once(dtype, x, spec):
    q = hb.quantize(x, spec, rng=hb.Philox(3), sign_rng=hb.Philox(4))
    expected = oracle.quantize(x.float().numpy(), spec, oracle.Place(3), oracle.Place(4))
    values = oracle.dequantize(expected, spec)[:, : x.shape[1]].reshape(x.shape)
    with np.errstate(over="ignore"):
        if dtype == torch.bfloat16:
            values = np.array([oracle.bf16(v) for v in values.reshape(-1)], dtype=np.float32).reshape(values.shape)
        elif dtype == torch.float16:
            values = values.astype(np.float16).astype(np.float32)
    got = q.dequantize(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.float().numpy(), values)


@pytest.mark.parametrize("counter, key, answer", PHILOX_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    from halfbyte.reference.philox import philox4x32

    assert tuple(oracle.philox(counter, key)) == answer
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == answer


@settings(max_examples=60)
@given(
    x=matrices(max_rows=3, max_cols=150),
    size=st.sampled_from((16, 32, 64, 128)),
    signs=st.sampled_from(SIGNS),
    seed=SEEDS,
    offset=OFFSETS,
)
def test_rotate(x, size, signs, seed, offset):
    rotation, place = hb.Hadamard(size=size, signs=signs), oracle.Place(seed, offset)
    got = reference.rotate(x, rotation, hb.Philox(seed, offset).on("cpu"))
    with np.errstate(all="ignore"):
        expected = np.array(oracle.rotated(x.float().numpy(), rotation, place), dtype=np.float32)
    expected = expected.reshape(got.shape)
    nans = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got.float().numpy()), nans)
    np.testing.assert_array_equal(
        got.float().numpy().view(np.uint32)[~nans], expected.view(np.uint32)[~nans], "rotated bits"
    )


def test_a_zero_block_is_no_nan_where_s_overflows():
    """S * f(1 / fp4_max) is infinite for a tiny amax and fp4_max < 1; 0 * Inf must not become a NaN scale."""
    spec = hb.NVFP4(fp4_max=0.5)
    x = torch.zeros(2, 32)
    x[0, :16] = 1e-40
    q = hb.quantize(x, spec)
    assert_equal(q, oracle.quantize(x.numpy(), spec), 32)
    assert (q.dequantize()[:, 16:] == 0).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_zero_scale_encodes_with_flt_max_even_where_d_overflows(rounding):
    """S below 2^-128 makes D infinite; 0 * Inf must not reach the codes."""
    spec = hb.NVFP4(fp4_max=1e-3, e4m3_max=0.3, rounding=rounding)
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 16:] = 1.0, -1e-3
    q = hb.quantize(x, spec, rng=hb.Philox(1), amax=torch.tensor(3e38))
    assert_equal(q, oracle.quantize(x.numpy(), spec, oracle.Place(1), amax=[3e38]), 32)
    assert layout.unpack(q.qdata)[0, :2].tolist() == [7, 0]
