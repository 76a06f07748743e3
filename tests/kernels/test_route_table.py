"""Which kernels every request launches, as docs/internals says it: written by hand, not read from the code."""

import pytest
import torch

import halfbyte as hb
from halfbyte import layout
from halfbyte.kernels import record
from halfbyte.kernels.quantize import both_route, route
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import assumed
from halfbyte.sides import Side, both_sides

RHT = hb.NVFP4(rotation=hb.Hadamard())
SPECS = {
    "none": None,
    "1x16": hb.NVFP4(),
    "16x16": hb.NVFP4(block=(16, 16)),
    "SR": hb.NVFP4(rounding="stochastic"),
    "RHT": RHT,
    "SR RHT": hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(signs="fresh")),
    "4over6": hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0),
    "row-scaled": hb.NVFP4(outer="row"),
    "search 16x16": hb.NVFP4(scaling=hb.FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)), block=(16, 16)),
    "MXFP8": hb.MXFP8(),
    "RHT 64": hb.NVFP4(rotation=hb.Hadamard(size=64)),
}
SHAPES = {"tiny": (32, 64), "layer": (512, 768), "cut": (300, 83), "wide": (2048, 2880), "large": (8192, 8192)}
ROWS, COLS, SMALL = ["amax_rows", "quantize_rows"], ["amax_rows", "quantize_cols"], ["quantize_small"]
ROTATED_ROWS, ROTATED_COLS = ["amax_rotated_rows", "quantize_rows"], ["amax_rotated", "quantize_cols"]
PLAIN = ("1x16", "SR", "4over6", "row-scaled")

ROW_ALONE = {
    **{(name, "tiny"): SMALL for name in (*PLAIN, "16x16", "search 16x16", "RHT", "SR RHT")},
    **{(name, shape): ROWS for name in PLAIN for shape in ("layer", "cut", "wide", "large")},
    **{("16x16", shape): ["amax_rows", "quantize_tiles"] for shape in ("layer", "wide", "large")},
    ("16x16", "cut"): ROWS,  # strips are whole tiles
    **{(name, shape): ROTATED_ROWS for name in ("RHT", "SR RHT") for shape in ("layer", "wide", "large")},
    # Rows of 83 values do not begin where 16 bytes do.
    **{(name, "cut"): ["amax_rotated", "quantize_rows"] for name in ("RHT", "SR RHT")},
    # Quick errors serve 2^18 blocks of tiles; neighbours are whole ones, at least 12,672 times 16 x 64.
    **{("search 16x16", shape): ["amax_rows", "quantize_neighbours"] for shape in ("large",)},
    **{("search 16x16", shape): ROWS for shape in ("layer", "cut", "wide")},
    **{("MXFP8", shape): ["quantize_rows"] for shape in SHAPES},
    # Tuples of 64 are used for whole tiles; elsewhere wide rotations are tensors.
    **{("RHT 64", shape): ROTATED_ROWS for shape in ("layer", "wide", "large")},
    ("RHT 64", "tiny"): ["amax_rotated_rows", "quantize_wide"],
    ("RHT 64", "cut"): ["amax_rotated", "quantize_wide"],
}
COL_ALONE = {
    **{(name, "tiny"): SMALL for name in (*PLAIN, "16x16", "search 16x16", "RHT", "SR RHT")},
    **{
        (name, shape): COLS for name in (*PLAIN, "16x16", "search 16x16") for shape in ("layer", "cut", "wide", "large")
    },
    **{(name, shape): ROTATED_COLS for name in ("RHT", "SR RHT") for shape in ("layer", "cut", "wide", "large")},
    **{("MXFP8", shape): ["quantize_cols"] for shape in SHAPES},
    **{("RHT 64", shape): ["amax_rotated", "quantize_wide"] for shape in SHAPES},
}
BOTH = "quantize_row_col"
PAIRS = {
    # Rows without and columns with a rotation of 16: two launches up to 4M values of whole tiles.
    **{
        (row, col, shape): ["amax_rotated", f"{BOTH}_small" if shape == "layer" else BOTH]
        for row, col in (("1x16", "RHT"), ("SR", "SR RHT"), ("4over6", "RHT"))
        for shape in SHAPES
    },
    **{("1x16", "1x16", shape): ["amax_rows", BOTH] for shape in SHAPES},
    **{("1x16", "MXFP8", shape): ["amax_rows", BOTH] for shape in SHAPES},
    **{("MXFP8", "MXFP8", shape): [BOTH] for shape in SHAPES},
    **{("row-scaled", "RHT", shape): ["amax_rows", "amax_rotated", BOTH] for shape in SHAPES},
    **{("16x16", "16x16", shape): ["amax_rows", "quantize_tiles_both"] for shape in ("layer", "wide")},
    ("16x16", "16x16", "large"): ["amax_rows", "quantize_tiles", "transpose"],  # codes of many values
    **{("16x16", "16x16", shape): [*ROWS, "transpose"] for shape in ("tiny", "cut")},
    # A wide rotation is quantized by itself.
    ("1x16", "RHT 64", "layer"): ["amax_rotated", "quantize_rows", "quantize_wide"],
    ("1x16", "RHT 64", "cut"): ["amax_rotated", "quantize_rows", "quantize_wide"],
}
PRODUCTS = {
    "sm_80": ["dequantize", "dequantize", "gemm_pointer"],
    "sm_90": ["dequantize", "dequantize", "gemm_tma"],
    "sm_100": ["swizzle", "swizzle"],  # what surrounds torch's scaled_mm
    "sm_120": ["swizzle", "swizzle"],
    "gfx942": ["dequantize", "dequantize", "gemm_pointer"],
}


