"""The grouped ops: bytes equal a loop over the groups in every layout, opcheck, flop formula."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import GROUPS, RAGGED, SPECS, ends, slices
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import halfbyte as hb
from halfbyte import layout
from halfbyte.layout import Operand
from halfbyte.reference import dequantize, quantize_row_col
from halfbyte.sides import both_sides

HB = torch.ops.halfbyte
COLS = 40  # not a multiple of 16
LAYOUTS = ["linear", "swizzled_32_4_4"]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_layout = pytest.mark.parametrize("scale_layout", LAYOUTS)
RNG, SIGNS = hb.Philox(2**64 - 3, 11), hb.Philox(2**63, 12)
CPU = torch.device("cpu")


def alone(x_g, row_spec, col_spec, g, scale_layout):
    """Quantize one group with the seed that section 8 of numerics.md gives it."""
    step = g * 0x9E3779B97F4A7C15
    rng, signs = (hb.Philox((place.seed + step) % 2**64, place.offset).on(CPU) for place in (RNG, SIGNS))
    return quantize_row_col(x_g, *both_sides(row_spec, col_spec, draw=rng, sign_draw=signs, scale_layout=scale_layout))


def tokens(sizes, padding):
    x = torch.randn(sum(sizes) + padding, COLS, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 100
    x[sum(sizes) :] = torch.nan
    return x


def quantized(x, offsets, spec, scale_layout):
    return hb.grouped_quantize_row_col(x, offsets, spec, spec, rng=RNG, sign_rng=SIGNS, scale_layout=scale_layout)


@every_layout
@every_spec
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_tokens_along_the_rows(spec, scale_layout, groups):
    sizes, padding = GROUPS[groups]
    x = tokens(sizes, padding)
    row, _ = quantized(x, ends(sizes), spec, scale_layout)
    blocks, region = row.blocks, 0
    for g, rows in enumerate(slices(sizes)):
        want, _ = alone(x[rows], spec, None, g, scale_layout)
        assert torch.equal(blocks.qdata[rows], want.qdata)
        if scale_layout == "linear":
            assert torch.equal(blocks.block_scale[rows], want.block_scale)
        else:
            size = want.block_scale.numel()
            assert torch.equal(blocks.block_scale[region : region + size], want.block_scale)
            region += size
        if row.amax is not None:
            assert torch.equal(row.amax[rows] if spec.outer == "row" else row.amax[g], want.amax)
    assert not blocks.qdata[sum(sizes) :].any()
    assert not blocks.block_scale[sum(sizes) if scale_layout == "linear" else region :].any()
    assert torch.equal(row.dequantize()[sum(sizes) :], torch.zeros(padding, COLS))


@every_layout
@every_spec
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_tokens_along_the_contraction(spec, scale_layout, groups):
    sizes, padding = GROUPS[groups]
    x = tokens(sizes, padding)
    _, col = quantized(x, ends(sizes), spec, scale_layout)
    blocks, per_byte = col.blocks, spec.format.codes_per_byte
    alignment = layout.group_alignment(spec)
    starts = [0, *layout.group_ends(ends(sizes), alignment).tolist()]
    region = 0
    for g, rows in enumerate(slices(sizes)):
        _, want = alone(x[rows], spec, spec, g, scale_layout)
        assert starts[g] % 64 == 0 and starts[g + 1] - starts[g] == layout.round_up(sizes[g], alignment)
        part = blocks.qdata[:, starts[g] // per_byte : starts[g + 1] // per_byte]
        width = want.qdata.shape[1]
        assert torch.equal(part[:, :width], want.qdata) and not part[:, width:].any()
        if scale_layout == "linear":
            part = blocks.block_scale[:, starts[g] // spec.block_length : starts[g + 1] // spec.block_length]
            width = want.block_scale.shape[1]
            assert torch.equal(part[:, :width], want.block_scale) and not part[:, width:].any()
        else:
            size = want.block_scale.numel()
            assert torch.equal(blocks.block_scale[region : region + size], want.block_scale)
            region += size
        if col.amax is not None:
            assert torch.equal(col.amax[g], want.amax)
    assert not blocks.qdata[:, starts[-1] // per_byte :].any()
    if scale_layout != "linear":
        assert not blocks.block_scale[region:].any()
    assert col.shape == (COLS, len(x)) and col.splits_columns


@every_layout
@every_spec
def test_weights_of_experts(spec, scale_layout):
    w = (
        torch.randn(3, 23, COLS, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 9.0, 0.0])[:, None, None]
    )
    row, col = quantized(w, None, spec, scale_layout)
    for q, shape, side in ((row, (3, 23, COLS), 0), (col, (3, COLS, 23), 1)):
        assert q.shape == shape
        parts = [t.unflatten(0, (3, -1)) for t in q.blocks[:2]]
        for g in range(3):
            want = alone(w[g], spec, spec, g, scale_layout)[side]
            assert torch.equal(parts[0][g], want.qdata) and torch.equal(parts[1][g], want.block_scale)
            if q.amax is not None:
                assert torch.equal(q.amax.unflatten(0, (3, -1))[g].view(want.amax.shape), want.amax)
                values = dequantize(Operand(want, spec, shape[-1], scale_layout))
                assert torch.equal(q.dequantize()[g], values)


def test_an_amax_of_the_caller_is_used():
    x, offsets = tokens(RAGGED, 0), ends(RAGGED)
    amax = torch.arange(1.0, 6.0)
    row, col = hb.ops.grouped_quantize_row_col(
        x, offsets, *both_sides(hb.NVFP4(), hb.NVFP4(), row_amax=amax, col_amax=2 * amax)
    )
    assert row.amax is amax
    for g, rows in enumerate(slices(RAGGED)):
        want_row, want_col = quantize_row_col(
            x[rows], *both_sides(hb.NVFP4(), hb.NVFP4(), row_amax=amax[g], col_amax=2 * amax[g])
        )
        assert torch.equal(row.qdata[rows], want_row.qdata)
        start = layout.group_ends(offsets, layout.GROUP_COLUMNS)[g - 1] // 2 if g else 0
        assert torch.equal(col.qdata[:, start : start + want_col.qdata.shape[1]], want_col.qdata)


@pytest.mark.parametrize("name", ["standard", "stochastic", "rotated_fresh", "eden_rotated_fresh", "tile"])
def test_amaxes_alone_are_those_of_the_quantized_groups(name):
    spec, x, offsets = SPECS[name], tokens(RAGGED, 6), ends(RAGGED)
    signs = SIGNS.on(CPU)
    row, col = hb.ops.grouped_row_col_amax(x, offsets, spec, spec, signs)
    draw = RNG.on(CPU)
    expected = hb.ops.grouped_quantize_row_col(x, offsets, *both_sides(spec, spec, draw=draw, sign_draw=signs))
    assert torch.equal(row, expected[0].amax) and torch.equal(col, expected[1].amax) and row.count_nonzero() == 4
    (only,) = (amax for amax in hb.ops.grouped_row_col_amax(x, offsets, None, spec, signs) if amax.numel())
    assert torch.equal(only, col)


def test_shapes_do_not_depend_on_the_sizes_of_groups():
    for spec in SPECS.values():
        for scale_layout in LAYOUTS:
            shapes = {
                tuple(tuple(t.shape) for q in quantized(tokens(sizes, 64 - sum(sizes)), ends(sizes), spec, scale_layout)
                      for t in q.blocks)
                for sizes in ((64, 0, 0), (1, 1, 1), (21, 21, 21), (0, 0, 0), (17, 30, 17))
            }  # fmt: skip
            assert len(shapes) == 1


@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("splits", ["rows", "experts"])
def test_storage_round_trips(scale_layout, splits, tmp_path):
    x, offsets = (tokens(RAGGED, 6), ends(RAGGED)) if splits == "rows" else (torch.randn(2, 20, COLS), None)
    for q in quantized(x, offsets, hb.NVFP4(), scale_layout):
        torch.save(q, tmp_path / "q.pt")
        plain, metadata = hb.tensor.to_safetensors({"q": q})
        for other in (torch.load(tmp_path / "q.pt"), hb.tensor.from_safetensors(plain, metadata)["q"], q.clone()):
            assert other.splits_columns == q.splits_columns and other.shape == q.shape
            assert torch.equal(other.group_offsets, q.group_offsets)
            assert all(torch.equal(a, b) for a, b in zip(other.blocks, q.blocks, strict=True))


class TestOps:
    draws = (hb.Philox(11, 5).on(CPU).base, 3, hb.Philox(12).on(CPU).base, 7)

    # What a layout changes of a shape depends on the blocks and on what groups are padded to.
    @pytest.mark.parametrize(
        "name,scale_layout",
        [(name, "linear") for name in SPECS]
        + [(name, "swizzled_32_4_4") for name in ("standard", "tile", "row", "rotated_fresh", "mxfp8")],
    )
    def test_opcheck_quantize(self, name, scale_layout):
        spec = SPECS[name]
        end = (None, None, scale_layout, False, False, "")
        opcheck(HB.grouped_quantize_row_col, (tokens(RAGGED, 6), ends(RAGGED), spec.key, spec.key, *self.draws, *end))
        opcheck(HB.grouped_quantize_row_col, (torch.randn(2, 20, 36), None, spec.key, "", *self.draws, *end))

    def test_opcheck_with_amax_and_one_side(self):
        key, amax = hb.NVFP4().key, torch.ones(5)
        for keys, given in ((("", key), (None, amax)), ((key, key), (amax, amax))):
            end = (*given, "linear", True, True, "")
            opcheck(HB.grouped_quantize_row_col, (tokens(RAGGED, 0), ends(RAGGED), *keys, *self.draws, *end))

    def test_opcheck_amaxes(self):
        for keys in ((hb.NVFP4().key, SPECS["rotated_fresh"].key), ("", hb.NVFP4().key)):
            opcheck(HB.grouped_row_col_amax, (tokens(RAGGED, 6), ends(RAGGED), *keys, *self.draws[2:], ""))

    @every_layout
    def test_opcheck_dequantize_and_gemm(self, scale_layout):
        spec, offsets = hb.NVFP4(), ends(RAGGED)
        x = tokens(RAGGED, 6)
        row, col = quantized(x, offsets, spec, scale_layout)
        opcheck(HB.grouped_dequantize, (*row.blocks, offsets, spec.key, COLS, torch.bfloat16, scale_layout, ""))
        w = torch.randn(5, 24, COLS)
        side = (*row.blocks, spec.key, scale_layout)
        w_blocks = hb.ops.grouped_quantize_row_col(w, None, *both_sides(spec, None, scale_layout=scale_layout))[0]
        experts = (*w_blocks, spec.key, scale_layout)
        opcheck(HB.grouped_dequantize, (*w_blocks, None, spec.key, COLS, torch.float32, scale_layout, ""))
        opcheck(HB.grouped_gemm_nt, (*side, *experts, COLS, offsets, torch.bfloat16, ""))
        opcheck(HB.grouped_gemm_nt, (*side, w, None, None, "", "linear", COLS, offsets, torch.float32, ""))
        out = torch.zeros(len(x), 24)
        opcheck(HB.grouped_gemm_nt_out, (*side, *experts, COLS, offsets, out, True, ""))
        split = (*col.blocks, spec.key, scale_layout)
        opcheck(HB.grouped_gemm_nt, (*split, *split, len(x), offsets, torch.float32, ""))

    def test_flop_counter_knows_both_products(self):
        x, w, offsets = torch.randn(64, COLS), torch.randn(5, 24, COLS), ends(RAGGED)
        row, col = hb.grouped_quantize_row_col(x, offsets, hb.NVFP4(), hb.NVFP4())
        with FlopCounterMode(display=False) as counter:
            hb.grouped_gemm_nt(row, w, offsets)
            hb.grouped_gemm_nt(col, col, offsets)
        assert counter.get_total_flops() == 2 * 64 * 24 * COLS + 2 * COLS * COLS * 64

    def test_a_backend_without_the_kernel_is_refused(self):
        with pytest.raises(ValueError, match="backend='triton'"):
            hb.grouped_quantize_row_col(torch.zeros(4, 16), ends((4,)), hb.NVFP4(), None, backend="triton")

    @pytest.mark.parametrize(
        "x,offsets,message",
        [
            (torch.zeros(4, 16, dtype=torch.float64), ends((4,)), "x.dtype=torch.float64"),
            (torch.zeros(4, 16), None, "weights"),
            (torch.zeros(0, 4, 16), None, "at least one expert"),
            (torch.zeros(4, 16), ends((5,)), "at most 4"),
            (torch.zeros(4, 16), torch.zeros(1, 1, dtype=torch.int32), r"shape \[E\]"),
        ],
    )
    def test_refusals(self, x, offsets, message):
        with pytest.raises((TypeError, ValueError), match=message):
            hb.grouped_quantize_row_col(x, offsets, hb.NVFP4(), None)
