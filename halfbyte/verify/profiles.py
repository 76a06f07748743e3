"""How others quantize to NVFP4, rule by rule: a profile is a value, and its bytes are the package's, on any data.

docs/agreement.md says what each rule means. `DEFINITION` is docs/numerics.md section 3 (1x16, nearest) written in these
rules. Everything is fp32 torch on one tensor, every operation rounded by itself, apart from the reference and the
kernels on purpose: what agrees was computed twice.

Letters: m is a block's maximum, A the tensor's, S about 2688 / A, D and P about A / 2688, s a block's stored scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import E2M1, E4M3, FLT_MAX, NVFP4_BLOCK, f32

TOP = E2M1.max * E4M3.max
TINY = torch.finfo(torch.float32).tiny
OVERFLOW = 8
"""The code that a magnitude of 8 gets where nothing saturates: it spills into the sign."""


class PeerBytes(NamedTuple):
    """What a quantizer stores of x [M, K]: codes uint8 [M, K/2], scales uint8 [M, K/16], one fp32 number []."""

    qdata: Tensor
    block_scale: Tensor
    stored: Tensor


class PeerFactors(NamedTuple):
    """fp32 []: what is stored of the tensor, what takes it to the range of codes times scales, and what brings back."""

    stored: Tensor
    encode: Tensor
    decode: Tensor


def _amax(amax: Tensor, dtype: torch.dtype) -> PeerFactors:
    encode = _over(TOP, amax.clamp_min(f32(TOP / FLT_MAX))).clamp_max(FLT_MAX)
    encode = torch.where(amax == 0, 1.0, encode)
    return PeerFactors(amax, encode, _over(1, encode))


def _decode_factor(amax: Tensor, dtype: torch.dtype) -> PeerFactors:
    decode = amax / TOP
    return PeerFactors(decode, _over(1, decode), decode)


def _encode_factor(amax: Tensor, dtype: torch.dtype) -> PeerFactors:
    return _encode_factors(_over(TOP, amax.clamp_min(TINY)))


def _encode_factor_in_dtype(amax: Tensor, dtype: torch.dtype) -> PeerFactors:
    reciprocal = _over(1, amax.clamp_min(TINY)).to(dtype)  # torch takes number / tensor so
    return _encode_factors((reciprocal.float() * TOP).to(dtype).float())


def _encode_factors(encode: Tensor) -> PeerFactors:
    encode = encode.nan_to_num(nan=1.0, posinf=1.0)
    return PeerFactors(encode, encode, _over(1, encode))


def _over(number: float, t: Tensor) -> Tensor:
    """Divide, rounding once: torch takes number / tensor as a product with the reciprocal."""
    return torch.full_like(t, number) / t


STORED: Mapping[str, Callable[[Tensor, torch.dtype], PeerFactors]] = MappingProxyType(
    {
        "A": _amax,
        "A / 2688": _decode_factor,
        "2688 / A": _encode_factor,
        "2688 * (1 / A) in the dtype of x": _encode_factor_in_dtype,
    }
)
"""What is stored of the tensor, from amax fp32 [] and the dtype of x."""

SCALE: Mapping[str, Callable[[Tensor, PeerFactors, torch.dtype], Tensor]] = MappingProxyType(
    {
        "m * (S * f(1/6))": lambda m, f, dtype: m * (f.encode * f32(1 / E2M1.max)),
        "(m * f(1/6)) * S": lambda m, f, dtype: m * f32(1 / E2M1.max) * f.encode,
        "(m / 6) * S": lambda m, f, dtype: m / E2M1.max * f.encode,
        "(m / 6 in the dtype of x) * S": lambda m, f, dtype: (m / E2M1.max).to(dtype).float() * f.encode,
        "(m / 6) / P": lambda m, f, dtype: m / E2M1.max / f.decode,
        "m / (6 * P)": lambda m, f, dtype: m / (E2M1.max * f.decode),
    }
)
"""A block's scale before it becomes E4M3, from maxima fp32 [M, K/16] and the dtype of x."""

