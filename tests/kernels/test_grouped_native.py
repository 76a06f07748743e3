"""The call of scaled_grouped_mm: every argument by ATen's conditions, and the product that it means.

No GPU with FP4 tensor cores was at hand, and the op has no fake kernel: the call is recorded. `accepted` states what
ATen checks (GroupedBlas.cpp, torch 2.13); `meaning` computes the product from the arguments alone.
"""

from __future__ import annotations

import pytest
import torch
from grouped_cases import ends
from torch.nn.functional import ScalingType, SwizzleType

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels import record
from halfbyte.kernels.gemm import grouped_native, native_route
from halfbyte.layout import GroupedOperand

TILE = hb.NVFP4(block=(16, 16))
PAIRS = {
    "nvfp4": (hb.NVFP4(), TILE),
    "rotated": (hb.NVFP4(rotation=hb.Hadamard(size=128)),) * 2,
    "mxfp8": (hb.MXFP8(), hb.MXFP8()),
}
SIZES, PADDING, K, N = (17, 1, 0, 130, 16), 6, 64, 48
OFFSETS = ends(SIZES)
ROWS = sum(SIZES) + PADDING
SM_100 = record.TARGETS["sm_100"]


def operands(name, split, scale_layout=layout.LINEAR):
    """Return (a, b, contraction) of the groups along the rows or along the contraction."""
    torch.manual_seed(0)
    a_spec, b_spec = PAIRS[name]
    options = {"scale_layout": scale_layout}
    x, dy, w = torch.randn(ROWS, K), torch.randn(ROWS, N), torch.randn(len(SIZES), N, K)
    if split:
        sides = [reference.grouped_quantize_row_col(t, OFFSETS, None, a_spec, **options)[1] for t in (dy, x)]
        return *(GroupedOperand(side, a_spec, scale_layout) for side in sides), ROWS
    row, _ = reference.grouped_quantize_row_col(x, OFFSETS, a_spec, None, **options)
    w_row, _ = reference.grouped_quantize_row_col(w, None, b_spec, None, **options)
    return GroupedOperand(row, a_spec, scale_layout), GroupedOperand(w_row, b_spec, scale_layout), K


