"""Casts against ml_dtypes and gfloat at tolerance 0: every 16-bit value, and fp32 values around every boundary."""

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

import halfbyte as hb
from halfbyte import layout
from halfbyte.formats import E2M1, E4M3, E5M2
from halfbyte.reference import cast

BITS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
SCALE_ONE = torch.tensor(2688.0)  # the amax with which a block whose maximum is 6 gets scale 1 and keeps its values


def finite_16_bit(dtype: torch.dtype) -> torch.Tensor:
    values = BITS.view(dtype).float()
    return values[values.isfinite()]


def around_boundaries(code_values: list[float]) -> torch.Tensor:
    """Every value of a format and every midpoint of neighbours, with the fp32 values 1, 2, 3 and 1000 steps away."""
    points = np.array(sorted(code_values), dtype=np.float64)
    points = np.concatenate([points, (points[1:] + points[:-1]) / 2, [points[-1] * 1.05, points[-1] * 1e4]])
    bits = points.astype(np.float32).view(np.int32)[:, None] + np.array([-1000, -3, -2, -1, 0, 1, 2, 3, 1000], np.int32)
    values = bits[bits >= 0].view(np.float32)
    return torch.from_numpy(np.concatenate([values, -values]))


def random_fp32(n: int = 1 << 16) -> torch.Tensor:
    bits = torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    values = bits.view(torch.float32)
    return values[values.isfinite()]


def inputs(fmt) -> torch.Tensor:
    sizes = [fmt.decode(code) for code in range(1 << (fmt.bits - 1))]
    boundaries = around_boundaries([v for v in sizes if v == v])
    return torch.cat([finite_16_bit(torch.bfloat16), finite_16_bit(torch.float16), boundaries, random_fp32()])


def assert_codes(actual: torch.Tensor, expected: np.ndarray, values: torch.Tensor) -> None:
    wrong = actual.numpy() != expected
    assert not wrong.any(), f"{wrong.sum()} codes differ, first at {values.numpy()[wrong][0]!r}"


def ml_codes(values: torch.Tensor, dtype, largest: float) -> np.ndarray:
    """ml_dtypes does not saturate: clamp first."""
    return np.clip(values.numpy(), -largest, largest).astype(dtype).view(np.uint8)


