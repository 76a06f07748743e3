"""HalfbyteCallback: what a run's RunStates need of the Trainer of transformers, which owns the loop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from halfbyte.convert import high_precision
from halfbyte.distributed import place_ranks_
from halfbyte.integrations.other_recipes import recipe_difference
from halfbyte.nn.linear import describe_recipe
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.spec import parse_recipe
from halfbyte.state import RunState

HIGH_PRECISION, AS_TRAINED = "high_precision", "as_trained"


class HalfbyteCallback(TrainerCallback, ExportableState):
    """Let `transformers.Trainer` train a model that `hb.quantize_` converted: `callbacks=[HalfbyteCallback()]`.

    The model's RunStates advance after every micro-batch and begin their schedule's steps; every process draws bits of
    its own (`hb.distributed.place_ranks_`), unless RunStates were given their ranks before; checkpoints hold them (in
    trainer_state.json, beside the step they belong to), and `resume_from_checkpoint` continues with the same bits. The
    model in eval mode computes in high precision, in the Trainer's evaluation and elsewhere, until `release()`.

    Args:
        evaluation: "high_precision", or "as_trained" to evaluate in the recipes.
        is_strict: whether resuming raises where the checkpoint has no RunState or another recipe; else it warns, and
            goes on at a position that the checkpoint's run cannot have reached.

    Raises:
        ValueError: evaluation is neither.
    """

    def __init__(self, *, evaluation: str = HIGH_PRECISION, is_strict: bool = True) -> None:
        if evaluation not in (HIGH_PRECISION, AS_TRAINED):
            raise ValueError(f"evaluation={evaluation!r}: give {HIGH_PRECISION!r} or {AS_TRAINED!r}")
        self.evaluation, self.is_strict = evaluation, is_strict
        self.saved: dict[str, Any] | None = None
        """What a checkpoint held when the Trainer restores callbacks; nothing reads it."""
        self._model: nn.Module | None = None
        self._states: list[RunState] = []
        self._hooks: list[Any] = []
        self._open: list[AbstractContextManager] = []  # evaluations that are running
        self._aside: AbstractContextManager | None = None  # between the steps of a compiled model

    def state(self) -> dict[str, Any]:
        """Return what the Trainer writes into trainer_state.json."""
        saved = None
        if self._model is not None:
            is_aside = self._aside is not None
            self._end_aside()
            states = [state.state_dict() for state in self._states]
            saved = {"version": 1, "states": states, "recipes": _names_by_recipe(self._model)}
            if is_aside:
                self._put_aside()
        return {
            "args": {"evaluation": self.evaluation, "is_strict": self.is_strict},
            "attributes": {"saved": saved},
        }

    def release(self) -> None:
        """Let the model compute in its recipes in eval mode too."""
        self._end_aside()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if model is not None:
            self._attach(model, args)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._end_aside()
        if args.n_gpu > 1:
            raise ValueError(
                f"args.n_gpu={args.n_gpu}: nn.DataParallel copies the model in every step, and copies do not advance; "
                "start one process per GPU with torchrun, or show the process one GPU"
            )
        layers = _layers(model)
        if not layers:
            raise ValueError(
                f"model={type(model).__name__}: no layer of it follows a recipe, so there is nothing to advance; call "
                "hb.quantize_(model, …) before trainer.train()"
            )
        found = {id(layer.run_state): layer.run_state for layer in layers.values() if layer.run_state is not None}
        self._model, self._states = model, list(found.values())
        self._attach(model, args)
        self._resume(args, state)
        self._place(args)
        if args.torch_compile:
            self._put_aside()  # for eval_on_start

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_aside()
        for run_state in self._states:
            assert self._model is not None, "states were found in a model"
            run_state.begin_step(self._model)

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._advance()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._advance()
        for run_state in self._states:
            run_state.settle_amaxes()  # of a checkpoint the first rank alone writes the states
        if args.torch_compile:
            self._put_aside()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_aside()

    def _place(self, args: Any) -> None:
        """Let every process draw bits of its own, unless somebody has said which rank it is."""
        if args.world_size <= 1 or all(run_state.is_placed for run_state in self._states):
            return
        tensor_ranks = getattr(getattr(args, "parallelism_config", None), "tp_size", 1)
        if tensor_ranks > 1:
            raise ValueError(
                f"args.parallelism_config.tp_size={tensor_ranks}: ranks that hold parts of one tensor draw alike, and "
                "the Trainer does not say which do; call hb.distributed.place_ranks_(model, mesh) before train()"
            )
        assert self._model is not None, "called once the model is known"
        place_ranks_(self._model)

    def _advance(self) -> None:
        for run_state in self._states:
            run_state.advance()

    def _attach(self, model: nn.Module, args: Any) -> None:
        """Hook the model, and models inside it, whose generate() calls them alone; end what another callback set up.

        Compiled code would break at such hooks: there, the recipes are put aside between steps.
        """
        self.release()
        whole = [module for module in model.modules() if module is model or hasattr(module, "generate")]
        for module in whole:
            for hook in list(module._forward_pre_hooks.values()):
                owner = getattr(hook, "__self__", None)
                if isinstance(owner, HalfbyteCallback):
                    owner.release()
            if self.evaluation == HIGH_PRECISION and not args.torch_compile:
                before = module.register_forward_pre_hook(self._before, prepend=True)
                self._hooks += [before, module.register_forward_hook(self._after, always_call=True)]

    def _before(self, module: nn.Module, arguments: Any) -> None:
        if not module.training and not torch.compiler.is_compiling():
            context = high_precision(module)
            context.__enter__()
            self._open.append(context)

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._open and not torch.compiler.is_compiling():
            self._open.pop().__exit__(None, None, None)

    def _put_aside(self) -> None:
        """Compute in high precision until the next step begins: what comes between two steps is evaluation."""
        if self.evaluation == HIGH_PRECISION and self._model is not None and self._aside is None:
            self._aside = high_precision(self._model)
            self._aside.__enter__()

    def _end_aside(self) -> None:
        if self._aside is not None:
            self._aside.__exit__(None, None, None)
            self._aside = None

    def _resume(self, args: Any, state: Any) -> None:
        name, model = type(self).__name__, self._model
        entry = state.stateful_callbacks.get(name)
        if isinstance(entry, list):
            raise ValueError(f"callbacks has {len(entry)} of {name}: every one would advance; give one")
        assert model is not None, "called once the model is known"
        if state.global_step == 0:
            return
        saved = (entry or {}).get("attributes", {}).get("saved")
        # A Trainer that resumes saves into what it found, and looks for an entry of every callback.
        state.stateful_callbacks.setdefault(name, self.state())
        if not _is_of(saved, len(self._states)):
            self._go_on_from(state.global_step, args.gradient_accumulation_steps)
            return
        now, then = _recipes_by_name(_names_by_recipe(model)), _recipes_by_name(saved["recipes"])
        other = recipe_difference(now, then, _called)
        if other:
            self._complain(
                f"{other}: convert the model with the recipe, rules and keep of that run, change recipes by "
                "hb.Schedule, or say HalfbyteCallback(is_strict=False) to go on with those of the model"
            )
        for run_state, values in zip(self._states, saved["states"], strict=True):
            run_state.load_state_dict(values)

    def _go_on_from(self, step: int, micro_batches: int) -> None:
        """Go on from a checkpoint that says no position."""
        position = step * micro_batches
        self._complain(
            f"the checkpoint of step {step} holds no RunState for this model, as one that was written without "
            "HalfbyteCallback: the position of its random bits is unknown. HalfbyteCallback(is_strict=False) goes on "
            f"at position {position}"
        )
        for run_state in self._states:
            later = {"position": max(position, run_state.next_position), "step": max(step, run_state.step)}
            run_state.load_state_dict({**run_state.state_dict(), **later})

    def _complain(self, message: str) -> None:
        if self.is_strict:
            raise ValueError(f"resume_from_checkpoint: {message}")
        warnings.warn(f"resume_from_checkpoint: {message}", stacklevel=2)


def _is_of(saved: Any, count: int) -> bool:
    """Whether these are the places of `count` RunStates, as `state()` writes them."""
    if not isinstance(saved, Mapping) or saved.get("version") != 1:
        return False
    return isinstance(saved.get("recipes"), Mapping) and len(saved.get("states") or ()) == count


def _called(key: str | None) -> str:
    """Return how people call the recipe of a key, which another version may have written."""
    if key is None:
        return "no layer of that name"
    try:
        return describe_recipe(parse_recipe(key))
    except ValueError:
        return key


def _layers(model: nn.Module) -> dict[str, FollowsRecipe]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FollowsRecipe)}


def _names_by_recipe(model: nn.Module) -> dict[str, list[str]]:
    """Return {key of a recipe: names of layers} as the model was converted, whatever a schedule changed since."""
    names: dict[str, list[str]] = {}
    for name, layer in _layers(model).items():
        recipe = layer.recipe if layer.recipe_before is None else layer.recipe_before
        names.setdefault(recipe.key, []).append(name)
    return names


def _recipes_by_name(names: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: key for key, layers in names.items() for name in layers}
