"""The quantization kernels on a GPU: every golden vector, and every spec against the reference, bit for bit."""

from dataclasses import replace

import eden_checks
import golden_vectors as golden
import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.amax.plain import finite_amax, row_col_amax
from halfbyte.kernels.quantize.both import quantize_rows_and_cols
from halfbyte.kernels.quantize.both_route import Pair, choose_pair
from halfbyte.kernels.quantize.one import quantize_side
from halfbyte.sides import Side, both_sides

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = (((257, 1000), torch.bfloat16), ((160, 512), torch.float32), ((130, 77), torch.float16))


# By spec, since each has kernels of its own: all edge vectors together compile more than a hundred.
GOLDEN = {}
for case in checks.QUANTIZED:
    GOLDEN.setdefault(f"{case.kind}-{golden.spec_of(case.entry).key}", []).append(case)


@pytest.mark.parametrize("vectors", sorted(GOLDEN))
def test_golden(vectors):
    for case in GOLDEN[vectors]:
        checks.check_golden(case._replace(device="cuda"))


def test_eden_scales_beside_their_thresholds():
    eden_checks.check_stored_codes("cuda")
    eden_checks.check_blocks("cuda")


@pytest.mark.parametrize("signs", ("fresh", "+" * 16))
def test_eden_of_a_large_tensor(signs):
    pair = checks.EDEN, replace(checks.EDEN, rotation=hb.Hadamard(signs=signs))
    for kind in ("heavy", "ties", "nonfinite"):
        x = checks.sample(kind, (8192, 8192), torch.bfloat16, "cuda")
        assert choose_pair(Pair(x, *both_sides(*pair, **checks.draws("cuda")))).constants["ROW"].along
        checks.check_row_col(x, pair, layout.LINEAR)


def test_golden_row_col():
    for case in checks.ROW_COL:
        checks.check_golden_row_col(case._replace(device="cuda"))


@pytest.mark.parametrize("spec", checks.SPECS, ids=lambda spec: spec.key)
def test_against_the_reference(spec):
    for shape, dtype in SHAPES:
        for kind in ("heavy", "ties", "tiny", "nonfinite"):
            x = checks.sample(kind, shape, dtype, "cuda")
            checks.check_against_reference(x, spec, layout.LINEAR)
            checks.check_against_reference(x.T, spec, layout.SWIZZLED_32_4_4)


@pytest.mark.parametrize("spec", checks.NARROW, ids=lambda spec: spec.key)
def test_rows_that_are_no_power_of_two(spec):
    checks.check_narrow_rows(spec, 512, "cuda")


@pytest.mark.parametrize("index", range(len(checks.PAIRS)))
def test_row_col(index):
    for shape, dtype in SHAPES:
        for kind in ("heavy", "nonfinite"):
            x = checks.sample(kind, shape, dtype, "cuda")
            for scale_layout in layout.SCALE_LAYOUTS:
                checks.check_row_col(x, checks.PAIRS[index], scale_layout)


@pytest.mark.parametrize("index", range(2))
def test_row_col_of_small_tensors(index):
    pair = checks.PAIRS[index]
    for shape in ((64, 256), (512, 1024), (1024, 4096)):
        for kind in ("heavy", "nonfinite"):
            x = checks.sample(kind, shape, torch.bfloat16, "cuda")
            assert choose_pair(Pair(x, *both_sides(*pair))).kernel == "quantize_row_col_small_kernel"
            checks.check_row_col(x, pair, layout.LINEAR)


@pytest.mark.parametrize("amaxes", checks.AMAXES)
def test_several_tiles_a_program(amaxes, monkeypatch):
    checks.check_several_tiles("cuda", amaxes, monkeypatch)


@pytest.mark.parametrize("col", checks.WIDE, ids=lambda spec: spec.key)
@pytest.mark.parametrize("hardware", (0, 100))
def test_maxima_of_wide_rotations_on_other_targets(hardware, col, monkeypatch):
    for shape in ((1000, 1032), (512, 2048), (77, 130)):
        x = checks.sample("nonfinite" if shape[0] == 1000 else "heavy", shape, torch.bfloat16, "cuda")
        checks.check_rotated_amax(x, col, hardware, monkeypatch)


