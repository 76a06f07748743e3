"""What quantize_ did, layer by layer: a value that prints as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from halfbyte.nn.linear import describe_recipe
from halfbyte.notebook import html_lines, html_table
from halfbyte.spec import Recipe
from halfbyte.state import RunState

HEAD = ("layer", "out x in", "recipe", "why")
NUMBERED = "recipe "
"""How a recipe without a name begins in the table, where its key would hide the other columns."""


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

    @property
    def follows(self) -> Recipe | None:
        """The recipe of the layer after the conversion, None in high precision."""
        return self.recipe or self.present


@dataclass(frozen=True, kw_only=True)
class Report:
    """What quantize_ did; prints as a table.

    Args:
        rows: one per linear layer, in the model's order; of experts one for each of their two weights.
        state: the RunState that the converted layers draw from; advance it once per micro-batch.
        others: {class: names} of modules with matrices of their own that are no linear layers: they stay.
        weights: elements of the weights that this call converted, and of all that the model multiplies by, `others`
            included; a weight that several layers hold counts once. None: those of the rows.
    """

    rows: tuple[Row, ...]
    state: RunState = field(repr=False)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weights: tuple[int, int] | None = None

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that now follow a recipe."""
        return tuple(row.name for row in self.rows if row.recipe is not None)

    @property
    def kept(self) -> dict[str, str]:
        """Name and reason of every layer that stays as it is: in high precision, or converted before."""
        return {row.name: row.reason for row in self.rows if row.recipe is None}

    @property
    def share(self) -> float:
        """Which part of the weights that the model multiplies by this call converted, 0 to 1."""
        done, total = self.weights or (
            sum(math.prod(row.shape) for row in self.rows if row.recipe is not None),
            sum(math.prod(row.shape) for row in self.rows),
        )
        return done / total if total else 0.0

    def table_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, under `HEAD`."""
        names = self._recipe_names()
        return [(row.name, " x ".join(map(str, row.shape)), names[row.follows], row.reason) for row in self.rows]

    def closing_lines(self) -> list[str]:
        """Return what is said under the table, first the key of every recipe that has but a number there."""
        names = self._recipe_names().items()
        lines = [f"{name}: {recipe.key}" for recipe, name in names if recipe and name.startswith(NUMBERED)]
        lines += [f"{text}: no torch.nn.Linear, stays as it is" for text in describe_others(self.others)]
        of = "all weights of the model that are multiplied" if self.others else "their weights"
        words = f"{len(self.converted)} of {len(self.rows)} linear layers converted"
        percent = f"{100 * self.share:.1f}"
        return [*lines, f"{words}, {'99.9' if percent == '100.0' and self.share < 1 else percent} % of {of}"]

    def _recipe_names(self) -> dict[Recipe | None, str]:
        """Return what the table calls each recipe: what `recipes.get` reads, or a number instead of a key."""
        names: dict[Recipe | None, str] = {None: "high precision"}
        numbers = count(1)
        for recipe in dict.fromkeys(row.follows for row in self.rows):
            if recipe is not None:
                name = describe_recipe(recipe)
                names[recipe] = f"{NUMBERED}{next(numbers)}" if name == recipe.key else name
        return names

    def __str__(self) -> str:
        table = [HEAD, *self.table_rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *self.closing_lines()])

    def _repr_html_(self) -> str:
        return html_table(HEAD, self.table_rows()) + html_lines(self.closing_lines())


def describe_others(others: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return "3 x Conv1d (a, b, …)" for each class of modules that are no linear layers."""
    return [f"{len(names)} x {kind} ({some(names, 2)})" for kind, names in others.items()]


def some(names: tuple[str, ...], count: int = 4) -> str:
    """Return the first names, and … for others."""
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")
