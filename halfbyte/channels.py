"""Which channels of x get more than four bits, and what else of x a recipe takes apart before it is quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.values import check_choice, refused

CHANNELS_AT_ONCE = 32
"""Channels come in whole blocks of MXFP8."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Which channels of x are multiplied in more than four bits, and how (docs/numerics.md section 2).

    Args:
        kind: "mxfp8" takes the channels with the largest norm out of what is quantized to NVFP4 and multiplies them in
            MXFP8 (after TetraJet-v2, arXiv 2510.27527); "patch" adds what the rounding of x and w took from the product
            of those with the largest rounding errors, to first order (after CHON, arXiv 2602.02047).
        share: of the channels, 0 < share < 1; rounded up to whole groups of 32.

    Raises:
        ValueError: there is no such kind, or the share is out of bounds.
    """

    kind: Literal["mxfp8", "patch"]
    share: float

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("mxfp8", "patch"))
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 < self.share < 1:
            raise refused("share", self.share, "give a share of the channels, 0 < share < 1")
        object.__setattr__(self, "share", float(self.share))

    @property
    def key(self) -> str:
        return f"{self.kind},{self.share!r}"

    def count(self, channels: int) -> int:
        """Return how many of so many channels are meant."""
        return min(channels, CHANNELS_AT_ONCE * math.ceil(self.share * channels / CHANNELS_AT_ONCE))


def parse_channels(text: str) -> Channels:
    """Return the channels whose key is `text`.

    Raises:
        ValueError: it is no such key.
    """
    kind, share = text.split(",")
    parts: Any = {"kind": kind, "share": float(share)}
    return Channels(**parts)


def check_treatment_of_x(recipe: Any) -> None:
    """Raise ValueError where a recipe takes a mean or channels of x apart that its GEMMs need together."""
    if recipe.channels is not None and not isinstance(recipe.channels, Channels):
        raise refused("channels", recipe.channels, "use None, or what hb.recipes.outlier_channels() has")
    fprop, wgrad = recipe.fprop, recipe.wgrad
    reads_x = (fprop and fprop.a) or (wgrad and wgrad.b)
    for field, none in (("activation_mean", "kept"), ("channels", None)):
        value = getattr(recipe, field)
        if value == none:
            continue
        if recipe.backward == "dequantized":
            what = "the mean" if field == "activation_mean" else "these channels"
            raise refused(field, value, f"a dequantized backward would lack {what}; use {none!r}")
        if fprop is not None and fprop.batch_invariant:
            what = "a mean over tokens depends" if field == "activation_mean" else "which channels they are depends"
            raise refused(field, value, f"{what} on the batch; use {none!r}")
        if not reads_x:
            what = "split" if field == "activation_mean" else "taken apart"
            raise refused(field, value, f"no GEMM quantizes x, so nothing is {what}; use {none!r}")
    channels = recipe.channels
    if channels is None:
        return
    if recipe.activation_mean == "split":
        raise refused("channels", channels, "activation_mean='split' takes x apart already; use one of the two")
    if channels.kind == "patch" and not (fprop and fprop.a and fprop.b):
        raise refused("channels", channels, "a patch is for a forward that quantizes x and w; use kind='mxfp8'")
    if channels.kind == "patch" and any(spec.rotation for spec in fprop.specs):
        raise refused("channels", channels, "rotated operands do not dequantize to x and w; drop rotation in fprop")
