"""The calls of scaled_mm: every argument by ATen's own rules on fake CUDA tensors, and what surrounds the call.

No GPU with FP4 tensor cores was at hand: `emulated_scaled_mm` computes what the call means from its arguments alone.
"""

import kernel_checks as checks
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels import record
from halfbyte.kernels.gemm import native, native_route
from halfbyte.sides import Epilogue

torch.manual_seed(0)

LINEAR, SWIZZLED = layout.LINEAR, layout.SWIZZLED_32_4_4
PAIRS = (
    (hb.NVFP4(), checks.TILE),
    (checks.ROW, checks.ROW),
    (hb.NVFP4(), checks.ROW),
    (hb.MXFP8(), hb.MXFP8()),
    (hb.MXFP8(element="e5m2"), hb.MXFP8()),
)
SHAPES = ((128, 256, 512), (1, 16, 32), (9, 17, 37), (130, 5, 48), (3, 1, 16))


def packed(rows, K, spec, scale_layout=SWIZZLED):
    x = torch.randn(rows, K)
    return layout.Operand(reference.quantize(x, spec, scale_layout=scale_layout), spec, K, scale_layout)


def emulated_scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, swizzle_a, scale_b, scale_recipe_b, swizzle_b, bias, output_dtype
):
    """What scaled_mm computes: block scales from the swizzled buffers, tensor factors, bias, one rounding."""
    length = {ScalingType.BlockWise1x16: 16, ScalingType.BlockWise1x32: 32}[scale_recipe_a[0]]
    assert scale_recipe_a == scale_recipe_b and swizzle_a == swizzle_b and swizzle_a[0] == SwizzleType.SWIZZLE_32_4_4
    sides = []
    for mat, scales in ((mat_a, scale_a), (mat_b.t(), scale_b)):
        assert len(scales) == len(swizzle_a) == len(scale_recipe_a)
        if mat.dtype == torch.float4_e2m1fn_x2:
            table = torch.tensor(
                [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
            )
            values = table[layout.unpack(mat.view(torch.uint8)).long()]
        else:
            values = mat.double()
        blocks = layout.unswizzle(scales[0], mat.shape[0], values.shape[1] // length).float().double()
        values = (values.unflatten(1, (-1, length)) * blocks[..., None]).flatten(1)
        sides.append(values if len(scales) == 1 else values * scales[1].double())
    y = sides[0] @ sides[1].T
    assert bias is None or (output_dtype != torch.float32 and bias.dtype == output_dtype)
    return (y if bias is None else y + bias.double()).to(output_dtype)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " x ".join(spec.key for spec in pair))
@pytest.mark.parametrize("shape", SHAPES)
def test_aten_accepts_the_call(pair, shape):
    """The fake kernel of scaled_mm checks shapes, strides, dtypes and scale sizes for CUDA tensors on any machine."""
    M, N, K = shape
    real = packed(M, K, pair[0]), packed(N, K, pair[1])
    with FakeTensorMode() as mode:
        fake = []
        for side in real:
            tensors = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in side.blocks)
            fake.append(side._replace(blocks=layout.Blocks(*tensors)))
        assert isinstance(fake[0].blocks.qdata, torch._subclasses.FakeTensor) and mode is not None
        calls = [(None, None)]
        if not any(spec.has_row_amax for spec in pair):
            bias = torch.empty(N, dtype=torch.bfloat16, device="cuda")
            calls += [(torch.bfloat16, bias), (torch.float16, None), (torch.float32, None)]
        for dtype, bias in calls:
            y = torch.nn.functional.scaled_mm(**native.scaled_mm_arguments(*fake, dtype, bias))
            assert y.shape == (M, -(-N // 16) * 16) and y.device.type == "cuda"
            assert y.dtype == (torch.float32 if dtype is None else dtype)


def test_the_fake_kernel_refuses_a_wrong_call():
    """The check above can fail: without padding ATen's rules reject the operands."""
    with FakeTensorMode():
        blocks = layout.Blocks(
            torch.empty(16, 24, dtype=torch.uint8, device="cuda"),
            torch.empty(128 * 4, dtype=torch.uint8, device="cuda"),
            torch.empty((), device="cuda"),
        )
        side = layout.Operand(blocks, hb.NVFP4(), 48, SWIZZLED)
        arguments = native.scaled_mm_arguments(side, side, torch.bfloat16, None)
        arguments["mat_a"] = blocks.qdata.view(torch.float4_e2m1fn_x2)
        with pytest.raises((RuntimeError, ValueError)):
            torch.nn.functional.scaled_mm(**arguments)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " x ".join(spec.key for spec in pair))
@pytest.mark.parametrize("shape", ((9, 17, 37), (5, 32, 64)))
@pytest.mark.parametrize("scale_layout", (LINEAR, SWIZZLED))
def test_the_call_means_the_product(pair, shape, scale_layout, monkeypatch):
    monkeypatch.setattr(native, "scaled_mm", emulated_scaled_mm)
    M, N, K = shape
    a, b = packed(M, K, pair[0], scale_layout), packed(N, K, pair[1], scale_layout)
    decoded = [reference.decode(side) for side in (a, b)]
    existing = torch.randn(M, N)
    for dtype in checks.DTYPES:
        for bias in (None, torch.randn(N).to(dtype), torch.randn(N)):
            expected = reference.gemm_nt(*decoded, Epilogue(torch.float32, bias))
            y = native.native_gemm_nt(a, b, Epilogue(dtype, bias))
            assert y.dtype == dtype and y.shape == (M, N)
            tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=1e-5)
    out = existing.clone()
    assert native.native_gemm_nt(a, b, Epilogue(addend=out, out=out)) is out
    torch.testing.assert_close(out, reference.gemm_nt(*decoded, Epilogue(torch.float32, addend=existing)))
    with_outer = Epilogue(torch.float32, outer=(torch.randn(M), torch.randn(N)))
    torch.testing.assert_close(native.native_gemm_nt(a, b, with_outer), reference.gemm_nt(*decoded, with_outer))


