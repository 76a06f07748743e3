"""Scales of NVFP4: from amax to the fp32 tensor factors, from a block's maximum to its E4M3 scale (section 3 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import E2M1, FLT_MAX, f32
from halfbyte.reference.blocks import magnitude_bits
from halfbyte.reference.cast import e4m3_nearest
from halfbyte.spec import NVFP4, Spec


class TensorFactors(NamedTuple):
    """fp32, [] or [rows]: A, S, S / fp4_max and D of docs/numerics.md section 3.

    poison: where amax is no valid maximum; None where that was asked and is nowhere.
    """

    a: Tensor
    s: Tensor
    s_over_m4: Tensor
    d: Tensor
    poison: Tensor | None

    def rows(self, start: int, stop: int) -> TensorFactors:
        """Return the factors of some rows, shaped to broadcast over blocks [16, rows, blocks]."""
        if self.a.dim() == 0:
            return self
        a, s, s_over_m4, d = (t[start:stop, None] for t in (self.a, self.s, self.s_over_m4, self.d))
        return TensorFactors(a, s, s_over_m4, d, None if self.poison is None else self.poison[start:stop, None])


def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return max |x| over the finite elements in fp32: [] or, with dim=-1, one per row; 0 for nothing."""
    if x.numel() == 0:
        shape = x.shape[:-1] if dim is not None else ()
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    bits = magnitude_bits(x)
    amax = (bits.amax() if dim is None else bits.amax(dim)).view(x.dtype).float()
    if x.device.type == "cpu" and all_finite(amax):
        return amax
    a = x.float().abs()
    a = torch.where(a.isfinite(), a, 0.0)
    return a.amax() if dim is None else a.amax(dim)


def greatest_amax(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest `finite_amax` of tensors, at least one: fp32 []."""
    return torch.stack([finite_amax(x) for x in xs]).amax()


def all_finite(magnitudes: Tensor) -> bool:
    """Return whether magnitudes, at least one, are finite: on the host."""
    return float(magnitudes.amax() if magnitudes.dim() else magnitudes) < torch.inf


def clamped_amax(amax: Tensor, spec: Spec) -> Tensor:
    """Return A: amax, no smaller than what keeps S finite."""
    return amax.clamp_min(f32(spec.divisor / FLT_MAX))


def tensor_factors(amax: Tensor, spec: NVFP4) -> TensorFactors:
    """Derive every fp32 factor of an operand from its amax ([] or [rows])."""
    known = None if amax.dim() or amax.device.type != "cpu" else float(amax)  # on a GPU, mask rather than ask
    poison = None
    if known is None or not 0 <= known <= FLT_MAX:
        poison = ~((amax >= 0) & (amax <= FLT_MAX))
    clean = amax if poison is None else torch.where(poison, 0.0, amax)
    a = clamped_amax(clean, spec)
    # Divide tensors, not scalars: CUDA torch turns division by a scalar into a multiplication.
    s = (torch.full_like(a, f32(spec.divisor)) / a).clamp_max_(FLT_MAX)
    if poison is not None or known == 0:
        s = torch.where(clean == 0, 1.0, s)
    return TensorFactors(a, s, s * f32(1 / spec.fp4_max), s.reciprocal(), poison)


def _at_most_flt_max(t: Tensor) -> Tensor:
    # IEEE's minimum: where S or D overflows for fp4_max < 1 or tiny maxima, 0 * Inf means FLT_MAX, not NaN.
    return t.nan_to_num(nan=FLT_MAX, posinf=FLT_MAX)


def block_scale(block_amax: Tensor, factors: TensorFactors) -> Tensor:
    """Return the E4M3 scale that maps the block maximum to fp4_max: fp32 of block_amax's shape."""
    return e4m3_nearest(_at_most_flt_max(block_amax * factors.s_over_m4))


def candidate_scale(block_amax: Tensor, factors: TensorFactors, ratio: float) -> Tensor:
    """Return the E4M3 scale of one 4over6 candidate, fp32: `ratio` times the standard scale."""
    six = torch.full_like(factors.s, E2M1.max)
    base = (block_amax / six) * factors.s
    return e4m3_nearest(base * f32(ratio))


def scale_bytes(scale: Tensor) -> Tensor:
    """Return the uint8 that hold a scale, fp32 values of E4M3 or NaN."""
    return scale.to(torch.float8_e4m3fn).view(torch.uint8)


def encode_scale(scale: Tensor, factors: TensorFactors) -> Tensor:
    """Return what multiplies x before the cast: 1 / (scale * D), saturating; `scale` is fp32."""
    return _at_most_flt_max((scale * factors.d).reciprocal_())


def global_scale(amax: Tensor, spec: Spec) -> Tensor:
    """Return g = A * f(1 / (e4m3_max * fp4_max)), the fp32 decode factor that a GEMM applies: [] or [rows]."""
    return clamped_amax(amax, spec) * f32(1 / (spec.divisor))
