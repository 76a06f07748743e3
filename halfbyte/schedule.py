"""A precision schedule: which recipe a run follows from which step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from halfbyte import recipes
from halfbyte.spec import Recipe, parse_recipe
from halfbyte.values import split_outside

Start = int | float


@dataclass(frozen=True)
class Schedule:
    """Changes of recipe in the course of a run.

    Before the first change every layer keeps the recipe it was converted with. "BF16 forward for the last 10 %" is
    `Schedule([(0.9, "bf16/nvfp4")], steps=…)`, "MXFP8 backward at the end" `[(0.8, "nvfp4_mxfp8_bwd")]`.

    Args:
        changes: pairs (when, recipe) in the order of time: an int is the optimizer step before which the recipe
            changes, counted from 0, a float from 0 to 1 that share of `steps`, the last step at the latest. A recipe
            may be a preset's name, or "forward/backward" of two presets.
        steps: optimizer steps of the whole run; needed where a change has a share.

    Raises:
        ValueError: a share without `steps` or outside of the run, changes out of order or on one step, or a name that
            is no preset.
        TypeError: something else than pairs of a number and a recipe.
    """

    changes: tuple[tuple[Start, Recipe], ...]
    steps: int | None = None
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __init__(self, changes: Iterable[tuple[Start, Recipe | str]], steps: int | None = None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps={steps!r}: give the number of optimizer steps, an int above 0")
        if isinstance(changes, (str, Mapping)) or not isinstance(changes, Iterable):
            raise TypeError(f"changes={changes!r}: give a list of pairs (step or share, recipe)")
        pairs = tuple(_pair(change) for change in changes)
        object.__setattr__(self, "changes", pairs)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "starts", tuple(_first_step(when, steps) for when, _ in pairs))
        for (earlier, one), (later, two) in pairwise(zip((when for when, _ in pairs), self.starts, strict=True)):
            if one == two:
                step = f"{one} of {steps}" if steps else one
                raise ValueError(f"changes: {earlier} and {later} both fall on step {step}; keep one of them")
            if two < one:
                words = f"{later} is step {two} and follows {earlier}, step {one}"
                raise ValueError(f"changes: {words}; put them in the order of time")

    def at(self, step: int) -> Recipe | None:
        """Return the recipe of optimizer step `step`, counted from 0; None before the first change."""
        found = None
        for start, (_, recipe) in zip(self.starts, self.changes, strict=True):
            found = recipe if start <= step else found
        return found

    def refuse_unbegun(self) -> None:
        """Raise ValueError: micro-batches go by, and nobody asks which recipe they have."""
        if self.changes:
            raise ValueError(
                "the RunState has a schedule and its begin_step was never called, so that no recipe would ever change: "
                "call begin_step(model) before the first micro-batch of every optimizer step"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"changes": [[when, recipe.key] for when, recipe in self.changes], "steps": self.steps}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Schedule:
        """Return the schedule that wrote `state`.

        Raises:
            ValueError, TypeError: `state` is not what `state_dict` returns.
        """
        if not isinstance(state, dict) or set(state) != {"changes", "steps"}:
            raise ValueError(f"state={state!r}: not a Schedule; pass what Schedule.state_dict() returned")
        return cls([(when, parse_recipe(key)) for when, key in state["changes"]], state["steps"])


def parse_schedule(text: str, steps: int, read: Callable[[str], Recipe] = recipes.get) -> Schedule | None:
    """Return the schedule that a user wrote in one line, None for an empty one.

    Args:
        text: "WHEN:RECIPE,…", such as "0.85:bf16/nvfp4,1900:bf16"; with a point WHEN is a share of the steps.
        steps: optimizer steps of the whole run.
        read: returns the recipe of a name.

    Raises:
        ValueError: the text does not have this form, or means what Schedule refuses.
    """
    changes: list[tuple[Start, Recipe]] = []
    for part in filter(None, split_outside(text, ",")):
        when, _, recipe = part.partition(":")
        words = f"schedule={text!r}: {part!r} is not WHEN:RECIPE, such as 0.9:bf16/nvfp4 or 1800:bf16"
        try:
            start = float(when) if "." in when else int(when)
        except ValueError as error:
            raise ValueError(words) from error
        if not recipe:
            raise ValueError(words)
        changes.append((start, read(recipe)))
    return Schedule(changes, steps) if changes else None


def _pair(change: Any) -> tuple[Start, Recipe]:
    if not isinstance(change, (tuple, list)) or len(change) != 2:
        raise TypeError(f"changes: {change!r} is not a pair (step or share, recipe)")
    when, recipe = change
    if isinstance(when, bool) or not isinstance(when, (int, float)):
        raise TypeError(f"changes: {when!r} is no step and no share of the steps; give an int or a float")
    if not isinstance(recipe, Recipe | str):
        raise TypeError(f"changes: {recipe!r} is no recipe; give a Recipe or the name of a preset")
    return when, recipes.resolve(recipe)


def _first_step(when: Start, steps: int | None) -> int:
    if isinstance(when, float):
        if steps is None:
            raise ValueError(f"steps=None: a change at {when} is a share of the steps; pass steps=")
        if not 0 <= when < 1:
            raise ValueError(f"changes: {when} is no share of the steps; give 0.0 <= share < 1.0, or an int for a step")
        return min(round(when * steps), steps - 1)
    if when < 0 or (steps is not None and when >= steps):
        raise ValueError(f"changes: step {when} is outside of the run; give 0 <= step < steps={steps}")
    return when
