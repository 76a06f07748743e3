"""Element casts, vectorised over any shape: value -> code and code -> value (docs/numerics.md sections 1, 4 and 6).

Every function takes fp32 and works in whole-tensor torch operations, each rounded separately.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from halfbyte.formats import E2M1, E4M3, E8M0_NAN, ElementFormat

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

_EXPONENT_MASK = 0x7F800000


def _binade(a: Tensor) -> Tensor:
    """Return the power of two at or below max(a, 1): E2M1's step in that binade is half of it."""
    return (a.clamp_min(1.0).view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


def _with_sign(codes: Tensor, v: Tensor) -> Tensor:
    return codes.bitwise_or_((v.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8))


def e2m1_nearest(v: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest E2M1 value, ties to the even code, saturating.

    Args:
        v: fp32, contiguous, no NaN.

    Returns:
        codes uint8 0..15 and magnitudes fp32 (the rounded |v|), both of v's shape.
    """
    a = v.abs().clamp_max_(E2M1.max)
    # Adding 2^22 binades leaves half a binade as the last bit: the addition itself rounds to nearest even.
    magic = _binade(a).mul_(2.0**22)
    shifted = a.add_(magic)
    bits = shifted.view(torch.int32)
    # Low byte: steps within the binade, 0..4; (bits >> 22) = 2 * (149 + log2 binade), 42 modulo 256 at binade 1.
    codes = bits.to(torch.uint8).add_((bits >> 22).to(torch.uint8).sub_(42))
    return _with_sign(codes, v), shifted - magic


def e2m1_stochastic(v: Tensor, random_bytes: Tensor | None) -> Tensor:
    """Round stochastically with 8 random bits an element, as `cvt.rs.satfinite.e2m1x4.f32` does.

    Args:
        v: fp32, contiguous, no NaN.
        random_bytes: uint8 of v's shape; None means all zero, which truncates toward zero.

    Returns:
        codes uint8 0..15 of v's shape.
    """
    t = v.abs().clamp_max_(E2M1.max)
    if random_bytes is not None:
        step = _binade(t).mul_(0.5)
        t = t.add_(step.mul_(random_bytes).mul_(1 / 256))
    normal = (t.view(torch.int32) >> 22).sub_(252)  # exponent and one mantissa bit, from 1.0 = code 2
    codes = torch.where(t < 1.0, t.mul_(2.0).to(torch.int32), normal).to(torch.uint8)
    return _with_sign(codes, v)


def e4m3(x: Tensor) -> Tensor:
    """Cast fp32 to E4M3, nearest even and saturating; returns float8_e4m3fn."""
    return x.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def fp8(x: Tensor, element: ElementFormat) -> Tensor:
    """Cast fp32 to the MXFP8 element, nearest even and saturating; returns its float8 dtype."""
    return x.clamp(-element.max, element.max).to(FP8_DTYPES[element.name])


def e8m0_ceil(x: Tensor) -> Tensor:
    """Return the smallest E8M0 exponent whose power of two is >= x, for fp32 x >= 0, as int32."""
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127, code 0, is the subnormal with mantissa 0x400000.
    return exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(torch.int32)


def e8m0_value(exponent: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 (NaN for 0xFF) of E8M0 exponents, any integer dtype."""
    e = exponent.to(torch.int32)
    bits = torch.where(e == 0, 0x00400000, e << 23)
    return torch.where(e == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


@lru_cache(maxsize=8)
def _pair_table(device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 values of a packed byte, the low nibble first."""
    values = torch.tensor([E2M1.decode(code) for code in range(16)], dtype=torch.float32)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    return pairs.contiguous().view(torch.int64).squeeze(1).to(device)


def e2m1_values(qdata: Tensor) -> Tensor:
    """Decode packed codes: uint8 [..., B] -> fp32 [..., 2 * B]."""
    if qdata.numel() == 0:
        return torch.empty(*qdata.shape[:-1], 2 * qdata.shape[-1], dtype=torch.float32, device=qdata.device)
    # Under a tracer the table is a fake tensor, which must not stay in the cache for eager calls.
    table = _pair_table if type(qdata) is Tensor else _pair_table.__wrapped__
    return table(qdata.device)[qdata.int()].view(torch.float32)
