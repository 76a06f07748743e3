"""Grouped quantization, GEMM and layers on a GPU: the bytes of the reference on the same device."""

import kernel_checks as checks
import pytest
import torch
from grouped_cases import EDEN, GROUPS, RECIPES, SPECS, ends

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import backend
from halfbyte.kernels.amax import route as amax_route
from halfbyte.kernels.gemm.grouped import grouped_gemm_nt
from halfbyte.kernels.quantize import grouped_route
from halfbyte.layout import SCALE_LAYOUTS, Operand, group_alignment, group_ends
from halfbyte.rng import StreamPhilox
from halfbyte.sides import both_sides

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SR, RHT = {"rounding": "stochastic"}, {"rotation": hb.Hadamard()}
FRESH = {"rotation": hb.Hadamard(size=32, signs="fresh")}
PAIRS = {name: (spec, spec) for name, spec in SPECS.items() if name != "rotated_fresh"} | {
    "fresh": (hb.NVFP4(**SR, **FRESH), hb.NVFP4(**SR, **FRESH)),
    "activation": (hb.NVFP4(), hb.NVFP4(**RHT)),
    "gradient": (hb.NVFP4(**SR), hb.NVFP4(**SR, **RHT)),
    "mixed": (hb.NVFP4(), hb.MXFP8()),
    "eden_row": (EDEN, SPECS["eden"]),
    "wide": (hb.NVFP4(rotation=hb.Hadamard(size=64)), hb.NVFP4(rotation=hb.Hadamard(size=128))),
    "widest": (hb.NVFP4(rotation=hb.Hadamard(size=128, signs="fresh"), outer="row"), SPECS["rotated_fresh"]),
}
SIZES = {**{name: (*groups, 40) for name, groups in GROUPS.items()}, "uneven": ((1300, 5, 0, 700, 64, 1931), 96, 1024)}
"""Name: sizes of the groups, tokens behind the last, features."""

PRODUCTS = {
    "nvfp4": hb.NVFP4(),
    "row": hb.NVFP4(outer="row"),
    "rotated": hb.NVFP4(rotation=hb.Hadamard(size=128)),
    "mxfp8": hb.MXFP8(),
}


def draws():
    return {"draw": hb.Philox(2**64 - 3, 11).on("cuda"), "sign_draw": hb.Philox(2**63, 12).on("cuda")}


def tokens(sizes, padding, cols):
    x = torch.randn(sum(sizes) + padding, cols, device="cuda").bfloat16()
    x[:1, 3] = torch.nan
    x[sum(sizes) :] = torch.nan
    return x