def launched(row, col, shape, target="sm_90"):
    explained = hb.ops.explain(SHAPES[shape], SPECS[row], SPECS[col], target=target)
    return [step.kernel.removesuffix("_kernel") for step in explained.steps if step.programs]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "none"])
def test_one_orientation(name, shape):
    assert launched(name, "none", shape) == ROW_ALONE[name, shape]
    assert launched("none", name, shape) == COL_ALONE[name, shape]


@pytest.mark.parametrize(("row", "col", "shape"), PAIRS, ids=str)
def test_pairs(row, col, shape):
    assert launched(row, col, shape) == PAIRS[row, col, shape]


@pytest.mark.parametrize("target", PRODUCTS)
def test_products(target):
    explained = hb.ops.explain((4096, 4096, 4096), hb.NVFP4(), SPECS["16x16"], target=target)
    assert [s.kernel.removesuffix("_kernel") for s in explained.steps if s.programs] == PRODUCTS[target]


@pytest.mark.parametrize("target", PRODUCTS)
def test_products_of_one_row(target):
    """Decoded and plain operands have a kernel of their own; what tensor cores read as codes goes there."""

    def kernels(*specs):
        explained = hb.ops.explain((1, 4096, 4096), *specs, target=target)
        return [step.kernel.removesuffix("_kernel") for step in explained.steps if step.programs]

    expected = PRODUCTS[target]
    if "dequantize" in expected:
        expected = [*expected[:-1], "row_product"]
    assert kernels(hb.NVFP4(), SPECS["16x16"]) == expected
    assert kernels(None, None) == ["row_product"]
    assert kernels(None, SPECS["16x16"]) == ["dequantize", "row_product"]


GROUPS = {
    # Tokens: a plan, the amaxes of both orientations, both orientations; a rotation from 32 on by itself.
    ("grouped_quantize", "1x16", "RHT"): ["plan", "packed_amax", "grouped_quantize"],
    ("grouped_quantize", "row-scaled", "RHT"): ["plan", "grouped_amax", "grouped_quantize"],
    ("grouped_quantize", "MXFP8", "MXFP8"): ["plan", "grouped_quantize"],
    ("grouped_quantize", "1x16", "RHT 64"): [
        "plan", "grouped_wide_amax", "grouped_amax", "grouped_wide", "grouped_quantize",
    ],
    # Experts of equal size need no plan.
    ("grouped_experts", "16x16", "none"): ["amax_rows", "quantize_tiles"],
    ("grouped_experts", "1x16", "none"): ["amax_rows", "quantize_experts"],
}  # fmt: skip


@pytest.mark.parametrize(("op", "row", "col"), GROUPS, ids=str)
def test_groups(op, row, col):
    shape, groups = ((2048, 4096), 8) if op == "grouped_quantize" else ((8, 1024, 2048), 0)
    explained = hb.ops.explain(shape, SPECS[row], SPECS[col], op=op, groups=groups, target="sm_90")
    assert [s.kernel.removesuffix("_kernel") for s in explained.steps if s.programs] == GROUPS[op, row, col]


