"""The quantization kernels in Triton's interpreter: golden vectors and small tensors, bit for bit."""

from dataclasses import replace

import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.amax import route as maxima
from halfbyte.kernels.amax.plain import finite_amax, operand_amax, row_col_amax
from halfbyte.kernels.quantize import both_route, route
from halfbyte.kernels.quantize.both import quantize_rows_and_cols
from halfbyte.kernels.quantize.one import quantize_side
from halfbyte.kernels.quantize.route import OneSide, choose_one_side
from halfbyte.sides import Side, both_sides

KINDS = ("heavy", "ties", "tiny", "nonfinite")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def one_per_spec(cases):
    """Return the first vector of every name but its last part, which says what it is an edge of."""
    chosen = {}
    for case in cases:
        chosen.setdefault((case.kind, case.entry["name"].rsplit("-", 1)[0]), case)
    return list(chosen.values())


@pytest.mark.parametrize("case", one_per_spec(checks.QUANTIZED)[::20], ids=lambda case: case.id)
def test_golden(case):
    checks.check_golden(case)


def test_an_error_that_overflows_loses():
    """At this amax (q * scale) * A is Inf for the first candidates."""
    cases = [case for case in checks.QUANTIZED if case.entry["name"] == "amax-1.3e+35-c4-mae"]
    assert cases
    for case in cases:
        checks.check_golden(case)


@pytest.mark.parametrize("case", checks.ROW_COL[::8], ids=lambda case: case.id)
def test_golden_row_col(case):
    checks.check_golden_row_col(case)


@pytest.mark.parametrize("index", range(len(checks.SPECS)), ids=lambda index: checks.SPECS[index].key)
def test_against_the_reference(index):
    x = checks.sample(KINDS[index % 4], (35, 150), DTYPES[index % 3], "cpu")
    checks.check_against_reference(
        x if index % 2 else x.T.contiguous().T, checks.SPECS[index], layout.SCALE_LAYOUTS[index % 2]
    )


@pytest.mark.parametrize("index", range(len(checks.SPECS)), ids=lambda index: checks.SPECS[index].key)
def test_aligned_bf16_is_read_in_pairs(index):
    x = checks.sample(KINDS[index % 4], (40, 72), torch.bfloat16, "cpu")
    checks.check_against_reference(x, checks.SPECS[index], layout.SCALE_LAYOUTS[index % 2])
    checks.check_against_reference(x.T, checks.SPECS[index], layout.SCALE_LAYOUTS[index % 2])


@pytest.mark.parametrize("spec", checks.NARROW, ids=lambda spec: spec.key)
def test_rows_that_are_no_power_of_two(spec):
    checks.check_narrow_rows(spec, 16, "cpu")


@pytest.mark.parametrize("index", range(len(checks.PAIRS)))
def test_row_col(index):
    x = checks.sample(KINDS[index % 4], (40, 72), DTYPES[index % 3], "cpu")
    checks.check_row_col(x, checks.PAIRS[index], layout.SCALE_LAYOUTS[index % 2])


@pytest.mark.parametrize("index", range(3))
def test_row_col_of_whole_tiles(index):
    x = checks.sample(KINDS[index], (64, 192), torch.bfloat16, "cpu")
    checks.check_row_col(x, checks.PAIRS[index], layout.LINEAR)


@pytest.mark.parametrize("amaxes", checks.AMAXES)
def test_several_tiles_a_program(monkeypatch, amaxes):
    checks.check_several_tiles("cpu", amaxes, monkeypatch)


@pytest.mark.parametrize("kind, dtype", (("nonfinite", torch.bfloat16), ("tiny", torch.float32)))
@pytest.mark.parametrize("cols", (128, 136), ids=("whole", "cut"))
@pytest.mark.parametrize("spec", checks.WIDE_COLUMNS, ids=lambda spec: spec.key)
def test_wide_rotations_along_columns(spec, cols, kind, dtype):
    x = checks.sample(kind, (2 * spec.alignment, cols), dtype, "cpu").T
    choice = choose_one_side(OneSide(x, Side(spec)))
    assert (choice.kernel, choice.constants["RULE"].full) == ("quantize_wide_kernel", cols == 128)
    checks.check_against_reference(x, spec, layout.LINEAR)


@pytest.mark.parametrize("spec", checks.HALVES, ids=lambda spec: spec.key)
def test_two_threads_share_a_group_along_rows(spec, monkeypatch):
    monkeypatch.setattr(route, "INTERPRETED_BLOCKS", 16)  # tiles of one row, that need no mask
    x = checks.sample("heavy", (4, 512), torch.bfloat16, "cpu")
    x[1, 130] = torch.nan
    choice = choose_one_side(OneSide(x, Side(spec)))
    assert (choice.kernel, choice.constants["RULE"].paired) == ("quantize_rows_kernel", True)
    checks.check_against_reference(x, spec, layout.LINEAR)


@pytest.mark.parametrize("shape", ((0, 16), (3, 0), (0, 0)))
@pytest.mark.parametrize("spec", (hb.NVFP4(), hb.NVFP4(outer="row"), hb.MXFP8()), ids=lambda spec: spec.key)
def test_empty(shape, spec):
    x = torch.empty(shape, dtype=torch.bfloat16)
    checks.check_against_reference(x, spec, layout.LINEAR)
    checks.check_row_col(x, (spec, spec), layout.SWIZZLED_32_4_4)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -1.0))
