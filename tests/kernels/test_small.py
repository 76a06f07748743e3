"""Small tensors in one launch, and rotations of 64 and 128: bit for bit, in Triton's interpreter."""

import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels import backend
from halfbyte.kernels.quantize import small

WIDE = [
    hb.NVFP4(rotation=hb.Hadamard(size=64, signs="fresh"), rounding="stochastic"),
    hb.NVFP4(rotation=hb.Hadamard(size=128), outer="row"),
]


@pytest.mark.parametrize("index", range(len(checks.SPECS)), ids=lambda index: checks.SPECS[index].key)
def test_one_launch(index, monkeypatch):
    spec, scale_layout = checks.SPECS[index], layout.SCALE_LAYOUTS[index % 2]
    x = checks.sample(("heavy", "nonfinite")[index % 2], (20, 72), torch.bfloat16, "cpu")
    if small.fits(x, spec, scale_layout):
        monkeypatch.setattr(backend.strips, "quantize_lines_or_strips", None)
    options = {**checks.draws("cpu"), "scale_layout": scale_layout}
    for view in (x, x.T):
        checks.same_blocks(backend.quantize(view, spec, **options), reference.quantize(view, spec, **options))


def test_what_fits():
    x = torch.ones(16, 1024)
    assert small.fits(x, hb.NVFP4(), layout.LINEAR)
    assert not small.fits(torch.ones(17, 1024), hb.NVFP4(), layout.LINEAR)
    assert not small.fits(x, hb.NVFP4(), layout.SWIZZLED_32_4_4), "its padding is 128 rows"
    assert not small.fits(x, hb.MXFP8(), layout.LINEAR), "it has no amax"
    assert not small.fits(torch.ones(0, 16), hb.NVFP4(), layout.LINEAR)


@pytest.mark.parametrize("spec", WIDE, ids=lambda spec: spec.key)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_wide_rotations_along_rows_and_columns(spec, dtype):
    x = checks.sample("nonfinite", (40, 264), dtype, "cpu")
    for view, scale_layout in zip((x, x.T), layout.SCALE_LAYOUTS, strict=True):
        checks.check_against_reference(view, spec, scale_layout)
    checks.check_row_col(x, (hb.NVFP4(), spec), layout.LINEAR)