def test_one_call_where_scaled_mm_can_finish(monkeypatch):
    calls = []

    def record(**arguments):
        calls.append((len(arguments["scale_a"]), arguments["output_dtype"], arguments["bias"] is not None))
        return emulated_scaled_mm(**arguments)

    monkeypatch.setattr(native, "scaled_mm", record)
    a, b, row = packed(4, 32, hb.NVFP4()), packed(16, 32, hb.NVFP4()), packed(4, 32, checks.ROW)
    native.native_gemm_nt(a, b, Epilogue(bias=torch.randn(16).bfloat16()))
    native.native_gemm_nt(a, b, Epilogue(torch.float32))
    native.native_gemm_nt(a, b, Epilogue(bias=torch.randn(16)))
    native.native_gemm_nt(row, b)
    out = torch.zeros(4, 16, dtype=torch.bfloat16)
    native.native_gemm_nt(a, b, Epilogue(addend=out, out=out))
    assert calls == [
        (2, torch.bfloat16, True),
        (2, torch.float32, False),
        *[(1, torch.float32, False)] * 3,
    ]


def test_padding_behind_the_view_is_used_in_place():
    """Rows allocated with 16-byte multiples are not copied, and what lies in their padding does not matter."""
    side = packed(5, 40, hb.NVFP4())
    wide = torch.full((5, 32), 0xFF, dtype=torch.uint8)
    wide[:, :24] = side.blocks.qdata
    roomy = side._replace(blocks=side.blocks._replace(qdata=wide[:, :24]))
    matrix = native.scaled_mm_arguments(roomy, roomy, None, None)["mat_a"]
    assert matrix.data_ptr() == wide.data_ptr() and matrix.shape == (5, 32)
    tight = native.scaled_mm_arguments(side, side, None, None)["mat_a"]
    assert tight.data_ptr() != side.blocks.qdata.data_ptr()
    y = [emulated_scaled_mm(**native.scaled_mm_arguments(s, s, torch.float32, None)) for s in (roomy, side)]
    assert torch.equal(*y)


@pytest.mark.parametrize("shape", ((0, 5, 16), (4, 0, 16), (3, 5, 0)))
def test_nothing_to_multiply(shape, monkeypatch):
    monkeypatch.setattr(native, "scaled_mm", None)
    M, N, K = shape
    bias = torch.randn(N)
    y = native.native_gemm_nt(packed(M, K, hb.NVFP4()), packed(N, K, hb.NVFP4()), Epilogue(torch.float32, bias))
    assert torch.equal(y, bias.expand(M, N))


def test_reasons():
    nvfp4, mxfp8, wide = hb.NVFP4(), hb.MXFP8(), hb.MXFP8(element="e5m2")
    for name in ("sm_100", "sm_103", "sm_120"):
        target = record.TARGETS[name]
        assert native_route.unsupported(nvfp4, checks.TILE, target) is None
        assert native_route.unsupported(mxfp8, wide, target) is None
        assert "e5m2" in native_route.unsupported(wide, wide, target)
        assert "not quantized" in native_route.unsupported(nvfp4, None, target)
        assert "mix" in native_route.unsupported(nvfp4, mxfp8, target)
    for name in ("sm_90", "gfx950"):
        assert name in native_route.unsupported(nvfp4, nvfp4, record.TARGETS[name])
