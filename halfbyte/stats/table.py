"""The statistics of a step as a value: rows for files, and a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.notebook import html_lines, html_table
from halfbyte.stats.each_expert import EXPERT_HEAD, expert_row
from halfbyte.stats.figures import NOISE_LIMIT, LayerStatistics

HEAD = (
    *("layer", "operand", "amax", "SNR dB", "rel. error", "underflow", "saturated", "scale 0", "not standard"),
    *("RHT gain dB", "outliers", "top channel"),
)
PRODUCT_HEAD = ("layer", "product", "cosine", "noise / signal")


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """What was measured in one optimizer step, over its micro-batches and ranks; prints as two tables.

    Args:
        step: its number, from 1 on.
        layers: those that ran.
        unobserved: {layer: why it was not measured}.
    """

    step: int
    layers: tuple[LayerStatistics, ...]
    unobserved: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerStatistics:
        for row in self.layers:
            if row.name == name:
                return row
        raise KeyError(f"layer={name!r}: measured were {', '.join(row.name for row in self.layers)}")

    @property
    def noise_ratio(self) -> float:
        """Noise of all weight gradients over their norm without quantization."""
        found = [row.products["dw"] for row in self.layers if "dw" in row.products]
        wanted = sum(product.wanted for product in found)
        return math.sqrt(sum(product.noise for product in found) / wanted) if wanted else math.nan

    @property
    def is_noisy(self) -> bool:
        """Whether that exceeds 1/√3, beyond which training in FP4 stalls (arXiv 2505.19115)."""
        return self.noise_ratio > NOISE_LIMIT

    def records(self) -> list[dict[str, Any]]:
        """Return one flat dict for every operand and every product of every layer; what is not measured is None."""
        rows: list[dict[str, Any]] = []
        for layer in self.layers:
            of = {"step": self.step, "layer": layer.name, "recipe": layer.recipe}
            rows += [{**of, **_operand_record(layer, name)} for name in layer.operands]
            rows += [
                {**of, "product": name, "cosine": _finite(p.cosine), "noise_ratio": _finite(p.noise_ratio)}
                for name, p in layer.products.items()
            ]
        return rows

    def operand_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of operands, under `HEAD`."""
        return [_operand_row(layer, name) for layer in self.layers for name in layer.operands]

    def product_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of products, under `PRODUCT_HEAD`."""
        return [
            (
                layer.name,
                name,
                f"{p.cosine:.5f}",
                f"{p.noise_ratio:.3f}" + (" !" if name == "dw" and layer.is_noisy else ""),
            )
            for layer in self.layers
            for name, p in layer.products.items()
        ]

    def expert_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of experts: of each layer those with most and fewest tokens, the noisiest."""
        return [expert_row(layer) for layer in self.layers if layer.experts]

    def closing_lines(self) -> list[str]:
        """Return what is said under the tables."""
        side = f"{'beyond' if self.is_noisy else 'within'} 1/√3 = {NOISE_LIMIT:.3f}"
        if math.isnan(self.noise_ratio):
            side = "for none was measured, or one is not finite"
        lines = [f"noise of the weight gradients: {self.noise_ratio:.3f} of their norm, {side}"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.unobserved.items():
            reasons.setdefault(reason, []).append(name)
        return lines + [f"not measured: {', '.join(names)}: {reason}" for reason, names in reasons.items()]

    def __str__(self) -> str:
        parts = [f"step {self.step}", *aligned_table(HEAD, self.operand_rows()), ""]
        parts += [*aligned_table(PRODUCT_HEAD, self.product_rows()), ""]
        if experts := self.expert_rows():
            parts += [*aligned_table(EXPERT_HEAD, experts), ""]
        parts += self.closing_lines()
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        tables = html_table(HEAD, self.operand_rows()) + html_table(PRODUCT_HEAD, self.product_rows())
        tables += html_table(EXPERT_HEAD, experts) if (experts := self.expert_rows()) else ""
        return f"<p><b>step {self.step}</b></p>{tables}{html_lines(self.closing_lines())}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _operand_record(layer: LayerStatistics, name: str) -> dict[str, Any]:
    one, spread = layer.operands[name], layer.tensors[name.partition(".")[0]]
    figures = {
        "amax": one.amax,
        "snr_db": one.snr_db,
        "relative_error": one.relative_error,
        "underflow": one.underflow_share,
        "saturation": one.saturation_share,
        "scale_underflow": one.scale_underflow_share,
        "four_over_six": one.four_over_six_share,
        "rht_gain_db": one.rht_gain_db,
        "outliers": spread.outlier_share,
        "top_channel_share": spread.top_channel_share,
    }
    finite = {key: _finite(value) for key, value in figures.items()}
    return {"operand": name, "spec": one.spec, **finite, "top_channel": spread.top_channel}


def _operand_row(layer: LayerStatistics, name: str) -> tuple[str, ...]:
    record = _operand_record(layer, name)
    shares = ("underflow", "saturation", "scale_underflow", "four_over_six")
    top = record["top_channel_share"]
    return (
        layer.name,
        name,
        _number(record["amax"], ".3g"),
        _number(record["snr_db"], ".1f"),
        _number(record["relative_error"], ".3f"),
        *(_percent(record[key]) for key in shares),
        _number(record["rht_gain_db"], "+.2f"),
        _percent(record["outliers"]),
        f"{record['top_channel']}: {_percent(top)}" if top else "-",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, names to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
