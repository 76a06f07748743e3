"""hb.inspect: which layers and operands lose most under which recipe, what is wrong with them, and what to keep.

Weights are measured under every recipe as they are. With a batch, one step is run under the first recipe: activations
and gradients are measured as `hb.collect_stats` does it, and layers are ranked by `hb.stats.sensitivity`.
"""

from __future__ import annotations

import copy
import csv
import html
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.convert import quantize_
from halfbyte.functional.foreign import PLAIN
from halfbyte.nn.experts import expert_weights
from halfbyte.nn.grouped import GroupedLinear, GroupedRecipe
from halfbyte.nn.linear import Linear, describe_recipe
from halfbyte.notebook import html_table
from halfbyte.policy import Keep, plain_name
from halfbyte.recipes import resolve
from halfbyte.rng import Philox
from halfbyte.sides import Side
from halfbyte.spec import Recipe
from halfbyte.stats import pictures
from halfbyte.stats.collect import SILENT, collect_stats, spec_keys
from halfbyte.stats.figures import (
    SIDE_SUMS,
    SIDES,
    LayerStatistics,
    OperandStatistics,
    TensorStatistics,
)
from halfbyte.stats.measure import side_sums, tensor_sums
from halfbyte.stats.sensitivity import (
    BUDGET,
    Proposal,
    SensitivityReport,
    check_budget,
    check_by,
    scalar_loss,
    sensitivity,
)
from halfbyte.stats.table import HEAD, StepStatistics, aligned_table

RECIPES = ("nvfp4", "four_over_six", "mxfp8")
CHANNEL_SHARE, CHANNEL_TIMES = 0.1, 10.0
"""A channel is an outlier if this share of its values are outliers, this many times the share of the whole tensor."""
EVERY_BLOCK = Keep(last_fraction=0)
TINY = 1e-4
"""Times the median of the other layers' gradients: below, a layer hardly learns."""
WEIGHT_HEAD = (
    "layer",
    "recipe",
    "operand",
    "SNR dB",
    "rel. error",
    "underflow",
    "saturated",
    "RHT gain dB",
    "outliers",
)
WORST = 6
"""Layers of which histograms are drawn."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about one layer that a user should look at.

    Args:
        layer: its name.
        kind: "not finite", "dead", "outlier channel", "tiny gradients" or "noise".
        text: what was seen.
    """

    layer: str
    kind: Literal["not finite", "dead", "outlier channel", "tiny gradients", "noise"]
    text: str


