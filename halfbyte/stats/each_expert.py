"""Statistics of each expert: behind a layer's ledger lie short ones, without counts of channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte.stats.figures import FIXED, MAXIMA, LayerStatistics, ledger_size, read_ledger

EXPERT_HEAD = ("layer", "experts with tokens", "most tokens", "fewest", "noisiest y", "noisiest dx", "noisiest dw")
Features = tuple[int, int]
"""in_features and out_features of a layer."""


def ledger_of_experts(features: Features, experts: int, device: torch.device) -> Tensor:
    """Return a ledger of nothing: that of the layer, then `experts` short ones; 0 of them for a linear layer."""
    return torch.zeros(ledger_size(*features) + experts * FIXED, dtype=torch.float64, device=device)


def _parts(ledger: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """Return the layer's own ledger, and those of its experts [experts, FIXED]; views."""
    size = ledger_size(*features)
    return ledger[:size], ledger[size:].view(-1, FIXED)


def add_group(ledger: Tensor, features: Features, group: Tensor, index: int, groups: int) -> None:
    """Add what one group of tokens gave to the ledger of its layer, and to that of its expert.

    Args:
        ledger: of `ledger_of_experts`.
        features: of the layer.
        group: the ledger of this group alone, [ledger_size].
        index: of the group.
        groups: how many there are; where ranks hold some of the experts each, their indices are not the layer's, and
            only the layer's own ledger takes part.
    """
    whole, each = _parts(ledger, features)
    _add(whole, group)
    if len(each) == groups:
        _add(each[index], group[:FIXED])


def _add(ledger: Tensor, other: Tensor) -> None:
    ledger[:MAXIMA] = torch.maximum(ledger[:MAXIMA], other[:MAXIMA])
    ledger[MAXIMA:] += other[MAXIMA:]


def is_maximum(ledger: Tensor, features: Features) -> Tensor:
    """Return which entries are maxima, of which ranks take the largest; the others are sums."""
    mask = torch.zeros(len(ledger), dtype=torch.bool, device=ledger.device)
    whole, each = _parts(mask, features)
    whole[:MAXIMA] = True
    each[:, :MAXIMA] = True
    return mask


def read_experts(
    ledger: Tensor, about: tuple[str, str], features: Features, specs: list[str | None]
) -> tuple[Tensor, dict[int, LayerStatistics]]:
    """Return the layer's own ledger, and the figures of each expert that got tokens; arguments as of `read_ledger`."""
    whole, each = _parts(ledger, features)
    found = {}
    for index, one in enumerate(each):
        if one.any():
            found[index] = read_ledger(one, (f"{about[0]}[{index}]", about[1]), (0, 0), specs)
    return whole, found


def expert_row(layer: LayerStatistics) -> tuple[str, ...]:
    """Return the cells of a layer of experts: who got most and least, and whose products are noisiest."""
    tokens = {index: one.tensors["x"].elements for index, one in layer.experts.items()}
    most, least = max(tokens, key=tokens.__getitem__), min(tokens, key=tokens.__getitem__)
    shares = (f"{index}: {tokens[index] / sum(tokens.values()):.1%}" for index in (most, least))
    cells = [layer.name, f"{len(tokens)}", *shares]
    for product in ("y", "dx", "dw"):
        ratios = {i: one.products[product].noise_ratio for i, one in layer.experts.items() if product in one.products}
        worst = max(ratios, key=lambda i: (math.isnan(ratios[i]), ratios[i]), default=None)
        cells.append("-" if worst is None else f"{worst}: {ratios[worst]:.3f}")
    return tuple(cells)
