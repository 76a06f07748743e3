"""Whether another module can stand in the place of one that a model holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def names_of_modules(model: nn.Module) -> Mapping[int, int]:
    """Return under how many names a model holds each module, by the module's id."""
    return Counter(id(module) for name, module in model.named_modules(remove_duplicate=False) if name)


def replaced_problem(module: nn.Module, places: Mapping[int, int]) -> str:
    """Say why another module cannot stand in the place of one, "" if it can."""
    if any(getattr(module, kind) for kind in HOOKS):
        return "it has hooks, which a module in its place would not run"
    if not places[id(module)]:
        return "it is the model itself, and no module holds it"
    return "the model holds it under several names" if places[id(module)] > 1 else ""
