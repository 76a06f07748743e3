"""What statistics consist of: sums and maxima that ranks and micro-batches add up, and the figures made of them.

A ledger is one fp64 tensor of a layer: maxima first, then sums, then a count of outliers for every channel of x, w and
dy. Nothing in it is a mean or a share, so that adding ledgers is exact, and the figures of several ranks or
micro-batches are those of all their tokens together (docs/statistics.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from halfbyte.spec import parse

TENSORS = ("x", "w", "dy")
SIDES = ("x.row", "w.row", "dy.row", "w.col", "dy.col", "x.col")
"""The six operands in the order of the GEMMs: fprop, dgrad, wgrad."""
PRODUCTS = ("y", "dx", "dw")

SIDE_SUMS = (
    *("elements", "signal", "noise", "magnitude", "deviation", "nonzero", "underflow", "saturated"),
    *("blocks", "scale_underflow", "chosen", "other_noise"),
)
"""Of one operand, see `OperandStatistics`; `chosen`, `other_noise` are NaN where the spec has no such figure."""
PRODUCT_SUMS = ("elements", "wanted", "got", "noise")
TENSOR_SUMS = ("elements", "outliers")
MAXIMA = len(SIDES) + len(TENSORS)

OUTLIER = 6.0
"""Times the root mean square of its tensor: what an outlier exceeds."""
NOISE_LIMIT = 1 / math.sqrt(3)
"""Noise of the weight gradient over the gradient: beyond, training in FP4 stalls (arXiv 2505.19115, section 4)."""


FIXED = MAXIMA + len(SIDES) * len(SIDE_SUMS) + len(PRODUCTS) * len(PRODUCT_SUMS) + len(TENSORS) * len(TENSOR_SUMS)
"""Entries that do not depend on a layer's features: those before the counts of channels."""


