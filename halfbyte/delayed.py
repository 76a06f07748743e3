"""When x and gradients are quantized with amaxes of earlier steps, and what of a recipe that concerns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.values import refused


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """x and the gradient of y are quantized with the amax of an earlier step (docs/numerics.md section 3).

    Args:
        every: the amaxes are measured in one step of so many and serve all steps until those of the next are known.
        margin: they are multiplied by; more than 1 leaves room for values that grow.

    Raises:
        ValueError: one of them is out of bounds.
    """

    every: int = 1
    margin: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise refused("every", self.every, "give a number of steps, 1 or more")
        margin = self.margin
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 1 <= margin <= 1024:
            raise refused("margin", margin, "give a factor with 1 <= margin <= 1024; 1.0 changes nothing")
        object.__setattr__(self, "margin", float(margin))

    @property
    def key(self) -> str:
        return f"delayed,{self.every},{self.margin!r}"


def parse_delayed(text: str) -> Delayed:
    """Return the value whose key is `text`.

    Raises:
        ValueError: it is no such key.
    """
    name, every, margin = text.split(",")
    if name != "delayed":
        raise ValueError(f"amax={text!r}: only 'delayed' is known")
    return Delayed(every=int(every), margin=float(margin))


def waits(spec: Any) -> bool:
    """Whether an operand of this spec has the one amax that may be an earlier one."""
    return spec is not None and spec.format.has_amax and spec.has_tensor_amax


def check_delayed(recipe: Any) -> None:
    """Raise ValueError where a recipe has a value for `amax` that its operands cannot follow."""
    delayed = recipe.amax
    if delayed is not None and not isinstance(delayed, Delayed):
        raise refused("amax", delayed, "use None, or what hb.recipes.delayed_amax() has")
    problem = None if delayed is None else delay_problem(recipe)
    if problem is not None:
        raise refused("amax", delayed, problem)


def delay_problem(recipe: Any) -> str | None:
    """Say why a recipe's operands cannot be quantized with an earlier amax, and what to do, or None."""
    if recipe.activation_mean == "split":
        return "x without its mean has another amax in every call; use activation_mean='kept'"
    if recipe.channels is not None:
        return "channels of x are taken apart anew in every call; use channels=None"
    operands = [gemm and gemm.a for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
    if recipe.backward == "original":
        operands.append(recipe.wgrad and recipe.wgrad.b)
    if not any(waits(spec) for spec in operands):
        return "no operand of x or dy is NVFP4 with outer='tensor', so none has one; use None"
    return None
