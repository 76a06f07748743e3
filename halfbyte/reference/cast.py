"""Element casts, vectorised over any shape: value -> code and code -> value (docs/numerics.md sections 1, 4 and 6).

Every function takes fp32 and works in whole-tensor torch operations, each rounded separately.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from halfbyte.formats import E2M1, E4M3, E8M0_NAN, ElementFormat

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

SMALL = 1024
"""Elements up to which looking up takes longer than converting."""

_EXPONENT_MASK = 0x7F800000
_ONE_BIT_MASK = 0x7FC00000  # the exponent and the first bit of the mantissa


def _masked(a: Tensor, mask: int) -> Tensor:
    return a.view(torch.int32).bitwise_and(mask).view(torch.float32)


def _binade(a: Tensor, element: ElementFormat = E2M1) -> Tensor:
    """Return the power of two at or below max(a, the least normal value): 2^mantissa_bits steps of that binade."""
    return _masked(a, _EXPONENT_MASK).clamp_min_(element.min_normal)


def _to_nearest_(a: Tensor, element: ElementFormat) -> Tensor:
    """Round a, fp32 from 0 to the element's greatest value, to the nearest of its values in place, ties to even."""
    binade = _binade(a, element)
    # Adding these leaves one step as the last bit: the addition itself rounds. Powers of two: no product does.
    magic = 2.0 ** (23 - element.mantissa_bits)
    return a.add_(binade, alpha=magic).sub_(binade, alpha=magic)


def round_nearest(v: Tensor) -> Tensor:
    """Return |v| rounded to the nearest magnitude of E2M1, ties to the even code, saturating.

    Args:
        v: fp32, no NaN.
    """
    return _to_nearest_(v.abs().clamp_max_(E2M1.max), E2M1)


def e4m3_nearest(x: Tensor) -> Tensor:
    """Return x, fp32 and at least 0, rounded to the nearest value of E4M3 as fp32, ties to even, saturating.

    What `e4m3` says in a float8, several times as fast on a CPU, and needed in fp32 anyway.
    """
    return _to_nearest_(x.clamp_max(E4M3.max), E4M3)


def round_stochastic(v: Tensor, random: Tensor | None) -> Tensor:
    """Return |v| rounded to a magnitude of E2M1 with 8 random bits an element, as `cvt.rs.satfinite.e2m1x4.f32` does.

    Args:
        v: fp32, no NaN.
        random: 0 to 255, fp32 of v's shape; None means all zero, which truncates toward zero.
    """
    t = v.abs().clamp_max_(E2M1.max)
    if random is not None:
        t.add_(_binade(t).mul_(random), alpha=0.5 / 256)  # an exact product: fused or not, one rounding
    # Truncating the mantissa rounds to E2M1's steps from 1 on; below they are halves, which what is left stands above.
    t.view(torch.int32).bitwise_and_(_ONE_BIT_MASK)
    return t.mul_(2.0).floor_().mul_(0.5)


def with_sign(magnitude: Tensor, v: Tensor) -> Tensor:
    """Return magnitudes fp32 with the signs of v, both overwritten: several times as fast as torch's copysign."""
    sign = v.view(torch.int32).bitwise_and_(torch.iinfo(torch.int32).min)
    magnitude.view(torch.int32).bitwise_or_(sign)
    return magnitude


def e2m1_codes(magnitude: Tensor, v: Tensor) -> Tensor:
    """Return the codes, uint8 0..15, of magnitudes of E2M1 with the signs of v."""
    halves = magnitude.mul(2.0).to(torch.int8).view(torch.uint8)  # 0 1 2 3 4 6 8 12
    codes = torch.minimum(halves, (halves >> 2).add_(4))
    sign = (v.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    return codes.bitwise_or_(sign)


def e2m1_nearest(v: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest E2M1 value: codes uint8 and magnitudes fp32, see `round_nearest`."""
    magnitude = round_nearest(v)
    return e2m1_codes(magnitude, v), magnitude


def e2m1_stochastic(v: Tensor, random_bytes: Tensor | None) -> Tensor:
    """Round to E2M1 codes uint8 with random bytes uint8 (None: zeros) of v's shape, see `round_stochastic`."""
    return e2m1_codes(round_stochastic(v, None if random_bytes is None else random_bytes.float()), v)


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


@lru_cache(maxsize=32)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What 256 bytes stand for: fp32 of a float8 dtype; of uint8, packed codes, two fp32 as an int64, the low first."""
    if dtype != torch.uint8:
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)
    values = torch.tensor([E2M1.decode(code) for code in range(16)], dtype=torch.float32)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    return pairs.contiguous().view(torch.int64).squeeze(1).to(device)


def _look_up(codes: Tensor) -> Tensor:
    """Return the entries of `_table` that the bytes of codes name, in codes' shape and memory order."""
    # Under a tracer the table is a fake tensor, which must not stay in the cache for eager calls.
    table = _table if type(codes) is Tensor else _table.__wrapped__
    entries = table(codes.dtype, codes.device)
    if codes.is_contiguous():
        return entries.index_select(0, codes.view(torch.uint8).view(-1).int()).view(codes.shape)
    order = sorted(range(codes.dim()), key=codes.stride, reverse=True)
    in_memory = codes.permute(order)
    found = entries.index_select(0, in_memory.view(torch.uint8).reshape(-1).int())
    return found.view(in_memory.shape).permute(sorted(range(codes.dim()), key=order.__getitem__))


def e2m1_values(qdata: Tensor) -> Tensor:
    """Decode packed codes: uint8 [..., B] -> fp32 [..., 2 * B]."""
    if qdata.numel() == 0:
        return torch.empty(*qdata.shape[:-1], 2 * qdata.shape[-1], dtype=torch.float32, device=qdata.device)
    return _look_up(qdata.contiguous()).view(torch.float32)


def fp8_values(codes: Tensor) -> Tensor:
    """Return a float8 tensor in fp32; torch's own conversion of a large one takes five times as long on a CPU."""
    return _look_up(codes) if codes.numel() > SMALL else codes.float()