@pytest.mark.parametrize("spec", checks.ROTATED_LINES, ids=lambda spec: spec.key)
def test_maxima_of_rotated_rows(spec):
    for shape in ((3, 8), (1000, 1032), (512, 2048), (2048, 8192)):
        for kind in ("heavy", "nonfinite"):
            checks.check_rotated_rows(checks.sample(kind, shape, torch.bfloat16, "cuda"), spec)


@pytest.mark.parametrize("axis", (0, 1))
def test_the_errors_of_a_tile_are_added_in_order(axis):
    checks.check_tile_sums(axis, "cuda")


def test_launches_that_overlap_wait_for_each_other():
    pair, options = checks.PAIRS[1], checks.draws("cuda")
    xs = [checks.sample("heavy", (512, 1024), torch.bfloat16, "cuda") for _ in range(4)]
    expected = [reference.quantize_row_col(x, *both_sides(*pair, **options)) for x in xs]
    quantize_rows_and_cols(xs[0], *both_sides(*pair, **options))  # compiles
    graph = torch.cuda.CUDAGraph()
    x = torch.empty_like(xs[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sides = []
        for new in xs:
            x.copy_(new)
            sides.append(quantize_rows_and_cols(x, *both_sides(*pair, **options)))
            x.zero_()
    for _ in range(20):
        graph.replay()
    for actual, wanted in zip(sides, expected, strict=True):
        for got, want in zip(actual, wanted, strict=True):
            checks.same_blocks(got, want)


def test_amax_of_large_tensors():
    x = checks.sample("nonfinite", (4096, 4100), torch.bfloat16, "cuda")
    rotated = hb.NVFP4(rotation=hb.Hadamard())
    assert torch.equal(finite_amax(x), reference.finite_amax(x))
    assert torch.equal(finite_amax(x, -1), reference.finite_amax(x, -1))
    assert torch.equal(
        row_col_amax(x, hb.NVFP4(), rotated, None)[1], reference.finite_amax(reference.rotate(x.T, rotated.rotation))
    )


def test_more_than_two_to_the_31_elements():
    x = torch.zeros(1, (1 << 31) + 4096, dtype=torch.bfloat16, device="cuda").view(-1, 4096)
    x[-3:] = torch.randn(3, 4096, device="cuda")
    blocks = quantize_side(x, Side(hb.NVFP4(), amax=torch.tensor(6.0, device="cuda")))
    tail = reference.quantize(x[-8:], hb.NVFP4(), amax=torch.tensor(6.0, device="cuda"))
    assert torch.equal(blocks.qdata[-8:], tail.qdata) and torch.equal(blocks.block_scale[-8:], tail.block_scale)
    assert not blocks.qdata[:-8].any()


def test_a_graph_replays_with_new_values():
    x = torch.randn(256, 512, device="cuda").bfloat16()
    spec = hb.NVFP4(rounding="stochastic")
    draw = hb.Philox(1, 2).on("cuda")
    quantize_side(x, Side(spec, draw=draw))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks = quantize_side(x, Side(spec, draw=draw))
    x.copy_(torch.randn(256, 512))
    draw.base.copy_(torch.tensor([3, 4]))
    graph.replay()
    checks.same_blocks(blocks, reference.quantize(x, spec, draw=hb.Philox(3, 4).on("cuda")))


SIBLINGS = (
    ((768, 768), (256, 768), (256, 768)), ((2048, 768), (2048, 768)), ((8, 16),), ((4096, 4096), (1024, 4096)),
    ((5, 8), (999, 88)), ((3, 5), (7, 9)),
)  # fmt: skip
"""Of both dtypes one launch reads them, but for the last, which are no multiple of 16 bytes."""


@pytest.mark.parametrize("bad", [None, float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_amax_of_siblings_wherever_it_is(dtype, bad):
    for shapes in SIBLINGS:
        for i in range(len(shapes)):
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for shape in shapes]
            xs[i].view(-1)[-1] = -77.5
            if bad is not None:
                xs[-1].view(-1)[1] = bad
            assert float(hb.ops.amax_of_all([x.cuda() for x in xs])) == 77.5
