"""The emulated GEMM on a GPU: golden products and error bounds, with both kernels, whatever the GPU would choose."""

import golden_vectors as golden
import kernel_checks as checks
import pytest
import row_checks
import torch

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels.gemm import dense, route
from halfbyte.kernels.target import target_of
from halfbyte.kernels.unpack import dequantize as dq
from halfbyte.layout import Operand
from halfbyte.sides import Epilogue

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HOPPER = torch.cuda.is_available() and route.tma_tiles(target_of(torch.device("cuda", 0)))
VARIANTS = ("auto", "pointer", "tma") if HOPPER else ("auto", "pointer")
SHAPES = ((1, 1, 1), (16, 16, 16), (129, 257, 513), (1000, 520, 2064), (2048, 1024, 4096), (256, 384, 30000))
PAIRS = (
    (hb.NVFP4(), checks.TILE),
    (checks.ROW, checks.ROW),
    (checks.ROW, hb.NVFP4(e4m3_max=256.0)),
    (hb.MXFP8(), hb.MXFP8(element="e5m2")),
    (hb.NVFP4(), None),
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 5e-4}


def operand(rows, K, spec):
    x = torch.randn(rows, K, device="cuda").bfloat16()
    return dq.Decoded(x) if spec is None else dq.decode(Operand(reference.quantize(x, spec), spec, K))


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden(variant):
    for case in golden.cases("edge_gemm"):
        checks.check_gemm(case._replace(device="cuda"), variant)


@pytest.mark.skipif(not HOPPER, reason="without tensor maps a copy is multiplied")
@pytest.mark.parametrize(
    "shape", [(128, 64, 64), (136, 264, 520), (1000, 520, 2064), (2048, 4096, 1024), (768, 512, 30000)]
)
def test_operands_whose_columns_lie_together_give_the_same_bits(shape):
    M, N, K = shape
    a, b = operand(M, K, hb.NVFP4()), operand(N, K, hb.NVFP4(e4m3_max=256.0))
    bias = torch.randn(N, device="cuda")
    for dtype in BOUNDS:
        expected = dense.gemm_nt(a, b, Epilogue(dtype, bias), variant="tma")
        for turned in ((True, False), (False, True), (True, True)):
            sides = (
                side._replace(values=side.values.T.contiguous().T) if is_turned else side
                for side, is_turned in zip((a, b), turned, strict=True)
            )
            assert torch.equal(dense.gemm_nt(*sides, Epilogue(dtype, bias), variant="tma"), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " x ".join(str(s and s.key) for s in pair))
def test_error(pair, shape, variant):
    M, N, K = shape
    a, b = operand(M, K, pair[0]), operand(N, K, pair[1])
    if variant == "tma" and M * N and not all(route.describable(side.values) for side in (a, b)):
        with pytest.raises(ValueError, match="variant='tma'"):  # a tensor map needs rows of whole 16 bytes
            dense.gemm_nt(a, b, variant=variant)
        return
    width = min(a.values.shape[1], b.values.shape[1])
    narrow = [side._replace(values=side.values[:, :width]) for side in (a, b)]
    for dtype, bound in BOUNDS.items():
        y = torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
        dense.gemm_nt(a, b, Epilogue(out=y), variant=variant)
        if M * N > 1:  # the bound is one on the norm: a single number may be off by half a unit in the last place
            assert checks.relative_error(y, *narrow) <= bound
    bias, existing = torch.randn(N, device="cuda"), torch.randn(M, N, device="cuda")
    y = existing.clone()
    dense.gemm_nt(a, b, Epilogue(bias=bias, addend=y, out=y), variant=variant)
    assert checks.relative_error(y, *narrow, plus=bias + existing) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", (256, 2048))
def test_error_of_long_contractions(variant, rows):
    """Dense bf16 operands, whose sums are never exact: tensor cores truncate, so a chain must not grow with K."""
    a, b = operand(rows, 40_000, None), operand(2048, 40_000, None)
    y = dense.gemm_nt(a, b, Epilogue(torch.float32), variant=variant)
    assert checks.relative_error(y, a, b) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("splits", (2, 3, 7))
def test_split_contraction(variant, splits, monkeypatch):
    a, b = operand(300, 5000, hb.NVFP4()), operand(200, 5000, checks.ROW)
    tile = (route.POINTER_TILES if variant == "pointer" or not HOPPER else route.TMA_TILES)[-1]
    plan = route.GemmPlan(tile in route.TMA_TILES, tile, splits, False)
    monkeypatch.setattr(dense, "gemm_plan", lambda *_: plan)
    y = dense.gemm_nt(a, b, Epilogue(torch.float32))
    assert checks.relative_error(y, a, b) <= BOUNDS[torch.float32]
    assert torch.equal(y, dense.gemm_nt(a, b, Epilogue(torch.float32))), "the sum depends on the run"


