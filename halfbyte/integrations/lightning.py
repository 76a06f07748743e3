"""Precision plugins of Lightning 2.6 that train in a recipe: `Trainer(plugins=NVFP4Precision("nvfp4"))`, and Fabric's.

A plugin sees the whole model before the strategy wraps it, and every backward after it: it converts in place (DDP drops
what a plugin returns), moves the RunStates on, begins the steps of a schedule and keeps both in checkpoints.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from halfbyte.convert import high_precision, quantize_
from halfbyte.distributed import place_ranks_
from halfbyte.integrations.other_recipes import recipe_difference
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.policy import Keep
from halfbyte.recipes import resolve
from halfbyte.spec import Recipe
from halfbyte.state import RunState

GEMMS = ("32-true", "bf16-mixed", "bf16-true")
"""Lightning's names of what runs in high precision: in fp32, in bf16 by autocast, in bf16 with bf16 weights."""
EVALUATIONS = ("high_precision", "as_trained")
STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
DATA_PARALLEL = "data_parallel"  # as Lightning calls the dimension of ModelParallelStrategy's mesh
Gemms = Literal["32-true", "bf16-mixed", "bf16-true"]
Evaluation = Literal["high_precision", "as_trained"]


class _Converts:
    """What both plugins do; `convert_module`, `forward_context` and so on are Lightning's names."""

    precision: Any

    def __init__(
        self,
        recipe: Recipe | str = "nvfp4",
        precision: Gemms = "bf16-mixed",
        *,
        rules: Mapping[str, Recipe | str | None] | None = None,
        keep: Keep | None = None,
        state: RunState | None = None,
    ) -> None:
        if precision not in GEMMS:
            raise ValueError(f"precision={precision!r}: use one of {', '.join(map(repr, GEMMS))}")
        self.precision = precision
        self.recipe, self.rules, self.keep = resolve(recipe), rules, keep
        self.run_state = state
        self._model: nn.Module | None = None
        self._has_begun = False

    def __repr__(self) -> str:
        """Say it in refusals of Lightning, which name no remedy."""
        return f"{type(self).__name__}: to shard with it, take ModelParallelStrategy (FSDP2)"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the linear layers of a model, or of a part of it, in place, and return it.

        Layers that follow recipes already stay as they are: call it on the layers in `configure_model` before
        `fully_shard` wraps them. What is converted draws from the plugin's RunState, each rank at a place of its own.

        Raises:
            ValueError: parameters are sharded before anything was converted, or nothing is to be converted.
        """
        if not _followers(module):
            sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
            if sharded:
                raise ValueError(
                    f"{sharded[0]} is a DTensor: convert before it is sharded; in configure_model, call "
                    "self.trainer.precision_plugin.convert_module(self.model) before fully_shard(…)"
                )
            report = quantize_(module, self.recipe, rules=self.rules, keep=self.keep, state=self.run_state)
            self.run_state = report.state
        if self.precision == "bf16-true":
            module.to(torch.bfloat16)
        self._model = module
        if dist.is_available() and dist.is_initialized() and not all(state.is_placed for state in self._states()):
            mesh = getattr(module, "_device_mesh", None)
            if isinstance(mesh, DeviceMesh):
                place_ranks_(module, mesh, dims=(DATA_PARALLEL,))
            else:
                place_ranks_(module)
        return module

    def forward_context(self) -> AbstractContextManager:
        if self.precision != "bf16-mixed":
            return nullcontext()
        device = next(self._converted().parameters()).device
        return torch.autocast(device.type, torch.bfloat16)

    def convert_input(self, data: Any) -> Any:
        return _floats_to(data, torch.bfloat16) if self.precision == "bf16-true" else data

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: where the RunStates are, and which layers follow which recipe."""
        if self._model is None:
            return {}
        states = [state.state_dict() for state in self._states()]
        return {"version": 1, "states": states, "recipes": _keys(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was written.

        Raises:
            ValueError: the model follows other recipes than the checkpoint's did.
        """
        other = recipe_difference(_keys(self._converted()), state_dict["recipes"])
        if other:
            raise ValueError(f"{other}: give the plugin the recipe, rules and keep of that run")
        for state, values in zip(self._states(), state_dict["states"], strict=True):
            state.load_state_dict(values)

    def _converted(self) -> nn.Module:
        if self._model is None:
            raise ValueError(
                f"{type(self).__name__} has converted no model: let the Trainer or Fabric set one up first"
            )
        return self._model

    def _states(self) -> list[RunState]:
        found = [layer.run_state for layer in _followers(self._converted()).values()]
        return list({id(state): state for state in found if state is not None}.values())

    def _advance(self) -> None:
        for state in self._states():
            state.advance()

    def _begin(self) -> None:
        """Begin a schedule's step before its first micro-batch."""
        if not self._has_begun:
            for state in self._states():
                state.begin_step(self._converted())
            self._has_begun = True


class NVFP4Precision(_Converts, TrainerPrecision):
    """Let Lightning's Trainer train in a recipe: on one device, with DDPStrategy and ModelParallelStrategy (FSDP2).

    RunStates advance after every backward and begin their schedule's step before its first micro-batch; checkpoints
    hold them, and `ckpt_path=` goes on with the same bits.

    Args:
        recipe: a Recipe, or a preset's name.
        precision: "bf16-mixed", "bf16-true" or "32-true": of everything that is not quantized, as Lightning's own.
        rules, keep, state: as of hb.quantize_.
        evaluation: "high_precision", or "as_trained" to validate, test and predict in the recipes.

    Raises:
        ValueError: an argument is none of these; later, the strategy is another one.
    """

    def __init__(
        self,
        recipe: Recipe | str = "nvfp4",
        precision: Gemms = "bf16-mixed",
        *,
        rules: Mapping[str, Recipe | str | None] | None = None,
        keep: Keep | None = None,
        state: RunState | None = None,
        evaluation: Evaluation = "high_precision",
    ) -> None:
        super().__init__(recipe, precision, rules=rules, keep=keep, state=state)
        if evaluation not in EVALUATIONS:
            raise ValueError(f"evaluation={evaluation!r}: use one of {', '.join(map(repr, EVALUATIONS))}")
        self.evaluation = evaluation

    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer = module._trainer if isinstance(module, LightningModule) else None
        if trainer is not None and not isinstance(trainer.strategy, STRATEGIES):
            raise ValueError(
                f"strategy={type(trainer.strategy).__name__}: {type(self).__name__} is for "
                f"{', '.join(kind.__name__ for kind in STRATEGIES)}; to shard, take ModelParallelStrategy"
            )
        return super().convert_module(module)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        self._begin()
        with super().train_step_context():
            yield

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self._advance()
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **options: Any) -> Any:
        if options:
            raise ValueError(f"optimizer.step({', '.join(options)}): {type(self).__name__} passes a closure alone")
        result = super().optimizer_step(optimizer, model, closure)
        self._has_begun = False
        return result

    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        with self._evaluating(), super().val_step_context():
            yield

    @contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        with self._evaluating(), super().test_step_context():
            yield

    @contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        with self._evaluating(), super().predict_step_context():
            yield

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint:
            raise ValueError(
                f"ckpt_path: the checkpoint holds no {type(self).__name__}, so the position of its random bits is "
                "unknown; load its weights alone, by load_state_dict, to begin a new run"
            )

    def _evaluating(self) -> AbstractContextManager:
        return high_precision(self._converted()) if self.evaluation == "high_precision" else nullcontext()


class FabricNVFP4Precision(_Converts, FabricPrecision):
    """Let Lightning's Fabric train in a recipe: `Fabric(plugins=FabricNVFP4Precision("nvfp4"))`.

    `fabric.setup` converts, `fabric.backward` advances; the loop saves the plugin beside the model (`fabric.save(path,
    {"model": model, "precision": plugin})`), begins a schedule's steps, and evaluates in `hb.high_precision(model)`.

    Args:
        recipe, precision, rules, keep, state: as of NVFP4Precision.
    """

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        self._advance()
        return super().post_backward(tensor, module)


def _followers(module: nn.Module) -> dict[str, Any]:
    """Return the layers that follow a recipe, by name."""
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, FollowsRecipe)}
    return {name: layer for name, layer in found.items() if layer.recipe.specs or layer.run_state is not None}


def _keys(module: nn.Module) -> dict[str, str]:
    """Return name -> key of the recipe that a layer was converted to, whatever a schedule changed since."""
    layers = _followers(module).items()
    return {name: (layer.recipe if layer.recipe_before is None else layer.recipe_before).key for name, layer in layers}


def _floats_to(data: Any, dtype: torch.dtype) -> Any:
    """Return nested data with its floating-point tensors in a dtype."""
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
