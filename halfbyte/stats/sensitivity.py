"""Which layers and which of their operands hurt most: one at a time in high precision, all else the same.

The same batch at the same random places is run without quantization, with it, and once for every candidate. What a
candidate is worth is how much closer the gradient of the whole model comes to that without quantization.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfbyte.convert import high_precision
from halfbyte.functional.earlier import refuse_delayed
from halfbyte.functional.foreign import PLAIN
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import LinearLayer
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.notebook import html_table
from halfbyte.policy import Keep, plain_name
from halfbyte.spec import Recipe
from halfbyte.stats.collect import spec_keys
from halfbyte.stats.counterfactual import Counterfactual
from halfbyte.stats.figures import SIDES
from halfbyte.stats.pictures import heat_map, paths_in
from halfbyte.stats.table import aligned_table

ALL = "all six"
"""The candidate that leaves a layer in high precision altogether: what a rule of None does."""

BUDGET = 0.1
"""Of the multiplications of linear layers: what a proposal may put in high precision."""

HEAD = ("layers", "operand", "cosine", "gain", "loss", "share of FLOPs")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one counterfactual gave.

    Args:
        target: a layer's name, or a glob of layers of one kind.
        operand: of `figures.SIDES`, or ALL.
        cosine: of its gradient with that of a step without quantization.
        gain: by how much that exceeds the cosine of the step with all operands quantized.
        loss: of the step.
        share: of the multiplications of all measured layers that its layers do.
    """

    target: str
    operand: str
    cosine: float
    gain: float
    loss: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Layers to leave in high precision; prints as code to paste.

    Args:
        targets: names or globs.
        share: of the multiplications of linear layers that this costs.
    """

    targets: tuple[str, ...]
    share: float

    @property
    def rules(self) -> dict[str, None]:
        """As `hb.quantize_(rules=…)` takes them."""
        return dict.fromkeys(self.targets)

    @property
    def keep(self) -> Keep:
        """As `hb.quantize_(keep=…)` takes it: these layers beside those that are kept by default."""
        return Keep(names=(*Keep().names, *self.targets))

    def __str__(self) -> str:
        if not self.targets:
            return "no layer within the budget brings the gradient closer"
        lines = [f"    {target!r}: None," for target in self.targets]
        names = ", ".join(map(repr, self.targets))
        return "\n".join(
            (
                f"# {100 * self.share:.1f} % of the FLOPs of linear layers in high precision",
                "rules = {",
                *lines,
                "}",
                f"keep = hb.Keep(names=(*hb.Keep().names, {names}))",
            )
        )


@dataclass(frozen=True, kw_only=True)
class SensitivityReport:
    """What `sensitivity` found; prints as a table, the most valuable candidates first.

    Args:
        candidates: in the order of their gain; of equal ones first that with the smaller loss.
        cosine: of the gradient with all operands quantized and that without quantization.
        losses: with all operands quantized, and without quantization.
    """

    candidates: tuple[Trial, ...]
    cosine: float
    losses: tuple[float, float]

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers or kinds of layers, the most valuable first."""
        return tuple(one.target for one in self.candidates if one.operand == ALL)

    def gain(self, target: str, operand: str = ALL) -> float:
        """Return the gain of one candidate.

        Raises:
            KeyError: it was not tried.
        """
        for one in self.candidates:
            if (one.target, one.operand) == (target, operand):
                return one.gain
        raise KeyError(
            f"({target!r}, {operand!r}): tried were {', '.join(self.targets)} with {ALL!r} and their operands"
        )

    def propose(self, budget: float = BUDGET) -> Proposal:
        """Return what to leave in high precision: what gains most for its FLOPs first, as long as it fits.

        Args:
            budget: share of the FLOPs of linear layers, 0 to 1.

        Raises:
            ValueError: it is no share.
        """
        check_budget(budget)
        whole = [one for one in self.candidates if one.operand == ALL and one.gain > 0]
        chosen: list[str] = []
        spent = 0.0
        for one in sorted(whole, key=lambda one: one.gain / max(one.share, 1e-12), reverse=True):
            if spent + one.share <= budget + 1e-9:
                chosen.append(one.target)
                spent += one.share
        return Proposal(targets=tuple(chosen), share=spent)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, under `HEAD`."""
        return [
            (c.target, c.operand, f"{c.cosine:.6f}", f"{c.gain:+.2e}", f"{c.loss:.6f}", f"{100 * c.share:.1f} %")
            for c in self.candidates
        ]

    def csv(self) -> str:
        """Return all candidates as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("target", "operand", "cosine", "gain", "loss", "share"))
        writer.writerows((c.target, c.operand, c.cosine, c.gain, c.loss, c.share) for c in self.candidates)
        return text.getvalue()

    def draw(self, folder: str | Path) -> list[Path]:
        """Draw the gains as a heat-map, PNG and SVG, into a folder, and return the paths.

        Raises:
            ImportError: matplotlib is missing.
        """
        (paths,) = paths_in(folder, "sensitivity")
        gains = {(one.target, one.operand): one.gain for one in self.candidates}
        tried = [operand for operand in (ALL, *SIDES) if any(one.operand == operand for one in self.candidates)]
        values = [[gains.get((target, operand), math.nan) for operand in tried] for target in self.targets]
        heat_map(paths, self.targets, tried, values, "gain in gradient cosine with this operand in high precision")
        return paths

    def closing_lines(self) -> list[str]:
        """Return what is said under the table."""
        quantized, plain = self.losses
        return [
            f"all quantized: gradient cosine {self.cosine:.6f}, loss {quantized:.6f}; without quantization {plain:.6f}",
            *str(self.propose()).split("\n"),
        ]

    def __str__(self) -> str:
        return "\n".join((*aligned_table(HEAD, self.rows()), "", *self.closing_lines()))

    def _repr_html_(self) -> str:
        said = html.escape("\n".join(self.closing_lines()))
        return html_table(HEAD, self.rows()) + f"<pre>{said}</pre>"


