"""hb.collect_stats: statistics of every layer in every n-th optimizer step, and nothing in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.functional.foreign import PLAIN
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import LinearLayer, describe_recipe
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.policy import matches
from halfbyte.position import warn_user
from halfbyte.spec import GemmSpec, Recipe
from halfbyte.stats.each_expert import is_maximum, ledger_of_experts, read_experts
from halfbyte.stats.experts import observed_experts
from halfbyte.stats.figures import NOISE_LIMIT, LayerStatistics, read_ledger
from halfbyte.stats.observe import observed_outputs
from halfbyte.stats.table import StepStatistics

_PLAIN_GEMM = GemmSpec()
SILENT = "nothing ran forward and backward"
"""Of a layer that a sampled step did not reach."""
SHARED = "nothing ran with its values: ranks share its pass (tensor parallel), or its weight arrives as codes"
"""Of a layer with a DTensor for a weight that a sampled step did not reach."""
TAKEN = "a later hb.collect_stats measured it in this step; remove() one of them"
"""Of a layer that adds to the ledger of another collector: it adds to one alone."""


class Sink(Protocol):
    """Where the statistics of a step go."""

    def write(self, statistics: StepStatistics) -> None:
        """Take those of one step."""
        ...


class StatsCollector:
    """Measures the layers of a model in sampled steps; `hb.collect_stats` makes one.

    The first step is sampled, and every step whose number `every` divides. `advance()`, called after each optimizer
    step, or `follow(optimizer)`, called once, tells where a step ends.

    Attributes:
        last: of the latest sampled step, a StepStatistics, None before there is one.
        unobserved: {layer: why it is not measured}.
    """

    def __init__(self, model: nn.Module, every: int, to: Sequence[Sink], names: Sequence[str], group: Any) -> None:
        self.every, self._sinks, self._group = every, tuple(to), group
        followers = {name: m for name, m in model.named_modules() if isinstance(m, FollowsRecipe)}
        self._layers, self.unobserved = _observable(followers, tuple(names))
        self._model = model
        self._ledgers: dict[str, Tensor] = {}
        self.step = 0
        self.last: StepStatistics | None = None
        self._has_warned = self._is_agreed = False
        self._handles: list[Any] = []
        self._begin()

    @property
    def is_sampling(self) -> bool:
        """Whether the step that runs now is measured."""
        return bool(self._layers) and self.samples(self.step + 1)

    def samples(self, step: int) -> bool:
        """Whether a step is measured: the first has the number 1."""
        return step == 1 or step % self.every == 0

    def start_at(self, step: int) -> StatsCollector:
        """Go on behind `step` steps, as a resumed run does, and return self."""
        self._end()
        self.step = step
        self._begin()
        return self

    def follow(self, optimizer: torch.optim.Optimizer) -> StatsCollector:
        """Let every step of `optimizer` end one here, and return self.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer, or call advance()")
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        return self

    def advance(self) -> StepStatistics | None:
        """End a step: read what was measured, write it, and begin the next; all ranks of the group together.

        Returns:
            The statistics of the step if it was sampled, else None.

        Warns:
            UserWarning: the noise of the weight gradients exceeds the gradients over √3; said once.
        """
        found = None
        if self.is_sampling:
            found = self.last = self._read()
            self._end()
            for sink in self._sinks if self._is_first() else ():
                sink.write(found)
            self._warn(found)
        self.step += 1
        self._begin()
        return found

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self.advance()

    def remove(self) -> None:
        """Measure nothing any more: the layers are as they were before."""
        self._end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers, self._ledgers = {}, {}

    def __enter__(self) -> StatsCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _begin(self) -> None:
        if not self.is_sampling:
            return
        for name, layer in self._layers.items():
            device = _device_of(layer, self._model)
            ledger = self._ledgers.get(name)
            if ledger is None or ledger.device != device:
                experts = layer.experts if isinstance(layer, GroupedRecipe) else 0
                ledger = self._ledgers[name] = ledger_of_experts(_features(layer), experts, device)
            layer.ledger = ledger.zero_()
            layer.instead = observed_experts if isinstance(layer, GroupedRecipe) else observed_outputs

    def _end(self) -> None:
        for name, layer in self._layers.items():
            if self._is_ours(name):
                layer.ledger = layer.instead = None

    def _is_ours(self, name: str) -> bool:
        """Whether a layer adds to this collector's ledger."""
        return self._layers[name].ledger is not None and self._layers[name].ledger is self._ledgers.get(name)

    def _read(self) -> StepStatistics:
        """Return the statistics of the step, of all ranks together."""
        ledgers = list(self._ledgers.values())
        rows: list[LayerStatistics] = []
        recipes: dict[Recipe, tuple[str, list[str | None]]] = {}
        if ledgers:
            together = self._reduced(torch.cat([ledger.to(ledgers[0].device) for ledger in ledgers])).cpu()
            for (name, layer), ledger in zip(
                self._layers.items(), together.split([len(ledger) for ledger in ledgers]), strict=True
            ):
                if layer.recipe not in recipes:
                    recipes[layer.recipe] = describe_recipe(layer.recipe), spec_keys(layer.recipe)
                described, keys = recipes[layer.recipe]
                about, features = (name, described), _features(layer)
                own, experts = read_experts(ledger, about, features, keys)
                row = read_ledger(own, about, features, keys)
                rows.append(replace(row, experts=experts))
        taken = {row.name: TAKEN for row in rows if not self._is_ours(row.name)}
        silent = {row.name: self._why_silent(row.name) for row in rows if not row.tensors}
        return StepStatistics(
            step=self.step + 1,
            layers=tuple(row for row in rows if row.tensors and row.name not in taken),
            unobserved={**self.unobserved, **silent, **taken},
        )

    def _why_silent(self, name: str) -> str:
        return SHARED if hasattr(getattr(self._layers[name], "weight", None), "placements") else SILENT

    def _reduced(self, together: Tensor) -> Tensor:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return together
        self._agree(list(self._layers))
        masks = [is_maximum(ledger, _features(self._layers[name])) for name, ledger in self._ledgers.items()]
        largest = torch.cat([mask.to(together.device) for mask in masks])
        maxima = torch.where(largest, together, 0.0)
        dist.all_reduce(together, dist.ReduceOp.SUM, self._group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, self._group)
        return torch.where(largest, maxima, together)

    def _agree(self, names: list[str]) -> None:
        """Raise on every rank where ranks hold other layers, whose ledgers do not add up."""
        if self._is_agreed:
            return
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, names, self._group)
        if any(other != names for other in found):
            raise ValueError(
                "group=None: its ranks hold other layers, as stages of a pipeline do; give collect_stats the group of "
                "ranks that hold the same"
            )
        self._is_agreed = True

    def _is_first(self) -> bool:
        return not dist.is_available() or not dist.is_initialized() or dist.get_rank(self._group) == 0

    def _warn(self, found: StepStatistics) -> None:
        if found.is_noisy and not self._has_warned and self._is_first():
            self._has_warned = True
            loudest = sorted(found.layers, key=lambda row: row.dw_noise_ratio, reverse=True)[:4]
            named = ", ".join(f"{row.name} {row.dw_noise_ratio:.2f}" for row in loudest)
            warn_user(
                f"step {found.step}: quantization noise is {found.noise_ratio:.2f} of the weight gradients of a "
                f"micro-batch, beyond 1/√3 = {NOISE_LIMIT:.2f}, where training in FP4 stalls (arXiv 2505.19115), most "
                f"in {named}; larger batches, a recipe with less noise in wgrad, or a high-precision backward at the "
                "end (hb.Schedule) help"
            )


