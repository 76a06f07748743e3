"""Small tensors in one launch, and rotations of 64 and 128: bit for bit, in Triton's interpreter."""

import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.quantize import one, route
from halfbyte.kernels.quantize.one import quantize_side
from halfbyte.sides import Side

WIDE = [
    hb.NVFP4(rotation=hb.Hadamard(size=64, signs="fresh"), rounding="stochastic"),
    hb.NVFP4(rotation=hb.Hadamard(size=128), outer="row"),
]


SMALL = "quantize_small_kernel"


def kernel_of(x, spec, scale_layout=layout.LINEAR):
    return route.choose_one_side(route.OneSide(x, Side(spec, scale_layout=scale_layout))).kernel


@pytest.mark.parametrize("index", range(len(checks.SPECS)), ids=lambda index: checks.SPECS[index].key)
def test_one_launch(index, monkeypatch):
    spec, scale_layout = checks.SPECS[index], layout.SCALE_LAYOUTS[index % 2]
    x = checks.sample(("heavy", "nonfinite")[index % 2], (20, 72), torch.bfloat16, "cpu")
    if kernel_of(x, spec, scale_layout) == SMALL:
        monkeypatch.setattr(one.lines, "quantize_any", None)
    options = {**checks.draws("cpu"), "scale_layout": scale_layout}
    for view in (x, x.T):
        checks.same_blocks(quantize_side(view, Side(spec, **options)), reference.quantize(view, spec, **options))


def test_what_fits():
    x = torch.ones(16, 1024)
    assert kernel_of(x, hb.NVFP4()) == SMALL
    assert kernel_of(torch.ones(17, 1024), hb.NVFP4()) != SMALL
    assert kernel_of(x, hb.NVFP4(), layout.SWIZZLED_32_4_4) != SMALL, "its padding is 128 rows"
    assert kernel_of(x, hb.MXFP8()) != SMALL, "it has no amax"
    given = route.OneSide(x, Side(hb.NVFP4(), amax=torch.tensor(1.0)))
    assert route.choose_one_side(given).kernel != SMALL


@pytest.mark.parametrize("spec", WIDE, ids=lambda spec: spec.key)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_wide_rotations_along_rows_and_columns(spec, dtype):
    x = checks.sample("nonfinite", (40, 264), dtype, "cpu")
    for view, scale_layout in zip((x, x.T), layout.SCALE_LAYOUTS, strict=True):
        checks.check_against_reference(view, spec, scale_layout)
    checks.check_row_col(x, (hb.NVFP4(), spec), layout.LINEAR)
