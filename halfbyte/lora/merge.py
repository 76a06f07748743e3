"""merge_lora_: adapters, ours or PEFT's, taken into the codes that they were trained beside, and what that rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte import layout, ops
from halfbyte.functional.lora import common_amax, merged_codes
from halfbyte.functional.weights import takes_amax
from halfbyte.lora.freeze import as_table, exchange
from halfbyte.nn.linear import Linear
from halfbyte.nn.lora import LoRALinear, frozen_weight
from halfbyte.notebook import ShowsText
from halfbyte.tensor import QuantTensor

MAGNITUDE = 7  # the bits of an E2M1 code beside its sign


@dataclass(frozen=True, kw_only=True)
class MergedLayer:
    """One merged adapter.

    Args:
        name: of the layer.
        error: of the merged weight against what the layer multiplied by in training, relative, Frobenius norms; 0 for
            merge_aware=True, whose forwards multiplied by the merged bytes.
        update_error: the same error relative to the adapter's product: the share of the update that rounding lost.
        changed: share of the codes that stand for another number than those of the base, 0 to 1.
    """

    name: str
    error: float
    update_error: float
    changed: float

    @property
    def percent(self) -> tuple[str, ...]:
        """The three numbers, as they are printed."""
        return tuple(f"{100 * value:.3g} %" for value in (self.error, self.update_error, self.changed))


@dataclass(frozen=True, kw_only=True)
class Merged(ShowsText):
    """What `merge_lora_` did; prints as a table."""

    rows: tuple[MergedLayer, ...]

    @property
    def error(self) -> float:
        """The greatest relative error of a layer."""
        return max(row.error for row in self.rows)

    def __str__(self) -> str:
        head = ("layer", "error", "of the update", "codes changed")
        return "\n".join(as_table(head, [(row.name, *row.percent) for row in self.rows]))


class _Source(NamedTuple):
    """An adapter: the module that holds it, the frozen layer, and how the fp32 sum of both is computed."""

    holder: nn.Module
    base: Linear
    values: Callable[[], Tensor]
    merge_aware: bool

    @property
    def codes(self) -> QuantTensor:
        weight = frozen_weight(self.base)
        assert weight is not None, "found so"
        return weight


def merge_lora_(model: nn.Module) -> Merged:
    """Take the adapters of `model` into its codes, in place: every hb.nn.LoRALinear becomes an hb.nn.Linear.

    The merged weight is quantized as the base was, which rounds; the result says how much that changes. With
    merge_aware=True the bytes are those that forwards multiplied by, as long as this computes as they did: on the same
    kind of device, with the same torch.backends.cuda.matmul settings. PEFT's LoRA layers over frozen layers are merged
    too, their active adapters; of a PeftModel, `get_base_model()` is what remains.

    Args:
        model: what `lora_` made, or a model whose frozen layers PEFT gave adapters.

    Returns:
        Merged, which prints as a table.

    Raises:
        ValueError: no layer has an adapter, a merged weight holds NaN or Inf, or an adapter of PEFT adds more than a
            product to the weight. The model is unchanged then.
    """
    sources = {name: source for name, module in model.named_modules() if (source := _source(name, module)) is not None}
    if not sources:
        raise ValueError(f"model={type(model).__name__}: no layer of it has an adapter; add them with hb.lora_")
    if "" in sources:
        raise ValueError("model is itself a layer and cannot be replaced in place; use model.merged_codes()")
    by_base = {id(source.base): source for source in sources.values()}
    done = {name: _merge(name, source, by_base) for name, source in sources.items()}
    new: dict[int, Linear] = {}
    for name, (holder, base, *_) in sources.items():
        linear = new[id(holder)] = base.to_linear() if isinstance(base, LoRALinear) else base
        linear.weight = nn.Parameter(done[name][0], requires_grad=False)
    exchange(model, new)
    return Merged(rows=tuple(row for _, row in done.values()))


def _source(name: str, module: Any) -> _Source | None:
    if isinstance(module, LoRALinear):
        return _Source(module, module, module.merged_values, module.merge_aware)
    base = getattr(module, "base_layer", None)
    if not isinstance(base, Linear) or not hasattr(module, "get_delta_weight"):
        return None
    weight = frozen_weight(base)
    if weight is None:
        return None
    active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    more = [adapter for adapter in active if module.lora_variant.get(adapter) or module.lora_bias.get(adapter)]
    if more:
        raise ValueError(
            f"{name}: its adapter {more[0]!r} adds more than B A to the weight (a variant such as DoRA, or a bias), "
            "which this cannot merge; train a plain LoraConfig"
        )
    return _Source(module, base, partial(_peft_values, module, weight, active), False)


def _peft_values(module: Any, weight: QuantTensor, adapters: list[str]) -> Tensor:
    with torch.no_grad():
        values = weight.dequantize(torch.float32)
        for adapter in adapters:
            values += module.get_delta_weight(adapter).float()
    return values


def _merge(name: str, source: _Source, by_base: Mapping[int, _Source]) -> tuple[QuantTensor, MergedLayer]:
    """Return the merged weight and what merging changed.

    Args:
        by_base: all adapters of the model, by the ids of their layers.
    """
    values, base = source.values(), source.codes
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name}: its merged weight holds NaN or Inf; go back to adapters of before the run diverged")
    family = [by_base[id(member)] for member in source.base.amax_group if id(member) in by_base]
    amax = None
    if len(family) > 1 and takes_amax(base.spec):
        amax = common_amax([ops.amax(values if one is source else one.values()) for one in family], base.dtype)
    merged = merged_codes(base, values, amax)
    lost = 0.0 if source.merge_aware else float(torch.linalg.norm(merged.dequantize(torch.float32) - values))
    update = float(torch.linalg.norm(values - base.dequantize(torch.float32)))
    changed = int((_codes(merged) != _codes(base)).sum()) / max(base.numel(), 1)
    error, update_error = (lost / n if n else 0.0 for n in (float(torch.linalg.norm(values)), update))
    assert math.isfinite(error), "of finite values"
    return merged, MergedLayer(name=name, error=error, update_error=update_error, changed=changed)


def _codes(q: QuantTensor) -> Tensor:
    """Return what a weight's elements are compared by: a sum with zero makes +0 of -0, which changes no value."""
    if q.spec.format.codes_per_byte == 1:
        return q.qdata.float()
    codes = layout.unpack(q.qdata)
    return torch.where((codes & MAGNITUDE) == 0, 0, codes)
