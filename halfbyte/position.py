"""What moves the position of a RunState without a line in the loop, and who notices that nothing moves it.

A position serves one micro-batch: forward, backward, whatever is recomputed in it. The next one begins with the first
forward after a backward, which hooks on a model see; an optimizer's step ends at least one.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from halfbyte.state import RunState

WATCHED_STEPS = 16
"""Steps of optimizers after which nobody waits any longer for one that holds a layer's weight: it steps masters."""

_WARNED = "_halfbyte_warned"
_INSTALLED = ("site-packages", "dist-packages")
_OWN = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))
_STANDARD = str(Path(sysconfig.__file__).parent) + os.sep

FORGOTTEN = (
    "call advance() of their RunState (report.state of hb.quantize_) once per micro-batch, or let it follow the model "
    "by itself, report.state.follow(model), or, compiled as a whole, report.state.follow(optimizer); transformers' "
    "Trainer takes callbacks=[HalfbyteCallback()] from halfbyte.integrations.transformers. A layer that copy.deepcopy "
    "made draws from a copy of it: hb.quantize_(model, recipe, state=state) gives it the model's"
)
FORGOTTEN_PRIVATE = (
    "these layers were built without state= and draw from a RunState of their own, which no other's advance() moves; "
    "pass the run's RunState as state= where they are built, or hb.set_recipe_(model, recipe, state=state), and call "
    "state.advance() once per micro-batch, or state.follow(model) once"
)


def warn_user(message: str) -> None:
    """Warn at the innermost line that is no library's; where libraries are all there is, at theirs that called ours."""
    frames = list(_frames())
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_OWN)]
    frame = next((frame for frame in own if _is_users(frame.f_code.co_filename)), (own or frames)[0])
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    where = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, *where, frame.f_globals.get("__name__"), registry)


def warn_of_others(names: Sequence[str]) -> None:
    """Warn of layers that follow a recipe but no schedule, in a model of which others follow one."""
    warn_user(
        f"{len(names)} layers follow a recipe but not this RunState and its schedule ({', '.join(names[:4])}"
        f"{', …' if len(names) > 4 else ''}): pass state= where they are built; hb.set_recipe_(…, state=state) "
        "and hb.quantize_(…, state=state) move those that were built without one or copied from this one's"
    )


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(filename: str) -> bool:
    is_installed = any(part in _INSTALLED for part in Path(filename).parts)
    return not is_installed and not filename.startswith((_STANDARD, "<frozen", "<eval_with_key"))


def in_backward() -> bool:
    """Whether this runs within a backward pass, as what activation checkpointing recomputes does."""
    return torch._C._current_graph_task_id() != -1


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # builds for CPUs lack the question


class ModelHooks:
    """Move a RunState at the first forward of `model` after a backward has gone through what it returned."""

    def __init__(self, state: RunState, model: nn.Module) -> None:
        self._state = state
        self._handles = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Leave the position to others again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward():
            # A graph that is captured here replays this too: it must not begin all its replays at one position.
            self._state.catch_up(always=is_capturing())

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
            return
        tensors = list(_tensors(output))
        if not tensors:  # an object that nobody can look into: perhaps a backward will follow
            self._state.owe()
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self._state.owe()


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        parts = [leaf] if isinstance(leaf, Tensor) else pytree.tree_leaves(getattr(leaf, "__dict__", None))
        yield from (part for part in parts if isinstance(part, Tensor))


class OptimizerHook:
    """Move a RunState after every step of `optimizer`."""

    def __init__(self, state: RunState, optimizer: Optimizer) -> None:
        self._state = state
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Leave the position to others again."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self._state.after_step()


class Interleaved:
    """Micro-batches whose forwards and backwards take turns, as in a pipeline: each has a position of its own.

    Before the first turn layers note no amaxes for later steps: pipelines learn shapes from tensors that nobody filled.

    Args:
        state: that stands where the micro-batch whose turn it is draws.
        places: int64 [2, 2] of each, in memory of its own: compiled code may keep that of a forward for its backward.
    """

    def __init__(self, state: RunState, places: list[Tensor]) -> None:
        self._state, self._places = state, places
        self._waiting = state.pause_amaxes()

    def turn(self, index: int) -> None:
        """Let the forward or backward of a micro-batch run, or a part of either.

        Raises:
            TypeError: index is no int.
            ValueError: there is no such micro-batch, or they have ended.
        """
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"index={index!r}: give an int, that of a micro-batch")
        if not self._state.is_taking(self):
            raise ValueError(f"index={index}: these micro-batches have ended; interleave the next ones")
        if not 0 <= index < len(self._places):
            count = len(self._places)
            raise ValueError(f"index={index}: give 0 <= index < {count}, or call interleave with more than {count}")
        self._resume()
        self._state.stand_at(self._places[index])

    def end(self) -> None:
        """Let the position behind the last one be the next that anybody draws at; once they have ended, do nothing."""
        if not self._state.is_taking(self):
            return
        self._resume()
        self._state.stand_at(self._places[-1])
        self._state.end_turns()

    def _resume(self) -> None:
        while self._waiting:
            self._waiting.pop().measures = True


