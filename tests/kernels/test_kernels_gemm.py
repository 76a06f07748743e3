"""The emulated GEMM: golden products, every kind of operand and epilogue, both kernels, splits, edges."""

import golden_vectors as golden
import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels.gemm import dense, route
from halfbyte.kernels.target import amd, nvidia
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.sides import Epilogue

torch.manual_seed(0)

VARIANTS = ("pointer", "tma")
PAIRS = (
    (hb.NVFP4(), checks.TILE),
    (checks.ROW, checks.ROW),
    (checks.ROW, hb.NVFP4(e4m3_max=256.0)),
    (hb.NVFP4(), checks.ROW),
    (hb.MXFP8(), hb.MXFP8(element="e5m2")),
    (hb.NVFP4(), None),
    (None, checks.ROW),
    (None, None),
)
ROTATED = hb.NVFP4(rotation=hb.Hadamard(size=32))


@pytest.mark.parametrize("index, case", [pytest.param(i, c, id=c.id) for i, c in enumerate(golden.cases("edge_gemm"))])
def test_golden(index, case):
    checks.check_gemm(case, VARIANTS[index % 2])


def into(out, bias=None, *, accumulate=True):
    return Epilogue(bias=bias, addend=out if accumulate else None, out=out)


def assert_like_reference(pair, shape, **options):
    M, N, K = shape
    xs = (torch.randn(rows, K).bfloat16() for rows in (M, N))
    ours, theirs = zip(*map(checks.decoded_pair, xs, pair), strict=True)
    width = min(side.values.shape[1] for side in theirs)
    theirs = [side._replace(values=side.values[:, :width]) for side in theirs]
    bias, existing = torch.randn(N), torch.randn(M, N)
    for extra in (False, True):
        y, expected = existing.clone(), existing.clone()
        dense.gemm_nt(*ours, into(y, bias if extra else None, accumulate=extra), **options)
        reference.gemm_nt(*theirs, into(expected, bias if extra else None, accumulate=extra))
        assert (y - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " x ".join(str(s and s.key) for s in pair))
@pytest.mark.parametrize("variant", VARIANTS)
def test_operands_and_epilogues(pair, variant):
    assert_like_reference(pair, (9, 19, 48), variant=variant)