def test_an_invalid_amax_poisons_every_block(value):
    blocks = quantize_side(
        torch.ones(3, 40), Side(hb.NVFP4(), amax=torch.tensor(value), scale_layout=layout.SWIZZLED_32_4_4)
    )
    assert not blocks.qdata.any()
    expected = layout.swizzle(torch.full((3, 3), 0x7F, dtype=torch.uint8))
    assert torch.equal(blocks.block_scale, expected)


def test_strides_are_read_as_they_are():
    x = torch.randn(64, 200).bfloat16()
    for view in (x[::2, ::2], x[:, 3:], x[5:].T, x.view(4, 16, 200).transpose(0, 1)):
        checks.check_against_reference(view, hb.NVFP4(), layout.LINEAR)


def test_amax_of_rows_and_of_both_orientations():
    x = checks.sample("nonfinite", (40, 72), torch.bfloat16, "cpu")
    assert torch.equal(finite_amax(x), reference.finite_amax(x))
    assert torch.equal(finite_amax(x, -1), reference.finite_amax(x, -1))
    rotated = hb.NVFP4(rotation=hb.Hadamard())
    row, col = row_col_amax(x, hb.NVFP4(), rotated, None)
    assert torch.equal(row, reference.finite_amax(x))
    assert torch.equal(col, reference.finite_amax(reference.rotate(x.T, rotated.rotation)))


@pytest.mark.parametrize("col", checks.WIDE, ids=lambda spec: spec.key)
@pytest.mark.parametrize("hardware", (0, 90, 100))
def test_maxima_of_wide_rotations_on_every_target(hardware, col, monkeypatch):
    x = checks.sample("nonfinite", (160, 104), torch.bfloat16, "cpu")
    checks.check_rotated_amax(x, col, hardware, monkeypatch)


@pytest.mark.parametrize("spec", checks.ROTATED_LINES, ids=lambda spec: spec.key)
@pytest.mark.parametrize("per_sm", (1, 8))
def test_maxima_of_rotated_rows(per_sm, spec, monkeypatch):
    for table in ("ROW_PROGRAMS", "FRESH_PROGRAMS"):  # of one multiprocessor: programs take lines again and again
        monkeypatch.setattr(maxima, table, dict.fromkeys((16, 32, 64, 128), per_sm))
    for shape in ((3, 8), (130, 136), (200, 256), (64, 1024)):
        for kind in ("heavy", "nonfinite"):
            checks.check_rotated_rows(checks.sample(kind, shape, torch.bfloat16, "cpu"), spec)


@pytest.mark.parametrize("far", (False, True), ids=("first", "last"))
@pytest.mark.parametrize("bad", (float("nan"), float("-inf")))
def test_the_maximum_of_rotated_rows_leaves_one_bad_group_out(bad, far):
    spec = hb.NVFP4(rotation=hb.Hadamard(size=64))
    x = torch.randn(40, 256).bfloat16()
    x[-1 if far else 0, -1 if far else 0] = bad
    checks.check_rotated_rows(x, spec)
    assert operand_amax(x, spec, None) > 1


def test_rows_that_are_not_read_in_words_are_told_why():
    spec, x = hb.NVFP4(rotation=hb.Hadamard(size=64)), torch.randn(64, 256).bfloat16()
    for view, asked, why in (
        (x, hb.NVFP4(rotation=hb.Hadamard(size=64), outer="row"), "an amax each"),
        (x.float(), spec, "not bf16"),
        (x.T, spec, "not bf16 in aligned rows"),
        (x[:, 3:], spec, "not bf16 in aligned rows"),
    ):
        choice = maxima.choose_amax(maxima.AmaxOfOne(view, asked))
        (name, reason), *_ = choice.instead
        assert choice.kernel == "amax_rotated_kernel" and name == "amax_rotated_rows_kernel" and why in str(reason)


@pytest.mark.parametrize("axis", (0, 1))
def test_the_errors_of_a_tile_are_added_in_order(axis):
    checks.check_tile_sums(axis, "cpu")


@pytest.mark.parametrize("shape", [(5, 0), (0, 64), (0, 0)])
def test_amax_of_nothing(shape):
    x = torch.empty(shape)
    assert torch.equal(finite_amax(x), reference.finite_amax(x))
    assert torch.equal(finite_amax(x, -1), reference.finite_amax(x, -1))


def test_given_amaxes_replace_the_computed_ones():
    x = torch.randn(32, 48)
    amax = torch.tensor(1.5)
    row, col = quantize_rows_and_cols(x, *both_sides(hb.NVFP4(), hb.NVFP4(outer="row"), row_amax=amax))
    checks.same_blocks(row, reference.quantize(x, hb.NVFP4(), amax=amax))
    checks.same_blocks(col, reference.quantize(x.T, hb.NVFP4(outer="row")))


@pytest.mark.parametrize("signs", ("fresh", "+" * 16))
def test_eden_in_tiles_of_large_tensors(signs, monkeypatch):
    monkeypatch.setattr(both_route, "EDEN_VALUES", 0)
    pair = checks.EDEN, replace(checks.EDEN, rotation=hb.Hadamard(signs=signs))
    for kind in KINDS:
        checks.check_row_col(checks.sample(kind, (128, 256), torch.bfloat16, "cpu"), pair, layout.LINEAR)