def refuse_turns(turns: Interleaved | None, what: str) -> None:
    """Raise ValueError for what would change where interleaved micro-batches draw that have not ended."""
    if turns is not None:
        raise ValueError(
            f"{what}() before interleaved micro-batches have ended: call end() of what interleave returned behind the "
            "last one, in a `finally` where one may fail"
        )


class ConvertedAt(NamedTuple):
    """Where a model holds a layer that was converted: the module above, the name there, the name in the model."""

    parent: weakref.ref[nn.Module]
    own_name: str
    name: str

    def is_lost(self) -> bool:
        """Whether somebody put a new torch.nn.Linear there: wrappers and layers of other classes know what they do."""
        parent = self.parent()
        return parent is not None and type(parent._modules.get(self.own_name)) is nn.Linear


class Watch:
    """Looks once, after the second step of the optimizer of a RunState's layers, whether the position moved.

    After steps until then it also looks whether the layers are still where they were converted.
    """

    def __init__(self, state: RunState) -> None:
        self._state = weakref.ref(state)
        self._layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._left = WATCHED_STEPS
        self._places: list[list[ConvertedAt]] = []
        _STEPS.tell(self)

    def add(self, layer: Any) -> None:
        """Take note of a layer that draws from the RunState, and of its places, which outlive it here."""
        self._layers.add(layer)
        self._places.append(layer.places)

    def after_step(self, optimizer: Optimizer) -> bool:
        """Look, and return whether that is all."""
        state = self._state()
        if state is None:
            return True
        self._left -= 1
        self._look_for_lost()
        layers = self._trained_by(optimizer, state)
        if layers and type(state.base) is Tensor and not state.base.is_meta:
            self._compare(optimizer, state, len(layers))
        return self._left <= 0

    def _look_for_lost(self) -> None:
        lost = list(dict.fromkeys(place.name for places in self._places for place in places if place.is_lost()))
        if lost:
            self._places.clear()
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            warn_user(
                f"{lost[0]}{more} was converted, and a torch.nn.Linear was put in its place since, which follows no "
                "recipe: transformers' resize_token_embeddings builds a new head. Resize before converting, or call "
                "hb.quantize_ again"
            )

    def _compare(self, optimizer: Optimizer, state: RunState, count: int) -> None:
        position = state.next_position
        if optimizer not in self._seen:
            self._seen[optimizer] = position
            return
        self._left = 0
        # Layers that were built one by one have a RunState each: one of them speaks for all that this optimizer trains.
        if position == self._seen[optimizer] and not hasattr(optimizer, _WARNED):
            setattr(optimizer, _WARNED, True)
            state.say_forgotten(f"two optimizer steps drew the same random bits in {count} layers")

    def _trained_by(self, optimizer: Optimizer, state: RunState) -> list[Any]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [layer for layer in self._layers if _draws_from(layer, state) and _holds(layer, held)]

    def __reduce__(self) -> tuple:
        return type(None), ()  # of copies, nobody looks after


class _Steps:
    """Hears of the steps of optimizers that nobody handed over, by torch's one hook for all of them.

    The hook stays: taken out within a step it breaks that step, and objects may die at any time.
    """

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._hook: Any = None

    def tell(self, watch: Watch) -> None:
        self._watches.add(watch)
        self._hook = self._hook or register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if torch.compiler.is_compiling() or is_capturing():
            return
        for watch in list(self._watches):
            if watch.after_step(optimizer):
                self._watches.discard(watch)


_STEPS = _Steps()  # one for the process, as torch's hook is; it changes nothing that is computed


def _draws_from(layer: Any, state: RunState) -> bool:
    return layer.run_state is state and layer.training and layer.recipe.needs_rng


def _holds(layer: Any, parameters: Iterable[int]) -> bool:
    return any(id(parameter) in parameters for parameter in layer._parameters.values())