def accepted(call):
    """Assert what ATen checks before it launches."""
    a, b, nvfp4 = call["mat_a"], call["mat_b"], call["mat_a"].dtype == torch.float4_e2m1fn_x2
    assert a.dtype == b.dtype and a.dtype in (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    assert a.stride(-1) == 1 and b.stride(-2) == 1, "a by rows, b by columns"
    for t in (a, b):
        outer = [stride for stride in t.stride() if stride != 1]
        assert all(stride * t.element_size() % 16 == 0 for stride in outer) and t.data_ptr() % 16 == 0
    assert a.size(-1) % 16 == b.size(-2) % 16 == b.size(-1) % 16 == 0
    if b.dim() == 3:
        assert a.size(-1) == b.size(-2)
    offs = call["offs"]
    assert offs.dtype == torch.int32 and offs.dim() == 1 and call["output_dtype"] == torch.bfloat16
    length = 16 if nvfp4 else 32
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise] if nvfp4 else [ScalingType.BlockWise1x32]
    orders = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(kinds)]
    for i, (side, mat) in enumerate((("a", a), ("b", b))):
        scales = call[f"scale_{side}"]
        assert call[f"scale_recipe_{side}"] == kinds and call[f"swizzle_{side}"] == orders
        assert len(scales) == len(kinds)
        assert scales[0].dtype == (torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu)
        if nvfp4:
            assert scales[1].dtype == torch.float32 and scales[1].shape == offs.shape
        if mat.dim() == 2:
            assert scales[0].dim() == 2 and scales[0].size(0) >= mat.size(i)
        else:
            columns = mat.size(1) * (2 if nvfp4 else 1)
            size = layout.round_up(columns // length, 4) * layout.round_up(mat.size(2), 128)
            assert scales[0].shape == (mat.size(0), size)


def values(mat, scale, rows, nvfp4):
    """Return the fp64 values of one group's [rows, bytes] with its own swizzled region."""
    if nvfp4:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        codes = table[layout.unpack(mat.view(torch.uint8)).long()]
    else:
        codes = mat.double()
    length = 16 if nvfp4 else 32
    blocks = layout.unswizzle(scale, rows, codes.shape[1] // length).float().double()
    return (codes.unflatten(1, (-1, length)) * blocks[..., None]).flatten(1)


def meaning(call):
    """Return the fp64 products of the groups, each from its own bytes and its own region of scales."""
    a, b, offs = call["mat_a"], call["mat_b"].mT, call["offs"].tolist()
    nvfp4, split = a.dtype == torch.float4_e2m1fn_x2, b.dim() == 2
    per_byte, length = (2, 16) if nvfp4 else (1, 32)
    products, region = [], [0, 0]
    for g, (start, end) in enumerate(zip([0, *offs[:-1]], offs, strict=True)):
        sides = []
        for i, (mat, scale) in enumerate(((a, call["scale_a"][0]), (b, call["scale_b"][0]))):
            if mat.dim() == 3:
                own, own_scale = mat[g], scale[g]
            else:
                own = mat[:, start // per_byte : end // per_byte] if split else mat[start:end]
                size = layout.swizzled_numel(own.shape[0], own.shape[1] * per_byte // length)
                own_scale = scale.flatten()[region[i] : region[i] + size]
                region[i] += size
            sides.append(values(own, own_scale, own.shape[0], nvfp4))
        factor = call["scale_a"][1][g].double() * call["scale_b"][1][g].double() if nvfp4 else 1.0
        products.append(sides[0] @ sides[1].T * factor)
    return products


@pytest.mark.parametrize("scale_layout", layout.SCALE_LAYOUTS)
@pytest.mark.parametrize("split", [False, True], ids=["rows", "contraction"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_call(name, split, scale_layout, monkeypatch):
    a, b, length = operands(name, split, scale_layout)
    calls = []

    def record(**call):
        calls.append(call)
        shape = (len(SIZES), N, K) if split else (ROWS, N)
        return torch.ones(shape, dtype=torch.bfloat16)

    monkeypatch.setattr(grouped_native, "scaled_grouped_mm", record)
    assert native_route.grouped_unsupported(a, b, torch.bfloat16, False, SM_100) is None
    y = grouped_native.grouped_gemm_nt(a, b, OFFSETS, length)
    (call,) = calls
    accepted(call)
    products = meaning(call)
    out = torch.empty((len(SIZES), N, K) if split else (ROWS, N))
    expected = reference.grouped_gemm_nt(a, b, OFFSETS, length, out).double()
    product = torch.stack(products) if split else torch.cat(products)
    torch.testing.assert_close(product, expected if split else expected[: sum(SIZES)], rtol=1e-5, atol=1e-5)
    if not split:
        assert y[sum(SIZES) :].eq(0).all() and y[: sum(SIZES)].eq(1).all()


def test_what_is_emulated_says_why():
    a, b, _ = operands("nvfp4", split=False)
    row = a._replace(spec=hb.NVFP4(outer="row"))
    narrow = b._replace(data=b.data._replace(qdata=b.data.qdata[:, :40]))
    decoded = a._replace(data=a.data._replace(qdata=torch.zeros(ROWS, K)))
    for sides, dtype, accumulate, target, reason in (
        ((a, b), torch.bfloat16, False, record.TARGETS["sm_90"], "sm_90"),
        ((a, b), torch.bfloat16, False, record.TARGETS["sm_120"], "no kernel for sm_120"),
        ((a, b), torch.float32, False, SM_100, "rounds to bf16"),
        ((a, b), torch.bfloat16, True, SM_100, "accumulates nothing"),
        ((row, b), torch.bfloat16, False, SM_100, "one factor per group"),
        ((a, narrow), torch.bfloat16, False, SM_100, "multiples of 16 rows"),
        ((decoded, b), torch.bfloat16, False, SM_100, "no codes"),
        ((a, GroupedOperand(torch.zeros(5, N, K))), torch.bfloat16, False, SM_100, "not quantized"),
    ):
        assert reason in native_route.grouped_unsupported(*sides, dtype, accumulate, target)
    e5m2 = GroupedOperand(a.data, hb.MXFP8(element="e5m2"))
    other = GroupedOperand(b.data, hb.MXFP8())
    assert "e4m3" in native_route.grouped_unsupported(e5m2, other, torch.bfloat16, False, SM_100)