def _observable(followers: dict[str, FollowsRecipe], names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers that can be measured, and why the others cannot."""
    layers: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, layer in followers.items():
        if not any(matches(name, glob) for glob in names):
            continue
        reason = _obstacle(layer)
        if reason:
            reasons[name] = reason
        else:
            layers[name] = layer
    return layers, reasons


def _obstacle(layer: Any) -> str:
    if not isinstance(layer, LinearLayer | GroupedRecipe):
        return f"a {type(layer).__name__} has GEMMs of its own"
    if isinstance(layer, LinearLayer) and layer.entry is not None:
        return "ranks share it: NVFP4Colwise and NVFP4Rowwise have passes of their own"
    if isinstance(layer, GroupedRecipe) and layer.entry is not None:
        return "ranks share its experts: ExpertParallel, GroupedColwise and GroupedRowwise have passes of their own"
    weight = getattr(layer, "weight", None)  # experts of transformers hold theirs elsewhere
    if weight is not None and type(weight) not in PLAIN and not hasattr(weight, "placements"):
        return f"its weight is a {type(weight).__name__}: no values to compare codes with"
    return ""


def _features(layer: Any) -> tuple[int, int]:
    return layer.in_features, layer.out_features


def _device_of(layer: Any, model: nn.Module) -> torch.device:
    weight = getattr(layer, "weight", None)
    return weight.device if isinstance(weight, Tensor) else next(model.parameters()).device


def spec_keys(recipe: Recipe) -> list[str | None]:
    """Return the key of every operand of `figures.SIDES`, None for what is not quantized."""
    gemms = [gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
    return [None if spec is None else spec.key for gemm in gemms for spec in (gemm.a, gemm.b)]


def collect_stats(
    model: nn.Module,
    every: int = 100,
    *,
    to: Sequence[Sink] = (),
    names: Sequence[str] = ("*",),
    group: Any = None,
) -> StatsCollector:
    """Measure what quantization does to the layers of `model`, in the first optimizer step and in every n-th.

    No bit of the model, its gradients or its random places changes. In a sampled step x and the weights are kept until
    the backward, as training in bf16 does; in the others nothing is done.

    Args:
        model: converted by `hb.quantize_`. Layers that it kept in high precision are not measured.
        every: optimizer steps from one sampled step to the next.
        to: where the statistics go, such as [hb.stats.JSONL(path)]; `statistics.last` has them anyway.
        names: globs of the layers to measure.
        group: the torch.distributed group over which ranks are added up: those that train the same layers on other
            data. None: all ranks.

    Returns:
        StatsCollector; call its `advance()` after each optimizer step, or its `follow(optimizer)` once.

    Raises:
        ValueError: no layer that follows a recipe matches, or `every` is no number of steps.
        TypeError: model is no module, or `every` no int.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every={every!r}: give an int, the optimizer steps from one sampled step to the next")
    if every < 1:
        raise ValueError(f"every={every}: give at least 1")
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a tuple of globs")
    listed = isinstance(to, Sequence) and not isinstance(to, str)
    if not listed or not all(callable(getattr(sink, "write", None)) for sink in to):
        raise TypeError(f"to={to!r}: give a list of sinks, such as [hb.stats.JSONL(path)]")
    statistics = StatsCollector(model, every, to, names, group)
    if not statistics._layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(statistics.unobserved.items())[:4])
        raise ValueError(
            f"names={tuple(names)}: no layer of {type(model).__name__} can be measured"
            + (f" ({reasons})" if reasons else "; call hb.quantize_ first, or give globs that match its layers")
        )
    return statistics