def same_blocks(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            checks.same(a, b)


@pytest.mark.parametrize("groups", ["ragged", "all_to_one", "single_tokens", "nothing", "uneven"])
@pytest.mark.parametrize("pair", PAIRS)
def test_bytes_of_tokens(pair, groups):
    sizes, padding, cols = SIZES[groups]
    x, offsets = tokens(sizes, padding, cols), ends(sizes).cuda()
    for scale_layout in SCALE_LAYOUTS:
        options = {**draws(), "scale_layout": scale_layout}
        expected = reference.grouped_quantize_row_col(x, offsets, *both_sides(*PAIRS[pair], **options))
        same_blocks(backend.grouped_quantize_row_col(x, offsets, *both_sides(*PAIRS[pair], **options)), expected)


@pytest.mark.parametrize("pair", ["wide", "widest", "eden_rotated_fresh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_what_is_not_read_in_words(pair, dtype):
    sizes, padding, cols = SIZES["uneven"]
    x, offsets = tokens(sizes, padding, cols + 1).to(dtype)[:, 1:], ends(sizes).cuda()
    expected = reference.grouped_quantize_row_col(x, offsets, *both_sides(*PAIRS[pair], **draws()))
    same_blocks(backend.grouped_quantize_row_col(x, offsets, *both_sides(*PAIRS[pair], **draws())), expected)


@pytest.mark.parametrize("pair", ["gradient", "fresh"])
def test_bytes_as_other_sizes_and_targets_find_them(pair, monkeypatch):
    """Several tiles a program, as large tensors have them; of maxima the warps that sm_100 takes."""
    warps_of = amax_route.amax_warps
    monkeypatch.setattr(amax_route, "amax_warps", lambda side, _: warps_of(side, 100))
    monkeypatch.setattr(grouped_route, "LOOPS", ((1, 2),))
    test_bytes_of_tokens(pair, "ragged")
    test_bytes_of_tokens(pair, "uneven")


@pytest.mark.parametrize("shape", [(3, 23, 40), (4, 256, 512)])
@pytest.mark.parametrize("pair", PAIRS)
def test_bytes_of_experts(pair, shape):
    w = torch.randn(shape, device="cuda").bfloat16()
    for scale_layout in SCALE_LAYOUTS:
        options = {**draws(), "scale_layout": scale_layout}
        expected = reference.grouped_quantize_row_col(w, None, *both_sides(*PAIRS[pair], **options))
        same_blocks(backend.grouped_quantize_row_col(w, None, *both_sides(*PAIRS[pair], **options)), expected)


@pytest.mark.parametrize("pair", ["activation", "gradient", "tile", "4over6", "mxfp8", "widest"])
def test_transient_values_are_the_decoded_codes(pair):
    sizes, padding, cols = SIZES["uneven"]
    x, offsets, specs = tokens(sizes, padding, cols), ends(sizes).cuda(), PAIRS[pair]
    codes = backend.grouped_quantize_row_col(x, offsets, *both_sides(*specs, **draws()))
    values = backend.grouped_quantize_row_col(x, offsets, *both_sides(*specs, transient=(True, True), **draws()))
    expected = backend.grouped_values(codes[0], specs[0], offsets, cols)
    checks.same(values[0].qdata[: sum(sizes)], expected[: sum(sizes)])
    end = int(group_ends(offsets, group_alignment(specs[1]))[-1])
    expected = backend.grouped_values(codes[1], specs[1], offsets, len(x), split=True)
    checks.same(values[1].qdata[:, :end], expected[:, :end])
    checks.same(values[0].amax, codes[0].amax)


@pytest.mark.parametrize("shape", [(3, 48, 1280), (2, 32, 1024), (2, 32, 2880), (2, 32, 1296), (2, 23, 40)])
def test_tiles_as_codes_and_values(shape):
    """NaN, Inf and zeros included, where whole programs cover the experts and where not."""
    w, spec = torch.randn(shape, device="cuda").bfloat16(), SPECS["tile"]
    w[0, 3, 5], w[1, 20, 7], w[1, :16] = torch.nan, -torch.inf, 0
    expected, _ = reference.grouped_quantize_row_col(w, None, *both_sides(spec, None))
    codes, _ = backend.grouped_quantize_row_col(w, None, *both_sides(spec, None))
    same_blocks([codes], [expected])
    values, _ = backend.grouped_quantize_row_col(w, None, *both_sides(spec, None, transient=(True, False)))
    checks.same(values.qdata, backend.grouped_values(expected, spec, None, shape[-1]))


@pytest.mark.parametrize("variant", ["auto", "pointer"])
@pytest.mark.parametrize("dtype,accumulate", [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)])
@pytest.mark.parametrize("groups", ["ragged", "all_to_first", "nothing", "uneven"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, groups, dtype, accumulate, variant):
    """fprop, dgrad with transposed experts, wgrad; NaN reaches only the products that read it."""
    (sizes, padding, cols), spec = SIZES[groups], PRODUCTS[name]
    x, offsets = tokens(sizes, padding, cols), ends(sizes).cuda()
    dy = torch.randn(len(x), 192, device="cuda").bfloat16()
    w = torch.randn(len(sizes), 192, cols, device="cuda").bfloat16()
    (row, col), (dy_row, dy_col) = (
        reference.grouped_quantize_row_col(t, offsets, *both_sides(spec, spec)) for t in (x, dy)
    )
    w_row, _ = reference.grouped_quantize_row_col(w, None, *both_sides(spec, None))
    rows, experts = (len(x), len(sizes))
    operand = lambda blocks, K: Operand(blocks, spec, K)  # noqa: E731
    cases = [
        ((rows, 192), operand(row, cols), operand(w_row, cols), cols),
        ((experts, 192, cols), operand(dy_col, rows), operand(col, rows), rows),
        ((rows, 192), operand(row, cols), w, cols),
        ((experts, 192, cols), dy.mT, x.mT, rows),
        ((rows, cols), dy, w.mT, 192),
    ]
    if spec.alignment == 16:
        cases.append(((rows, cols), operand(dy_row, 192), w.mT, 192))
    for shape, a, b, K in cases:
        existing = torch.randn(shape, device="cuda").to(dtype)
        if not accumulate:
            existing.fill_(torch.nan)
        expected = reference.grouped_gemm_nt(a, b, offsets, K, existing.clone(), accumulate=accumulate)
        actual = grouped_gemm_nt(a, b, offsets, K, existing.clone(), accumulate=accumulate, variant=variant)
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = (t.double().nan_to_num() for t in (actual, expected))
        bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
        assert (actual - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("experts_by", ["rows", "columns"])
def test_products_are_those_of_each_group_alone(experts_by):
    """Bit for bit: one chain of products in order, whatever the tile and the group."""
    sizes, cols = (1300, 700, 0, 1931), 1024  # so many tiles that no contraction is split
    x, offsets = tokens(sizes, 0, cols).nan_to_num(), ends(sizes).cuda()
    w = torch.randn(len(sizes), 8448, cols, device="cuda").bfloat16()
    w = w.mT.contiguous().mT if experts_by == "columns" else w
    row, _ = backend.grouped_quantize_row_col(x, offsets, *both_sides(hb.NVFP4(), None, transient=(True, False)))
    spec = hb.NVFP4()
    out = torch.empty(len(x), 8448, device="cuda", dtype=torch.bfloat16)
    grouped_gemm_nt(Operand(row, spec, cols), w, offsets, cols, out)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        alone = backend.from_values(row.qdata[part], row.amax[g], spec)
        checks.same(out[part], backend.gemm_nt(alone, backend.plain(w[g])))
        start += size


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_layer_follows_the_reference(recipe):
    sizes, padding, K, N = (70, 1, 0, 130, 33), 6, 200, 136
    torch.manual_seed(0)
    x, w, dy = torch.randn(sum(sizes) + padding, K), torch.randn(5, N, K), torch.randn(sum(sizes) + padding, N)
    results = []
    for device in ("cpu", "cuda"):
        inputs, weight = (t.bfloat16().to(device).requires_grad_() for t in (x, w))
        options = {"rng": hb.Philox(5, 8), "out_dtype": torch.float32}
        y = hb.grouped_linear(inputs, weight, ends(sizes).to(device), RECIPES[recipe], **options)
        y.backward(dy.bfloat16().to(device).float())
        results.append([y.detach().cpu(), inputs.grad.cpu(), weight.grad.cpu()])
    for name, ours, theirs in zip(("y", "dx", "dw"), results[1], results[0], strict=True):
        bound = 1e-5 if name == "y" else 5e-3  # gradients are rounded to bf16
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < bound, f"{name}: relative error {error:.2e}"


def test_nothing_is_read_on_the_host():
    """A layer, forward and backward, runs under a CUDA graph, and follows other offsets in a replay."""
    recipe = hb.recipes.nvfp4()
    x = torch.randn(512, 256, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(4, 128, 256, device="cuda").bfloat16().requires_grad_()
    offsets, place = ends((100, 200, 12, 200)).cuda(), StreamPhilox(hb.Philox(3, 4).on(torch.device("cuda")).base, 0)

    def step():
        y = hb.grouped_linear(x, w, offsets, recipe, rng=place)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, w))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in ((100, 200, 12, 200), (0, 500, 0, 1)):
        offsets.copy_(ends(sizes))
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            checks.same(replayed, eager)
