"""hb.gemm_nt: block-scaled products against fp64, the order of what follows the sum, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, MAE, MX, MX5, RHT, ROW, STANDARD, TILE, make, matrices

import halfbyte as hb

SUM = 2e-6  # fp32 accumulation and factors, relative to the sum of absolute products
OPERANDS = (None, STANDARD, TILE, ROW, MAE, hb.NVFP4(fp4_max=5.0), MX, MX5)
PAIRS = [
    (a, b) for a, b in itertools.product(OPERANDS, OPERANDS) if not (a and b) or a.block_length == b.block_length
] + [(RHT, RHT), (RHT, hb.NVFP4(rotation=hb.Hadamard(), outer="row"))]


def quantized(x, spec, **options):
    return x if spec is None else hb.quantize(x, spec, **options)


def values(x, spec) -> torch.Tensor:
    """What the operand stands for in fp64; zeros pad it to whole rotations, whose tail enters the product."""
    if spec is None:
        return x.double()
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % spec.alignment)) if spec.rotation else x
    return hb.quantize(padded, spec).dequantize(torch.float32).double()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join("plain" if s is None else s.key for s in p))
@pytest.mark.parametrize("m, k, n", [(7, 45, 19), (33, 160, 16)])
def test_against_fp64(pair, m, k, n):
    a, b = make("normal", (m, k), torch.bfloat16, 1), make("heavy", (n, k), torch.bfloat16, 2)
    x, y = (values(t, spec) for t, spec in zip((a, b), pair, strict=True))
    got = hb.gemm_nt(quantized(a, pair[0]), quantized(b, pair[1]), torch.float32)
    assert ((got.double() - x @ y.T).abs() <= SUM * (x.abs() @ y.abs().T)).all()


@settings(max_examples=40)
@given(a=matrices(patterns=("normal", "heavy", "sparse")), spec=st.sampled_from((STANDARD, TILE, ROW, MX)))
def test_any_shape(a, spec):
    b = make("normal", (9, a.shape[1]), torch.bfloat16, 1)
    x, y = values(a, spec), values(b, spec)
    got = hb.gemm_nt(hb.quantize(a, spec), hb.quantize(b, spec), torch.float32)
    assert got.shape == (a.shape[0], 9)
    assert ((got.double() - x @ y.T).abs() <= SUM * (x.abs() @ y.abs().T)).all()


def operands(spec=STANDARD):
    a, b = make("normal", (7, 45), torch.bfloat16, 1), make("normal", (5, 45), torch.bfloat16, 2)
    return hb.quantize(a, spec), hb.quantize(b, spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_after_bias_and_accumulation(dtype):
    a, b = operands()
    bias, existing = torch.randn(5), torch.randn(7, 5).to(dtype)
    wide = hb.gemm_nt(a, b, torch.float32)
    assert torch.equal(hb.gemm_nt(a, b, dtype), wide.to(dtype))
    assert torch.equal(hb.gemm_nt(a, b, dtype, bias=bias), (wide + bias).to(dtype))
    out = existing.clone()
    assert hb.gemm_nt(a, b, bias=bias, out=out, accumulate=True) is out
    assert torch.equal(out, (wide + bias + existing.float()).to(dtype))
    assert hb.gemm_nt(a, b, out=out) is out and torch.equal(out, wide.to(dtype))
    assert hb.gemm_nt(a, b).dtype == torch.bfloat16


def test_out_of_any_strides():
    a, b = operands()
    out = torch.zeros(5, 14)[:, ::2].T
    assert hb.gemm_nt(a, b, out=out) is out
    assert torch.equal(out, hb.gemm_nt(a, b, torch.float32))


@pytest.mark.parametrize("spec", [STANDARD, ROW, MX, None])
def test_an_empty_contraction_gives_zeros_plus_bias(spec):
    a, b, bias = torch.empty(3, 0), torch.empty(4, 0), torch.randn(4)
    a, b = quantized(a, spec), quantized(b, spec)
    assert torch.equal(hb.gemm_nt(a, b), torch.zeros(3, 4).bfloat16())
    assert torch.equal(hb.gemm_nt(a, b, torch.float32, bias=bias), bias.expand(3, 4))


def test_factors_whose_product_overflows_are_applied_one_by_one():
    """g_a * g_b is Inf, the result is not: large amaxes over small elements, and sums of zero."""
    x, y = torch.zeros(2, 16), torch.zeros(2, 16)
    x[0, 0], y[0, 0] = 1e34, 1e3
    a, b = hb.quantize(x, STANDARD, amax=torch.tensor(3e38)), hb.quantize(y, STANDARD, amax=torch.tensor(1e8))
    assert torch.isinf(a.amax / 2688 * (b.amax / 2688))
    want = a.dequantize().double() @ b.dequantize().double().T
    assert want[0, 0] > 1e36
    torch.testing.assert_close(hb.gemm_nt(a, b, torch.float32), want.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(hb.gemm_nt(b, a, torch.float32), want.T.float(), rtol=1e-5, atol=0)


def test_it_runs_in_fp32_inside_autocast():
    a, b = operands()
    want = hb.gemm_nt(a, b, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hb.gemm_nt(a, b, torch.float32), want)


@pytest.mark.parametrize(
    "change, error, names",
    [
        ({"b": torch.zeros(5, 44)}, ValueError, ["(7, 45)", "(5, 44)"]),
        ({"b": torch.zeros(45)}, ValueError, ["b.shape", "(45,)"]),
        ({"b": torch.zeros(5, 45).double()}, TypeError, ["b.dtype", "float64"]),
        ({"b": torch.zeros(5, 45).int()}, TypeError, ["b.dtype", "int32"]),
        ({"b": [1.0]}, TypeError, ["b=list"]),
        ({"b": hb.quantize(torch.zeros(5, 45), MX)}, ValueError, ["16", "32"]),
        ({"b": hb.quantize(torch.zeros(5, 45), RHT)}, ValueError, ["rotation"]),
        ({"out_dtype": torch.float64}, TypeError, ["out_dtype", "float64"]),
        ({"out": torch.zeros(7, 5, dtype=torch.int32)}, TypeError, ["out.dtype", "int32"]),
        ({"out": 3}, TypeError, ["out=3"]),
        ({"out": torch.zeros(5, 7)}, ValueError, ["out.shape", "(5, 7)", "(7, 5)"]),
        ({"bias": torch.zeros(7)}, ValueError, ["bias.shape", "(7,)", "(5,)"]),
        ({"bias": 1.0}, TypeError, ["bias=1.0", "tensor"]),
        ({"bias": torch.zeros(5, dtype=torch.int64)}, TypeError, ["bias=torch.int64", "float"]),
        ({"b": torch.zeros(5, 45, device="meta")}, ValueError, ["b.device=meta", "a.device=cpu", "move"]),
        ({"accumulate": True}, ValueError, ["accumulate", "out"]),
        ({"backend": "cuda"}, ValueError, ["backend='cuda'", "reference"]),
        ({"backend": "triton"}, ValueError, ["backend='triton'"]),
    ],
)
def test_mistakes_are_named(change, error, names):
    a, b = operands()
    with pytest.raises(error) as caught:
        hb.gemm_nt(**{"a": a, "b": b, "backend": "reference" if "backend" not in change else None, **change})
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_no_gradient_flows_on_any_device():
    a, b = torch.randn(16, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    assert not hb.gemm_nt(a, b).requires_grad
    assert not hb.grouped_gemm_nt(a, b[None], torch.tensor([16])).requires_grad


def test_compiled_code_takes_quantized_arguments():
    a, b = hb.quantize(torch.randn(32, 64), hb.NVFP4()), hb.quantize(torch.randn(48, 64), hb.NVFP4(block=(16, 16)))
    product = torch.compile(hb.gemm_nt, fullgraph=True, backend="aot_eager")
    assert torch.equal(product(a, b), hb.gemm_nt(a, b))
    assert torch.equal(product(b, a), hb.gemm_nt(b, a))
