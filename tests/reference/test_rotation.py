"""The random Hadamard transform: a symmetric orthogonal matrix times signs, exactly; what it does to a GEMM, nearly."""

import math

import pytest
import torch
from strategies import make, same_bytes

import halfbyte as hb
from halfbyte import reference

SIZES = (16, 32, 64, 128)
FIXED = "+++-+------+-+--"


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, fp64, entries +1 and -1: parity of the common bits."""
    return torch.tensor([[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)]).double()


def sign_matrix(size: int, signs: str = "fixed", place: hb.Philox = hb.Philox(0)) -> torch.Tensor:  # noqa: B008
    """The transform as +1 / -1 [size, size]: row i is the image of the unit vector i."""
    unit = torch.eye(size, dtype=torch.bfloat16)
    return reference.rotate(unit, hb.Hadamard(size=size, signs=signs), place.on(unit.device)).double().sign()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", ["fixed", "fresh"])
def test_orthogonal_and_sylvester(size, signs):
    m = sign_matrix(size, signs, hb.Philox(5, 6))
    assert torch.equal(m @ m.T, size * torch.eye(size).double())
    factors = m[:, 0]  # H's first column is all ones
    assert torch.equal(m, hadamard(size) * factors[:, None])
    if signs == "fixed":
        assert "".join("+" if f > 0 else "-" for f in factors) == FIXED * (size // 16)


@pytest.mark.parametrize("size", SIZES)
def test_normalised(size):
    unit = torch.eye(size, dtype=torch.bfloat16)
    y = reference.rotate(unit, hb.Hadamard(size=size))
    expected = torch.tensor(1 / math.sqrt(size)).bfloat16()
    assert (y.abs() == expected).all()


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_fp64_product_up_to_one_bf16_rounding(size):
    x = make("heavy", (40, 3 * size), torch.bfloat16, size)
    y = reference.rotate(x, hb.Hadamard(size=size)).double()
    exact = (x.double().view(-1, size) @ sign_matrix(size)).view(40, -1) / math.sqrt(size)
    norm = x.double().view(-1, size).norm(dim=1)[:, None].expand(-1, size).reshape(40, -1)
    assert ((y - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-22 * norm).all()


def test_groups_do_not_mix_and_the_tail_is_padded():
    x = torch.zeros(1, 37, dtype=torch.bfloat16)
    x[0, 33] = 1.0
    y = reference.rotate(x, hb.Hadamard(size=16))
    assert y.shape == (1, 48) and (y[0, :32] == 0).all() and (y[0, 32:] != 0).all()
    padded = torch.nn.functional.pad(x, (0, 11))
    assert torch.equal(reference.rotate(padded, hb.Hadamard(size=16)), y)


def test_zeros_are_positive():
    x = torch.full((2, 16), -0.0, dtype=torch.bfloat16)
    assert not reference.rotate(x, hb.Hadamard()).signbit().any()


def test_fresh_signs_depend_on_the_whole_place_and_repeat():
    places = [hb.Philox(1), hb.Philox(2), hb.Philox(1, 1), hb.Philox(1, 1 << 32), hb.Philox(1 | 1 << 40)]
    factors = [sign_matrix(128, "fresh", place)[:, 0] for place in places]
    for i, a in enumerate(factors):
        assert all(32 < (a != b).sum() < 96 for b in factors[:i])
    for size in SIZES:  # a narrower transform takes the first signs of the same draw
        assert torch.equal(sign_matrix(size, "fresh", places[0])[:, 0], factors[0][:size])


def test_first_block_does_not_reach_the_signs():
    rotation = hb.Hadamard(size=32, signs="fresh")
    x = make("normal", (3, 64), torch.bfloat16, 1)
    a, b = (reference.rotate(x, rotation, hb.Philox(4, 5, first_block=n).on("cpu")) for n in (0, 99))
    assert torch.equal(a, b)


def operands(spec: hb.NVFP4, signs_a: hb.Philox, signs_b: hb.Philox):
    """Two matrices with an outlier column, [24, 130] and [20, 130], as rotated operands; the exact product."""
    a, b = make("normal", (24, 130), torch.bfloat16, 1), make("normal", (20, 130), torch.bfloat16, 2)
    a[:, 7] *= 30
    q = (hb.quantize(a, spec, sign_rng=signs_a), hb.quantize(b, spec, sign_rng=signs_b))
    return *q, a.double() @ b.double().T


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", ["fixed", "fresh"])
def test_the_rotation_cancels_in_the_gemm(size, signs):
    spec = hb.NVFP4(rotation=hb.Hadamard(size=size, signs=signs))
    a, b, exact = operands(spec, hb.Philox(1), hb.Philox(1))
    error = (hb.gemm_nt(a, b, torch.float32).double() - exact).norm() / exact.norm()
    plain, plain_b, _ = operands(hb.NVFP4(), hb.Philox(1), hb.Philox(1))
    without = (hb.gemm_nt(plain, plain_b, torch.float32).double() - exact).norm() / exact.norm()
    assert error < 0.2 and without < 0.2


def test_signs_that_are_not_shared_do_not_cancel():
    spec = hb.NVFP4(rotation=hb.Hadamard(size=64, signs="fresh"))
    a, b, exact = operands(spec, hb.Philox(1), hb.Philox(2))
    assert (hb.gemm_nt(a, b, torch.float32).double() - exact).norm() > 0.4 * exact.norm()


def test_sign_rng_and_rng_are_apart():
    """sign_rng only turns the basis, rng only rounds: each changes bytes alone."""
    spec = hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(size=32, signs="fresh"))
    x = make("normal", (16, 64), torch.bfloat16, 3)
    base = hb.quantize(x, spec, rng=hb.Philox(1), sign_rng=hb.Philox(2))
    other_bits = hb.quantize(x, spec, rng=hb.Philox(3), sign_rng=hb.Philox(2))
    other_signs = hb.quantize(x, spec, rng=hb.Philox(1), sign_rng=hb.Philox(3))
    assert torch.equal(base.block_scale.float(), other_bits.block_scale.float()) and not same_bytes(base, other_bits)
    assert not torch.equal(base.block_scale.float(), other_signs.block_scale.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_are_cast_to_bf16_first(dtype):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(reference.rotate(x, hb.Hadamard()), reference.rotate(x.bfloat16(), hb.Hadamard()))


def test_gemm_refuses_what_does_not_cancel():
    x = make("normal", (16, 64), torch.bfloat16, 3)
    rotated = hb.quantize(x, hb.NVFP4(rotation=hb.Hadamard()))
    for other in (x, hb.quantize(x, hb.NVFP4()), hb.quantize(x, hb.NVFP4(rotation=hb.Hadamard(size=32)))):
        with pytest.raises(ValueError, match="rotation"):
            hb.gemm_nt(rotated, other)