def check_budget(budget: float) -> None:
    """Refuse what is no share."""
    if not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r}: give a share of the linear layers' FLOPs, 0 < budget <= 1")


def check_by(by: str) -> None:
    """Refuse what layers are not tried by."""
    if by not in ("layer", "kind"):
        raise ValueError(f"by={by!r}: use 'layer' or 'kind'")


def sensitivity(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    by: Literal["layer", "kind"] = "kind",
    operands: bool = True,
) -> SensitivityReport:
    """Put one operand at a time in high precision, run the same step, and rank what that is worth.

    A rotated operand in high precision is rotated likewise and not quantized (docs/statistics.md). The model is left as
    it was: no gradient is accumulated, no random place moves, buffers come back.

    Args:
        model: converted by `hb.quantize_`.
        step: runs the forward of one fixed batch and returns the loss, a scalar; it is called 2 + candidates times.
        by: "kind" tries layers together whose names differ in numbers only, "layer" every layer alone.
        operands: try each quantized operand too, not only all six together.

    Returns:
        SensitivityReport.

    Raises:
        ValueError: no layer quantizes anything, `by` is neither, or the loss is no scalar with a gradient.
    """
    check_by(by)
    layers = _layers(model)
    targets = {name: [name] for name in layers} if by == "layer" else _kinds(layers)
    with _left_as_found(model) as again:
        with high_precision(model):
            plain_loss, wanted = _gradient(again, step, model)
        nothing = Counterfactual({})
        quantized_loss, found = _with(layers, nothing, lambda: _gradient(again, step, model))
        costs = _costs(layers, nothing)
        base = _cosine(found, wanted)
        candidates = []
        for target, names in targets.items():
            sides = _sides(layers[names[0]].recipe)
            tried = {ALL: frozenset(sides)} | ({side: frozenset((side,)) for side in sides} if operands else {})
            for operand, exact in tried.items():
                chosen = Counterfactual({id(layers[name]): exact for name in names})
                loss, gradient = _with(layers, chosen, lambda: _gradient(again, step, model))
                cosine = _cosine(gradient, wanted)
                share = sum(costs[name] for name in names)
                candidates.append(
                    Trial(target=target, operand=operand, cosine=cosine, gain=cosine - base, loss=loss, share=share)
                )
    ranked = sorted(candidates, key=lambda one: (-one.gain, one.loss))
    return SensitivityReport(candidates=tuple(ranked), cosine=base, losses=(quantized_loss, plain_loss))


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that quantize something and hold their weights in high precision."""
    found = {
        plain_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, LinearLayer | GroupedRecipe)
        and module.recipe.specs
        and type(getattr(module, "weight", None)) in (*PLAIN, NoneType)
    }
    if not found:
        raise ValueError(
            f"model={type(model).__name__}: no layer quantizes an operand and holds its weight in high precision; call "
            "hb.quantize_ first"
        )
    apart = next((name for name, layer in found.items() if layer.recipe.channels is not None), None)
    if apart is not None:
        raise ValueError(
            f"{apart}: recipe.channels={found[apart].recipe.channels}: operands of a product with channels apart are "
            "not told from each other; give the layers dataclasses.replace(recipe, channels=None)"
        )
    for name, layer in found.items():
        refuse_delayed(layer.recipe, f"the trial steps of {name}")
    return found


def _kinds(layers: dict[str, Any]) -> dict[str, list[str]]:
    """Return {glob: names} of layers whose names differ in numbers only."""
    kinds: dict[str, list[str]] = {}
    for name, layer in layers.items():
        glob = ".".join("*" if re.fullmatch(r"\d+", part) else part for part in name.split("."))
        kinds.setdefault(f"{glob}\n{layer.recipe.key}", []).append(name)
    return {key.partition("\n")[0] if len(names) > 1 else names[0]: names for key, names in kinds.items()}


def _sides(recipe: Recipe) -> list[str]:
    return [side for side, key in zip(SIDES, spec_keys(recipe), strict=True) if key is not None]


def _costs(layers: dict[str, Any], ran: Counterfactual) -> dict[str, float]:
    """Return each layer's share of the multiplications of a step: experts multiply the tokens that came to them."""
    costs = {name: ran.rows[id(layer)] * layer.in_features * layer.out_features for name, layer in layers.items()}
    total = max(1, sum(costs.values()))
    return {name: cost / total for name, cost in costs.items()}


