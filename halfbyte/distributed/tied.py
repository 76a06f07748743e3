"""Whether a parameter of which ranks are to keep parts is another module's too, which would go on with the whole one.

A style of parallelize_module is handed a module, not the model that holds it. So a weight that something outside has
too, such as an embedding tied to a head, is not seen: torch's ColwiseParallel and RowwiseParallel untie it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

UNTIE = "give each its own, nn.Parameter(weight.detach().clone()), or leave both whole"


def refuse_tied(module: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a parameter of a layer is another one's too, as far as that can be seen.

    Args:
        module: that holds the layers, of which all names are looked at.
        layers: whose parameters are about to be replaced, by what messages call them.
    """
    names: dict[int, list[str]] = {}
    for prefix, holder in module.named_modules():
        for key, param in holder._parameters.items():
            names.setdefault(id(param), []).append(f"{prefix}.{key}".lstrip("."))
    for name, layer in layers.items():
        for key, param in layer._parameters.items():
            if param is None:
                continue
            one, *others = names.get(id(param), [key])
            if others:
                raise ValueError(f"{one} and {others[0]} are one parameter, of which ranks would keep parts: {UNTIE}")
            if hasattr(param, "kept_in_parts"):
                what = f"{name or 'module'}: its {key}"
                raise ValueError(f"{what} is that of another module, of which ranks keep parts already: {UNTIE}")


def replace_(module: nn.Module, key: str, param: Any, part: Any) -> None:
    """Put what a rank keeps of a parameter in its place, and leave a note for a module that has it too.

    Args:
        module: changed in place.
        key: of the parameter.
        param: it.
        part: what becomes the parameter, which needs a gradient if that one does.
    """
    setattr(module, key, nn.Parameter(part, requires_grad=param.requires_grad))
    param.kept_in_parts = True