@pytest.mark.parametrize("tile", (HOPPER or ()) + route.POINTER_TILES, ids=str)
def test_every_tile(tile, monkeypatch):
    tma = tile in route.TMA_TILES
    monkeypatch.setattr(dense, "gemm_plan", lambda *_: route.GemmPlan(tma, tile, 1, False))
    for N in (500, 512):  # 500 fp32 values are whole 16 bytes, 500 - 3 are not: plain stores
        a, b = operand(700, 1100, checks.ROW), operand(N, 1100, checks.TILE)
        for dtype, bound in BOUNDS.items():
            out = torch.randn(700, N, device="cuda").to(dtype)
            y = out.clone()
            dense.gemm_nt(a, b, Epilogue(addend=y, out=y))
            assert checks.relative_error(y, a, b, plus=out) <= bound
        if tile.bn < 256:
            few = b._replace(values=b.values[: N - 3])
            y = dense.gemm_nt(a, few, Epilogue(torch.float32))
            assert checks.relative_error(y, a, few) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_plain_operands_of_other_dtypes(dtype):
    x, w = (torch.randn(n, 777, device="cuda").to(dtype) for n in (300, 200))
    y = dense.gemm_nt(dq.Decoded(x), dq.Decoded(w), Epilogue(torch.float32))
    assert checks.relative_error(y, dq.Decoded(x), dq.Decoded(w)) <= 1e-6
    mixed = operand(200, 777, hb.NVFP4())
    y = dense.gemm_nt(dq.Decoded(x), mixed, Epilogue(torch.float32))
    assert checks.relative_error(y, dq.Decoded(x), mixed._replace(values=mixed.values[:, :777])) <= 1e-6


def test_a_captured_graph_replays_new_factors():
    a, b = operand(256, 512, hb.NVFP4()), operand(128, 512, hb.NVFP4())
    expected = dense.gemm_nt(a, b, Epilogue(torch.float32)) * 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dense.gemm_nt(a, b, Epilogue(torch.float32))
    a.amax.mul_(2)
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)


@pytest.mark.skipif(not HOPPER, reason="cuBLAS is asked on sm_90 alone")
@pytest.mark.parametrize("shape", ((768, 2048, 16384), (768, 768, 9000)))
def test_products_of_cublas(shape):
    """A weight gradient that torch.mm makes: as near to fp64 as ours, equal in every run and in a graph."""
    M, N, K = shape
    a, b = operand(M, K, hb.NVFP4()), operand(N, K, checks.ROW)
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    assert route.gemm_plan(a.values, b.values, (out, None), a.values.shape[1]) is None
    y = dense.gemm_nt(a, b)
    assert checks.relative_error(y, a, b) <= BOUNDS[torch.bfloat16]
    assert torch.equal(y, dense.gemm_nt(a, b)), "the sum depends on the run"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dense.gemm_nt(a, b)
    graph.replay()
    assert torch.equal(y, captured), "the sum depends on the graph"


@pytest.mark.parametrize("case", row_checks.CASES, ids=str)
def test_sums_of_one_row_have_one_order(case):
    row_checks.check_order(case, "cuda")


@pytest.mark.parametrize("check", row_checks.CHECKS, ids=lambda check: check.__name__)
def test_bits_of_one_row(check):
    check("cuda")


@pytest.mark.parametrize("shape", ((4096, 4096), (14336, 4096), (512, 8192), (4096, 14336), (1001, 30_001)))
def test_one_row_of_real_size(shape):
    """As a mean and a token alone are: nearer to fp64 than tensor cores are, the same bits in every run and graph."""
    N, K = shape
    a, b = operand(1, K, None), operand(N, K, None)
    bias = torch.randn(N, device="cuda")
    y = row_checks.multiplied(a, b, Epilogue(torch.float32))
    assert torch.equal(y, row_checks.in_order(a.values, b.values))
    assert checks.relative_error(y, a, b) <= 1e-6
    y = row_checks.multiplied(a, b, Epilogue(torch.float32, bias))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dense.gemm_nt(a, b, Epilogue(torch.float32, bias))
    graph.replay()
    assert torch.equal(y, captured) and checks.relative_error(y, a, b, plus=bias[None]) <= 1e-6
    codes, weight = operand(1, K, hb.NVFP4()), operand(N, K, checks.ROW)
    for dtype, bound in BOUNDS.items():
        assert checks.relative_error(row_checks.multiplied(codes, weight, Epilogue(dtype)), codes, weight) <= bound
