"""What must hold for any input: nearest, monotone, odd, idempotent, padding, strides, batching, scaling, layouts."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    HEADROOM,
    MAE,
    MX,
    MX5,
    NAN_SCALE,
    RHT,
    ROW,
    SEEDS,
    SPECS,
    SR,
    STANDARD,
    TILE,
    TOWARD_ZERO,
    assert_same_bytes,
    fourosix,
    make,
    matrices,
    specs,
)

import halfbyte as hb
from halfbyte import layout

RNG = {"rng": hb.Philox(7, 1), "sign_rng": hb.Philox(8, 2)}
TAME = ("normal", "heavy", "ties", "sparse", "spread")
LOWEST_NORMAL_SCALE = 2.0**-6
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def codes(q: hb.QuantTensor) -> torch.Tensor:
    return layout.unpack(q.qdata) if q.spec.format.codes_per_byte == 2 else q.qdata.view(torch.uint8)


def logical_codes(q: hb.QuantTensor) -> torch.Tensor:
    return codes(q)[:, : q.shape[-1]]


# Rounding


@settings(max_examples=80)
@given(x=matrices(patterns=TAME), spec=st.sampled_from((STANDARD, TILE, ROW, hb.NVFP4(fp4_max=5.0, e4m3_max=256.0))))
def test_nearest_is_nearest(x, spec):
    """No E2M1 value lies nearer to x / (scale * amax / (448 * 6)) than the code's.

    Encoding multiplies by a rounded factor: within 2e-7 of a midpoint either neighbour may be the nearer one.
    """
    q = hb.quantize(x, spec)
    if q.numel() == 0 or q.amax.numel() == 0:
        return
    amax = q.amax.double()[:, None] if spec.outer == "row" else q.amax.double()
    unit = q.block_scale.double().repeat_interleave(16, 1)[:, : x.shape[1]] * amax / (spec.e4m3_max * spec.fp4_max)
    usable = unit > 0
    y = x.double().abs() / torch.where(usable, unit, 1.0)
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    distance = (y.clamp_max(6.0)[..., None] - values).abs()
    chosen = (logical_codes(q) & 7).long()
    mine = distance.gather(-1, chosen[..., None])[..., 0]
    assert ((mine <= distance.amin(-1) + 2e-7 * y.clamp_max(6.0)) | ~usable).all()


def test_ties_go_to_the_even_code_through_the_public_call():
    midpoints = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    x = torch.cat([midpoints, -midpoints, torch.tensor((6.0, -0.0))])[None]
    q = hb.quantize(x, STANDARD, amax=torch.tensor(2688.0))
    assert codes(q).tolist() == [[0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 8]]


@settings(max_examples=60)
@given(x=matrices(patterns=TAME), spec=st.sampled_from((STANDARD, TILE, ROW, TOWARD_ZERO, MX, MX5, MAE)))
def test_monotone_within_a_block(x, spec):
    """x[i] <= x[j] in one block means value[i] <= value[j]."""
    length = spec.block_length
    values = torch.nn.functional.pad(hb.quantize(x, spec).dequantize(torch.float32), (0, -x.shape[1] % length))
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % length)).unflatten(1, (-1, length))
    order = x.argsort(-1)
    assert (values.unflatten(1, (-1, length)).gather(-1, order).diff(dim=-1) >= 0).all()


@settings(max_examples=80)
@given(x=matrices(), spec=specs)
def test_odd(x, spec):
    """quantize(-x) flips every stored sign and nothing else; a rotation makes zeros +0, so there only values flip."""
    q, negated = hb.quantize(x, spec, **RNG), hb.quantize(-x, spec, **RNG)
    assert torch.equal(q.block_scale.view(torch.uint8), negated.block_scale.view(torch.uint8))
    if spec.rotation is not None:
        a, b = q.dequantize(torch.float32), negated.dequantize(torch.float32)
        assert ((a == -b) | a.isnan()).all()
        return
    sign = {2: 8, 1: 0x80}[spec.format.codes_per_byte]
    nan = NAN_SCALE[spec.format.scale.name]
    scale = q.block_scale.view(torch.uint8).repeat_interleave(spec.block_length, 1)[:, : x.shape[1]]
    expected = torch.where(scale == nan, logical_codes(q), logical_codes(q) ^ sign)
    assert torch.equal(logical_codes(negated), expected)


# Idempotence


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec",
    [STANDARD, TILE, ROW, hb.NVFP4(e4m3_max=256.0), hb.NVFP4(fp4_max=4.0)],
    ids=["1x16", "16x16", "row", "256", "fp4_max 4"],
)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), pattern=st.sampled_from(("normal", "heavy")))
def test_idempotent_with_the_same_amax_where_scales_are_normal(spec, dtype, seed, pattern):
    """Standard scaling, nearest, the same amax, fp4_max 6 or 4: codes and scales of every block with a normal scale.

    There the block maximum has the code of fp4_max, so the decoded maximum leads back to the same scale, and no
    decoded value lies near a midpoint. A subnormal scale may be so coarse that the maximum has a smaller code.
    """
    x = make(pattern, (20, 48), dtype, seed).clamp(-1000, 1000)
    q = hb.quantize(x, spec)
    again = hb.quantize(q.dequantize(dtype), spec, amax=q.amax)
    normal = q.block_scale.float() >= LOWEST_NORMAL_SCALE
    assert normal.float().mean() > 0.5
    same = (q.block_scale.view(torch.uint8) == again.block_scale.view(torch.uint8)) | ~normal
    assert same.all()
    assert ((codes(q) == codes(again)) | ~normal.repeat_interleave(16, 1)).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), spec=st.sampled_from((STANDARD, TILE)))
def test_idempotent_without_an_amax_in_bf16(seed, spec):
    """A bf16 amax decodes to itself: quantizing bf16 values again changes no byte where scales are normal."""
    q = hb.quantize(make("normal", (16, 64), torch.bfloat16, seed), spec)
    assert (q.block_scale.float() >= LOWEST_NORMAL_SCALE).all()
    assert_same_bytes(q, hb.quantize(q.dequantize(torch.bfloat16), spec))


@settings(max_examples=60)
@given(x=matrices(patterns=("normal", "heavy", "ties", "sparse")), spec=st.sampled_from((MX, MX5)))
def test_mxfp8_values_are_idempotent(x, spec):
    """The second scale may be half the first (a maximum rounded down), on whose finer grid every value still lies."""
    values = hb.quantize(x, spec).dequantize(torch.float32)
    assert torch.equal(hb.quantize(values, spec).dequantize(torch.float32), values)


def again(q: hb.QuantTensor, **options) -> hb.QuantTensor:
    return hb.quantize(q.dequantize(torch.float32), q.spec, amax=q.amax, **options)


def test_where_quantization_is_not_idempotent():
    """Why the statements above are no wider: subnormal and zero scales, headroom, truncation; MXFP8's bytes."""
    x = torch.tensor([[2688.0] + [0.0] * 15 + [3.1 * 2.0**-9] * 16 + [2.6 * 2.0**-9] * 16])
    q = hb.quantize(x, STANDARD)
    assert (q.block_scale.float() * 2**9).int().tolist() == [[448 * 2**9, 1, 0]]
    assert codes(q)[0, ::16].tolist() == [7, 5, 7]
    assert codes(again(q))[0, ::16].tolist() == [7, 7, 0]  # 3 of 6 is half a scale, which rounds to even: 0
    assert again(q).dequantize()[0, ::16].tolist() == [2688, 0, 0]
    for spec in (hb.NVFP4(fp4_max=HEADROOM), TOWARD_ZERO):
        q = hb.quantize(make("normal", (16, 64), torch.bfloat16, 0), spec)
        assert not torch.allclose(q.dequantize(torch.float32), again(q).dequantize())
    x = torch.tensor([[449.0] + [0.0] * 31])
    q = hb.quantize(x, MX)
    once = hb.quantize(q.dequantize(), MX)
    assert (q.block_scale.view(torch.uint8), once.block_scale.view(torch.uint8)) == (128, 127)
    assert torch.equal(q.dequantize(), once.dequantize())


