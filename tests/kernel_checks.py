"""What the tests of the decoding kernels and of the GEMM share, on the CPU (interpreter) and on a GPU alike."""

from __future__ import annotations

import golden_vectors as golden
import numpy as np
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import layout, reference
from halfbyte.kernels.gemm import dense
from halfbyte.kernels.unpack import dequantize as dq
from halfbyte.kernels.unpack import swizzle, transpose
from halfbyte.layout import Blocks
from halfbyte.sides import Epilogue

LAYOUTS = (layout.LINEAR, layout.SWIZZLED_32_4_4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = hb.NVFP4(block=(16, 16))
ROW = hb.NVFP4(outer="row")


def same(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN equal to NaN whatever its payload."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan()), "NaN elsewhere than expected"
        actual, expected = (torch.where(t.isnan(), 0.0, t).contiguous() for t in (actual, expected))
        bits = torch.int16 if actual.element_size() == 2 else torch.int32
        actual, expected = actual.view(bits), expected.view(bits)
    assert torch.equal(actual, expected)


def blocks_of(case: golden.Case, prefix: str = "") -> Blocks:
    """Return the stored bytes of a vector."""
    amax = case.tensor(f"{prefix}amax") if case.has(f"{prefix}amax") else torch.empty(0, device=case.device)
    outer_row = case.entry.get("outer") == "row"
    return Blocks(
        case.tensor(f"{prefix}qdata"), case.tensor(f"{prefix}block_scale"), amax if outer_row else amax.squeeze()
    )


def check_dequantize(case: golden.Case) -> None:
    """The stored bytes of a vector give its stored values, in every dtype and scale layout."""
    spec, expected = golden.spec_of(case.entry), case.tensor("dequant")
    expected = expected.reshape(layout.matrix_shape(expected.shape))
    blocks = blocks_of(case)
    for scale_layout in LAYOUTS:
        swizzled = scale_layout != layout.LINEAR
        stored = blocks._replace(block_scale=layout.swizzle(blocks.block_scale)) if swizzled else blocks
        for dtype in DTYPES if swizzled else DTYPES[:1]:
            actual = dq.dequantize(layout.Operand(stored, spec, expected.shape[1], scale_layout), dtype)
            same(actual, expected.to(dtype))


def check_transpose(case: golden.Case) -> None:
    blocks, shape = blocks_of(case), case.array("dequant").shape
    qdata, scale = transpose.transpose(blocks.qdata, blocks.block_scale, *shape)
    same(qdata, case.tensor("t_qdata"))
    same(scale, case.tensor("t_block_scale"))


def check_swizzle(scale: Tensor) -> None:
    expected = layout.swizzle(scale)
    same(swizzle.swizzle(scale), expected)
    same(swizzle.unswizzle(expected, *scale.shape), scale)


def decoded_pair(x: Tensor, spec: hb.NVFP4 | hb.MXFP8 | None) -> tuple[dq.Decoded, reference.Decoded]:
    """Return an operand as the kernels and as the reference decode it; None leaves it as it is."""
    if spec is None:
        return dq.Decoded(x), reference.Decoded(x.float(), None)
    stored = layout.Operand(reference.quantize(x, spec), spec, x.shape[1])
    return dq.decode(stored), reference.decode(stored)


def check_gemm(case: golden.Case, variant: dense.Variant) -> None:
    """A stored product, within the vector's own bound."""
    operands = []
    for name in ("a", "b"):
        entry = case.entry[name]
        spec, place = golden.spec_of(entry), golden.place_of(entry)
        x = case.tensor(name, entry["dtype"])
        amax = case.tensor(f"{name}_given_amax") if case.has(f"{name}_given_amax") else None
        if amax is not None and getattr(spec, "outer", "tensor") == "tensor":
            amax = amax.squeeze()
        draw = place.on(x.device)
        blocks = reference.quantize(x, spec, draw=draw, sign_draw=draw, amax=amax)
        operands.append(dq.decode(layout.Operand(blocks, spec, x.shape[1])))
    existing = case.tensor("existing") if case.has("existing") else None
    bias = case.tensor("bias") if case.has("bias") else None
    y = dense.gemm_nt(*operands, Epilogue(torch.float32, bias, existing, existing), variant=variant)
    got, want, bound = y.cpu().numpy(), case.array("out"), case.array("bound")
    assert np.array_equal(np.isnan(got), np.isnan(want)), "NaN elsewhere than expected"
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(got.astype(np.float64) - want) <= case.entry["rtol"] * bound
    assert (near | np.isnan(want) | (got == want)).all()


def relative_error(y: Tensor, a: dq.Decoded, b: dq.Decoded, plus: Tensor | None = None) -> float:
    """Return the relative Frobenius error of y against fp64 of the decoded operands, plus what was added."""
    expected = _values64(a) @ _values64(b).T
    if plus is not None:
        expected = expected + plus.double()
    return ((y.double() - expected).norm() / expected.norm()).item()


def _values64(side: dq.Decoded) -> Tensor:
    values = side.values.double()
    if side.amax is None:
        return values
    factor = side.amax.double() / side.divisor
    return values * (factor[:, None] if factor.dim() else factor)
