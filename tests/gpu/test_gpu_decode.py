"""Dequantize, transpose and swizzle on a GPU: every golden vector and large tensors, bit for bit."""

import golden_vectors as golden
import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.unpack import dequantize as dq
from halfbyte.kernels.unpack import transpose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STORED = [case._replace(device="cuda") for case in golden.cases() if case.has("dequant")]
SPECS = (hb.NVFP4(), checks.ROW, hb.NVFP4(rotation=hb.Hadamard(size=128)), hb.MXFP8(), hb.MXFP8(element="e5m2"))


@pytest.mark.parametrize("kind", sorted({case.kind for case in STORED}))
def test_golden_dequant(kind):
    for case in STORED:
        if case.kind == kind:
            checks.check_dequantize(case)


def test_golden_transpose():
    cases = [case for case in STORED if case.has("t_qdata")]
    assert cases
    for case in cases:
        checks.check_transpose(case)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
@pytest.mark.parametrize("shape", ((1000, 2000), (257, 4099), (4096, 4096)))
def test_large(spec, shape):
    blocks = reference.quantize(torch.randn(shape, device="cuda") * 3, spec)
    swizzled = blocks._replace(block_scale=layout.swizzle(blocks.block_scale))
    for dtype in checks.DTYPES:
        stored = layout.Operand(blocks, spec, shape[1])
        expected = reference.dequantize(stored, dtype)
        checks.same(dq.dequantize(stored, dtype), expected)
        checks.same(dq.dequantize(layout.Operand(swizzled, spec, shape[1], layout.SWIZZLED_32_4_4), dtype), expected)
    checks.same(dq.decode(stored).values.float(), reference.decode(stored).values)


@pytest.mark.parametrize("shape", ((1, 1), (17, 33), (1000, 2000), (2000, 1000), (257, 4099), (4096, 8192)))
def test_transpose(shape):
    rows, cols = shape
    blocks = -(-cols // 16)
    qdata = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 256, (-(-rows // 16), blocks), dtype=torch.uint8, device="cuda")
    scale = scale.repeat_interleave(16, 0)[:rows]
    for ours, theirs in zip(
        transpose.transpose(qdata, scale, *shape), reference.transpose(qdata, scale, *shape), strict=True
    ):
        checks.same(ours, theirs)


@pytest.mark.parametrize("shape", ((1, 1), (129, 33), (300, 4), (8192, 512)))
def test_swizzle(shape):
    checks.check_swizzle(torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda"))


def test_every_element_is_written_and_offsets_are_64_bit():
    rows, cols = 70_000, 32_768  # 2.3e9 values, more than 2^31
    qdata = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 127, (rows, cols // 16), dtype=torch.uint8, device="cuda")
    blocks = layout.Blocks(qdata, scale, torch.tensor(3.0, device="cuda"))
    y = dq.dequantize(layout.Operand(blocks, hb.NVFP4(), cols), torch.bfloat16)
    for part in (slice(0, 8), slice(rows - 8, rows)):
        few = layout.Blocks(qdata[part], scale[part], blocks.amax)
        checks.same(y[part], reference.dequantize(layout.Operand(few, hb.NVFP4(), cols), torch.bfloat16))
    turned, _ = transpose.transpose(qdata, scale, rows, cols)
    few = reference.transpose(qdata[:, -8:].contiguous(), scale[:, -1:].contiguous(), rows, 16)[0]
    checks.same(turned[-16:], few)


def test_a_captured_graph_replays_new_bytes():
    first, second = (reference.quantize(torch.randn(256, 512, device="cuda"), hb.NVFP4()) for _ in range(2))
    static = layout.Blocks(*(t.clone() for t in first))
    dq.dequantize(layout.Operand(static, hb.NVFP4(), 512), torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dq.dequantize(layout.Operand(static, hb.NVFP4(), 512), torch.bfloat16)
    for target, source in zip(static, second, strict=True):
        target.copy_(source)
    graph.replay()
    checks.same(y, reference.dequantize(layout.Operand(second, hb.NVFP4(), 512), torch.bfloat16))