@dataclass(frozen=True, kw_only=True)
class WeightLoss:
    """A weight under one recipe: what its operands lose.

    Args:
        layer, recipe: names.
        operands: {w.row, w.col: OperandStatistics}, as far as the recipe quantizes them.
    """

    layer: str
    recipe: str
    operands: Mapping[str, OperandStatistics]

    @property
    def snr_db(self) -> float:
        """Of the operand that loses most; infinite where none is quantized."""
        return min((one.snr_db for one in self.operands.values()), default=math.inf)


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """What `hb.inspect` found; prints what is wrong, then the tables, the worst layers first.

    Args:
        weights: of every layer under every recipe.
        spreads: {layer: outliers of its weight}.
        histograms: {layer: `pictures.magnitudes` of its weight}.
        step: of the batch, None without one.
        ranking: of the batch, None without one.
        budget: share of the FLOPs that the proposal may cost.
    """

    weights: tuple[WeightLoss, ...]
    spreads: Mapping[str, TensorStatistics]
    histograms: Mapping[str, Sequence[float]]
    step: StepStatistics | None
    ranking: SensitivityReport | None
    budget: float

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong: NaN and Inf first, then dead layers, outlier channels, tiny gradients, noise."""
        layers = {row.name: row for row in self.step.layers} if self.step else {}
        silent = [name for name, why in self.step.unobserved.items() if why == SILENT] if self.step else []
        found = [
            *_not_finite(self.spreads, layers),
            *_dead(self.spreads, layers, silent),
            *_channels(self.spreads, layers),
            *_tiny(layers),
            *_noisy(layers),
        ]
        return tuple(found)

    @property
    def proposal(self) -> Proposal | None:
        """What to keep in high precision within the budget; None without a batch."""
        return None if self.ranking is None else self.ranking.propose(self.budget)

    @property
    def worst(self) -> tuple[WeightLoss, ...]:
        """The weights, the lowest SNR first, before it those with NaN or Inf, last those of zeros: none has an SNR."""
        return tuple(sorted(self.weights, key=_kept))

    def weight_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of weights, under `WEIGHT_HEAD`."""
        return [
            (
                *(loss.layer, loss.recipe, name, f"{one.snr_db:.2f}", f"{one.relative_error:.4f}"),
                *(f"{100 * share:.2f} %" for share in (one.underflow_share, one.saturation_share)),
                "-" if math.isnan(one.rht_gain_db) else f"{one.rht_gain_db:+.2f}",
                f"{100 * self.spreads[loss.layer].outlier_share:.3f} %",
            )
            for loss in self.worst
            for name, one in loss.operands.items()
        ]

    def csv(self) -> str:
        """Return everything that was measured as CSV: one line for each operand, of weights for each recipe."""
        text = io.StringIO()
        names = ("layer", "recipe", "operand", "spec", "amax", "snr_db", "relative_error", "underflow", "saturation")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow((*names, "scale_underflow", "four_over_six", "rht_gain_db"))
        measured = [(loss.layer, loss.recipe, one) for loss in self.weights for one in loss.operands.values()]
        if self.step is not None:
            measured += [
                (row.name, f"{row.recipe} (step)", one) for row in self.step.layers for one in row.operands.values()
            ]
        for layer, recipe, one in measured:
            shares = (one.underflow_share, one.saturation_share, one.scale_underflow_share, one.four_over_six_share)
            figures = (one.amax, one.snr_db, one.relative_error, *shares, one.rht_gain_db)
            writer.writerow((layer, recipe, one.name, one.spec, *figures))
        return text.getvalue()

    def draw(self, folder: str | Path) -> list[Path]:
        """Draw heat-map and histograms as PNG and SVG into a folder, and return the paths.

        Raises:
            ImportError: matplotlib is missing.
        """
        maps, bars = pictures.paths_in(folder, "heatmap", "histograms")
        if self.step is not None:
            names = [row.name for row in self.step.layers]
            values = [[_snr(row.operands.get(side)) for side in SIDES] for row in self.step.layers]
            pictures.heat_map(maps, names, SIDES, values, f"SNR in dB of every operand, {self.step.layers[0].recipe}")
        else:
            recipes = list(dict.fromkeys(loss.recipe for loss in self.weights))
            names = list(self.spreads)
            snr = {(loss.layer, loss.recipe): loss.snr_db for loss in self.weights}
            values = [[snr.get((name, recipe), math.nan) for recipe in recipes] for name in names]
            pictures.heat_map(maps, names, recipes, values, "SNR in dB of weights")
        worst = list(dict.fromkeys(loss.layer for loss in self.worst))[:WORST]
        pictures.histograms(bars, {name: self.histograms[name] for name in worst}, "weights that lose most")
        return [*maps, *bars]

    def closing_lines(self) -> list[str]:
        """Return findings and proposal."""
        said = [f"{one.kind}: {one.layer}: {one.text}" for one in self.findings] or ["nothing stands out"]
        return said + (str(self.proposal).split("\n") if self.proposal is not None else [])

    def __str__(self) -> str:
        parts = [*self.closing_lines(), "", *aligned_table(WEIGHT_HEAD, self.weight_rows())]
        if self.step is not None:
            parts += ["", *aligned_table(HEAD, self.step.operand_rows())]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        said = html.escape("\n".join(self.closing_lines()))
        step = "" if self.step is None else self.step._repr_html_()
        ranking = "" if self.ranking is None else self.ranking._repr_html_()
        return f"<pre>{said}</pre>{html_table(WEIGHT_HEAD, self.weight_rows())}{step}{ranking}"


def _snr(one: OperandStatistics | None) -> float:
    return math.nan if one is None else one.snr_db


def _kept(loss: WeightLoss) -> float:
    """Return the SNR by which weights are sorted."""
    if not all(math.isfinite(one.amax) for one in loss.operands.values()):
        return -math.inf
    return math.inf if math.isnan(loss.snr_db) else loss.snr_db


def _not_finite(spreads: Mapping[str, TensorStatistics], layers: Mapping[str, LayerStatistics]) -> list[Finding]:
    """Return layers with NaN or Inf, those with some in their weight first: from there they reach the others."""
    bad = {}
    for name, spread in spreads.items():
        tensors = layers[name].tensors if name in layers else {"w": spread}
        bad[name] = [key for key, one in tensors.items() if not math.isfinite(one.amax)]
    return [
        Finding(layer=name, kind="not finite", text=f"NaN or Inf in {', '.join(said)}")
        for name, said in sorted(bad.items(), key=lambda item: "w" not in item[1])
        if said
    ]