def test_e2m1_nearest_is_that_of_ml_dtypes():
    values = inputs(E2M1)
    codes, magnitude = cast.e2m1_nearest(values)
    expected = ml_codes(values, ml_dtypes.float4_e2m1fn, 6.0)
    assert_codes(codes, expected, values)
    decoded = np.abs(expected.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    np.testing.assert_array_equal(magnitude.numpy(), decoded)


@pytest.mark.parametrize(
    "fmt, dtype", [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)], ids=lambda f: getattr(f, "name", "")
)
def test_fp8_is_that_of_ml_dtypes(fmt, dtype):
    values = inputs(fmt)
    assert_codes(cast.fp8(values, fmt).view(torch.uint8), ml_codes(values, dtype, fmt.max), values)
    codes = np.arange(256, dtype=np.uint8)
    decoded = torch.from_numpy(codes).view(cast.FP8_DTYPES[fmt.name]).float().numpy()
    np.testing.assert_array_equal(decoded, codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize(
    "ours, info",
    [
        (lambda v: cast.e2m1_nearest(v)[0], gf.format_info_ocp_e2m1),
        (lambda v: cast.e4m3(v).view(torch.uint8), gf.format_info_ocp_e4m3),
        (lambda v: cast.fp8(v, E5M2).view(torch.uint8), gf.format_info_ocp_e5m2),
    ],
    ids=["e2m1", "e4m3", "e5m2"],
)
def test_nearest_is_that_of_gfloat(ours, info):
    values = inputs(
        hb.MXFP8(element="e5m2").element_format if info.name.endswith("e5m2") else E4M3 if info.k == 8 else E2M1
    )
    rounded = gfloat.round_ndarray(info, values.double().numpy(), sat=True)
    assert_codes(ours(values), gfloat.encode_ndarray(info, rounded).astype(np.uint8), values)


def test_e2m1_stochastic_is_that_of_gfloat_for_every_byte():
    """On 16-bit values a + u * step is exact, so that gfloat's fp64 sum must give the same."""
    values = torch.cat([finite_16_bit(torch.bfloat16), finite_16_bit(torch.float16)])
    values = values[(values.abs() < 8) & (values.abs() > 1e-3)][::7]
    drawn = torch.arange(256, dtype=torch.uint8)
    v = values.repeat_interleave(256)
    codes = cast.e2m1_stochastic(v, drawn.repeat(values.numel()))
    rounded = gfloat.round_ndarray(
        gf.format_info_ocp_e2m1,
        v.numpy(),
        gfloat.RoundMode.StochasticFastest,
        sat=True,
        srbits=drawn.repeat(values.numel()).numpy().astype(np.int64),
        srnumbits=8,
    )
    assert_codes(codes, gfloat.encode_ndarray(gf.format_info_ocp_e2m1, rounded).astype(np.uint8), v)


def test_toward_zero_is_that_of_gfloat():
    values = inputs(E2M1)
    rounded = gfloat.round_ndarray(
        gf.format_info_ocp_e2m1, values.double().numpy(), gfloat.RoundMode.TowardZero, sat=True
    )
    expected = gfloat.encode_ndarray(gf.format_info_ocp_e2m1, rounded).astype(np.uint8)
    assert_codes(cast.e2m1_stochastic(values, None), expected, values)


def test_quantize_rounds_stochastically_as_gfloat_with_the_same_bits():
    """Through the public call: blocks with maximum 6 under an amax of 2688 have scale 1."""
    g = torch.Generator().manual_seed(11)
    x = torch.empty(64, 48).uniform_(-6, 6, generator=g)
    x[:, ::16] = 6.0
    place = hb.Philox(seed=0x9876543210FEDCBA, offset=(1 << 40) + 3)
    q = hb.quantize(x, hb.NVFP4(rounding="stochastic"), rng=place, amax=SCALE_ONE)
    assert (q.block_scale.float() == 1).all()
    drawn = b"".join(oracle.random_bytes(oracle.Place(place.seed, place.offset), block) for block in range(64 * 3))
    bits = np.frombuffer(drawn, np.uint8).reshape(64, 48).astype(np.int64)
    stochastic = gfloat.RoundMode.StochasticFastest
    info = gf.format_info_ocp_e2m1
    rounded = gfloat.round_ndarray(info, x.numpy(), stochastic, sat=True, srbits=bits, srnumbits=8)
    np.testing.assert_array_equal(layout.unpack(q.qdata).numpy(), gfloat.encode_ndarray(info, rounded))


def test_quantize_rounds_to_nearest_as_ml_dtypes():
    """Every finite 16-bit value of magnitude up to 6 through the public call, 15 of them and a 6 in each block."""
    values = torch.cat([finite_16_bit(torch.bfloat16), finite_16_bit(torch.float16)])
    values = values[values.abs() <= 6]
    values = torch.nn.functional.pad(values, (0, -values.numel() % 15)).view(-1, 15)
    x = torch.cat([values, torch.full((len(values), 1), 6.0)], dim=1)
    q = hb.quantize(x, hb.NVFP4(), amax=SCALE_ONE)
    assert (q.block_scale.float() == 1).all()
    assert_codes(layout.unpack(q.qdata), x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8), x)


def test_e8m0_values_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    decoded = cast.e8m0_value(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(decoded, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    powers = decoded[:-1]
    np.testing.assert_array_equal(powers.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), codes[:-1])
    np.testing.assert_array_equal(cast.e8m0_ceil(torch.from_numpy(powers)).numpy(), codes[:-1])


def test_e8m0_rounds_up():
    values = torch.cat([finite_16_bit(torch.bfloat16).abs(), random_fp32().abs(), around_boundaries([1.0, 2.0]).abs()])
    values = values[values <= 2.0**127]  # the largest that quantization asks for is FLT_MAX / 448
    exponent = cast.e8m0_ceil(values).double()
    x = values.double()
    assert (torch.exp2(exponent - 127) >= x).all()
    assert ((torch.exp2(exponent - 128) < x) | (exponent == 0)).all()


@pytest.mark.parametrize(
    "element, info", [("e4m3", gf.format_info_mxfp8_e4m3), ("e5m2", gf.format_info_mxfp8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_mxfp8_blocks_are_those_of_gfloat(element, info):
    """gfloat encodes a block for a given scale; ours is the smallest power of two that does not saturate."""
    g = torch.Generator().manual_seed(3)
    x = (
        torch.randn(12, 64, generator=g) * torch.exp2(torch.randint(-20, 20, (12, 64), generator=g).float())
    ).bfloat16()
    q = hb.quantize(x, hb.MXFP8(element=element))
    for row in range(12):
        for block in range(2):
            values = x[row, 32 * block : 32 * block + 32].double().numpy()
            top = hb.MXFP8(element=element).element_format.max
            exponent = int(np.ceil(np.log2(np.abs(values).max() / top)))
            encoded = list(gfloat.encode_block(info, 2.0**exponent, values / 2.0**exponent))
            assert encoded[0] == int(q.block_scale.view(torch.uint8)[row, block])
            got = q.qdata.view(torch.uint8)[row, 32 * block : 32 * block + 32].tolist()
            assert got == encoded[1:]
            decoded = q.dequantize(torch.float32)[row, 32 * block : 32 * block + 32].double().numpy()
            np.testing.assert_array_equal(decoded, np.array(list(gfloat.decode_block(info, encoded))))
