"""What a run does to the model: a recipe, and which layers follow it, written as one word.

`nvfp4` follows hb.quantize_'s default policy: lm_head and the last 15 % of the blocks stay in high precision.
`nvfp4@all` puts every linear layer under the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

import halfbyte as hb
from halfbyte import recipes

EVERYWHERE = "all"
CONTROL = "naive_fp4"
"""The recipe that is meant to lose."""


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A recipe and the layers it leaves alone.

    Args:
        name: as the user writes it.
        recipe: for the layers that follow it.
        keep: the layers that do not; None is hb.quantize_'s default.
    """

    name: str
    recipe: hb.Recipe
    keep: hb.Keep | None

    @property
    def is_control(self) -> bool:
        """Whether the recipe, its forward or its backward is there to show what failing looks like."""
        return CONTROL in self.name.partition("@")[0].split("/")


def treatment_of(name: str) -> Treatment:
    """Return the treatment called `name`: a recipe's name, with `@all` behind it or without.

    Raises:
        ValueError: no recipe has that name, or something else than `all` follows the `@`.
    """
    recipe, at, layers = name.partition("@")
    if at and layers != EVERYWHERE:
        raise ValueError(f"recipe={name!r}: {layers!r} after the @; use {recipe}@{EVERYWHERE} or {recipe}")
    keep = hb.Keep(names=(), last_fraction=0.0) if at else None
    return Treatment(name=name, recipe=recipes.get(recipe), keep=keep)