def ledger_size(in_features: int, out_features: int) -> int:
    """Return the number of entries of a layer's ledger."""
    return FIXED + 2 * in_features + out_features


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Where things stand in a ledger: views of it, to write or to read."""

    amaxes: Tensor
    sides: Tensor
    products: Tensor
    tensors: Tensor
    channels: tuple[Tensor, Tensor, Tensor]


def entries(ledger: Tensor, in_features: int, out_features: int) -> Entries:
    """Return the parts of a ledger."""
    sizes = (
        MAXIMA,
        len(SIDES) * len(SIDE_SUMS),
        len(PRODUCTS) * len(PRODUCT_SUMS),
        len(TENSORS) * len(TENSOR_SUMS),
        *(in_features, in_features, out_features),
    )
    amaxes, sides, products, tensors, *channels = ledger.split(sizes)
    return Entries(
        amaxes=amaxes,
        sides=sides.view(len(SIDES), -1),
        products=products.view(len(PRODUCTS), -1),
        tensors=tensors.view(len(TENSORS), -1),
        channels=(channels[0], channels[1], channels[2]),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _decibel(ratio: float) -> float:
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """One operand of a GEMM: v are the values that are quantized, rotated if the spec rotates, q what codes stand for.

    Args:
        name: of `SIDES`.
        spec: its key.
        amax: the largest magnitude of v.
        elements: values, padding included.
        signal, noise: sums of v² and (q − v)².
        magnitude, deviation: sums of |v| and |q − v|.
        nonzero, underflow: values that are not 0, and those of them whose q is.
        saturated: values beyond the largest magnitude of their block.
        blocks, scale_underflow: blocks that are not all 0, and those of them whose scale is.
        chosen: blocks with another scale than the standard one, of `blocks`; NaN where no candidates are tried.
        other_noise: the noise with a rotation where the spec has none, without where it has one; NaN if not measured.
    """

    name: str
    spec: str
    amax: float
    elements: float
    signal: float
    noise: float
    magnitude: float
    deviation: float
    nonzero: float
    underflow: float
    saturated: float
    blocks: float
    scale_underflow: float
    chosen: float
    other_noise: float

    @property
    def snr_db(self) -> float:
        """10 log₁₀ of signal over noise; infinite without noise."""
        return math.inf if self.noise == 0 and self.signal > 0 else _decibel(_ratio(self.signal, self.noise))

    @property
    def relative_error(self) -> float:
        """Sum of |q − v| over the sum of |v|."""
        return _ratio(self.deviation, self.magnitude)

    @property
    def underflow_share(self) -> float:
        """Of the values that are not 0, which share becomes 0."""
        return _ratio(self.underflow, self.nonzero)

    @property
    def saturation_share(self) -> float:
        """Of the values that are not 0, which share lies beyond the range of its block."""
        return _ratio(self.saturated, self.nonzero)

    @property
    def scale_underflow_share(self) -> float:
        """Of the blocks that are not all 0, which share has a scale of 0."""
        return _ratio(self.scale_underflow, self.blocks)

    @property
    def four_over_six_share(self) -> float:
        """Of the blocks that are not all 0, which share took another scale than the standard one; NaN: not tried."""
        return _ratio(self.chosen, self.blocks)

    @property
    def rht_gain_db(self) -> float:
        """How much larger the SNR is with a Hadamard transform than without; NaN where that was not measured."""
        without, rotated = (
            (self.other_noise, self.noise) if parse(self.spec).rotation else (self.noise, self.other_noise)
        )
        return _decibel(_ratio(without, rotated))


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """One tensor before it is quantized: its largest magnitude, and how many outliers each channel holds.

    Args:
        name: x, w or dy. Channels are the columns: in_features of x and w, out_features of dy.
        amax: the largest magnitude.
        elements, outliers: values, and those beyond 6 times the root mean square of their tensor.
        channels: outliers of every channel.
    """

    name: str
    amax: float
    elements: float
    outliers: float
    channels: tuple[float, ...]

    @property
    def outlier_share(self) -> float:
        """Outliers among all values."""
        return _ratio(self.outliers, self.elements)

    @property
    def channel_shares(self) -> tuple[float, ...]:
        """Outliers among the values of each channel."""
        each = self.elements / max(1, len(self.channels))
        return tuple(_ratio(count, each) for count in self.channels)

    @property
    def top_channel(self) -> int:
        """The channel with the largest share of outliers; of one expert none is counted, and it is 0."""
        return max(range(len(self.channels)), key=self.channels.__getitem__, default=0)

    @property
    def top_channel_share(self) -> float:
        """Outliers among the values of that channel."""
        return self.channel_shares[self.top_channel] if self.channels else math.nan


@dataclass(frozen=True, kw_only=True)
class ProductStatistics:
    """What a GEMM returned, beside the product of its unquantized operands.

    Args:
        name: y, dx or dw.
        elements: values.
        wanted, got, noise: sums of squares of the unquantized product, of the quantized one, and of their difference.
    """

    name: str
    elements: float
    wanted: float
    got: float
    noise: float

    @property
    def cosine(self) -> float:
        """Of the angle between the two."""
        return _ratio((self.wanted + self.got - self.noise) / 2, math.sqrt(self.wanted * self.got))

    @property
    def noise_ratio(self) -> float:
        """Norm of the difference over the norm of the unquantized product: of dw, the noise-to-gradient ratio."""
        return math.sqrt(_ratio(self.noise, self.wanted)) if self.wanted else math.nan


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What one layer did in one sampled step, or one expert of it.

    Args:
        name: of the layer.
        recipe: its name or key.
        operands: {x.row, …: OperandStatistics}, those that the recipe quantizes.
        tensors: {x, w, dy: TensorStatistics}.
        products: {y, dx, dw: ProductStatistics}, those that were computed.
        experts: of a layer of experts, {index: the same of one}, those that got tokens; their tensors have no channels.
    """

    name: str
    recipe: str
    operands: dict[str, OperandStatistics]
    tensors: dict[str, TensorStatistics]
    products: dict[str, ProductStatistics]
    experts: dict[int, LayerStatistics] = field(default_factory=dict)

    @property
    def dw_noise_ratio(self) -> float:
        """Noise of the weight gradient over its norm without quantization; 0 where there is none."""
        dw = self.products.get("dw")
        return 0.0 if dw is None or math.isnan(dw.noise_ratio) else dw.noise_ratio

    @property
    def is_noisy(self) -> bool:
        """Whether that exceeds 1/√3."""
        return self.dw_noise_ratio > NOISE_LIMIT


def read_ledger(
    ledger: Tensor, about: tuple[str, str], features: tuple[int, int], specs: Sequence[str | None]
) -> LayerStatistics:
    """Return the figures of a layer.

    Args:
        ledger: fp64, on the CPU.
        about: name and recipe of the layer.
        features: in_features and out_features.
        specs: the key of each of `SIDES`, None for what is not quantized.
    """
    parts = entries(ledger, *features)
    operands = {
        name: OperandStatistics(name=name, spec=spec, amax=amax, **dict(zip(SIDE_SUMS, sums, strict=True)))
        for name, spec, amax, sums in zip(SIDES, specs, parts.amaxes.tolist(), parts.sides.tolist(), strict=False)
        if spec is not None and sums[0]
    }
    amaxes = parts.amaxes[len(SIDES) :].tolist()
    tensors = {
        name: TensorStatistics(
            name=name, amax=amax, elements=sums[0], outliers=sums[1], channels=tuple(channels.tolist())
        )
        for name, amax, sums, channels in zip(TENSORS, amaxes, parts.tensors.tolist(), parts.channels, strict=True)
        if sums[0]
    }
    products = {
        name: ProductStatistics(name=name, **dict(zip(PRODUCT_SUMS, sums, strict=True)))
        for name, sums in zip(PRODUCTS, parts.products.tolist(), strict=True)
        if sums[0]
    }
    return LayerStatistics(name=about[0], recipe=about[1], operands=operands, tensors=tensors, products=products)