# Where the input lies


@settings(max_examples=60)
@given(x=matrices(), spec=specs, rows=st.integers(0, 3), blocks=st.integers(0, 2), data=st.data())
def test_padding_is_neutral(x, spec, rows, blocks, data):
    """Zeros appended to a block, as whole blocks and as rows change no byte of the blocks that were there."""
    q = hb.quantize(x, spec, **RNG)
    per_row, cols = q.block_scale.shape[1], x.shape[1]
    to_block = -cols % spec.alignment
    extra = data.draw(st.integers(0, to_block)) if blocks == 0 else to_block + blocks * spec.alignment
    padded = torch.nn.functional.pad(x, (0, extra, 0, rows))
    place = hb.Philox(7, 1, blocks_per_row=per_row)
    wide = hb.quantize(padded, spec, rng=place, sign_rng=RNG["sign_rng"])
    assert torch.equal(codes(wide)[: x.shape[0], : codes(q).shape[1]], codes(q))
    scales = wide.block_scale.view(torch.uint8)[: x.shape[0], :per_row]
    assert torch.equal(scales, q.block_scale.view(torch.uint8))
    if q.amax is not None:
        assert torch.equal(wide.amax[: x.shape[0]] if spec.outer == "row" else wide.amax, q.amax)


@every_spec
def test_strides_do_not_matter(spec):
    x = make("spread", (19, 37), torch.bfloat16, 3)
    expected = hb.quantize(x, spec, **RNG)
    wide = torch.zeros(19, 2 * 37 + 5, dtype=x.dtype)
    wide[:, 3 : 3 + 2 * 37 : 2] = x
    flipped = x.flip(0).flip(0)
    for view in (x.T.contiguous().T, wide[:, 3 : 3 + 2 * 37 : 2], flipped, torch.stack([x, x])[1]):
        assert_same_bytes(hb.quantize(view, spec, **RNG), expected)
    expanded = x[:1].expand(5, 37)
    assert_same_bytes(hb.quantize(expanded, spec, **RNG), hb.quantize(expanded.contiguous(), spec, **RNG))