ENCODE: Mapping[str, Callable[[Tensor, Tensor, PeerFactors], Tensor]] = MappingProxyType(
    {
        "x * (1 / (s * D))": lambda x, s, f: x * _over(1, s * f.decode).clamp_max(FLT_MAX),
        "x * (S / s)": lambda x, s, f: x * (f.encode / s),
        "x / (s * P)": lambda x, s, f: x / (s * f.decode),
        "x / (s / S)": lambda x, s, f: x / (s / f.encode),
    }
)
"""What is rounded to E2M1, from x fp32 [M, K/16, 16] and scales fp32 [M, K/16, 1]."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The rules by which x becomes bytes; the defaults are the definition's.

    Args:
        stored: what is kept of the tensor, a key of STORED.
        scale: the formula of a block's scale, a key of SCALE.
        scale_of_zeros: what takes the place of a scale that is 0 before the cast.
        scale_floor: smaller scales are raised to it before the cast.
        scale_after_zero: what takes the place of a scale that the cast made 0.
        encode: the formula of what is rounded to E2M1, a key of ENCODE.
        factor_of_zero: what x is multiplied with where the scale is 0.
        has_minus_zero: whether a product of -0 keeps its sign (code 8).
        saturates: whether magnitudes of 7 and more give code 7; else they give code 8.
        code_of_nan: the magnitude of a product that is no number.
    """

    stored: str = "A"
    scale: str = "m * (S * f(1/6))"
    scale_of_zeros: float = 0.0
    scale_floor: float = 0.0
    scale_after_zero: float = 0.0
    encode: str = "x * (1 / (s * D))"
    factor_of_zero: float = FLT_MAX
    has_minus_zero: bool = True
    saturates: bool = True
    code_of_nan: int = 0

    def __post_init__(self) -> None:
        for field, known in (("stored", STORED), ("scale", SCALE), ("encode", ENCODE)):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"{field}={value!r}: use one of {', '.join(map(repr, known))}")
        for field in ("scale_of_zeros", "scale_floor", "scale_after_zero"):
            value = getattr(self, field)
            if not 0 <= value <= E4M3.max:
                raise ValueError(f"{field}={value}: a scale lies between 0 and {E4M3.max:g}")
        if not 0 <= self.factor_of_zero <= FLT_MAX:
            raise ValueError(f"factor_of_zero={self.factor_of_zero}: use a number between 0 and the largest of fp32")
        if self.code_of_nan not in range(8):
            raise ValueError(f"code_of_nan={self.code_of_nan}: a magnitude's code lies between 0 and 7")


DEFINITION = Profile()


def rules() -> tuple[str, ...]:
    """Return the names of the rules in the order in which they act on a tensor."""
    return tuple(field.name for field in fields(Profile))


def steps(profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Yield (rule, profile) from the definition to `profile`, one differing rule more each time."""
    current = DEFINITION
    for rule in rules():
        if getattr(current, rule) != getattr(profile, rule):
            current = replace(current, **{rule: getattr(profile, rule)})
            yield rule, current


def bytes_by(profile: Profile, x: Tensor) -> PeerBytes:
    """Quantize by the rules of a profile.

    Args:
        profile: the rules.
        x: bf16 or fp32 [M, K], K a multiple of 16, finite.

    Returns:
        PeerBytes.

    Raises:
        ValueError: x has another shape or dtype, or holds NaN or Inf, of which the profiles say nothing.
    """
    _check(x)
    blocks = x.float().unflatten(1, (-1, NVFP4_BLOCK))
    maxima = blocks.abs().amax(-1)
    factors = STORED[profile.stored](x.float().abs().amax(), x.dtype)
    ratio = SCALE[profile.scale](maxima, factors, x.dtype)
    ratio = torch.where(ratio == 0, profile.scale_of_zeros, ratio)
    scale = ratio.clamp(profile.scale_floor, E4M3.max).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, profile.scale_after_zero, scale.float())
    products = ENCODE[profile.encode](blocks, scale[..., None], factors)
    products = torch.where(scale[..., None] == 0, blocks * profile.factor_of_zero, products)
    codes = _codes(products, profile).flatten(1)
    stored_scale = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    return PeerBytes(codes[:, ::2] | codes[:, 1::2] << 4, stored_scale, factors.stored)


def _codes(products: Tensor, profile: Profile) -> Tensor:
    """Return E2M1 codes uint8, of nearest with ties to even: a tie goes up where the code above is the even one."""
    a = products.abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    for low, high in ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5)):
        code += (a > low).to(torch.uint8) + (a >= high).to(torch.uint8)
    code += (a > 5).to(torch.uint8)
    sign = products.signbit() if profile.has_minus_zero else products < 0
    code |= sign.to(torch.uint8) << 3
    if not profile.saturates:
        code = torch.where(a >= 7, OVERFLOW, code)
    nan = profile.code_of_nan + (sign.to(torch.uint8) << 3)
    return torch.where(products.isnan(), nan, code).to(torch.uint8)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] % NVFP4_BLOCK or x.numel() == 0:
        raise ValueError(f"x.shape={tuple(x.shape)}: give a matrix with a multiple of {NVFP4_BLOCK} columns")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x.dtype={x.dtype}: use torch.bfloat16 or torch.float32")
    if not bool(x.isfinite().all()):
        raise ValueError("x holds NaN or Inf: profiles are of finite values; leave them out")
