"""What stays in high precision unless somebody says otherwise: layers by name, and blocks by their place in a stack."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which linear layers stay in high precision: by default as in NVIDIA's NVFP4 pretraining (arXiv 2509.25149).

    Args:
        names: globs of fully qualified names.
        first_blocks: this many blocks at the start of every stack of blocks.
        last_fraction: this share of the blocks at the end of the stack, rounded up, but never all of them.
    """

    names: tuple[str, ...] = (
        *("*lm_head", "*embed*", "*output_layer"),
        *("*router", "*router.*", "*.gate", "*.gate.*", "*shared_expert_gate"),
    )
    first_blocks: int = 0
    last_fraction: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise TypeError(f"names={self.names!r}: give a tuple of globs")
        object.__setattr__(self, "names", tuple(self.names))
        if not isinstance(self.first_blocks, int) or self.first_blocks < 0:
            raise ValueError(f"first_blocks={self.first_blocks!r}: give a number of blocks >= 0")
        if not 0 <= self.last_fraction <= 1:
            raise ValueError(f"last_fraction={self.last_fraction!r}: give a share between 0 and 1")

    def last_blocks(self, count: int) -> int:
        """Return how many of `count` blocks stay in high precision at the end."""
        return min(math.ceil(self.last_fraction * count - 1e-9), max(count - 1, 0))


def kept_blocks(model: nn.Module, layers: Iterable[str], keep: Keep) -> dict[str, str]:
    """Return {layer name: reason} of the layers in the first and last blocks of every outermost ModuleList."""
    kept: dict[str, str] = {}
    outer: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{p}.") for p in outer):
            continue
        inside = [name for name in layers if name.startswith(f"{path}." if path else "")]
        if not inside:
            continue
        outer.append(path)
        count, last = len(module), keep.last_blocks(len(module))
        for index in range(count):
            edge = "first" if index < keep.first_blocks else "last" if index >= count - last else None
            prefix = f"{path}.{index}." if path else f"{index}."
            if edge is not None:
                amount = keep.first_blocks if edge == "first" else last
                reason = f"{edge} {amount} of {count} blocks of {path or 'the model'}"
                kept.update({name: reason for name in inside if name.startswith(prefix) or name == prefix[:-1]})
    return kept
