"""Whether a checkpoint's run trained the layers of this model in the recipes that they follow now."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _by_key(key: str | None) -> str:
    return "high precision" if key is None else key


def recipe_difference(
    now: Mapping[str, str], then: Mapping[str, str], called: Callable[[str | None], str] = _by_key
) -> str | None:
    """Say which layer, first in the model's order, the run trained in another recipe; None if it trained none so.

    Args:
        now, then: key of the recipe by name of the layer, of this model and of the checkpoint.
        called: what a key is called in the sentence; that of a layer that one of them lacks is None.
    """
    other = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if not other:
        return None
    first = other[0]
    return (
        f"the checkpoint's run trained {first} in {called(then.get(first))}, this model has {called(now.get(first))} "
        f"there ({len(other)} layers differ)"
    )