def _dead(
    spreads: Mapping[str, TensorStatistics], layers: Mapping[str, LayerStatistics], silent: Sequence[str]
) -> list[Finding]:
    """Return layers without a signal, those whose weight is 0 first: none reaches the layers before and behind them."""
    words = {"x": "its input is 0", "w": "its weight is 0", "dy": "no gradient reaches it"}
    found = []
    for name, spread in spreads.items():
        tensors = layers[name].tensors if name in layers else {"w": spread}
        said = [words[key] for key, one in tensors.items() if one.amax == 0]
        said += [f"{SILENT} through it"] if name in silent else []
        if said:
            found.append((words["w"] not in said, Finding(layer=name, kind="dead", text=", ".join(said))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _channels(spreads: Mapping[str, TensorStatistics], layers: Mapping[str, LayerStatistics]) -> list[Finding]:
    found: list[tuple[float, Finding]] = []
    for name, spread in spreads.items():
        for key, one in (layers[name].tensors if name in layers else {"w": spread}).items():
            share = one.top_channel_share
            if share > CHANNEL_SHARE and share > CHANNEL_TIMES * one.outlier_share:
                text = f"{100 * share:.0f} % of channel {one.top_channel} of {key} lie beyond 6 times its rms"
                found.append((share, Finding(layer=name, kind="outlier channel", text=text)))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def _tiny(layers: Mapping[str, LayerStatistics]) -> list[Finding]:
    sizes = {name: row.tensors["dy"].amax for name, row in layers.items() if row.tensors["dy"].amax > 0}
    if len(sizes) < 2:
        return []
    middle = statistics.median(sizes.values())
    small = sorted((size, name) for name, size in sizes.items() if size < TINY * middle)
    return [
        Finding(
            layer=name, kind="tiny gradients", text=f"max |dy| is {size:.1e}, the median of all layers {middle:.1e}"
        )
        for size, name in small
    ]


def _noisy(layers: Mapping[str, LayerStatistics]) -> list[Finding]:
    noisy = sorted((row for row in layers.values() if row.is_noisy), key=lambda row: -row.dw_noise_ratio)
    text = "the noise of its weight gradient is {:.2f} of the gradient, beyond 1/√3"
    return [Finding(layer=row.name, kind="noise", text=text.format(row.dw_noise_ratio)) for row in noisy]


def weight_loss(name: str, weight: Tensor, recipe: Recipe) -> WeightLoss:
    """Return what a weight [N, K], or those of experts [E, N, K], loses as the operand of fprop and of dgrad.

    Random bits draw at place 0; sums are over all experts.
    """
    keys = dict(zip(SIDES, spec_keys(recipe), strict=True))
    gemms = {"w.row": recipe.fprop, "w.col": recipe.dgrad}
    operands = {}
    for side_name, gemm in gemms.items():
        spec = None if gemm is None else gemm.b
        if spec is None or (side_name == "w.col" and recipe.backward == "dequantized"):
            continue
        found = []
        for index, w in enumerate(_matrices(weight)):
            place = Philox(0).on(w.device).group(index)
            t = w if side_name == "w.row" else w.T
            side = Side(spec, draw=place, sign_draw=place)
            found.append(side_sums(t, side, ops.quantize(t, side)))
        sums, amax = torch.stack([sums for sums, _ in found]).sum(0), max(float(amax) for _, amax in found)
        values = dict(zip(SIDE_SUMS, sums.tolist(), strict=True))
        operands[side_name] = OperandStatistics(name=side_name, spec=keys[side_name] or "", amax=amax, **values)
    return WeightLoss(layer=name, recipe=describe_recipe(recipe), operands=operands)


def _matrices(weight: Tensor) -> Sequence[Tensor]:
    return weight.detach().unbind(0) if weight.dim() == 3 else (weight.detach(),)


def _spread(weight: Tensor) -> TensorStatistics:
    counts, columns, amaxes = zip(*map(tensor_sums, _matrices(weight)), strict=True)
    elements, outliers = torch.stack(counts).sum(0).tolist()
    channels = tuple(torch.stack(columns).sum(0).tolist())
    amax = max(float(amax) for amax in amaxes)
    return TensorStatistics(name="w", amax=amax, elements=elements, outliers=outliers, channels=channels)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights in high precision of linear layers, and of experts as [E, N, K]."""
    held = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear | GroupedLinear)}
    held = {name: weight for name, weight in held.items() if type(weight) in PLAIN} | expert_weights(model)
    return {plain_name(name): weight for name, weight in held.items()}


def inspect(
    model: nn.Module,
    batch: Callable[[nn.Module], Tensor] | Mapping[str, Any] | None = None,
    *,
    recipes: Sequence[Recipe | str] = RECIPES,
    budget: float = BUDGET,
    by: Literal["layer", "kind"] = "layer",
    keep: Keep = EVERY_BLOCK,
) -> InspectReport:
    """Say which layers and operands of a model lose most under which recipe, and what to keep in high precision.

    The model itself stays as it is: the step of a batch runs on a copy.

    Args:
        model: with linear layers, converted or not.
        batch: a function of the model that returns the loss of one batch; or a dict of arguments for a model that
            returns an object with a `loss`, as those of transformers do; None for weights alone.
        recipes: to measure weights under; the step runs under the first.
        budget: share of the linear layers' FLOPs that the proposal may put in high precision.
        by: as for `hb.stats.sensitivity`.
        keep: layers that the step leaves in high precision where the model is not converted; by default heads,
            embeddings, routers and adapters, and no block.

    Returns:
        InspectReport.

    Raises:
        ValueError: the model has no linear layer with a weight in high precision, or weights without values;
            there is no recipe, none quantizes a weight, one is there twice, or the first quantizes nothing beside a
            batch; the batch gives no loss; `budget`, `by`.
        TypeError: the model is no module, batch is neither, or `recipes` no list.
    """
    chosen = _checked(model, batch, recipes)
    check_budget(budget)
    check_by(by)
    weights = _weights(model)
    if not weights:
        raise ValueError(f"model={type(model).__name__}: no linear layer holds a weight in high precision")
    if empty := [name for name, weight in weights.items() if weight.is_meta]:
        raise ValueError(f"model={type(model).__name__}: the weight of {empty[0]} is on the meta device; load it first")
    losses = [weight_loss(name, weight, recipe) for recipe in chosen for name, weight in weights.items()]
    step = ranking = None
    if batch is not None:
        step, ranking = _step(model, batch, chosen[0], by, keep)
    return InspectReport(
        weights=tuple(loss for loss in losses if loss.operands),
        spreads={name: _spread(weight) for name, weight in weights.items()},
        histograms={name: pictures.magnitudes(weight) for name, weight in weights.items()},
        step=step,
        ranking=ranking,
        budget=budget,
    )


def _checked(model: Any, batch: Any, recipes: Any) -> list[Recipe]:
    """Return the recipes of `inspect`; refuse what is no model, batch or list of them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    if isinstance(recipes, str | Recipe):
        raise TypeError(f"recipes={recipes!r}: give a list, such as recipes=['nvfp4', 'mxfp8']")
    if not (batch is None or callable(batch) or isinstance(batch, Mapping)):
        raise TypeError(f"batch={type(batch).__name__}: give a function of the model that returns a loss, or a dict")
    chosen = [resolve(recipe) for recipe in recipes]
    if not chosen:
        raise ValueError(f"recipes={recipes!r}: give at least one, such as recipes=['nvfp4']")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"recipes={[describe_recipe(one) for one in chosen]}: name each once")
    if batch is not None and not chosen[0].specs:
        raise ValueError(
            f"recipes[0]={describe_recipe(chosen[0])!r} quantizes nothing, and the step of the batch runs under it; "
            "put one in front that quantizes"
        )
    if not any(gemm is not None and gemm.b is not None for one in chosen for gemm in (one.fprop, one.dgrad)):
        names = [describe_recipe(one) for one in chosen]
        raise ValueError(f"recipes={names}: none quantizes a weight; name one that does, such as 'nvfp4'")
    return chosen


def _step(
    model: nn.Module, batch: Any, recipe: Recipe, by: Literal["layer", "kind"], keep: Keep
) -> tuple[StepStatistics, SensitivityReport]:
    """Run one step of a copy of the model under a recipe in all layers that are not kept."""
    twin = copy.deepcopy(model)
    experts = [module for module in twin.modules() if isinstance(module, GroupedRecipe) and module.recipe.specs]
    layers = [module for module in twin.modules() if isinstance(module, Linear)] + experts
    if layers:
        for layer in layers:
            layer.recipe = recipe
    else:
        quantize_(twin, recipe, keep=keep)

    def run() -> Tensor:
        if callable(batch):
            return scalar_loss(batch(twin), "batch(model)")
        return scalar_loss(getattr(twin(**batch), "loss", None), "model(**batch).loss")

    with torch.enable_grad(), collect_stats(twin, every=1) as collector:
        run().backward()
        step = collector.advance()
    assert step is not None, "every step is sampled"
    twin.zero_grad()
    return step, sensitivity(twin, run, by=by, operands=False)