def _with(layers: dict[str, Any], instead: Counterfactual, run: Callable[[], Any]) -> Any:
    """Return what `run` does with what a counterfactual leaves in high precision."""
    before = {name: layer.instead for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.instead = instead.of_experts if isinstance(layer, GroupedRecipe) else instead
        return run()
    finally:
        for name, layer in layers.items():
            layer.instead = before[name]


def _gradient(again: Callable[[], None], step: Callable[[], Tensor], model: nn.Module) -> tuple[float, list[Tensor]]:
    """Return the loss of the step and its gradient, of each parameter that requires one."""
    again()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = scalar_loss(step(), "step()")
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item(), [g.detach() for g in gradients if g is not None]


def scalar_loss(loss: Any, name: str) -> Tensor:
    """Return a loss that can be differentiated.

    Args:
        loss: what a user's function returned.
        name: of that function, for the message.

    Raises:
        ValueError: it is none.
    """
    if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad:
        return loss
    shape = f" of shape {list(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else ""
    raise ValueError(
        f"{name} returned {type(loss).__name__}{shape}: return the loss, a scalar that depends on parameters which "
        "require gradients"
    )


def _cosine(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the cosine of the angle between two gradients of all parameters together."""
    dots = [0.0, 0.0, 0.0]
    for a, b in zip(found, wanted, strict=True):
        a, b = a.double().flatten(), b.double().flatten()
        dots = [total + float(pair[0] @ pair[1]) for total, pair in zip(dots, ((a, b), (a, a), (b, b)), strict=True)]
    return dots[0] / math.sqrt(dots[1] * dots[2]) if dots[1] and dots[2] else math.nan


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield what puts random places, torch's generators and buffers back where they were; they are so at the end."""
    layers = [module for module in model.modules() if isinstance(module, FollowsRecipe)]
    states = list({id(layer.run_state): layer.run_state for layer in layers if layer.run_state is not None}.values())
    places = [state.state_dict() for state in states]
    stale = [layer._stale for layer in layers]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    generators = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def again() -> None:
        for state, place in zip(states, places, strict=True):
            state.load_state_dict(place)
        for layer in layers:
            layer._stale = (0, 0)  # forwards at one place are meant here
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(generators[0])
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1], device)

    try:
        yield again
    finally:
        again()
        for layer, seen in zip(layers, stale, strict=True):
            layer._stale = seen
