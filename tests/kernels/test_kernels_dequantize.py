"""Dequantize kernels against the golden vectors and the reference, bit for bit."""

import golden_vectors as golden
import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.unpack import dequantize as dq
from halfbyte.layout import Blocks, Operand

torch.manual_seed(0)

# Each vector costs about a tenth of a second here; all of them run on a GPU (tests/gpu).
STORED = [case for case in golden.cases() if case.has("dequant") and case.array("dequant").size < 1000]
SAMPLE = STORED[::40] + [case for case in STORED if "amax" in case.id or "nonfinite" in case.id][::20]

SPECS = (hb.NVFP4(), checks.ROW, hb.NVFP4(rotation=hb.Hadamard(size=64)), hb.MXFP8(), hb.MXFP8(element="e5m2"))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in SAMPLE])
def test_golden(case):
    checks.check_dequantize(case)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_decode_gives_the_operand_of_the_gemm(spec):
    x = torch.randn(5, 70)
    blocks = reference.quantize(x, spec, scale_layout=layout.SWIZZLED_32_4_4)
    ours = dq.decode(Operand(blocks, spec, 70, layout.SWIZZLED_32_4_4))
    theirs = reference.decode(Operand(blocks, spec, 70, layout.SWIZZLED_32_4_4))
    checks.same(ours.values.float(), theirs.values)


@pytest.mark.parametrize("scale_layout", layout.SCALE_LAYOUTS)
@pytest.mark.parametrize("spec", (hb.NVFP4(), checks.ROW, hb.MXFP8()), ids=lambda spec: spec.key)
@pytest.mark.parametrize("shape", ((4, 256), (128, 256), (36, 264)))
def test_whole_and_ragged_tiles(shape, spec, scale_layout):
    blocks = reference.quantize(torch.randn(shape), spec, scale_layout=scale_layout)
    stored = Operand(blocks, spec, shape[1], scale_layout)
    checks.same(dq.dequantize(stored, torch.bfloat16), reference.dequantize(stored, torch.bfloat16))


def test_swizzled_scales_may_start_anywhere():
    spec = hb.NVFP4()
    blocks = reference.quantize(torch.randn(3, 48), spec, scale_layout=layout.SWIZZLED_32_4_4)
    moved = torch.cat((blocks.block_scale[:1], blocks.block_scale))[1:]
    expected = reference.dequantize(Operand(blocks, spec, 48, layout.SWIZZLED_32_4_4))
    ours = dq.dequantize(Operand(blocks._replace(block_scale=moved), spec, 48, layout.SWIZZLED_32_4_4))
    checks.same(ours, expected)


def every_code(spec):
    """Every element code under every scale: one row of blocks (E4M3; amax so that g = 1) or a row for each (E8M0)."""
    fmt = spec.format
    finite = {
        "e2m1": range(16),
        "e4m3": [c for c in range(256) if c & 0x7F != 0x7F],
        "e5m2": [c for c in range(256) if c & 0x7C != 0x7C],
    }
    codes = torch.tensor(finite[fmt.element.name], dtype=torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % fmt.length))
    blocks = len(codes) // fmt.length
    qdata = codes[::2] | codes[1::2] << 4 if fmt.codes_per_byte == 2 else codes
    if fmt.scale.name == "e4m3":
        scales = torch.arange(1, 128, dtype=torch.uint8).repeat_interleave(blocks)
        return Blocks(qdata.repeat(1, 127), scales[None], torch.tensor(2688.0))
    scales = torch.tensor([0, 1, 2, 20, 127, 240, 254, 255], dtype=torch.uint8)
    return Blocks(qdata.repeat(8, 1), scales[:, None].repeat(1, blocks), torch.empty(0))


@pytest.mark.parametrize("spec", (hb.NVFP4(), hb.MXFP8(), hb.MXFP8(element="e5m2")), ids=lambda spec: spec.key)
def test_every_code_under_every_kind_of_scale(spec):
    blocks = every_code(spec)
    cols = blocks.block_scale.shape[1] * spec.block_length
    for dtype in checks.DTYPES:
        stored = Operand(blocks, spec, cols)
        checks.same(dq.dequantize(stored, dtype), reference.dequantize(stored, dtype))


@pytest.mark.parametrize("amax", (1e-45, 1e-35, 2.0**99.99, 2.0**100, 3.4e38))
def test_the_branch_for_huge_amax(amax):
    blocks = every_code(hb.NVFP4())._replace(amax=torch.tensor(amax))
    stored = Operand(blocks, hb.NVFP4(), 127 * 16)
    checks.same(dq.dequantize(stored), reference.dequantize(stored))


@pytest.mark.parametrize("shape", ((0, 32), (3, 0), (0, 0)))
@pytest.mark.parametrize("spec", (hb.NVFP4(), checks.ROW, hb.MXFP8()), ids=lambda spec: spec.key)
def test_empty_tensors_are_never_launched(shape, spec, monkeypatch):
    monkeypatch.setattr(dq, "dequantize_kernel", None)
    blocks = reference.quantize(torch.randn(shape), spec)
    assert dq.dequantize(Operand(blocks, spec, shape[1]), torch.bfloat16).shape == shape
    assert dq.decode(Operand(blocks, spec, shape[1])).values.shape[0] == shape[0]


def test_rows_may_be_strided_and_start_anywhere():
    spec, x = hb.NVFP4(), torch.randn(6, 48)
    blocks = reference.quantize(x, spec)
    wide = torch.zeros(6, 29, dtype=torch.uint8)
    wide[:, 1:25] = blocks.qdata
    expected = reference.dequantize(Operand(blocks, spec, 48))
    checks.same(dq.dequantize(Operand(blocks._replace(qdata=wide[:, 1:25]), spec, 48)), expected)
    padded = torch.zeros(6, 32, dtype=torch.uint8)
    padded[:, :24] = blocks.qdata
    checks.same(dq.dequantize(Operand(blocks._replace(qdata=padded[:, :24]), spec, 48)), expected)
    last = Blocks(blocks.qdata[2:], blocks.block_scale[2:], blocks.amax)
    checks.same(dq.dequantize(Operand(last, spec, 48)), expected[2:])


def test_an_unknown_scale_layout_is_named():
    blocks = reference.quantize(torch.randn(2, 16), hb.NVFP4())
    with pytest.raises(ValueError, match="scale_layout='diagonal'"):
        dq.dequantize(Operand(blocks, hb.NVFP4(), 16, "diagonal"))
