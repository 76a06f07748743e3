"""What the tests of the quantization kernels share, on the CPU (interpreter) and on a GPU alike."""

from __future__ import annotations

from dataclasses import replace

import golden_vectors as golden
import kernel_checks as checks
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels import backend
from halfbyte.kernels.amax import plain, route
from halfbyte.kernels.device import tile_blocks
from halfbyte.kernels.quantize import both_route, lines
from halfbyte.kernels.quantize.route import ONE, OneSide
from halfbyte.kernels.route import choose_from
from halfbyte.kernels.unpack.dequantize import dequantize
from halfbyte.layout import Blocks, Operand
from halfbyte.sides import Side, both_sides

QUANTIZED = [case for case in golden.cases(*golden.QUANTIZE_KINDS) if case.has("qdata")]
EDEN_VECTORS = golden.cases("reference_nvfp4")
QUANTIZED += EDEN_VECTORS
ROW_COL = golden.cases("edge_row_col")

SR = {"rounding": "stochastic"}
EDEN = hb.NVFP4(scaling=hb.Eden(), fp4_max=hb.recipes.EDEN_FP4_MAX, e4m3_max=hb.recipes.EDEN_E4M3_MAX)
SPECS = (
    hb.NVFP4(),
    hb.NVFP4(outer="row"),
    hb.NVFP4(block=(16, 16)),
    hb.NVFP4(rounding="toward_zero"),
    hb.NVFP4(**SR),
    hb.NVFP4(**SR, fp4_max=6 * 16 / 17),
    hb.NVFP4(**SR, block=(16, 16)),
    hb.NVFP4(**SR, rotation=hb.Hadamard()),
    hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256),
    hb.NVFP4(scaling=hb.FourOverSix(error="mse"), outer="row"),
    hb.NVFP4(scaling=hb.FourOverSix(error_math="scaled"), e4m3_max=256),
    hb.NVFP4(scaling=hb.FourOverSix(error="mse", error_math="scaled", candidates=(0.875, 1, 1.25, 1.5))),
    hb.NVFP4(scaling=hb.FourOverSix(), block=(16, 16), e4m3_max=256),
    hb.NVFP4(scaling=hb.FourOverSix(), rotation=hb.Hadamard(), e4m3_max=256),
    hb.NVFP4(rotation=hb.Hadamard(), outer="row"),
    hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh")),
    hb.NVFP4(rotation=hb.Hadamard(size=64)),
    hb.NVFP4(rotation=hb.Hadamard(size=128, signs="fresh")),
    hb.MXFP8(),
    hb.MXFP8(element="e5m2"),
    EDEN,
    replace(EDEN, outer="row", rotation=hb.Hadamard()),
    hb.NVFP4(**SR, rotation=hb.Hadamard(size=32, signs="-++-+---")),
    hb.NVFP4(rotation=hb.Hadamard(size=64, signs=16 * "-+" + 15 * "+-" + "--"), outer="row"),
    replace(EDEN, rotation=hb.Hadamard(size=128, signs="fresh")),
)
PAIRS = (
    (hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(**SR), hb.NVFP4(**SR, rotation=hb.Hadamard())),
    (hb.NVFP4(), hb.MXFP8()),
    (hb.NVFP4(block=(16, 16)), hb.NVFP4(block=(16, 16))),
    (hb.NVFP4(), hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix())),
    (hb.NVFP4(outer="row"), hb.NVFP4(outer="row")),
    (hb.MXFP8(), hb.MXFP8(element="e5m2")),
    (None, hb.NVFP4(rotation=hb.Hadamard())),
    (hb.NVFP4(), None),
    (EDEN, replace(EDEN, rotation=hb.Hadamard(signs="fresh"))),
    (SPECS[-1], SPECS[-1]),
)
WIDE = [
    hb.NVFP4(rotation=hb.Hadamard(size=size, signs=signs), outer=outer)
    for size in (32, 64, 128)
    for signs, outer in (("fresh", "tensor"), ("fixed", "row"), ("-+++" * (size // 8) + "+" * (size // 2), "tensor"))
]
WIDE_COLUMNS = [
    hb.NVFP4(rotation=hb.Hadamard(size=64)),
    hb.NVFP4(**SR, rotation=hb.Hadamard(size=128, signs="fresh")),
    hb.NVFP4(outer="row", rotation=hb.Hadamard(size=128)),
    replace(EDEN, rotation=hb.Hadamard(size=64)),
    replace(EDEN, rotation=hb.Hadamard(size=128, signs="fresh")),
]
HALVES = [
    hb.NVFP4(**SR, rotation=hb.Hadamard(size=128, signs="--+-" * 15 + "+--+")),
    hb.NVFP4(outer="row", rotation=hb.Hadamard(size=128, signs="fresh")),
]
"""Of groups that two threads share along rows: signs of a half, the first of which is minus, and fresh ones."""
AMAXES = ((4.0, 3.0), (1e-30, 4.0), (4.0, 3e38), (torch.nan, 0.0))
"""Of row and col: what a program divides by without checks, and what it does not."""


def same_blocks(actual: Blocks | None, expected: Blocks | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        for got, want in zip(actual, expected, strict=True):
            checks.same(got, want)


def draws(device: str) -> dict:
    """Return a draw with all its words in use, and the place of fresh signs."""
    place = hb.Philox(0x123456789ABCDEF0, (7 << 32) + 5)
    return {"draw": place.on(device), "sign_draw": hb.Philox(99, 3).on(device)}


def sample(kind: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> Tensor:
    """Return values that reach the corners of the casts: ties, subnormals, outliers, NaN and Inf."""
    x = torch.randn(shape, device=device)
    if kind == "heavy":
        x = x / torch.rand(shape, device=device).clamp_min(1e-4)
    elif kind == "ties":
        x = (x * 8).round() / 8
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "nonfinite":
        count = max(1, x.numel() // 2000)
        for value in (float("nan"), float("inf")):
            x.view(-1)[torch.randint(x.numel(), (count,), device=device)] = value
    return x.to(dtype)


ANY_SIZE = [line for line in ONE if line.kernel not in ("quantize_small_kernel", "quantize_tiles_kernel")]


def by_lines(x: Tensor, side: Side) -> Blocks:
    """Quantize a tensor, however small, with the kernels that take any size."""
    request = OneSide(x.reshape(layout.matrix_shape(x.shape)), side)
    return lines.quantize_any(choose_from(ANY_SIZE, request)) if x.numel() else lines.without_values(request)


def check_golden(case: golden.Case) -> None:
    """The kernels give a vector's bytes in both scale layouts."""
    entry, spec = case.entry, golden.spec_of(case.entry)
    x = case.tensor("x", entry["dtype"])
    x = x.T if entry.get("transposed") or case.kind == "nvfp4_rht_col" else x
    draw = golden.place_of(entry).on(x.device)
    options = {"draw": draw, "sign_draw": draw}
    if case.has("given_amax"):
        given = case.tensor("given_amax")
        options["amax"] = given if spec.outer == "row" else given.reshape(())
    blocks = by_lines(x, Side(spec, **options))
    golden.assert_same(blocks.qdata, case.array("qdata"), "qdata")
    golden.assert_same(blocks.block_scale, case.array("block_scale"), "block_scale")
    if case.has("amax"):
        golden.assert_same(blocks.amax, case.array("amax"), "amax")
    swizzled = by_lines(x, Side(spec, scale_layout=layout.SWIZZLED_32_4_4, **options))
    checks.same(swizzled.block_scale, layout.swizzle(case.tensor("block_scale")))
    checks.same(swizzled.qdata, blocks.qdata)


def check_golden_row_col(case: golden.Case) -> None:
    entry = case.entry
    draw = golden.place_of(entry).on(case.device)
    specs = golden.spec_of(entry["row"]), golden.spec_of(entry["col"])
    both = backend.quantize_row_col(case.tensor("x", entry["dtype"]), *both_sides(*specs, draw=draw, sign_draw=draw))
    for prefix, blocks in zip(("row_", "col_"), both, strict=True):
        for name in ("qdata", "block_scale", "amax"):
            if case.has(prefix + name):
                golden.assert_same(getattr(blocks, name), case.array(prefix + name), prefix + name)


def check_against_reference(x: Tensor, spec: hb.NVFP4 | hb.MXFP8, scale_layout: str) -> None:
    options = {**draws(x.device), "scale_layout": scale_layout}
    same_blocks(by_lines(x, Side(spec, **options)), reference.quantize(x, spec, **options))


NARROW = [hb.NVFP4(), hb.NVFP4(**SR), hb.NVFP4(**SR, rotation=hb.Hadamard()), hb.NVFP4(scaling=hb.FourOverSix())]
NARROW += [EDEN, hb.NVFP4(outer="row"), hb.NVFP4(block=(16, 16)), hb.MXFP8(), hb.NVFP4(rotation=hb.Hadamard(size=32))]
"""Of tensors whose rows are no power of two, and may be read as if they were."""


def check_narrow_rows(spec: hb.NVFP4 | hb.MXFP8, rows: int, device: str) -> None:
    """A draw that goes through rows of the tensor or of a larger one, codes and values, contiguous or not."""
    x = sample("nonfinite", (rows, 3 * spec.alignment), torch.bfloat16, device)
    blocks = x.shape[1] // spec.block_length
    for per_row in (None, blocks, 5 * blocks):
        draw = hb.Philox(2**63 + 5, 2**62, first_block=2**32 - 70, blocks_per_row=per_row).on(x.device)
        options = {"draw": draw, "sign_draw": draws(device)["sign_draw"]}
        expected = reference.quantize(x, spec, **options)
        same_blocks(by_lines(x, Side(spec, **options)), expected)
        same_blocks(by_lines(torch.cat((x, x), 1)[:, : x.shape[1]], Side(spec, **options)), expected)
    values = by_lines(x, Side(spec, transient=True, **options)).qdata
    stored = Operand(expected, spec, x.shape[1])
    checks.same(values, reference.decode(stored).values.bfloat16())
    checks.same(dequantize(stored), reference.dequantize(stored))


def check_rotated_amax(x: Tensor, col: hb.NVFP4, hardware: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maxima of x and of the rotated x.T, found with the tile of another target, are the reference's."""
    tile_of = route.rotated_tile
    monkeypatch.setattr(route, "rotated_tile", lambda rule, packed, _: tile_of(rule, packed, hardware))
    sign_draw = draws(x.device)["sign_draw"]
    ours = plain.row_col_amax(x, hb.NVFP4(), col, sign_draw)
    checks.same(ours[0], reference.finite_amax(x))
    checks.same(ours[1], reference.quantize(x.T, col, sign_draw=sign_draw).amax)


ROTATED_LINES = [
    hb.NVFP4(rotation=hb.Hadamard(size=size, signs=signs))
    for size in (16, 32, 64, 128)
    for signs in ("fresh", "fixed", "-+++" * (size // 8) + "+" * (size // 2))
]


def check_rotated_rows(x: Tensor, spec: hb.NVFP4) -> None:
    """The maximum of rows read in words is that of the values which the reference rotates."""
    sign_draw = draws(x.device)["sign_draw"]
    assert route.choose_amax(route.AmaxOfOne(x, spec)).kernel == "amax_rotated_rows_kernel"
    ours = plain.operand_amax(x, spec, sign_draw)
    checks.same(ours, reference.quantize(x, spec, sign_draw=sign_draw).amax)


@triton.jit
def tile_sums_kernel(e_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, AXIS: tl.constexpr):
    places = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(out_ptr + places, tile_blocks.tree_sum(tl.load(e_ptr + places), AXIS))


def check_tile_sums(axis: int, device: str) -> None:
    """The errors of a tile's 16 blocks are added as section 5 says: any other order has other bits somewhere."""
    e = (torch.randn(32, 64, generator=torch.Generator().manual_seed(axis)) * 10).exp().to(device)
    sums = torch.empty_like(e)
    tile_sums_kernel[(1,)](e, sums, A=32, B=64, AXIS=axis, enable_fp_fusion=False)
    blocks = list(e.view(2, 16, 64).unbind(1) if axis == 0 else e.view(32, 4, 16).unbind(2))
    for apart in (8, 4, 2, 1):
        blocks = [blocks[r] + blocks[r + apart] for r in range(apart)]
    tiles = blocks[0].repeat_interleave(16, axis)
    checks.same(sums, tiles)


def check_several_tiles(device: str, amaxes: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that draw go through tiles beside each other; those of an amax that is not regular divide otherwise."""
    monkeypatch.setattr(both_route, "LOOPS", ((1, 2),))
    x = sample("heavy", (64, 256), torch.bfloat16, device)
    given = dict(zip(("row_amax", "col_amax"), (torch.tensor(a, device=device) for a in amaxes), strict=True))
    draw = hb.Philox(2**63 + 5, 2**62, first_block=2**32 - 70, blocks_per_row=2**20).on(x.device)
    asked = both_sides(*PAIRS[1], draw=draw, **given)
    expected = reference.quantize_row_col(x, *asked)
    for ours, theirs in zip(backend.quantize_row_col(x, *asked), expected, strict=True):
        same_blocks(ours, theirs)


def check_row_col(x: Tensor, pair: tuple, scale_layout: str) -> None:
    options = {**draws(x.device), "scale_layout": scale_layout}
    actual, expected = (
        backend.quantize_row_col(x, *both_sides(*pair, **options)),
        reference.quantize_row_col(x, *both_sides(*pair, **options)),
    )
    for got, want in zip(actual, expected, strict=True):
        same_blocks(got, want)
