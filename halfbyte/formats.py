"""The number formats and the block formats made of them: a few facts each, everything else derived.

This file is the only home of 6, 448, 57344, 16 and 32. Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E4M3,
E5M2, E8M0 and MXFP8; NVIDIA's NVFP4 (an E4M3 scale per 16 values, an fp32 scale per tensor).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


def f32(value: float) -> float:
    """Round a real number once to fp32, to nearest even: the `f(c)` of docs/numerics.md."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A small float: sign, exponent and mantissa bits, bias, and which codes are not numbers."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_sign: bool = True
    has_subnormals: bool = True
    nan_code: int | None = None

    @property
    def bits(self) -> int:
        return int(self.has_sign) + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def decode(self, code: int) -> float:
        """Return the value of one code; the definition that every cast is tested against."""
        magnitude = code & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if exponent == 0 and self.has_subnormals:
            value = mantissa * self.min_subnormal
        else:
            value = 2.0 ** (exponent - self.bias) * (1 + mantissa / (1 << self.mantissa_bits))
        if self.nan_code is not None and (magnitude == self.nan_code or value > self.max):
            return float("nan")
        return -value if self.has_sign and code >> (self.bits - 1) else value


E2M1 = ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
E4M3_NAN = 0x7F
E4M3 = ElementFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=E4M3_NAN)
E5M2 = ElementFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, nan_code=0x7F)

E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0 = ElementFormat(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=E8M0_BIAS,
    max=2.0**127,
    has_sign=False,
    has_subnormals=False,
    nan_code=E8M0_NAN,
)

FLT_MAX = f32(3.4028234663852886e38)
"""The largest finite fp32 value: where encode factors saturate instead of becoming Inf."""

NVFP4_BLOCK = 16
"""Values that share one E4M3 scale."""

MXFP8_BLOCK = 32
"""Values that share one E8M0 scale."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements in blocks of `length` that share a scale; with `has_amax` an fp32 amax stands behind the scales."""

    element: ElementFormat
    scale: ElementFormat
    length: int
    has_amax: bool
    codes_per_byte: int = field(init=False)
    block_bytes: int = field(init=False)
    """Bytes of the codes of one block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes_per_byte", 8 // self.element.bits)
        object.__setattr__(self, "block_bytes", self.length // self.codes_per_byte)


NVFP4_E2M1 = BlockFormat(element=E2M1, scale=E4M3, length=NVFP4_BLOCK, has_amax=True)
MXFP8_E4M3 = BlockFormat(element=E4M3, scale=E8M0, length=MXFP8_BLOCK, has_amax=False)
MXFP8_E5M2 = BlockFormat(element=E5M2, scale=E8M0, length=MXFP8_BLOCK, has_amax=False)

SWIZZLE_ROWS = 128
SWIZZLE_COLS = 4
"""The tile of the SWIZZLED_32_4_4 scale layout (cuBLAS block scaling factors layout)."""


def element_format(name: str) -> ElementFormat:
    """Return the element format called `name`.

    Raises:
        ValueError: no format has that name.
    """
    for fmt in (E2M1, E4M3, E5M2):
        if fmt.name == name:
            return fmt
    raise ValueError(f"element={name!r} is not a format; use 'e2m1', 'e4m3' or 'e5m2'")
