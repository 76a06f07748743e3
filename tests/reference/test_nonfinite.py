"""NaN and Inf are never swallowed: exactly their block, tile or rotation group is NaN, and all other bytes stay."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, MX, MX5, NAN_SCALE, ROW, SPECS, STANDARD, TILE, make

import halfbyte as hb

BAD = (math.nan, math.inf, -math.inf)
ROWS, COLS = 35, 150
RNG = {"rng": hb.Philox(3), "sign_rng": hb.Philox(4)}


def reached(spec, row: int, col: int) -> tuple[slice, slice]:
    """The rows and blocks that an element at (row, col) decides about."""
    if spec.is_tile:
        return slice(row // 16 * 16, row // 16 * 16 + 16), slice(col // 16, col // 16 + 1)
    width = spec.alignment // spec.block_length  # a block, or all that a rotation mixes
    first = col // spec.alignment * width
    return slice(row, row + 1), slice(first, first + width)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@settings(max_examples=12)
@given(row=st.integers(0, ROWS - 1), col=st.integers(0, COLS - 1), bad=st.sampled_from(BAD), seed=st.integers(0, 99))
def test_one_element_poisons_its_scope_and_nothing_else(spec, row, col, bad, seed):
    """The clean tensor has zeros for what is left out of amax: the element, or all that a rotation mixes it into."""
    x = make("normal", (ROWS, COLS), torch.bfloat16, seed)
    rows, blocks = reached(spec, row, col)
    clean, length, fmt = x.clone(), spec.block_length, spec.format
    clean[rows, blocks.start * length : blocks.stop * length] = 0
    poisoned = x.clone()
    poisoned[row, col] = bad
    if fmt.has_amax and spec.rotation is None:  # the other elements of a poisoned block still count for amax
        clean[rows, blocks.start * length : blocks.stop * length] = x[
            rows, blocks.start * length : blocks.stop * length
        ]
        clean[row, col] = 0
    expected, q = hb.quantize(clean, spec, **RNG), hb.quantize(poisoned, spec, **RNG)
    scale, want = q.block_scale.view(torch.uint8).clone(), expected.block_scale.view(torch.uint8).clone()
    assert (scale[rows, blocks] == NAN_SCALE[fmt.scale.name]).all()
    data, want_data = q.qdata.view(torch.uint8).clone(), expected.qdata.view(torch.uint8).clone()
    span = slice(blocks.start * fmt.block_bytes, blocks.stop * fmt.block_bytes)
    assert (data[rows, span] == 0).all()
    for t in (scale, want):
        t[rows, blocks] = 0
    for t in (data, want_data):
        t[rows, span] = 0
    assert torch.equal(scale, want) and torch.equal(data, want_data)
    if fmt.has_amax:
        assert torch.equal(q.amax, expected.amax)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_dequantize_and_gemm_show_the_poison(spec):
    x = make("normal", (ROWS, COLS), torch.bfloat16, 1)
    x[20, 70] = math.inf
    rows, blocks = reached(spec, 20, 70)
    q = hb.quantize(x, spec, **RNG)
    nan = torch.zeros(ROWS, COLS, dtype=torch.bool)
    nan[rows, blocks.start * spec.block_length : blocks.stop * spec.block_length] = True
    for dtype in DTYPES:
        assert torch.equal(q.dequantize(dtype).isnan(), nan)
    b = hb.quantize(make("normal", (5, COLS), torch.bfloat16, 2), spec, **RNG)
    y = hb.gemm_nt(q, b)
    assert torch.equal(y.isnan(), nan.any(1)[:, None].expand(ROWS, 5))
    assert torch.equal(hb.gemm_nt(b, q).isnan(), nan.any(1).expand(5, ROWS))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_nothing_else(bad, dtype):
    for spec in (STANDARD, TILE, ROW):
        q = hb.quantize(torch.full((3, 20), bad, dtype=dtype), spec)
        assert (q.amax == 0).all() and (q.block_scale.view(torch.uint8) == 0x7F).all() and (q.qdata == 0).all()


def test_amax_leaves_them_out():
    x = torch.tensor([[1.0, -3.0, math.inf] + [0.0] * 13, [math.nan, 2.0, 0.5] + [0.0] * 13])
    assert hb.quantize(x, STANDARD).amax == 3.0
    assert hb.quantize(x, ROW).amax.tolist() == [3.0, 2.0]


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_rotation_that_overflows_makes_its_blocks_nan(size):
    """A group whose sum exceeds FLT_MAX becomes Inf; amax is that of the other groups."""
    spec = hb.NVFP4(rotation=hb.Hadamard(size=size))
    x = torch.ones(2, 3 * size)
    signs = torch.tensor([1.0 if s == "+" else -1.0 for s in "+++-+------+-+--"]).repeat(size // 16)
    x[1, size : 2 * size] = 3e38 * signs
    q = hb.quantize(x, spec)
    nan = q.block_scale.view(torch.uint8) == 0x7F
    expected = torch.zeros_like(nan)
    expected[1, size // 16 : size // 8] = True
    assert torch.equal(nan, expected)
    clean = hb.quantize(torch.ones(2, 3 * size), spec)
    assert q.amax == clean.amax and torch.equal(q.qdata[0], clean.qdata[0])


def test_a_bf16_cast_that_overflows_is_an_inf():
    """Before a rotation fp32 becomes bf16: what rounds to Inf there poisons its group."""
    x = torch.ones(1, 32)
    x[0, 3] = torch.finfo(torch.float32).max
    q = hb.quantize(x, hb.NVFP4(rotation=hb.Hadamard()))
    assert q.block_scale.view(torch.uint8).tolist()[0][0] == 0x7F
    assert math.isfinite(q.amax) and q.block_scale.view(torch.uint8).tolist()[0][1] != 0x7F


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_values_are_no_poison(dtype):
    top = torch.finfo(dtype).max
    x = torch.full((4, 32), top, dtype=dtype)
    x[:, ::2] *= -1
    for spec in (STANDARD, TILE, ROW, MX, MX5):
        values = hb.quantize(x, spec).dequantize(torch.float32)
        # An MXFP8 element may round up to 2^128, which is Inf in fp32; NVFP4 decodes the amax to itself.
        assert not values.isnan().any() if spec in (MX, MX5) else values.isfinite().all(), spec
