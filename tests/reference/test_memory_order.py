"""What the reference does for speed alone: values instead of codes, draws of both orientations at once, tables."""

import dataclasses

import pytest
import torch

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.layout import Operand
from halfbyte.reference import nvfp4
from halfbyte.reference.cast import e4m3_nearest, fp8_values
from halfbyte.reference.philox import block_bytes, block_numbers, bytes_of_both
from halfbyte.reference.scale import scale_bytes
from halfbyte.sides import both_sides

SR, RHT = hb.NVFP4(rounding="stochastic"), hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard())
TILE = hb.NVFP4(block=(16, 16))
PAIRS = {
    "nvfp4": (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())),
    "gradients": (SR, RHT),
    "tiles": (TILE, TILE),
    "row": (hb.NVFP4(outer="row"), hb.NVFP4(outer="row", rotation=hb.Hadamard(size=32))),
    "mae": (hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0), hb.NVFP4(scaling=hb.FourOverSix(error="mse"))),
    "mxfp8": (hb.MXFP8(), hb.MXFP8(element="e5m2")),
}


def matrix(rows, cols, dtype=torch.float32):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    x[0], x[:, 1] = 0.0, -0.0
    x[rows // 2, 3] = torch.nan
    return x.to(dtype)


def bits(t):
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


@pytest.mark.parametrize("shape", [(64, 96), (37, 50), (1, 16), (0, 32)])
@pytest.mark.parametrize("pair", PAIRS)
def test_transient_values_are_the_decoded_codes(pair, shape):
    specs = PAIRS[pair]
    x = matrix(*shape) if shape[0] else torch.empty(shape)
    draw = hb.Philox(3, 8).on(torch.device("cpu"))
    codes = ops.quantize_row_col(x, *both_sides(*specs, draw=draw))
    values = ops.quantize_row_col(x, *both_sides(*specs, draw=draw, transient=(True, True)))
    for mine, stored, spec, cols in zip(values, codes, specs, (shape[1], shape[0]), strict=True):
        expected = reference.decode(Operand(stored, spec, cols))
        assert mine.block_scale.numel() == 0
        assert torch.equal(bits(mine.qdata), bits(expected.values))  # the sign of zero too
        assert torch.equal(bits(mine.amax), bits(stored.amax))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_fakes_have_the_strides_of_transient_values(pair):
    keys = [spec.key for spec in PAIRS[pair]]
    rng = torch.tensor([3, 8])
    arguments = (matrix(64, 96), *keys, rng, 0, 0, None, None, 0, None, None, "linear", True, True, "")
    torch.library.opcheck(torch.ops.halfbyte.quantize_row_col.default, arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", PAIRS)
def test_memory_order_does_not_show(pair, dtype):
    x = matrix(64, 96, dtype)
    for spec in PAIRS[pair]:
        options = {"draw": hb.Philox(3, 8).on(x.device), "amax": torch.rand(64) if spec == PAIRS["row"][0] else None}
        expected = reference.quantize(x, spec, **options)
        for same in (x.T.contiguous().T, torch.stack((x, x), 2)[..., 0]):
            for mine, theirs in zip(reference.quantize(same, spec, **options), expected, strict=True):
                assert torch.equal(bits(mine), bits(theirs))


def test_both_orientations_draw_what_each_would_alone(monkeypatch):
    draw = hb.Philox(0xFEDCBA9876543210, (1 << 63) - 2).on(torch.device("cpu"))
    row, col = bytes_of_both(32, 48, draw)
    for mine, place, shape in ((row, draw, (32, 3)), (col, draw.next(), (48, 2))):
        index = torch.arange(96).view(shape)
        assert torch.equal(mine, block_bytes(index, place))
        assert torch.equal(mine, block_bytes(index, place, together=False))
    far = torch.tensor([5, (7 << 32) + 5, (1 << 62) + 3])
    first = block_bytes(far, draw)[1:4].long()  # the 24 high bits of the first word
    assert block_numbers(far, draw).long().tolist() == (first[0] + (first[1] << 8) + (first[2] << 16)).tolist()
    x = matrix(64, 96)
    together = reference.quantize_row_col(x, *both_sides(SR, RHT, draw=draw))
    monkeypatch.setattr(nvfp4, "CHUNK_ELEMENTS", 1024)  # of several chunks, every one draws its own
    for mine, theirs in zip(together, reference.quantize_row_col(x, *both_sides(SR, RHT, draw=draw)), strict=True):
        assert torch.equal(mine.qdata, theirs.qdata)


@pytest.mark.parametrize("shape", [(64, 96), (50, 41), (7, 130)])
@pytest.mark.parametrize("transient", [(False, False), (True, False), (True, True)])
def test_tiles_of_several_chunks_are_turned_like_those_of_one(monkeypatch, shape, transient):
    x = matrix(*shape)
    expected = reference.quantize(x, TILE), reference.quantize(x.T.contiguous(), TILE)
    monkeypatch.setattr(nvfp4, "CHUNK_ELEMENTS", 1024)
    both = reference.quantize_row_col(x, *both_sides(TILE, TILE, transient=transient))
    for mine, codes, is_value, cols in zip(both, expected, transient, (shape[1], shape[0]), strict=True):
        if is_value:
            assert torch.equal(bits(mine.qdata), bits(reference.decode(Operand(codes, TILE, cols)).values))
        else:
            assert torch.equal(mine.qdata, codes.qdata) and torch.equal(mine.block_scale, codes.block_scale)


def test_a_shard_is_not_drawn_with_its_transpose():
    x, draw = matrix(64, 96), hb.Philox(3, 8, first_block=12).on(torch.device("cpu"))
    row, _ = reference.quantize_row_col(x, *both_sides(SR, dataclasses.replace(SR), draw=draw))
    assert torch.equal(row.qdata, reference.quantize(x, SR, draw=draw).qdata)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_tables_hold_every_float8(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(dtype)
    for t in (codes, codes[:256], codes.view(4, 8, 128).transpose(0, 2), codes.view(16, 256).T[::2]):
        values, expected = fp8_values(t), t.float()
        assert torch.equal(values.isnan(), expected.isnan()) and values.shape == t.shape
        assert torch.equal(bits(values.nan_to_num(nan=-1.0)), bits(expected.nan_to_num(nan=-1.0)))


def test_scales_in_fp32_are_torchs_float8():
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (exact[1:] + exact[:-1]) / 2
    edges = [
        torch.nextafter(t, towards) for t in (exact, halfway) for towards in (torch.tensor(0.0), torch.tensor(1e9))
    ]
    x = torch.cat([exact, halfway, *edges, torch.tensor([1e-45, 464.0, 1e38, torch.inf])])
    expected = x.clamp_max(448.0).to(torch.float8_e4m3fn)
    assert torch.equal(bits(e4m3_nearest(x)), bits(expected.float()))
    assert torch.equal(bits(scale_bytes(e4m3_nearest(x))), bits(expected))


def test_a_tensor_with_a_gradient_is_quantized():
    x = matrix(64, 96).requires_grad_()
    assert torch.equal(hb.quantize(x, hb.NVFP4()).qdata, hb.quantize(x.detach(), hb.NVFP4()).qdata)
