"""RunState: everything a training run carries beside model and optimizer, in one object with one state_dict."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.position import FORGOTTEN, FORGOTTEN_PRIVATE, ModelHooks, OptimizerHook, Watch, warn_user
from halfbyte.rng import SEED_LIMIT, StreamPhilox, as_signed64
from halfbyte.schedule import Schedule
from halfbyte.spec import Recipe

POSITION_SHIFT = 32  # offset = position << 32 | stream
STREAM_LIMIT = 1 << POSITION_SHIFT
POSITION_LIMIT = 1 << (63 - POSITION_SHIFT)
_LIMITS = {"seed": SEED_LIMIT, "position": POSITION_LIMIT, "streams": STREAM_LIMIT + 1}


class RunState:
    """The random position of a run, and where it is in its precision schedule.

    Draws are stateless, keyed by (seed, position, stream).

    `position` counts micro-batches and lives in a device tensor, so that advancing neither recompiles nor breaks a CUDA
    graph. `stream` is a static number that `quantize_` gives to every (layer, operand). The same position draws the
    same bits: recomputation under activation checkpointing repeats them, and the next `advance()` changes them all.

    Args:
        seed: 0 <= seed < 2**64. Data-parallel ranks use different seeds.
        schedule: the changes of recipe that `begin_step` makes, None for none.
    """

    _private = False  # what objects pickled before these attributes existed take
    _late_streams = 0
    _has_named_others = False
    _watch: Watch | None = None
    _has_said_forgotten = False
    _owed = False  # a backward came by a followed model since the position moved
    _moved = False  # since the last step of a followed optimizer
    _ahead = False  # such a step moved it last: an advance() that comes now would say the same

    def __init__(self, seed: int = 0, schedule: Schedule | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r}: give an int")
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"seed={seed}: give 0 <= seed < 2**64")
        self.seed = seed
        with torch.inference_mode(False):  # `advance` and autograd refuse inference tensors
            self._base = torch.tensor([as_signed64(seed), 0], dtype=torch.int64, device="cpu")
        self._streams = 0
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule={schedule!r}: give hb.Schedule([(step or share, recipe), …], steps=…)")
        self.schedule = schedule
        self.step = 0
        """Optimizer steps that `begin_step` has begun."""
        self.advances = 0
        """How often `advance` ran in this process: a host-side count that no draw depends on."""

    @classmethod
    def private(cls) -> RunState:
        """Return the RunState of layers that were built without one, seeded from torch's default generator."""
        state = cls(int(torch.randint(1 << 62, (), device="cpu")))
        state._private = True
        return state

    @property
    def is_private(self) -> bool:
        """Whether layers made it for themselves and nobody chose it since: then they move onto the run's RunState."""
        return self._private and self.schedule is None

    def share(self) -> RunState:
        """Return self, from now on the RunState that somebody chose."""
        self._private = False
        return self

    @property
    def base(self) -> Tensor:
        """int64 [2] = (seed, position << 32), updated in place by `advance`."""
        return self._base

    @property
    def position(self) -> int:
        """Micro-batches so far; reads the device."""
        return int(self._base[1]) >> POSITION_SHIFT

    @property
    def next_position(self) -> int:
        """The position of the next micro-batch: one on where a followed model has yet to catch up."""
        return self.position + self._owed

    def to(self, device: torch.device | str) -> RunState:
        """Move the position to `device` and return self."""
        with torch.inference_mode(False):
            self._base = self._base.to(device)
        return self

    def advance(self) -> None:
        """Go on to the next micro-batch; call it once per micro-batch, after its backward."""
        self._owed = False
        if self._ahead:
            self._ahead = False
        else:
            self._moved = True
            self._move()

    def _move(self) -> None:
        self._base[1].add_(1 << POSITION_SHIFT)
        self.advances += 1

    def follow(self, leader: nn.Module | torch.optim.Optimizer) -> ModelHooks | OptimizerHook:
        """Advance without a line in the loop, from now on: `state.follow(model)`, once, after the conversion.

        Following a model, the position moves at its first forward with gradients enabled after a backward: once per
        micro-batch, however many forwards that has; evaluation and recomputation leave it where it is. Following an
        optimizer, it moves after every step, so that the micro-batches of one step draw the same bits: for a model that
        is compiled as a whole, whose hooks do not run. Both may be followed, and `advance()` be called beside them:
        nothing moves twice.

        Args:
            leader: the module that the loop calls (also a wrapper, such as what torch.compile returned), or an
                optimizer.

        Returns:
            A handle with `remove()`.

        Raises:
            TypeError: it is neither.
            ValueError: no layer of the module draws from this RunState, or its `compile()` was called.
        """
        if isinstance(leader, torch.optim.Optimizer):
            return OptimizerHook(self, leader)
        if not isinstance(leader, nn.Module):
            raise TypeError(f"leader={type(leader).__name__}: give the model, or a torch.optim.Optimizer")
        if not any(getattr(module, "run_state", None) is self for module in leader.modules()):
            raise ValueError(
                f"leader={type(leader).__name__}: no layer of it draws from this RunState; follow the model that "
                "hb.quantize_ converted with it, after the conversion"
            )
        if getattr(leader, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"leader={type(leader).__name__}: compile() was called on it, and compiled code runs no such hooks; "
                "follow the optimizer, or what torch.compile(model) returns"
            )
        return ModelHooks(self, leader)

    def owe(self) -> None:
        """Take note that a backward came by: the next forward is another micro-batch's."""
        self._owed = True

    def catch_up(self, always: bool = False) -> None:
        """Begin the micro-batch of a forward of a followed model."""
        if self._owed or always:
            self._owed = self._ahead = False
            self._moved = True
            self._move()

    def after_step(self) -> None:
        """Go on after a step of a followed optimizer, unless somebody has or will."""
        if not self._owed and not self._moved:
            self._ahead = True
            self._move()
        self._moved = False

    def watch(self, layer: nn.Module) -> None:
        """Take note of a layer that draws from here: its optimizer's second step shows whether the position moves."""
        self._watch = self._watch or Watch(self)
        self._watch.add(layer)

    def say_forgotten(self, what: str) -> None:
        """Warn, once, that random bits repeat."""
        if not self._has_said_forgotten:
            self._has_said_forgotten = True
            warn_user(f"{what}: {FORGOTTEN_PRIVATE if self.is_private else FORGOTTEN}")

    def begin_step(self, model: nn.Module) -> Recipe | None:
        """Give the layers of `model` that draw from this RunState the recipe of the optimizer step that now begins.

        Call it once before each optimizer step's first micro-batch. Before the first change, also where a run went back
        to an earlier checkpoint, layers have the recipes they were converted with.

        Args:
            model: converted by `hb.quantize_` with this RunState. Layers kept in high precision stay there.

        Returns:
            The recipe if a layer changed to it, else None; if layers changed to several, that of the first.

        Raises:
            ValueError: there is a schedule and no layer of the model that could follow it, or it is called within
                `hb.high_precision`, which would undo the change.

        Warns:
            UserWarning: there is a schedule, and layers that follow a recipe, but not this RunState; said once.
        """
        step = self.step
        if self.schedule is None:
            self.step += 1
            return None
        named: list[tuple[str, Any]] = list(model.named_modules())
        candidates = [(name, m) for name, m in named if hasattr(m, "recipe_before") and not m.kept]
        layers = [layer for _, layer in candidates if layer.run_state is self]
        if not layers:
            raise ValueError(
                f"model={type(model).__name__}: no layer follows this RunState, so its schedule would change nothing; "
                "pass it as state= to hb.quantize_ or to the layers"
            )
        if any(layer.times_aside for layer in layers):
            raise ValueError(
                "model is in hb.high_precision, which puts the recipes back that it found and would undo the change of "
                "the schedule; call begin_step before or after the context"
            )
        self._name_others([(name, layer) for name, layer in candidates if layer.run_state is not self])
        self.step += 1
        recipe, changed = self.schedule.at(step), None
        for layer in layers:
            own = layer.recipe if layer.recipe_before is None else layer.recipe_before
            layer.recipe_before = None if recipe is None else own
            wanted = own if recipe is None else recipe
            if layer.recipe != wanted:
                layer.recipe = wanted
                changed = changed or wanted
        return changed

    def _name_others(self, layers: list[tuple[str, Any]]) -> None:
        """Warn once of layers that follow a recipe and no schedule, in a model of which others follow this one's."""
        if self._has_named_others:
            return
        found = [
            name or "the model"
            for name, layer in layers
            if layer.recipe.specs and (layer.run_state is None or layer.run_state.schedule is None)
        ]
        if found:
            self._has_named_others = True
            warnings.warn(
                f"{len(found)} layers follow a recipe but not this RunState and its schedule ({', '.join(found[:4])}"
                f"{', …' if len(found) > 4 else ''}): pass state= where they are built; hb.set_recipe_(…, state=state) "
                "and hb.quantize_(…, state=state) move those that were built without one",
                stacklevel=3,
            )

    def reserve_streams(self, count: int, *, late: bool = False) -> int:
        """Return the first of `count` stream numbers that nobody else gets.

        Args:
            count: how many.
            late: they are for a layer that was built without a RunState; a checkpoint may lack them, since such layers
                have not always drawn from that of the run.

        Raises:
            ValueError: the run has used up its 2**32 streams.
        """
        first = self._streams
        if first + count > STREAM_LIMIT:
            raise ValueError(f"count={count}: {first} of 2**32 streams are taken; use a second RunState, another seed")
        self._streams = first + count
        self._late_streams += count if late else 0
        return first

    def philox(self, stream: int) -> StreamPhilox:
        """Return the place of `stream` at the current position."""
        return StreamPhilox(self._base, stream)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: plain values; of the schedule only where there is one."""
        state: dict[str, Any] = {"version": 1, "seed": self.seed, "position": self.next_position}
        state["streams"] = self._streams
        if self.step:
            state["step"] = self.step
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that wrote `state`, in place: modules that hold this RunState follow.

        A schedule that this RunState was built with stays; otherwise that of the checkpoint is taken.

        Raises:
            ValueError: `state` is not a RunState's, or belongs to a model with other quantized layers.
        """
        remedy = "pass what RunState.state_dict() returned"
        if not isinstance(state, dict) or not {"version", *_LIMITS} <= set(state) or state["version"] != 1:
            raise ValueError(f"state={state!r}: not a RunState; {remedy}")
        for name, limit in _LIMITS.items():
            if type(state[name]) is not int or not 0 <= state[name] < limit:
                raise ValueError(f"state[{name!r}]={state[name]!r}: not an int with 0 <= {name} < {limit}; {remedy}")
        if self._streams and not self._streams - self._late_streams <= state["streams"] <= self._streams:
            raise ValueError(
                f"state['streams']={state['streams']}: this model uses {self._streams} streams, the checkpoint's run "
                "another number; convert the model with the same recipe and rules before loading"
            )
        step, schedule = state.get("step", 0), state.get("schedule")
        if type(step) is not int or step < 0:
            raise ValueError(f"state['step']={step!r}: not an int with 0 <= step; {remedy}")
        if self.schedule is None and schedule is not None:
            self.schedule = Schedule.from_state_dict(schedule)
        self.seed, self.step = state["seed"], step
        self._owed = self._moved = self._ahead = False
        self._streams = max(self._streams, state["streams"])
        values = [as_signed64(self.seed), state["position"] << POSITION_SHIFT]
        self._base.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))

    def __repr__(self) -> str:
        return f"RunState(seed={self.seed}, position={self.position}, streams={self._streams})"
