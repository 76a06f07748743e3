"""What a torchtitan run keeps in its checkpoints, and what its model computes while it is evaluated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from halfbyte.convert import high_precision
from halfbyte.integrations.other_recipes import recipe_difference
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.state import RunState


class Evaluation:
    """Lets a model in eval mode compute in high precision, as torchtitan's Validator runs it."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[Any] = []
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, arguments: Any) -> None:
        if not module.training:
            context = high_precision(module)
            context.__enter__()
            self._open.append(context)

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


class Saved:
    """What a checkpoint holds of a run: its RunState, and which layers follow which recipe.

    In one text: torch's distributed checkpoints restore the keys that a new run has, and a RunState has few at first.
    """

    def __init__(self, layers: Mapping[str, FollowsRecipe], state: RunState) -> None:
        self._layers, self._state = layers, state

    def state_dict(self) -> dict[str, Any]:
        saved = {"version": 1, "state": self._state.state_dict(), "recipes": self._recipes()}
        return {"text": json.dumps(saved)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = json.loads(state_dict["text"])
        other = recipe_difference(self._recipes(), saved["recipes"])
        if other:
            raise ValueError(f"{other}: convert the config with the recipe, rules and keep of that run")
        self._state.load_state_dict(saved["state"])

    def _recipes(self) -> dict[str, str]:
        """Return name -> key of the recipe that a layer was converted to, whatever a schedule changed since."""
        layers = self._layers.items()
        return {name: (m.recipe if m.recipe_before is None else m.recipe_before).key for name, m in layers}
