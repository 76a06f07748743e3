"""RunState: everything a training run carries beside model and optimizer, in one object with one state_dict."""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.amaxes import DelayedAmaxes, LayerAmaxes
from halfbyte.delayed import Delayed
from halfbyte.position import (
    FORGOTTEN,
    FORGOTTEN_PRIVATE,
    Interleaved,
    ModelHooks,
    OptimizerHook,
    Watch,
    refuse_turns,
    warn_of_others,
    warn_user,
)
from halfbyte.rng import SEED_LIMIT, StreamPhilox, as_signed64, rank_seed
from halfbyte.schedule import Schedule
from halfbyte.spec import Recipe

POSITION_SHIFT = 32  # offset = position << 32 | stream
STREAM_LIMIT = 1 << POSITION_SHIFT
POSITION_LIMIT = 1 << (63 - POSITION_SHIFT)
FORWARDS_UNBEGUN = 4096
"""Training forwards of layers before the first `begin_step` after which the caller has surely forgotten it."""
_LIMITS = {"seed": SEED_LIMIT, "position": POSITION_LIMIT, "streams": STREAM_LIMIT + 1}
_NEEDED, _MAY_BE = {"version", *_LIMITS}, {"step", "schedule", "amaxes"}


class RunState:
    """The random position of a run, and where it is in its precision schedule.

    Draws are stateless, keyed by (seed, rank, position, stream).

    `position` counts micro-batches and lives in a device tensor, so that advancing neither recompiles nor breaks a CUDA
    graph. `stream` is a static number that `quantize_` gives to every (layer, operand). The same position draws the
    same bits: recomputation under activation checkpointing repeats them, and the next `advance()` changes them all.
    Data-parallel ranks have one seed and different ranks: their rounding bits differ, fresh Hadamard signs do not.

    Args:
        seed: 0 <= seed < 2**64, the same on all ranks.
        schedule: the changes of recipe that `begin_step` makes, None for none.
        rank: 0 <= rank < 2**16, of this process among those that see other data; tensor-parallel ranks have the same.
            None is 0 until `set_rank`, a ZeroOptimizer or `hb.distributed.place_ranks_` says otherwise.
    """

    _private = False  # what objects pickled before these attributes existed take
    _rank: int | None = None
    _is_drawn_from = False
    _has_asked_for_rank = False
    _late_streams = 0
    _has_named_others = False
    _watch: Watch | None = None
    _has_said_forgotten = False
    _owed = False  # a backward came by a followed model since the position moved
    _moved = False  # since the last step of a followed optimizer
    _ahead = False  # such a step moved it last: an advance() that comes now would say the same
    _turns: Interleaved | None = None  # that says where each of several micro-batches draws, until they end
    _amaxes: DelayedAmaxes | None = None
    _unbegun = 0  # training forwards with delayed amaxes before the first step
    _made = ""  # alike in what was copied or unpickled from one

    def __init__(self, seed: int = 0, schedule: Schedule | None = None, rank: int | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r}: give an int")
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"seed={seed}: give 0 <= seed < 2**64")
        if rank is not None:
            rank_seed(seed, rank)  # refuses what is no rank
        self.seed, self._rank = seed, rank
        self._made = secrets.token_hex(8)
        with torch.inference_mode(False):  # `advance` and autograd refuse inference tensors
            self._hold(self._places_at(0))
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

    def is_copy_of(self, other: RunState) -> bool:
        """Whether it is another object, of which nobody but copy.deepcopy or pickle made one."""
        return self is not other and self._made == other._made != ""

    @property
    def rank(self) -> int:
        """That of this process among the data-parallel ranks; 0 if nobody said."""
        return self._rank or 0

    @property
    def is_placed(self) -> bool:
        """Whether somebody said which rank this is: `rank=`, `set_rank`, a ZeroOptimizer or `place_ranks_`."""
        return self._rank is not None

    def set_rank(self, rank: int) -> RunState:
        """Draw the rounding bits of a data-parallel rank from now on, in place, and return self.

        Args:
            rank: 0 <= rank < 2**16; 0 draws what a run of one process draws.

        Raises:
            TypeError, ValueError: it is another number, or none, or interleaved micro-batches have not ended.
        """
        refuse_turns(self._turns, "set_rank")
        seeds = rank_seed(self.seed, rank), self.seed
        for base, seed in zip((self._base, self._sign_base), seeds, strict=True):
            base[0].fill_(as_signed64(seed))
        self._rank = rank
        return self

    @property
    def base(self) -> Tensor:
        """int64 [2] = (seed + rank << 48, position << 32) of rounding bits, updated in place by `advance`."""
        return self._base

    def _places_at(self, position: int) -> Tensor:
        """Return int64 [2, 2], on the CPU: where rounding bits draw at a position, and where fresh signs do."""
        seeds = rank_seed(self.seed, self.rank), self.seed
        values = [[as_signed64(seed), position << POSITION_SHIFT] for seed in seeds]
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    def _hold(self, places: Tensor) -> None:
        self._places = places
        self._base, self._sign_base = places[0], places[1]  # views: one addition advances both

    @property
    def position(self) -> int:
        """Micro-batches so far; reads the device."""
        return int(self._base[1]) >> POSITION_SHIFT

    @property
    def next_position(self) -> int:
        """The position of the next micro-batch: one on where a followed model has yet to catch up."""
        return self.position + self._owed

    def to(self, device: torch.device | str) -> RunState:
        """Move the position to `device` and return self.

        Raises:
            ValueError: device is "meta", which would forget it.
        """
        if torch.device(device).type == "meta":
            raise ValueError("device=meta: there the position of the run would be lost; leave the RunState where it is")
        with torch.inference_mode(False):
            self._hold(self._places.to(device))
        return self

    def advance(self) -> None:
        """Go on to the next micro-batch; call it once per micro-batch, after its backward.

        Raises:
            ValueError: interleaved micro-batches have not ended, or what `begin_step` hands on has not begun.
        """
        refuse_turns(self._turns, "advance")
        self._owed = False
        if self._ahead:
            self._ahead = False
        else:
            self._moved = True
            self._move()

    def _refuse_unbegun(self) -> None:
        for late in () if self.step else (self._amaxes, self.schedule):
            if late is not None:
                late.refuse_unbegun()

    def _move(self) -> None:
        self._refuse_unbegun()
        self._places[:, 1].add_(1 << POSITION_SHIFT)
        self.advances += 1
        self.ask_for_rank()

    @property
    def amaxes(self) -> DelayedAmaxes:
        """Those of earlier steps, for layers whose recipe says so; `begin_step` hands them on."""
        self._amaxes = self._amaxes or DelayedAmaxes()
        return self._amaxes

    def settle_amaxes(self) -> None:
        """Ask all ranks, at a step's end and together, for what they have seen in it, so that one may write it down."""
        if self._amaxes is not None:
            self._amaxes.settle()

    def amaxes_of(self, stream: int, how: Delayed, experts: int | None = None) -> LayerAmaxes:
        """Return those of the layer whose first stream is `stream`, or of its experts."""
        return self.amaxes.of(stream, how, self._places.device, experts)

    def watch_steps(self) -> None:
        """Take note of a training forward with delayed amaxes; without any `begin_step` many of them are refused."""
        if not torch.compiler.is_compiling() and not self.step:  # compiled code that read the step would be of one step
            self._unbegun += 1
            if self._unbegun > FORWARDS_UNBEGUN:
                self.amaxes.refuse_unbegun()

    def note_draws(self) -> None:
        """Take note that a layer with a recipe that draws random bits follows this RunState."""
        self._is_drawn_from = True

    def ask_for_rank(self) -> None:
        """Warn once if layers draw, this process is one of several and nobody said which rank it is."""
        if self._rank is not None or self._has_asked_for_rank or not self._is_drawn_from:
            return
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._has_asked_for_rank = True
        warn_user(
            f"torch.distributed runs {dist.get_world_size()} processes and nobody gave this RunState its rank: all of "
            "them draw the same random bits, whose errors do not average out. Call hb.distributed.place_ranks_(model), "
            "with the group or mesh of the data-parallel ranks, or build hb.RunState(seed, rank=…); rank=0 where all "
            "processes are to draw alike"
        )

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

    def interleave(self, count: int) -> Interleaved:
        """Return the next `count` micro-batches, for a loop that runs forwards of some before backwards of others.

        Each draws what it would if all were run one after the other. A pipeline calls `turn(index)` before the forward
        and before the backward of each, in which it may be recomputed, and `end()` behind the last one, also where one
        fails.

        Raises:
            TypeError, ValueError: count is no int above 0, or earlier ones have not ended.
        """
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count={count!r}: give an int, that of the micro-batches")
        if count < 1:
            raise ValueError(f"count={count}: give the number of micro-batches, an int above 0")
        self._refuse_unbegun()
        refuse_turns(self._turns, "interleave")
        self.ask_for_rank()
        first, self._owed, self._ahead, self._moved = int(self._owed), False, False, True
        with torch.inference_mode(False):
            places = [self._places.clone() for _ in range(count)]
            for index, place in enumerate(places):
                place[:, 1].add_((first + index) << POSITION_SHIFT)
        self._turns = Interleaved(self, places)
        return self._turns

    def is_taking(self, turns: Interleaved) -> bool:
        """Whether these are the micro-batches that are interleaved now."""
        return self._turns is turns

    def stand_at(self, places: Tensor) -> None:
        """Draw at places, int64 [2, 2]: of rounding bits and of fresh signs."""
        with torch.inference_mode(False):
            self._hold(places)
        self.advances += 1

    def end_turns(self) -> None:
        """Let backwards that come by count again, as those of interleaved micro-batches have not."""
        self._turns = None
        self.owe()

    def pause_amaxes(self) -> list[LayerAmaxes]:
        """Let no layer note amaxes, and return those that did."""
        return [] if self._amaxes is None else self._amaxes.pause()

    def owe(self) -> None:
        """Take note that a backward came by: the next forward is another micro-batch's."""
        self._owed = self._turns is None

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
                `hb.high_precision`, which would undo the change, or before interleaved micro-batches have ended.

        Warns:
            UserWarning: there is a schedule, and layers that follow a recipe, but not this RunState; said once.
        """
        refuse_turns(self._turns, "begin_step")
        changed = self._follow_schedule(model)
        if self._amaxes is not None:
            self._amaxes.begin(self.step)
        self.step += 1
        return changed

    def _follow_schedule(self, model: nn.Module) -> Recipe | None:
        """Give layers the recipe of the step that begins; return it, None where nothing changes."""
        if self.schedule is None:
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
        recipe, changed = self.schedule.at(self.step), None
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
        if found := [name or "the model" for name, layer in layers if layer.recipe.specs and self._should_lead(layer)]:
            self._has_named_others = True
            warn_of_others(found)

    def _should_lead(self, layer: Any) -> bool:  # and does not: another with a schedule leads on purpose, but a copy
        return (other := layer.run_state) is None or other.schedule is None or other.is_copy_of(self)

    def reserve_streams(self, count: int, *, late: bool = False) -> int:
        """Return the first of `count` stream numbers that nobody else gets.

        Args:
            count: how many.
            late: of a layer built without a RunState; checkpoints of before such layers drew from the run's lack them.

        Raises:
            ValueError, TypeError: the run has used up its 2**32 streams, or `count` is no number of streams.
        """
        if not (is_int := type(count) is int) or count < 0:
            raise (ValueError if is_int else TypeError)(f"count={count!r}: give an int, 0 or more")
        first = self._streams
        if first + count > STREAM_LIMIT:
            raise ValueError(f"count={count}: {first} of 2**32 streams are taken; use a second RunState, another seed")
        self._streams = first + count
        self._late_streams += count if late else 0
        return first

    def philox(self, stream: int) -> StreamPhilox:
        """Return the place of `stream` at the current position."""
        return StreamPhilox(self._base, stream, None, self._sign_base)

    def philox_shifted(self, stream: int, shift: Tensor) -> StreamPhilox:
        """Return the place of `stream` at the current position, `shift`, int64 [2], further."""
        return StreamPhilox(self._base, stream, shift, self._sign_base)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, on all ranks the same: plain values; a schedule only where there is one.

        With a recipe whose amaxes are delayed all ranks call it together, unless they have called `settle_amaxes`.
        """
        state: dict[str, Any] = {"version": 1, "seed": self.seed, "position": self.next_position}
        state["streams"] = self._streams
        if self.step:
            state["step"] = self.step
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        if self._amaxes is not None and (amaxes := self._amaxes.state_dict()):
            state["amaxes"] = amaxes
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that wrote `state`, in place: modules that hold this RunState follow.

        A schedule that this RunState was built with stays; otherwise that of the checkpoint is taken. The rank stays.
        Interleaved micro-batches end here.

        Raises:
            ValueError: `state` is not a RunState's, or belongs to a model with other quantized layers.
        """
        remedy = "pass what RunState.state_dict() returned"
        if not isinstance(state, dict) or not _NEEDED <= set(state) <= _NEEDED | _MAY_BE or state["version"] != 1:
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
        is_own = self.schedule is not None or schedule is None
        followed = self.schedule if is_own else Schedule.from_state_dict(schedule)
        if self._amaxes is not None or state.get("amaxes"):
            self.amaxes.load_state_dict(state.get("amaxes", {}), step, is_scheduled=followed is not None)
        self.schedule = followed
        self.seed, self.step = state["seed"], step
        self._owed = self._moved = self._ahead = False
        self._turns = None
        self._streams = max(self._streams, state["streams"])
        self._places.copy_(self._places_at(state["position"]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_base", "_sign_base", "_turns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with torch.inference_mode(False):
            # What was pickled before there were ranks has the place of rank 0 alone.
            self._hold(state["_places"] if "_places" in state else torch.stack([state["_base"]] * 2))

    def __repr__(self) -> str:
        return f"RunState(seed={self.seed}, rank={self.rank}, position={self.position}, streams={self._streams})"
