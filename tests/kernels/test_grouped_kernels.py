"""Grouped kernels in Triton's interpreter: bytes and products equal to the reference's loop over the groups."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch
from grouped_cases import EDEN, GROUPS, SPECS, ends
from torch.library import opcheck

import halfbyte as hb
from halfbyte import reference
from halfbyte.functional.split import LayerSplit, Part, cut
from halfbyte.kernels import backend
from halfbyte.kernels.amax.route import wide_side
from halfbyte.kernels.device.scales import rule_of
from halfbyte.kernels.gemm.grouped import clear_tail, grouped_gemm_nt
from halfbyte.kernels.groups import plan_groups
from halfbyte.kernels.quantize import grouped_route, strips_route
from halfbyte.kernels.quantize.one import quantize_side
from halfbyte.kernels.unpack.grouped_dequantize import grouped_dequantize
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, SWIZZLED_32_4_4, Blocks, Operand, group_alignment, group_ends
from halfbyte.reference.scale import global_scale
from halfbyte.sides import Side, both_sides

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on a GPU")

COLS = 40  # not a multiple of 16
SR = {"rounding": "stochastic"}
PAIRS = {
    "tile_4over6": (SPECS["tile_4over6"], SPECS["tile_4over6"]),
    "row": (SPECS["row"], SPECS["row"]),
    "gradient": (hb.NVFP4(**SR), hb.NVFP4(**SR, rotation=hb.Hadamard(signs="fresh"))),
    "wide": (hb.NVFP4(rotation=hb.Hadamard(size=32)), hb.NVFP4(rotation=hb.Hadamard(size=32), outer="row")),
    "widest": (hb.NVFP4(rotation=hb.Hadamard(size=64)), SPECS["rotated_fresh"]),
    "half_wide": (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard(size=64), outer="row", **SR)),
    "mixed": (SPECS["4over6"], hb.MXFP8()),
    "eden": (EDEN, SPECS["eden"]),
    "eden_wide": (SPECS["eden_rotated_fresh"], SPECS["eden_rotated_fresh"]),
}
"""Together every rounding, outer scale, rotation and choice of scales."""


def draws():
    cpu = torch.device("cpu")
    return {"draw": hb.Philox(2**64 - 3, 11).on(cpu), "sign_draw": hb.Philox(2**63, 12).on(cpu)}


def tokens(sizes, padding, dtype=torch.bfloat16):
    x = torch.randn(sum(sizes) + padding, COLS, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 100
    x[2:3, 5] = torch.nan
    x[sum(sizes) :] = torch.nan
    return x.to(dtype)


def same_blocks(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            checks.same(a, b)


def check_bytes(x, offsets, pair, **options):
    expected = reference.grouped_quantize_row_col(x, offsets, *both_sides(*pair, **draws(), **options))
    same_blocks(backend.grouped_quantize_row_col(x, offsets, *both_sides(*pair, **draws(), **options)), expected)


def same_values(values, codes, specs, rows, offsets):
    """Compare transient values with decoded codes, as far as groups reach."""
    columns = int(group_ends(offsets, group_alignment(specs[1]))[-1])
    row, col = (
        reference.decode(Operand(blocks, spec, blocks.qdata.shape[1] * 2)).values.bfloat16()
        for blocks, spec in zip(codes, specs, strict=True)
    )
    checks.same(values[0].qdata[:rows], row[:rows, : values[0].qdata.shape[1]])
    checks.same(values[1].qdata[:, :columns], col[:, :columns])


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_any_size(groups):
    sizes, padding = GROUPS[groups]
    pair = hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())
    check_bytes(tokens(sizes, padding), ends(sizes, torch.int64), pair, scale_layout=SWIZZLED_32_4_4)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_spec(pair):
    sizes, padding = GROUPS["ragged"]
    layout = SWIZZLED_32_4_4 if pair in ("tile_4over6", "mixed") else LINEAR
    dtype = torch.float32 if pair in ("row", "mixed") else torch.bfloat16
    check_bytes(tokens(sizes, padding, dtype), ends(sizes), PAIRS[pair], scale_layout=layout)


WIDEST = {
    "nearest": hb.NVFP4(rotation=hb.Hadamard(size=128)),
    "halves_differ": hb.NVFP4(rotation=hb.Hadamard(size=128, signs="+" * 64 + "-" * 64)),
    "stochastic": hb.NVFP4(**SR, rotation=hb.Hadamard(size=128, signs="+--+")),
    "row": hb.NVFP4(rotation=hb.Hadamard(size=128, signs="fresh"), outer="row"),
    "eden": SPECS["eden_rotated_fresh"],
    "candidates": hb.NVFP4(rotation=hb.Hadamard(size=128), scaling=hb.FourOverSix(), e4m3_max=256.0),
    "half": hb.NVFP4(rotation=hb.Hadamard(size=64), outer="row"),
}
WIDE_SIZES = (131, 0, 127)  # a whole tile, a little of one and all but one row, NaN and Inf in either; no 0 behind
READ = {"words": (0, torch.bfloat16), "values": (1, torch.bfloat16), "fp32": (0, torch.float32)}


@pytest.mark.parametrize(
    "name,kind",
    [*((name, "words") for name in WIDEST), *(("eden", kind) for kind in ("values", "fp32")), ("row", "fp32")],
)
def test_threads_share_groups_of_128(name, kind):
    """Rows in words, value by value, and of another dtype."""
    spec, (start, dtype), rows = WIDEST[name], READ[kind], sum(WIDE_SIZES)
    x = torch.randn(rows + 3, start + 200, generator=torch.Generator().manual_seed(7)).to(dtype)[:, start:]
    x[3, 5], x[130, 190], x[rows:] = torch.nan, torch.inf, 3e4
    found = wide_side(x, plan_groups(ends(WIDE_SIZES), 3, len(x), 128, x.device), rule_of(spec, 0), False)
    shared = name not in ("halves_differ", "candidates", "half")
    assert (found.rule.paired, found.packed) == (shared, kind == "words")
    check_bytes(x, ends(WIDE_SIZES), (spec, spec))


@pytest.mark.parametrize("name", ["stochastic", "eden"])
def test_experts_and_values_of_groups_of_128(name):
    spec, rows = WIDEST[name], sum(WIDE_SIZES)
    x, offsets = torch.randn(rows, 136, generator=torch.Generator().manual_seed(8)).bfloat16(), ends(WIDE_SIZES)
    check_bytes(x.unflatten(0, (1, rows)), None, (spec, spec))
    codes = reference.grouped_quantize_row_col(x, offsets, *both_sides(spec, spec, **draws()))
    values = backend.grouped_quantize_row_col(x, offsets, *both_sides(spec, spec, transient=(True, True), **draws()))
    same_values(values, codes, (spec, spec), rows, offsets)


@pytest.mark.parametrize("pair", ["tile_4over6", "mixed", "gradient", "widest"])
def test_experts(pair):
    w = torch.randn(3, 23, COLS, generator=torch.Generator().manual_seed(2)).bfloat16()
    w[1] = 0
    w[2, 3, 4] = torch.inf
    check_bytes(w, None, PAIRS[pair], scale_layout=SWIZZLED_32_4_4 if pair == "mixed" else LINEAR)


@pytest.mark.parametrize("shape", [(2, 16, 0), (2, 0, 32)])
@pytest.mark.parametrize("pair", ["tile_4over6", "row", "gradient", "mixed"])
def test_experts_without_features(shape, pair):
    check_bytes(torch.zeros(shape, dtype=torch.bfloat16), None, PAIRS[pair])


def test_an_amax_of_the_caller_is_used():
    sizes, padding = GROUPS["ragged"]
    x, offsets = tokens(sizes, padding), ends(sizes)
    amax, by_row = torch.tensor([1.0, torch.nan, 3.0, 0.0, -1.0]), torch.rand(len(x))
    check_bytes(x, offsets, (hb.NVFP4(), hb.NVFP4()), row_amax=amax, col_amax=2 * amax)
    spec = hb.NVFP4(outer="row")
    given = {"row_amax": by_row, "col_amax": torch.rand(5, COLS)}
    expected = reference.grouped_quantize_row_col(x, offsets, *both_sides(spec, spec, **given))
    by_row[-1] = torch.nan  # of a token behind the last group: not read
    for ours, theirs in zip(
        backend.grouped_quantize_row_col(x, offsets, *both_sides(spec, spec, **given)), expected, strict=True
    ):
        checks.same(ours.qdata, theirs.qdata)
        checks.same(ours.block_scale, theirs.block_scale)


@pytest.mark.parametrize("pair", ["gradient", "plain", "tile_4over6"])
def test_whole_tiles_of_columns(pair):
    """Ragged tiles repeat their last row; an amax that is no maximum makes NaN of its group, but not of the padding."""
    specs = (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())) if pair == "plain" else PAIRS[pair]
    x, offsets = torch.randn(71, 256, generator=torch.Generator().manual_seed(5)).bfloat16(), ends((67, 3))
    x[3, 9] = torch.nan
    given = {f"{side}_amax": torch.tensor([4.0, torch.nan]) for side in ("row", "col")}
    check_bytes(x, offsets, specs, **given)
    given = {name: amax.nan_to_num(3.0) for name, amax in given.items()}
    codes = reference.grouped_quantize_row_col(x, offsets, *both_sides(*specs, **draws(), **given))
    values = backend.grouped_quantize_row_col(
        x, offsets, *both_sides(*specs, transient=(True, True), **draws(), **given)
    )
    same_values(values, codes, specs, 70, offsets)


def test_several_tiles_a_program(monkeypatch):
    """Programs that draw go through tiles beside each other; groups of an amax that is not regular divide otherwise."""
    monkeypatch.setattr(grouped_route, "LOOPS", ((1, 2),))
    specs = hb.NVFP4(**SR), hb.NVFP4(**SR, rotation=hb.Hadamard())
    x, offsets = torch.randn(115, 512, generator=torch.Generator().manual_seed(6)).bfloat16(), ends((67, 40, 3))
    x[80:84] *= 2.0**-70
    given = {f"{side}_amax": torch.tensor([4.0, 1e-30, 0.0]) for side in ("row", "col")}
    check_bytes(x, offsets, specs, **given)
    codes = reference.grouped_quantize_row_col(x, offsets, *both_sides(*specs, **draws(), **given))
    values = backend.grouped_quantize_row_col(
        x, offsets, *both_sides(*specs, transient=(True, True), **draws(), **given)
    )
    same_values(values, codes, specs, 110, offsets)


def test_experts_with_ragged_columns_have_a_program_a_tile(monkeypatch):
    monkeypatch.setattr(grouped_route, "LOOPS", ((1, 2),))
    w = torch.randn(2, 32, 300, generator=torch.Generator().manual_seed(8)).bfloat16()
    check_bytes(w, None, (hb.NVFP4(**SR), hb.NVFP4(**SR)))


@pytest.mark.parametrize("pair", ["gradient", "widest"])
def test_transient_values_are_the_decoded_codes(pair):
    sizes, padding = GROUPS["ragged"]
    x, offsets, specs = tokens(sizes, padding), ends(sizes), PAIRS[pair]
    codes = reference.grouped_quantize_row_col(x, offsets, *both_sides(*specs, **draws()))
    values = backend.grouped_quantize_row_col(x, offsets, *both_sides(*specs, transient=(True, True), **draws()))
    same_values(values, codes, specs, sum(sizes), offsets)


def exact(*shape):
    """Values whose codes, and all sums of products of them, are exact in fp32: results do not depend on the order."""
    values = torch.tensor([-6, -4, -3, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    chosen = torch.randint(0, len(values), shape, generator=torch.Generator().manual_seed(3))
    x = values[chosen]
    x[..., ::16] = 6.0
    return x


def transient(side):
    """Return an operand decoded by the reference: the interpreter spends most of a product on decoding."""
    (qdata, scale, amax), spec, cols, _ = side
    flat = Blocks(qdata.flatten(0, -2), scale.flatten(0, -2), amax)
    values = reference.decode(Operand(flat, spec, scale.shape[-1] * spec.block_length)).values.bfloat16()
    return Operand(Blocks(values.view(*qdata.shape[:-1], -1), scale.new_empty(0), amax), spec, cols)


class TestProducts:
    sizes, padding = GROUPS["ragged"]
    offsets = ends(sizes)
    rows, experts, N = sum(sizes) + padding, len(sizes), 8

    def check(self, shape, a, b, K, dtype=torch.bfloat16, accumulate=False, variant="auto", as_values=False):
        out = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        expected = reference.grouped_gemm_nt(a, b, self.offsets, K, out.clone(), accumulate=accumulate)
        if as_values:
            a, b = transient(a), transient(b)
        actual = grouped_gemm_nt(a, b, self.offsets, K, out.clone(), accumulate=accumulate, variant=variant)
        checks.same(actual + 0.0, expected + 0.0)  # zeros of either sign

    @pytest.mark.parametrize("spec,variant", [(s, "auto") for s in ("standard", "row", "mxfp8")] + [("row", "pointer")])
    def test_quantized(self, spec, variant):
        spec = SPECS[spec]
        x, dy, w = exact(self.rows, COLS), exact(self.rows, self.N), exact(self.experts, self.N, COLS)
        x[2, 5] = x[self.rows - 1] = torch.nan  # one block of one group; a token behind the last
        (row, col), (_, dy_col) = (
            reference.grouped_quantize_row_col(t, self.offsets, *both_sides(spec, spec)) for t in (x, dy)
        )
        w_row, _ = reference.grouped_quantize_row_col(w, None, *both_sides(spec, None))
        lengths = (COLS, COLS, self.rows, self.rows)
        sides = [Operand(blocks, spec, K) for blocks, K in zip((row, w_row, dy_col, col), lengths, strict=True)]
        accumulate = spec.key == SPECS["row"].key
        options = {"dtype": torch.float32, "accumulate": accumulate, "variant": variant, "as_values": True}
        self.check((self.rows, self.N), *sides[:2], COLS, **options)
        self.check((self.experts, self.N, COLS), *sides[2:], self.rows, **options)
        if spec.key == SPECS["standard"].key:  # what other codes become is the matter of test_dequantize
            self.check((self.rows, self.N), *sides[:2], COLS)

    def test_plain_and_swizzled(self):
        spec = hb.NVFP4()
        x, dy, w = (t.bfloat16() for t in (exact(self.rows, COLS), exact(self.rows, 64), exact(self.experts, 64, COLS)))
        row, col = reference.grouped_quantize_row_col(
            x, self.offsets, *both_sides(spec, spec, scale_layout=SWIZZLED_32_4_4)
        )
        row, col = Operand(row, spec, COLS, SWIZZLED_32_4_4), Operand(col, spec, self.rows, SWIZZLED_32_4_4)
        self.check((self.rows, 64), row, w, COLS)
        self.check((self.experts, 64, COLS), dy.mT, col, self.rows)
        self.check((self.experts, 64, COLS), dy.mT, x.mT, self.rows)
        self.check((self.rows, COLS), dy, w.mT, 64)  # experts with contiguous columns

    def test_a_part_of_operands_with_an_amax_a_row(self):
        """As ranks that share experts by features cut them out of the whole operands."""
        spec, split = SPECS["row"], LayerSplit(dim="N", borders=(0, 3, self.N), cuts=(0, 3, self.N), rank=1, group="")
        x, dy, w = exact(self.rows, COLS), exact(self.rows, self.N), exact(self.experts, self.N, COLS)
        w[:, 4] *= 8  # rows and experts have amaxes of their own
        row, col = reference.grouped_quantize_row_col(x, self.offsets, *both_sides(spec, spec))
        _, dy_col = reference.grouped_quantize_row_col(dy, self.offsets, *both_sides(None, spec))
        w_row, _ = reference.grouped_quantize_row_col(w, None, *both_sides(spec, None))
        of_w = cut(Operand(w_row, spec, COLS), Part(split, 0, split.borders), 0)
        of_dy = cut(Operand(dy_col, spec, self.rows), Part(split, 1, split.borders), 1)
        self.check((self.rows, self.N - 3), Operand(row, spec, COLS), of_w, COLS)
        self.check((self.experts, self.N - 3, COLS), of_dy, Operand(col, spec, self.rows), self.rows)

    def test_chains_of_a_long_contraction(self, monkeypatch):
        monkeypatch.setattr("halfbyte.kernels.gemm.route.MAX_CHAIN", 64)
        spec, offsets = hb.NVFP4(), ends((130, 0, 60))
        _, col = reference.grouped_quantize_row_col(exact(190, COLS), offsets, *both_sides(None, spec))
        side, shape = Operand(col, spec, 190), (3, COLS, COLS)
        expected = reference.grouped_gemm_nt(side, side, offsets, 190, torch.empty(shape))
        for variant in ("auto", "pointer"):
            actual = grouped_gemm_nt(*2 * [transient(side)], offsets, 190, torch.empty(shape), variant=variant)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # the factor is applied per chain


@pytest.mark.parametrize("scale_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("spec", ["standard", "row", "mxfp8"])
def test_dequantize(spec, scale_layout):
    (sizes, padding), spec = ((3, 1, 0, 4), 2), SPECS[spec]  # a program a row: few of them
    for t, offsets in ((tokens(sizes, padding), ends(sizes)), (tokens((2 * 3,), 0).view(2, 3, COLS), None)):
        blocks, _ = reference.grouped_quantize_row_col(t, offsets, *both_sides(spec, None, scale_layout=scale_layout))
        operand = Operand(blocks, spec, COLS, scale_layout)
        expected = reference.grouped_dequantize(operand, offsets, torch.float32)
        checks.same(grouped_dequantize(operand, offsets, torch.float32), expected)


def test_rows_behind_the_last_group_are_cleared():
    out, offsets = torch.ones(70, 24), ends((3, 0, 40))
    clear_tail(out, offsets)
    assert out[:43].eq(1).all() and out[43:].eq(0).all()


def test_opcheck_of_what_only_kernels_have(monkeypatch):
    for module in ("define", "grouped"):
        monkeypatch.setattr(f"halfbyte.ops.{module}.choose", lambda *arguments: "triton")
    spec = SPECS["tile"]
    blocks, _ = reference.grouped_quantize_row_col(torch.randn(2, 1, COLS), None, *both_sides(spec, None))
    arguments = (*blocks, spec.key, COLS, "")
    opcheck(torch.ops.halfbyte.grouped_decode, arguments)
    values = torch.ops.halfbyte.grouped_decode(*arguments).float() * global_scale(blocks.amax, spec)[:, None, None]
    expected = reference.grouped_dequantize(Operand(blocks, spec, COLS), None, torch.float32)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


def test_layer(monkeypatch):
    """Forward and backward on the kernels, experts quantized once for both GEMMs where they are tiles."""
    sizes, K, N = (17, 9), 24, 16
    generator = torch.Generator().manual_seed(6)
    x, w, dy = (torch.randn(*s, generator=generator).bfloat16() for s in ((28, K), (2, N, K), (28, N)))
    results = []
    for on_kernels in (False, True):
        if on_kernels:
            for module in ("define", "grouped"):
                monkeypatch.setattr(f"halfbyte.ops.{module}.choose", lambda *arguments: "triton")
            monkeypatch.setattr("halfbyte.ops.emulates", lambda device: True)
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = hb.grouped_linear(*leaves, ends(sizes), hb.recipes.nvfp4(), rng=hb.Philox(5, 8))
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=2**-7, atol=1e-6
        )  # one rounding to bf16 of sums in two orders
        assert actual.ne(expected).float().mean() < 0.01


@pytest.mark.parametrize("name,cols", [("tile", 256), ("tile", 1296), ("tile", 272), ("row", 256), ("mxfp8", 256)])
def test_experts_in_whole_tiles(name, cols):
    w, spec = torch.randn((2, 32, cols), generator=torch.Generator().manual_seed(7)).bfloat16(), SPECS[name]
    w[0, 3, 5], w[1] = torch.nan, 0
    expected, _ = reference.grouped_quantize_row_col(w, None, *both_sides(spec, None))
    decoded = transient(Operand(expected, spec, cols)).blocks.qdata
    if name == "tile":
        assert strips_route.strips_problem(w, spec) is None
    codes, _ = backend.grouped_quantize_row_col(w, None, *both_sides(spec, None))
    same_blocks([codes], [expected])
    given = None if name == "mxfp8" else 2 * reference.quantize(w[0], spec).amax
    same_blocks([quantize_side(w[0], Side(spec, amax=given))], [reference.quantize(w[0], spec, amax=given)])
    amax = None if codes.amax.numel() == 0 else codes.amax
    values, _ = backend.grouped_quantize_row_col(
        w, None, *both_sides(spec, None, row_amax=amax, transient=(True, False))
    )
    checks.same(values.qdata, decoded)