def test_the_first_candidate_that_fits_is_taken_and_the_others_say_why():
    never = Candidate("a", lambda n: Reason("{} is odd, {}", (n, "always")), lambda n: Choice("a"), "")
    table = (never, Candidate("b", fits_all, lambda n: Choice("b", (n,)), "takes all"))
    choice = choose_from(table, 3)
    assert (choice.kernel, choice.grid, choice.request, choice.why) == ("b", (3,), 3, "takes all")
    assert [(name, str(reason)) for name, reason in choice.instead] == [("a", "3 is odd, always")]


def test_reasons_become_text_only_when_they_are_read(monkeypatch):
    monkeypatch.setattr(Reason, "__str__", lambda self: pytest.fail("nobody asked"))
    with assumed(record.TARGETS["sm_90"]):
        x = torch.empty(300, 83, dtype=torch.bfloat16, device="meta")
        choice = route.choose_one_side(route.OneSide(x, Side(hb.NVFP4())))
    assert choice.kernel == "quantize_rows_kernel" and len(choice.instead) == 5


CAPPED = {
    # width, options: registers a thread may use along columns
    (64, ()): 96,
    (64, ("stochastic",)): 128,
    (64, ("eden",)): 96,
    (128, ()): None,  # two threads share a group
    (128, ("stochastic",)): 80,
    (128, ("eden",)): 112,
    (128, ("candidates",)): None,
    (128, ("decoded",)): None,
    (128, ("unequal",)): 168,
    (128, ("unequal", "swizzled")): 168,
}
OPTIONS = {
    "stochastic": {"rounding": "stochastic"},
    "eden": {"scaling": hb.Eden()},
    "candidates": {"scaling": hb.FourOverSix(), "e4m3_max": 256.0},
    "unequal": {"rotation": hb.Hadamard(size=128, signs="+" * 127 + "-")},
}


@pytest.mark.parametrize("width, options", CAPPED)
def test_column_kernels_of_wide_rotations_are_held_at_a_step_of_occupancy(width, options):
    fields = {k: v for o in options for k, v in OPTIONS.get(o, {}).items()}
    spec = hb.NVFP4(**{"rotation": hb.Hadamard(size=width)} | fields)
    layouts = {"scale_layout": layout.SWIZZLED_32_4_4} if "swizzled" in options else {}
    side = Side(spec, transient="decoded" in options, **layouts)
    for name in record.TARGETS:
        with assumed(record.TARGETS[name]):
            x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
            rows, cols = (route.choose_one_side(route.OneSide(view, side)).constants for view in (x, x.T))
        assert "maxnreg" not in rows
        # Others would spill a few bytes; AMD's compiler has no such option.
        fits = ("sm_90", "sm_100", "sm_103")
        if "swizzled" not in options and (width, options) != (128, ("stochastic",)):
            fits += ("sm_80", "sm_89")
        expected = CAPPED[width, options] if name in fits else None
        assert cols.get("maxnreg") == expected, name


@pytest.mark.parametrize(
    ("shape", "pair", "tile"),
    [
        ((8192, 8192), {}, (64, 128, True, 72)),
        ((16384, 8192), {}, (64, 128, True, 72)),
        ((8192, 8192), {"signs": "fresh"}, (64, 128, True, 72)),
        ((4096, 4096), {}, (64, 64, False, None)),  # of smaller ones programs are too few for tiles as large
        ((8224, 8192), {}, (64, 64, False, None)),  # not whole
    ],
)
def test_large_tensors_have_their_own_tiles_of_eden(shape, pair, tile):
    eden = hb.NVFP4(scaling=hb.Eden())
    col = hb.NVFP4(scaling=hb.Eden(), rotation=hb.Hadamard(**pair))
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    draw = hb.Philox(1, 2).on(x.device)
    for name in ("sm_80", "sm_90", "sm_100"):
        with assumed(record.TARGETS[name]):
            sides = both_sides(eden, col, draw=draw, sign_draw=draw if pair else None)
            constants = both_route.choose_pair(both_route.Pair(x, *sides)).constants
        found = constants["TR"], constants["TC"], constants["ROW"].along, constants.get("maxnreg")
        assert found == (tile if name != "sm_100" else (64, 64, False, None))  # where it has conversions to E2M1
        assert constants["COL"].along == constants["ROW"].along


def test_rows_of_eden_are_longer_in_large_tensors():
    eden = hb.NVFP4(scaling=hb.Eden())
    with assumed(record.TARGETS["sm_90"]):
        for shape, blocks in (((8192, 8192), 256), ((4096, 4096), 128)):
            x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            choice = route.choose_one_side(route.OneSide(x, Side(eden, draw=hb.Philox(1, 2).on(x.device))))
            assert choice.constants["N"] == blocks