@every_spec
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_the_dtype_does_not_matter_where_values_are_equal(spec, source):
    x = make("normal", (18, 40), torch.bfloat16, 4).half().float()
    x = torch.where(x.bfloat16().float() == x, x, 0.5)  # values that all three dtypes hold
    expected = hb.quantize(x, spec, **RNG)
    assert_same_bytes(hb.quantize(x.to(source), spec, **RNG), expected)


@every_spec
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 15, 37), (15, 1, 37), (5, 1, 3, 37)])
def test_leading_dimensions_are_rows(spec, shape):
    x = make("normal", (15, 37), torch.bfloat16, 5)
    q, flat = hb.quantize(x.view(shape), spec, **RNG), hb.quantize(x, spec, **RNG)
    assert q.shape == shape
    assert_same_bytes(q.view(15, 37), flat)
    assert torch.equal(q.dequantize(), flat.dequantize().view(shape))


@every_spec
@pytest.mark.parametrize("shape", [(0,), (0, 16), (5, 0), (0, 0), (2, 0, 40), (2, 40, 0), (0, 17)])
def test_empty_tensors(spec, shape):
    q = hb.quantize(torch.empty(shape), spec, **RNG)
    rows = layout.matrix_shape(torch.Size(shape))[0]
    padded = layout.round_up(shape[-1], spec.alignment)
    assert q.qdata.shape == (rows, padded // spec.format.codes_per_byte)
    assert q.block_scale.shape == (rows, padded // spec.block_length)
    assert q.dequantize().shape == shape
    if spec.format.has_amax:
        assert q.amax.tolist() == ([0.0] * rows if spec.outer == "row" else 0.0)
    swizzled = hb.quantize(torch.empty(shape), spec, scale_layout="swizzled_32_4_4", **RNG)
    assert swizzled.dequantize().shape == shape


@every_spec
def test_one_dimension_is_one_row(spec):
    x = make("normal", (37,), torch.float32, 6)
    q = hb.quantize(x, spec, **RNG)
    row = hb.quantize(x[None], spec, **RNG)
    assert q.shape == (37,) and torch.equal(q.qdata.view(torch.uint8), row.qdata.view(torch.uint8))
    assert torch.equal(q.dequantize(), row.dequantize()[0])


@settings(max_examples=60)
@given(x=matrices(), spec=specs, seed=SEEDS, cuts=st.tuples(st.integers(0, 18), st.integers(0, 3)))
def test_shards_have_the_bytes_of_the_whole(x, spec, seed, cuts):
    """A shard that names its origin and the whole's amax gets the whole's bytes, whatever the rounding."""
    row = min(cuts[0] // 16 * 16 if spec.is_tile else cuts[0], x.shape[0])
    col = min(cuts[1] * spec.alignment, x.shape[1])
    whole = hb.quantize(x, spec, rng=hb.Philox(seed), sign_rng=hb.Philox(seed, 1))
    per_row, length = whole.block_scale.shape[1], spec.block_length
    for rows in (slice(0, row), slice(row, None)):
        for cols in (slice(0, col), slice(col, None)):
            place = hb.Philox(seed, 0, (rows.start * per_row) + cols.start // length, per_row)
            shard = {"rng": place, "sign_rng": hb.Philox(seed, 1)}
            if whole.amax is not None:
                shard["amax"] = whole.amax[rows] if spec.outer == "row" else whole.amax
            part = hb.quantize(x[rows, cols], spec, **shard)
            blocks = slice(cols.start // length, cols.start // length + part.block_scale.shape[1])
            expected = whole.block_scale.view(torch.uint8)[rows, blocks]
            assert torch.equal(part.block_scale.view(torch.uint8), expected)
            assert torch.equal(codes(part), codes(whole)[rows, length * blocks.start : length * blocks.stop])


# Scaling


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    spec=specs,
    power=st.integers(-40, 40),
    pattern=st.sampled_from(("normal", "ties", "sparse")),
)
def test_powers_of_two_move_into_the_amax(seed, dtype, spec, power, pattern):
    """Scaling by 2^n, far from the ends of fp32, changes no code: n is in the amax alone, or in every E8M0 scale."""
    x = make(pattern, (17, 40), dtype, seed)
    x = torch.where(x.abs() < 2.0**-20, 0.0, x)
    q, scaled = hb.quantize(x, spec, **RNG), hb.quantize(x * 2.0**power, spec, **RNG)
    assert torch.equal(codes(q), codes(scaled))
    scale, moved = (t.block_scale.view(torch.uint8).int() for t in (q, scaled))
    if spec.format.has_amax:
        assert torch.equal(scale, moved)
        assert torch.equal(scaled.amax, q.amax * 2.0**power)
    else:
        assert torch.equal(torch.where(scale == 0, 0, scale + power), moved)


# An amax that is handed in


@settings(max_examples=60)
@given(x=matrices(patterns=TAME), spec=st.sampled_from([s for s in SPECS.values() if s.format.has_amax]))
def test_the_own_amax_handed_in_changes_nothing(x, spec):
    q = hb.quantize(x, spec, **RNG)
    assert_same_bytes(hb.quantize(x, spec, amax=q.amax.clone(), **RNG), q)


def test_a_smaller_amax_saturates_and_a_larger_one_wastes_range():
    x = torch.linspace(-8, 8, 32)[None]
    small, large = hb.quantize(x, STANDARD, amax=torch.tensor(1.0)), hb.quantize(x, STANDARD, amax=torch.tensor(1e4))
    assert small.amax == 1.0 and large.amax == 1e4
    assert (small.block_scale.float() == 448).all() and small.dequantize().abs().max() == 1.0
    assert large.block_scale.float().max() < 1
    unit = large.dequantize().abs().max() / 6
    assert (large.dequantize() - x).abs().max() <= unit < 8 / 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_an_amax_that_is_none_poisons_its_scope(bad):
    x = make("normal", (6, 40), torch.bfloat16, 1)
    q = hb.quantize(x, STANDARD, amax=torch.tensor(bad))
    assert (q.block_scale.view(torch.uint8) == 0x7F).all() and (q.qdata == 0).all() and q.dequantize().isnan().all()
    own = hb.quantize(x, ROW)
    amax = own.amax.clone()
    amax[2] = bad
    mixed = hb.quantize(x, ROW, amax=amax)
    keep = torch.arange(6) != 2
    assert torch.equal(mixed.qdata[keep], own.qdata[keep])
    assert torch.equal(mixed.block_scale.view(torch.uint8)[keep], own.block_scale.view(torch.uint8)[keep])
    assert (mixed.block_scale.view(torch.uint8)[2] == 0x7F).all() and (mixed.qdata[2] == 0).all()


# The other orientation and the other layout


@settings(max_examples=60)
@given(x=matrices(max_rows=35))
def test_standard_tiles_quantize_to_the_transpose(x):
    assert_same_bytes(hb.quantize(x.T, TILE), hb.quantize(x, TILE).transpose())


@settings(max_examples=60)
@given(x=matrices(max_rows=35), spec=specs.filter(lambda s: s.is_tile))
def test_transpose_moves_values_and_undoes_itself(x, spec):
    q = hb.quantize(x, spec, **RNG)
    t = q.transpose()
    assert t.shape == x.T.shape
    values, moved = q.dequantize(torch.float32), t.dequantize(torch.float32)
    assert torch.equal(values.T.contiguous().view(torch.int32), moved.view(torch.int32))
    assert_same_bytes(t.transpose(), q)
    row, col = hb.quantize_row_col(x, spec, spec, **RNG)
    assert_same_bytes(row, q)
    assert_same_bytes(col, t)


@settings(max_examples=60)
@given(x=matrices(), spec=specs)
def test_swizzled_scales_say_the_same(x, spec):
    linear, swizzled = (hb.quantize(x, spec, scale_layout=name, **RNG) for name in layout.SCALE_LAYOUTS)
    assert torch.equal(swizzled.block_scale.view(torch.uint8), layout.swizzle(linear.block_scale).view(torch.uint8))
    assert_same_bytes(linear, swizzled)
    for dtype in DTYPES:
        a, b = linear.dequantize(dtype), swizzled.dequantize(dtype)
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if x.numel():
        y, z = (hb.gemm_nt(q, q, torch.float32) for q in (linear, swizzled))
        assert torch.equal(y.nan_to_num(7.0), z.nan_to_num(7.0))


@pytest.mark.parametrize("spec", [SR, RHT, MAE], ids=["sr", "rht", "mae"])
def test_chunks_do_not_show(spec):
    """A tensor of several internal chunks, the last one partial, has the bytes of its rows quantized one by one."""
    x = make("spread", (2 * 513 + 3, 272), torch.bfloat16, 2)
    spec = dataclasses.replace(spec, outer="row")
    q = hb.quantize(x, spec, **RNG)
    for row in (0, 480, 481, 482, 511, 512, 513, 962, 963, 1027, 1028):
        place = hb.Philox(7, 1, first_block=row * 17)
        one = hb.quantize(x[row : row + 1], spec, rng=place, sign_rng=RNG["sign_rng"])
        assert torch.equal(one.qdata[0], q.qdata[row])
        assert torch.equal(one.block_scale.view(torch.uint8)[0], q.block_scale.view(torch.uint8)[row])


@settings(max_examples=40)
@given(scaling=fourosix, x=matrices(patterns=TAME))
def test_the_order_of_candidates_does_not_matter(scaling, x):
    spec = hb.NVFP4(scaling=scaling)
    other = dataclasses.replace(scaling, candidates=tuple(reversed(scaling.candidates)))
    assert_same_bytes(hb.quantize(x, spec), hb.quantize(x, dataclasses.replace(spec, scaling=other)))
