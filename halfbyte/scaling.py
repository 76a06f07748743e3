"""How the scale of an NVFP4 block is chosen (docs/numerics.md section 5): values with a key, which refuse nonsense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.formats import f32
from halfbyte.values import check_choice as _choose
from halfbyte.values import refused as _refuse


@dataclass(frozen=True)
class BlockMax:
    """The block scale maps the block's largest magnitude to the largest FP4 value."""

    @property
    def key(self) -> str:
        return "blockmax"


@dataclass(frozen=True, kw_only=True)
class FourOverSix:
    """Per block, choose among candidate scales the one with the least error (4over6, arXiv 2512.02010).

    Args:
        error: "mae" sums |error|, "mse" sums squares.
        candidates: multiples of the standard scale; 1 must be among them. 1.5 maps the block maximum to 4.
        error_math: "exact" measures in the input's units, "scaled" in units of the tensor scale (cheaper).
    """

    error: Literal["mae", "mse"] = "mae"
    candidates: tuple[float, ...] = (1.0, 1.5)
    error_math: Literal["exact", "scaled"] = "exact"

    def __post_init__(self) -> None:
        _choose("error", self.error, ("mae", "mse"))
        _choose("error_math", self.error_math, ("exact", "scaled"))
        numbers = isinstance(self.candidates, tuple | list) and all(type(r) in (int, float) for r in self.candidates)
        if not numbers or 1.0 not in self.candidates:
            raise _refuse("candidates", self.candidates, "give a tuple of multiples that contains 1.0")
        for ratio in self.candidates:
            if not 0 < ratio < 64 or f32(ratio) == 0:
                raise _refuse("candidates", self.candidates, "every multiple must lie between 0 and 64")
        # A set, tried in the order that decides ties: 1 first, then ascending.
        ordered = (1.0, *sorted({float(r) for r in self.candidates} - {1.0}))
        object.__setattr__(self, "candidates", ordered)

    @property
    def key(self) -> str:
        return ",".join(("4over6", self.error, self.error_math, *map(repr, self.candidates)))


@dataclass(frozen=True)
class Eden:
    """MS-EDEN (Quartet II, arXiv 2601.22813): codes to nearest, a block scale that makes up for their error on average.

    The scale that is stored is corrected by the block's own projection and rounded stochastically (docs/numerics.md
    section 5). On normal data, and on what a rotation with fresh signs makes like them, this is unbiased with half the
    error of stochastic rounding; a group that one element makes up nearly alone stays biased behind a rotation.
    """

    @property
    def key(self) -> str:
        return "eden"


Scaling = BlockMax | FourOverSix | Eden


def parse_scaling(text: str) -> Scaling:
    """Return the value whose `.key` is `text`.

    Raises:
        ValueError: no value writes it.
    """
    name, *fields = text.split(",")
    if name == "4over6":
        parts: list[Any] = list(fields)
        error, error_math, *candidates = parts
        return FourOverSix(error=error, candidates=tuple(map(float, candidates)), error_math=error_math)
    for scaling in (BlockMax(), Eden()):
        if name == scaling.key:
            return scaling
    raise ValueError(f"unknown scaling {name!r}")
