"""The values that say how a tensor is quantized: frozen, keyword-only, refused when they make no sense.

A spec travels to custom ops as `spec.key`, a short string that `parse` turns back into an equal spec. The key is built
once, in `__post_init__`, because building it inside a compiled region would break the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from halfbyte.channels import Channels, check_treatment_of_x, parse_channels
from halfbyte.delayed import Delayed, check_delayed, parse_delayed
from halfbyte.formats import (
    E2M1,
    E4M3,
    E5M2,
    FLT_MAX,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4_BLOCK,
    NVFP4_E2M1,
    BlockFormat,
    ElementFormat,
)
from halfbyte.notebook import ShowsGemms as _ShowsGemms
from halfbyte.scaling import BlockMax, Eden, FourOverSix, Scaling, parse_scaling
from halfbyte.values import EqualByKey as _EqualByKey
from halfbyte.values import check_choice as _choose
from halfbyte.values import refused as _refuse
from halfbyte.values import rows_problem

HADAMARD_SIGNS = "+++-+------+-+--"
"""The published 16 signs (docs/numerics.md section 7)."""

HADAMARD_SIZES = (16, 32, 64, 128)
BLOCKS = ((1, NVFP4_BLOCK), (NVFP4_BLOCK, NVFP4_BLOCK))
EDEN_FP4_MAX_LIMIT = 8.0  # beyond E2M1's largest value: the corrected scale makes up for what saturates
ROUNDINGS = ("nearest", "stochastic", "toward_zero")
_BLOCK_MAX = BlockMax()


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """Random Hadamard transform along the contraction dimension (docs/numerics.md section 7).

    Args:
        size: width of the transform, 16, 32, 64 or 128.
        signs: "fixed" uses the published 16 signs, "fresh" draws them from the call's `sign_rng`, "none" has none; or
            signs of your own, as "+--+": a string of + and - whose length divides `size`, and which repeats.
    """

    size: int = 16
    signs: str = "fixed"

    def __post_init__(self) -> None:
        _choose("size", self.size, HADAMARD_SIZES)
        object.__setattr__(self, "size", int(self.size))  # 16.0 would spell another key
        object.__setattr__(self, "signs", self._canonical_signs())

    def _canonical_signs(self) -> str:
        """Return one spelling for equal signs: a name, or the shortest period."""
        signs = self.signs
        if signs in ("fixed", "fresh", "none"):
            return signs
        if not isinstance(signs, str) or not signs or set(signs) - {"+", "-"} or self.size % len(signs):
            remedy = f"use 'fixed', 'fresh', 'none', or + and - as in '+--+', of a length that divides {self.size}"
            raise _refuse("signs", signs, remedy)
        period = next(n for n in range(1, len(signs) + 1) if signs[:n] * (len(signs) // n) == signs)
        return {"+": "none", HADAMARD_SIGNS: "fixed"}.get(signs[:period], signs[:period])

    @property
    def key(self) -> str:
        return f"{self.signs}{self.size}"


@dataclass(frozen=True, kw_only=True, eq=False)
class NVFP4(_EqualByKey):
    """4-bit floats E2M1, an E4M3 scale per block, an fp32 amax per tensor or row (docs/numerics.md sections 3 to 5).

    Args:
        block: (1, 16), or (16, 16) for operands whose transpose is shared between forward and backward.
        rounding: "nearest" (ties to even), "stochastic" (8 random bits an element), or "toward_zero"
            (truncation: stochastic rounding with all random bits 0; for controls only).
        outer: "tensor" or "row": what shares one fp32 amax.
        rotation: None or a Hadamard transform applied before quantization.
        scaling: BlockMax(), FourOverSix(...) or Eden(): how the block scale is chosen.
        fp4_max: the FP4 magnitude that the block maximum maps to; below 6 leaves headroom for stochastic rounding. At
            most 6, with Eden() 8.
        e4m3_max: the scale magnitude that the tensor maximum maps to; 256 with 4over6.

    Raises:
        ValueError: the fields contradict each other; the message names field, value and remedy.
    """

    block: tuple[int, int] = (1, NVFP4_BLOCK)
    rounding: Literal["nearest", "stochastic", "toward_zero"] = "nearest"
    outer: Literal["tensor", "row"] = "tensor"
    rotation: Hadamard | None = None
    scaling: Scaling = _BLOCK_MAX
    fp4_max: float = E2M1.max
    e4m3_max: float = E4M3.max
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        block = tuple(self.block) if isinstance(self.block, (tuple, list)) else self.block
        _choose("block", block, BLOCKS)
        object.__setattr__(self, "block", tuple(map(int, block)))
        _choose("rounding", self.rounding, ROUNDINGS)
        _choose("outer", self.outer, ("tensor", "row"))
        if self.rotation is not None and not isinstance(self.rotation, Hadamard):
            raise _refuse("rotation", self.rotation, "use None or Hadamard(size=16, signs='fixed')")
        if not isinstance(self.scaling, Scaling):
            raise _refuse("scaling", self.scaling, "use BlockMax(), FourOverSix(...) or Eden()")
        self._check_maxima()
        self._check_combinations()
        object.__setattr__(self, "key", self._build_key())

    def _check_maxima(self) -> None:
        fp4_limit = EDEN_FP4_MAX_LIMIT if isinstance(self.scaling, Eden) else E2M1.max
        for name, limit in (("fp4_max", fp4_limit), ("e4m3_max", E4M3.max)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= limit:
                raise _refuse(name, value, f"give a number with 0 < {name} <= {limit:g}")
            if value * FLT_MAX < 1:
                raise _refuse(name, value, "its reciprocal overflows fp32; use a larger one")
            object.__setattr__(self, name, float(value))
        if self.e4m3_max * self.fp4_max * FLT_MAX < 1:
            raise _refuse("e4m3_max", self.e4m3_max, "1 / (e4m3_max * fp4_max) overflows fp32; use a larger one")

    def _check_combinations(self) -> None:
        tile = self.block == (NVFP4_BLOCK, NVFP4_BLOCK)
        chosen = not isinstance(self.scaling, BlockMax)
        if tile and self.outer == "row":
            raise _refuse("outer", "row", "a 16x16 tile spans rows; use block=(1, 16) or outer='tensor'")
        if tile and self.rotation is not None:
            raise _refuse("rotation", self.rotation, "a 16x16 operand is shared with its transpose; use block=(1, 16)")
        if tile and isinstance(self.scaling, Eden):
            raise _refuse("scaling", self.scaling, "it corrects blocks of a rotated operand; use block=(1, 16)")
        if chosen and self.rounding != "nearest":
            raise _refuse(
                "rounding",
                self.rounding,
                f"{type(self.scaling).__name__} judges one rounding of the block, which biases any other; "
                "use rounding='nearest' or scaling=BlockMax()",
            )
        if isinstance(self.scaling, FourOverSix) and self.fp4_max != E2M1.max:
            raise _refuse("fp4_max", self.fp4_max, "candidates already choose the block maximum; use fp4_max=6.0")

    def _build_key(self) -> str:
        rotation = self.rotation.key if self.rotation else "-"
        block = f"{self.block[0]}x{self.block[1]}"
        fields = (block, self.rounding, self.outer, rotation, self.scaling.key, repr(self.fp4_max), repr(self.e4m3_max))
        return "/".join(("nvfp4", *fields))

    format = NVFP4_E2M1
    block_length = NVFP4_E2M1.length
    """Values that share a scale along the contraction."""

    @property
    def has_row_amax(self) -> bool:
        """Whether every row has an fp32 amax of its own."""
        return self.outer == "row"

    @property
    def has_tensor_amax(self) -> bool:
        """Whether one fp32 amax serves the whole tensor."""
        return self.outer == "tensor"

    @property
    def divisor(self) -> float:
        """The largest product of code and scale, which an amax is mapped to: m8 * m4 of docs/numerics.md."""
        return self.e4m3_max * self.fp4_max

    @property
    def tries_candidates(self) -> bool:
        """Whether the block scale is chosen by the error that it causes."""
        return not isinstance(self.scaling, BlockMax)

    @property
    def is_tile(self) -> bool:
        """Whether the blocks are 16×16 tiles, so that `transpose()` is exact."""
        return self.block[0] != 1

    @property
    def alignment(self) -> int:
        """The last dimension is padded with zeros to a multiple of this."""
        return self.rotation.size if self.rotation else NVFP4_BLOCK

    @property
    def needs_rng(self) -> bool:
        return self.rounding == "stochastic" or isinstance(self.scaling, Eden)

    @property
    def needs_sign_rng(self) -> bool:
        return self.rotation is not None and self.rotation.signs == "fresh"


@dataclass(frozen=True, kw_only=True, eq=False)
class MXFP8(_EqualByKey):
    """8-bit floats with an E8M0 scale per 32 values (OCP MX v1.0; docs/numerics.md section 6)."""

    element: Literal["e4m3", "e5m2"] = "e4m3"
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _choose("element", self.element, (E4M3.name, E5M2.name))
        object.__setattr__(self, "key", f"mxfp8/{self.element}")

    @property
    def format(self) -> BlockFormat:
        return MXFP8_E4M3 if self.element == E4M3.name else MXFP8_E5M2

    @property
    def element_format(self) -> ElementFormat:
        return self.format.element

    block_length = MXFP8_E4M3.length
    alignment = MXFP8_E4M3.length
    rounding = "nearest"
    outer = None
    rotation = None
    scaling = _BLOCK_MAX
    divisor = 1.0
    tries_candidates = False
    is_tile = False
    has_row_amax = False
    has_tensor_amax = False
    needs_rng = False
    needs_sign_rng = False


Spec = NVFP4 | MXFP8


@lru_cache(maxsize=1024)
def parse(key: str) -> Spec:
    """Return the spec whose `.key` is `key`; the inverse of `spec.key`.

    Raises:
        ValueError: `key` is not one that a spec of this version writes.
    """
    kind, *fields = key.split("/")
    parts: list[Any] = list(fields)  # the constructors check them
    try:
        if kind == "mxfp8":
            (element,) = parts
            return MXFP8(element=element)
        if kind == "nvfp4":
            block, rounding, outer, rotation, scaling, fp4_max, e4m3_max = parts
            return NVFP4(
                block=_parse_block(block),
                rounding=rounding,
                outer=outer,
                rotation=_parse_rotation(rotation),
                scaling=parse_scaling(scaling),
                fp4_max=float(fp4_max),
                e4m3_max=float(e4m3_max),
            )
    except ValueError as error:
        raise ValueError(f"key={key!r}: not a spec key; build it with NVFP4(...).key or MXFP8(...).key") from error
    raise ValueError(f"key={key!r}: not a spec key; build it with NVFP4(...).key or MXFP8(...).key")


def _parse_block(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def _parse_rotation(text: str) -> Hadamard | None:
    if text == "-":
        return None
    signs = text.rstrip("0123456789")
    return Hadamard(size=int(text[len(signs) :]), signs=signs)


def _show(spec: Spec | None) -> str:
    return "None (bf16)" if spec is None else repr(spec)


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """How the two operands of one GEMM `gemm_nt(a, b)` are quantized; None leaves an operand in bf16.

    Args:
        a, b: of the left and the right operand.
        batch_invariant: a row of the product has the same bits whatever other rows of `a` there are: its bytes depend
            on it alone, and the order of its sums on the sizes of b alone (docs/exactness.md).

    Raises:
        ValueError: the operands cannot meet in one GEMM, or a row cannot be independent of the others.
    """

    a: Spec | None = None
    b: Spec | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            if not isinstance(getattr(self, name), (NVFP4, MXFP8, type(None))):
                raise _refuse(name, getattr(self, name), "use NVFP4(...), MXFP8(...) or None for bf16")
        a, b = self.a, self.b
        if (a.rotation if a else None) != (b.rotation if b else None):
            raise _refuse(
                "a.rotation, b.rotation",
                (a and a.rotation, b and b.rotation),
                "the rotation cancels only if both operands rotate alike; give both the same Hadamard or None",
            )
        if a is not None and b is not None and a.block_length != b.block_length:
            raise _refuse(
                "a, b",
                f"{_show(a)} against {_show(b)}",
                f"block lengths {a.block_length} and {b.block_length} along one contraction; "
                "use NVFP4 with NVFP4 or MXFP8 with MXFP8",
            )
        _choose("batch_invariant", self.batch_invariant, (False, True))
        problem = rows_problem(a, b) if self.batch_invariant else None
        if problem is not None:
            raise _refuse("batch_invariant", True, problem)

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in (self.a, self.b) if spec is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe(_EqualByKey, _ShowsGemms):
    """The three GEMMs of a linear layer; None leaves a GEMM in high precision (bf16).

    fprop `y = nt(x, w)`, dgrad `dx = nt(dy, w.T)`, wgrad `dw = nt(dy.T, x.T)`: `a` and `b` of each GemmSpec are its
    left and right operand in this order.

    Args:
        fprop, dgrad, wgrad: a GemmSpec each, or None.
        backward: "original" reads x and w as they were; "dequantized" the values of fprop's operands, which are all
            that is saved, in high precision or quantized again as dgrad and wgrad say.
        activation_mean: "split" subtracts the mean over tokens from x before it is quantized, and adds that mean's
            share of y and dw in high precision (Averis, arXiv 2603.10444; docs/numerics.md section 2).
        channels: of x that get more than four bits, None for none; see `recipes.outlier_channels`, `hot_channels`.
        amax: None quantizes x and gradients with their own amax, `recipes.delayed_amax` with that of an earlier step.

    Raises:
        ValueError: the three do not form one training step.
    """

    fprop: GemmSpec | None = None
    dgrad: GemmSpec | None = None
    wgrad: GemmSpec | None = None
    backward: Literal["original", "dequantized"] = "original"
    activation_mean: Literal["kept", "split"] = "kept"
    channels: Channels | None = None
    amax: Delayed | None = None
    key: str = field(init=False, repr=False)
    specs: tuple[Spec, ...] = field(init=False, repr=False)
    """Every spec in the recipe, operand by operand."""
    needs_rng: bool = field(init=False, repr=False)
    """Whether a training step draws random bits."""
    needs_sign_rng: bool = field(init=False, repr=False)
    """Whether an operand is rotated with fresh signs."""

    def __post_init__(self) -> None:
        _choose("backward", self.backward, ("original", "dequantized"))
        _choose("activation_mean", self.activation_mean, ("kept", "split"))
        for name in ("fprop", "dgrad", "wgrad"):
            gemm = getattr(self, name)
            if gemm is not None and not isinstance(gemm, GemmSpec):
                raise _refuse(name, gemm, "use GemmSpec(a=..., b=...) or None for bf16")
            if gemm is not None and not gemm.specs:
                object.__setattr__(self, name, None)  # GemmSpec() and None mean the same GEMM: keep one spelling
        if self.backward == "dequantized":
            if self.fprop is None:
                raise _refuse("backward", "dequantized", "fprop is bf16, nothing is dequantized; use 'original'")
            if any(spec.rotation for spec in self.fprop.specs):
                raise _refuse("backward", "dequantized", "rotated operands do not dequantize to x and w; drop rotation")
        for name in ("dgrad", "wgrad"):
            gemm = getattr(self, name)
            if gemm is not None and gemm.batch_invariant:
                raise _refuse(f"{name}.batch_invariant", True, "it is the forward's; use False")
        check_treatment_of_x(self)
        check_delayed(self)
        parts = [f"{n}={_gemm_key(getattr(self, n))}" for n in ("fprop", "dgrad", "wgrad")]
        parts += [f"backward={self.backward}", *(["activation_mean=split"] if self.splits_mean else [])]
        values = ((name, getattr(self, name)) for name in ("channels", "amax"))
        parts += [f"{name}={value.key}" for name, value in values if value is not None]
        object.__setattr__(self, "key", ";".join(parts))
        specs = tuple(spec for gemm in (self.fprop, self.dgrad, self.wgrad) if gemm for spec in gemm.specs)
        object.__setattr__(self, "specs", specs)
        fresh = any(spec.needs_sign_rng for spec in specs)
        object.__setattr__(self, "needs_sign_rng", fresh)
        object.__setattr__(self, "needs_rng", fresh or any(spec.needs_rng for spec in specs))

    @property
    def splits_mean(self) -> bool:
        """Whether x is quantized without its mean over tokens."""
        return self.activation_mean == "split"

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickles of before lack what is computed, or newer fields
        names = ("fprop", "dgrad", "wgrad", "backward", "activation_mean", "channels", "amax")
        self.__init__(**{name: state[name] for name in names if name in state})


def parse_recipe(key: str) -> Recipe:
    """Return the recipe whose `.key` is `key`; the inverse of `recipe.key`.

    Raises:
        ValueError: `key` is not one that a recipe of this version writes.
    """
    try:
        parts: dict[str, Any] = dict(part.split("=", 1) for part in key.split(";"))
        fprop, dgrad, wgrad = (_parse_gemm(parts.pop(name)) for name in ("fprop", "dgrad", "wgrad"))
        readers = {"channels": parse_channels, "amax": parse_delayed}
        parts |= {name: read(parts[name]) for name, read in readers.items() if name in parts}
        return Recipe(fprop=fprop, dgrad=dgrad, wgrad=wgrad, **parts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"key={key!r}: not a recipe's key ({error}); pass what Recipe.key says") from error


def _parse_gemm(text: str) -> GemmSpec | None:
    if text == "bf16":
        return None
    left, right, *more = text.split("|")
    if more not in ([], ["batch_invariant"]):
        raise ValueError(f"{more} behind the operands of a GEMM")
    a, b = (None if side == "bf16" else parse(side) for side in (left, right))
    return GemmSpec(a=a, b=b, batch_invariant=bool(more))


def _gemm_key(gemm: GemmSpec | None) -> str:
    if gemm is None:
        return "bf16"
    operands = (spec.key if spec else "bf16" for spec in (gemm.a, gemm.b))
    return "|".join((*operands, *(["batch_invariant"] if gemm.batch_invariant else [])))