@pytest.mark.parametrize("shape", ((1, 1, 1), (1, 70, 33), (70, 5, 100)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_shapes(shape, variant):
    assert_like_reference(PAIRS[0], shape, variant=variant)


def test_a_rotated_tail_takes_part():
    x, w = torch.randn(4, 40), torch.randn(6, 40)
    ours, theirs = zip(*(checks.decoded_pair(t, ROTATED) for t in (x, w)), strict=True)
    y = dense.gemm_nt(*ours, Epilogue(torch.float32))
    assert ours[0].values.shape[1] == 64 and ours[0].values[:, 40:].any()
    torch.testing.assert_close(y, reference.gemm_nt(*theirs, Epilogue(torch.float32)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_one_rounding_to_the_output_dtype(dtype):
    # Sums of at most 48 products of 6-bit numbers are exact in fp32: the result is rounded exactly once.
    ours, theirs = zip(*(checks.decoded_pair(torch.randn(n, 48), checks.ROW) for n in (7, 12)), strict=True)
    bias = torch.randn(12).to(dtype)
    y = dense.gemm_nt(*ours, Epilogue(dtype, bias))
    checks.same(y, reference.gemm_nt(*theirs, Epilogue(dtype, bias)))
    existing = torch.randn(7, 12).to(dtype)
    summed = dense.gemm_nt(*ours, into(existing.clone()))
    checks.same(summed, reference.gemm_nt(*theirs, into(existing.clone())))


@pytest.mark.parametrize(("M", "N"), ((9, 16), (12, 37)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_addend_of_its_own_dtype_is_added_before_the_rounding(variant, M, N):
    ours, theirs = zip(*(checks.decoded_pair(torch.randn(n, 48), checks.ROW) for n in (M, N)), strict=True)
    addend = torch.randn(M, N)
    y = dense.gemm_nt(*ours, Epilogue(addend=addend), variant=variant)
    summed = dense.gemm_nt(*ours, into(addend.clone()), variant=variant)
    checks.same(y, summed.bfloat16())
    factors = [side.factor.double() for side in theirs]
    exact = (theirs[0].values.double() @ theirs[1].values.double().T) * (factors[0][:, None] * factors[1][None, :])
    torch.testing.assert_close(y.double(), exact + addend, rtol=2**-8, atol=1e-5)
    checks.same(reference.gemm_nt(*theirs, Epilogue(addend=addend)), y)


def test_an_addend_without_a_contraction():
    a, b, addend = torch.empty(3, 0), torch.empty(5, 0), torch.randn(3, 5)
    y = dense.gemm_nt(Decoded(a), Decoded(b), Epilogue(addend=addend))
    checks.same(y, addend.bfloat16())


def test_scalar_factors_that_overflow_together():
    a, b = (Decoded(torch.full((2, 16), v).bfloat16(), torch.tensor(3e38), 2688.0) for v in (2.0**-9, 2.0**-10))
    assert torch.isinf((torch.tensor(3e38) / 2688) ** 2)
    y = dense.gemm_nt(a._replace(amax=torch.tensor(1e30)), b, Epilogue(torch.float32))
    expected = (a.values.double() * (1e30 / 2688)) @ (b.values.double() * (3e38 / 2688)).T
    torch.testing.assert_close(y, expected.float())


@pytest.mark.parametrize(("variant", "splits"), (("pointer", 2), ("tma", 3)))
def test_split_contraction(variant, splits, monkeypatch):
    plans = []

    def plan(*arguments):
        plans.append(route.GemmPlan(variant == "tma", route.GemmTile(64, 128, 64, 4, 4), splits, True))
        return plans[-1]

    monkeypatch.setattr(dense, "gemm_plan", plan)
    assert_like_reference(PAIRS[splits - 2], (70, 37, 160))
    assert plans


def test_tiles_are_chosen_for_the_shape():
    tiles = route.tma_tiles(nvidia(90, 132))
    assert route.choose_tile(tiles, 8192, 8192, 8192, 132) == (tiles[0], 1)
    assert route.choose_tile(tiles, 65536, 1024, 1024, 132)[1] == 1
    wgrad_tile, splits = route.choose_tile(tiles, 1024, 1024, 65536, 132)
    assert splits > 1 and (1024 // wgrad_tile.bm) * (1024 // wgrad_tile.bn) * splits <= 132
    assert route.choose_tile(tiles, 64, 64, 64, 132)[1] == 1
    # Parts in several waves pay where whole tiles leave a third of the GPU idle, not where they nearly fill it.
    assert route.choose_tile(tiles, 2816, 1024, 32768, 132) == (tiles[0], 3)
    assert route.choose_tile(tiles, 5632, 2048, 16384, 132) == (tiles[0], 1)
    small = (*tiles, *route.SMALL_TILES)
    assert route.choose_tile(small, 512, 1024, 1024, 132) == (route.SMALL_TILES[2], 1)
    assert route.choose_tile(small, 1024, 1024, 512, 132) == (route.SMALL_TILES[0], 1)
    assert route.small_tiles(nvidia(90, 132)) == route.SMALL_TILES
    assert all(tile.bn > 64 for tile in route.small_tiles(nvidia(100, 148)))  # those spill there
    assert route.choose_tile(small, 1024, 1024, 65536, 132) == (wgrad_tile, splits)
    assert (
        route.tma_tiles(nvidia(80, 108))
        == route.tma_tiles(nvidia(120, 170))
        == route.tma_tiles(amd("gfx950", 256))
        == ()
    )


@pytest.mark.parametrize("shape", ((0, 5, 16), (4, 0, 16), (3, 5, 0)))
def test_nothing_to_multiply(shape, monkeypatch):
    monkeypatch.setattr(dense, "_run", None)
    M, N, K = shape
    a, b = Decoded(torch.randn(M, K).bfloat16()), Decoded(torch.randn(N, K).bfloat16())
    assert torch.equal(dense.gemm_nt(a, b, Epilogue(torch.float32)), torch.zeros(M, N))
    bias, existing = torch.randn(N), torch.randn(M, N)
    y = dense.gemm_nt(a, b, into(existing.clone(), bias))
    assert torch.equal(y, existing + bias)


def test_plain_operands_of_any_dtype_and_stride():
    x, w = torch.randn(33, 5).T, torch.randn(7, 40)[:, :33]
    for x_dtype, w_dtype in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ):
        a, b = x.to(x_dtype), w.to(w_dtype)
        y = dense.gemm_nt(Decoded(a), Decoded(b), Epilogue(torch.float32))
        torch.testing.assert_close(y, a.float() @ b.float().T)


def test_output_with_any_stride():
    ours, theirs = zip(*(checks.decoded_pair(torch.randn(n, 48), hb.NVFP4()) for n in (7, 12)), strict=True)
    out = torch.zeros(12, 7).T
    assert dense.gemm_nt(*ours, Epilogue(out=out)) is out
    torch.testing.assert_close(out, reference.gemm_nt(*theirs, Epilogue(torch.float32)))
    wide = torch.zeros(7, 20)
    dense.gemm_nt(*ours, Epilogue(out=wide[:, 3:15]))
    torch.testing.assert_close(wide[:, 3:15], out)
    assert not wide[:, :3].any() and not wide[:, 15:].any()


def test_nan_blocks_poison_only_what_reads_them():
    x, w = torch.randn(6, 64), torch.randn(5, 64)
    x[2, 20] = float("nan")
    ours, _ = zip(*(checks.decoded_pair(t, hb.NVFP4()) for t in (x, w)), strict=True)
    y = dense.gemm_nt(*ours)
    assert y[2].isnan().all() and not y[[0, 1, 3, 4, 5]].isnan().any()


def turned(side):
    """The same values, columns together."""
    return side._replace(values=side.values.T.contiguous().T)


@pytest.mark.parametrize("shape", ((24, 40, 100), (8, 16, 33), (70, 5, 64)), ids=str)
@pytest.mark.parametrize("variant", ("auto", "pointer"))
def test_operands_whose_columns_lie_together(shape, variant):
    M, N, K = shape
    bias, existing = torch.randn(N), torch.randn(M, N)
    xs = (torch.randn(rows, K).bfloat16() for rows in (M, N))
    (a, b), theirs = zip(*map(checks.decoded_pair, xs, PAIRS[0]), strict=True)
    expected = reference.gemm_nt(*theirs, into(existing.clone(), bias))
    for mine in ((turned(a), b), (a, turned(b)), (turned(a), turned(b))):
        y = dense.gemm_nt(*mine, into(existing.clone(), bias), variant=variant)
        assert (y - expected).norm() <= 1e-6 * expected.norm()


def test_turned_operands_are_read_by_tensor_maps_where_their_columns_begin_at_16_bytes(monkeypatch):
    plans, multiply = [], dense._multiply
    monkeypatch.setattr(dense, "_multiply", lambda *args: (plans.append((args[0].tma, *args[1:3])), multiply(*args)))
    for rows, tma in ((24, True), (20, False)):
        a, b = (turned(Decoded(torch.randn(rows, 64).bfloat16())) for _ in range(2))
        dense.gemm_nt(a, b)
        is_tma, *operands = plans.pop()
        assert is_tma is tma and all((x.stride(0) == 1) is tma for x in operands)


def test_tma_refuses_strides_it_cannot_describe():
    a, b = Decoded(torch.randn(4, 9).bfloat16()), Decoded(torch.randn(4, 9).bfloat16())
    with pytest.raises(ValueError, match="variant='tma'.*use 'auto'"):
        dense.gemm_nt(a, b, variant="tma")
    with pytest.raises(ValueError, match="variant='tma'.*use 'auto'"):
        dense.gemm_nt(turned(a), turned(b), variant="tma")


@pytest.mark.parametrize("accumulate", (False, True))
def test_a_long_contraction_is_summed_in_chains(accumulate, monkeypatch):
    monkeypatch.setattr(dense, "MAX_CHAIN", 100)
    monkeypatch.setattr(dense, "gemm_plan", lambda *_: route.GemmPlan(True, route.TMA_TILES[-1], 1, True))
    launches, multiply = [], dense._multiply
    monkeypatch.setattr(dense, "_multiply", lambda *args: (launches.append(args[1].shape[1]), multiply(*args)))
    ours, theirs = zip(*(checks.decoded_pair(torch.randn(n, 304), hb.NVFP4()) for n in (7, 12)), strict=True)
    bias, existing = torch.randn(12), torch.randn(7, 12)
    y = dense.gemm_nt(*ours, into(existing.clone(), bias, accumulate=accumulate))
    expected = reference.gemm_nt(*theirs, into(existing.clone(), bias, accumulate=accumulate))
    torch.testing.assert_close(y, expected)
    assert launches == [128, 128, 48]
