"""The greatest magnitudes that quantized layers see in a few batches: what engines scale their inputs by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.streams import FollowsRecipe


def input_amaxes(model: nn.Module, layers: Sequence[str], batches: Iterable[Any]) -> dict[str, float]:
    """Return the greatest finite magnitude of every layer's inputs, over forwards in the model's recipes.

    Args:
        model: it runs in eval mode without gradients, and is put back as it was.
        layers: names of its quantized layers.
        batches: what the model is called with: a mapping of keyword arguments, a tuple of arguments, or a tensor.

    Raises:
        ValueError: there is no batch, or a layer saw no input other than zeros.
    """
    found: dict[str, Tensor] = {}
    handles = [model.get_submodule(name).register_forward_pre_hook(_watch(found, name)) for name in layers]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    count = 0
    try:
        with torch.no_grad():
            for batch in batches:
                _call(model, batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    if not count:
        raise ValueError("batches is empty: give a few, such as those of an evaluation, or activations='none'")
    amaxes = {name: float(found.get(name, torch.zeros((), dtype=torch.float32))) for name in layers}
    unseen = [name for name, amax in amaxes.items() if amax == 0]
    if unseen:
        raise ValueError(
            f"batches: {unseen[0]} ({len(unseen)} layers) saw nothing but zeros in them, so the scale of its input is "
            "unknown; give batches that reach every layer, such as more tokens for the experts of a mixture"
        )
    return amaxes


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _watch(found: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, arguments: tuple) -> None:
        if isinstance(module, FollowsRecipe) and module.times_aside:
            raise ValueError(
                f"{name} computes in high precision while the model is in eval mode, so its input is not that of its "
                "recipe: HalfbyteCallback has set this up; call its release() before"
            )
        x = arguments[0].detach()
        if isinstance(module, GroupedRecipe):
            x = x[: int(arguments[2][-1])]  # rows behind the last group are padding
        if x.numel():
            amax = torch.where(x.isfinite(), x.abs(), torch.zeros_like(x)).amax().float()
            found[name] = torch.maximum(amax, found.get(name, torch.zeros_like(amax)))

    return hook
