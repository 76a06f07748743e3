"""Whether a parameter of which ranks are to keep parts is another module's too, which would go on with the whole one.

A style of parallelize_module is handed a module, not the model that holds it. So a weight that something outside has
too, such as an embedding tied to a head, is not seen: torch's ColwiseParallel and RowwiseParallel untie it alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

UNTIE = "give each its own, nn.Parameter(weight.detach().clone()), or leave both whole"


def refuse_tied(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ValueError if a parameter that is trained is another one's too; frozen ones learn nothing apart.

    Args:
        module: that holds the layers, of which all names are looked at.
        layers: whose parameters are about to be replaced.
    """
    names: dict[int, list[str]] = {}
    for prefix, holder in module.named_modules():
        for key, param in holder._parameters.items():
            names.setdefault(id(param), []).append(f"{prefix}.{key}".lstrip("."))
    for layer in layers:
        for key, param in layer._parameters.items():
            one, *others = names.get(id(param), [key])
            if param is not None and param.requires_grad and others:
                raise ValueError(f"{one} and {others[0]} are one parameter, of which ranks would keep parts: {UNTIE}")
