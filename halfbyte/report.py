"""What quantize_ did, layer by layer: a value that prints as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfbyte.nn.linear import describe
from halfbyte.spec import Recipe
from halfbyte.state import RunState


@dataclass(frozen=True, kw_only=True)
class Row:
    """One linear layer: its name, shape (out, in) or (experts, out, in), recipe or None, and why.

    present: the recipe that a layer follows which was converted before and stays as it is.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str
    present: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What quantize_ did; prints as a table.

    Args:
        rows: one per linear layer, in the model's order.
        state: the RunState that the converted layers draw from; advance it once per micro-batch.
        others: {class: names} of modules with matrices of their own that are no linear layers: they stay.
    """

    rows: tuple[Row, ...]
    state: RunState = field(repr=False)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that now follow a recipe."""
        return tuple(row.name for row in self.rows if row.recipe is not None)

    @property
    def kept(self) -> dict[str, str]:
        """Name and reason of every layer that stays as it is: in high precision, or converted before."""
        return {row.name: row.reason for row in self.rows if row.recipe is None}

    def __str__(self) -> str:
        table = [("layer", "out x in", "recipe", "why")]
        for row in self.rows:
            follows = row.recipe or row.present
            recipe = "high precision" if follows is None else describe(follows)
            table.append((row.name, " x ".join(map(str, row.shape)), recipe, row.reason))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        total = sum(math.prod(row.shape) for row in self.rows)
        done = sum(math.prod(row.shape) for row in self.rows if row.recipe is not None)
        share = f"{100 * done / total:.1f} %" if total else "none"
        lines.insert(1, "  ".join("-" * width for width in widths))
        for kind, names in self.others.items():
            some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            lines.append(f"{len(names)} x {kind} ({some}): no torch.nn.Linear, stays as it is")
        lines.append(f"{len(self.converted)} of {len(self.rows)} linear layers converted, {share} of their weights")
        return "\n".join(lines)
