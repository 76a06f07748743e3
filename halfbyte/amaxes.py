"""The amaxes of earlier steps that layers with `Recipe(amax=...)` quantize with, as a RunState keeps them.

A layer has four: of x along its rows (fprop) and its columns (wgrad), of the gradient dy of its output along its rows
(dgrad) and its columns (wgrad); experts have four each. A step that measures notes the greatest it meets; when the next
one begins these are held, for the steps until others are (docs/numerics.md section 3).
"""

from __future__ import annotations

import math
import warnings
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.delayed import Delayed
from halfbyte.formats import FLT_MAX

OPERANDS = ("x.row", "x.col", "dy.row", "dy.col")
"""Whose amaxes a layer has, in this order."""

X, DY = 0, 2
"""Where those of x begin, and those of dy."""

_COUNT = len(OPERANDS)
_FIELDS = ("held", "is_held", "seen", "exceeded")


class LayerAmaxes:
    """The amaxes of one layer, or of all experts of one.

    how: what its recipe says, or said.
    experts: how many there are, None for a layer of one weight.
    held: four fp32 [] or [experts], to quantize with; 0 where there is none yet.
    seen: four alike, the greatest that the present step, or the last one that measured, has met.
    exceeded: int64 [4] or [4 * experts], in how many steps that measured an operand had a greater one than it was
        quantized with.
    holds: of which operands "all" were held a step ago, "some" or "none", so that the host knows it without waiting.
    is_followed: whether the recipe still says so.
    measures: whether the present step notes what it meets.
    """

    def __init__(self, how: Delayed, device: torch.device, experts: int | None = None) -> None:
        self.how, self.experts = how, experts
        self._shape = () if experts is None else (experts,)
        self.count = _COUNT * (experts or 1)
        with torch.inference_mode(False):  # steps write to them, and autograd refuses inference tensors
            self.held, self.seen = (
                [torch.zeros(self._shape, device=device, dtype=torch.float32) for _ in OPERANDS] for _ in range(2)
            )
            self.exceeded = torch.zeros(self.count, dtype=torch.int64, device=device)
        self.is_held = [False] * self.count
        self.is_followed, self.measures = True, False

    @property
    def device(self) -> torch.device:
        return self.exceeded.device

    @property
    def measures_now_and_then(self) -> bool:
        """Whether the present step notes what it meets and the next one does not."""
        return self.measures and self.how.every > 1

    def to(self, device: torch.device) -> LayerAmaxes:
        """Be where the layer's operands are."""
        if self.device != device:
            with torch.inference_mode(False):
                self.held, self.seen = ([t.to(device) for t in tensors] for tensors in (self.held, self.seen))
                self.exceeded = self.exceeded.to(device)
            self.is_held = self.is_held
        return self

    @property
    def is_held(self) -> list[bool]:
        """Which amaxes were held a step ago, operand by operand: these are used."""
        return self._is_held

    @is_held.setter
    def is_held(self, held: list[bool]) -> None:
        self._is_held = held
        of_operands = [held[i : i + self.count // _COUNT] for i in range(0, self.count, self.count // _COUNT)]
        self.holds = ["all" if all(own) else "some" if any(own) else "none" for own in of_operands]
        with torch.inference_mode(False):
            self._masks = list(torch.tensor(of_operands, device=self.device).unbind()) if "some" in self.holds else []

    def known(self, operand: int, experts: slice | None = None) -> Tensor | None:
        """Return the amax that an operand is to be quantized with, None for its own.

        Args:
            operand: of `OPERANDS`.
            experts: those that are asked for, None for all; 0 says that one takes its own, see `lacks`.
        """
        if self.holds[operand] == "none":
            return None
        held = self.held[operand] * self._masks[operand] if self.holds[operand] == "some" else self.held[operand]
        return held if experts is None else held[experts]

    def lacks(self, operand: int) -> bool:
        """Whether some experts have an amax to be quantized with and others have not."""
        return self.holds[operand] == "some"

    def seen_by(self, operand: int, experts: slice | None = None) -> Tensor:
        """Return where to note what an operand has, of some experts or of all."""
        return self.seen[operand] if experts is None else self.seen[operand][experts]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return what is of each operand of numbers of all, [4] or [4 * experts], where the layer's operands are."""
        return list(flat.to(self.device).view(_COUNT, *self._shape).unbind())

    def hold(self, amaxes: Tensor, exceeded: Tensor) -> None:
        """Quantize with these from now on.

        Args:
            amaxes: fp32 [4] or [4 * experts].
            exceeded: bool, as many, whether the last ones were too small.
        """
        torch._foreach_copy_(self.held, self.parts(amaxes))
        torch._foreach_zero_(self.seen)
        self.exceeded += exceeded.to(self.device)

    def load(self, values: dict[str, Any], step: int) -> None:
        """Take what `DelayedAmaxes.state_dict` said of this layer after so many steps.

        Whoever has seen something has measured, whatever the recipe says before a schedule is asked.
        """
        for name, tensors in (("held", self.held), ("seen", self.seen)):
            torch._foreach_copy_(tensors, self.parts(torch.tensor(values[name], dtype=torch.float32)))
        self.exceeded.copy_(torch.tensor(values["exceeded"], dtype=self.exceeded.dtype))
        self.is_held = list(map(bool, values["is_held"]))
        measured = self.is_followed and step > 0 and (step - 1) % self.how.every == 0
        self.measures = measured or any(values["seen"])

    def load_late(self, values: dict[str, Any]) -> None:
        """Take the same where steps have begun since: what was seen then is held, and known to be."""
        self.load(values, 0)
        if self.measures:
            _hold([self], _together([self], "seen"))
        self.is_held, self.measures = (_together([self], "held") > 0).tolist(), False


class DelayedAmaxes:
    """The amaxes of all layers of a run, by the number of each layer's first random stream."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAmaxes] = {}
        self.changes = 0
        """How often operands have begun to use what is held: code that was recorded before does not."""
        self._unread: _Unread | None = None
        self._loaded: dict[str, Any] = {}  # of layers that do not delay theirs yet, which a schedule may change
        self._loaded_at: int | None = None  # after so many steps; None once a step has begun since
        self._is_settled = False

    def of(self, stream: int, how: Delayed, device: torch.device, experts: int | None = None) -> LayerAmaxes:
        """Return those of the layer with this stream, whose recipe says `how`.

        Raises:
            ValueError: a state was loaded that has others there.
        """
        layer = self.layers.get(stream)
        if layer is None:
            layer = LayerAmaxes(how, device, experts)
            if str(stream) in self._loaded:
                _check_row(stream, self._loaded[str(stream)], layer.count)
            self.layers[stream] = layer
            values = self._loaded.pop(str(stream), None)
            if values is not None and self._loaded_at is not None:
                layer.load(values, self._loaded_at)
            elif values is not None:
                layer.load_late(values)
        layer.how, layer.is_followed = how, True
        return layer

    @property
    def measures_now_and_then(self) -> bool:
        """Whether the present step does what the next one does not."""
        return any(layer.measures_now_and_then for layer in self.layers.values())

    def refuse_unbegun(self) -> None:
        """Raise ValueError if a layer waits for amaxes of earlier steps, which nobody tells apart."""
        if any(layer.is_followed for layer in self.layers.values()):
            raise ValueError(
                "a recipe delays its amaxes and begin_step was never called, so that none would ever be handed on: "
                "call begin_step(model) of the RunState before the first micro-batch of every optimizer step"
            )

    def begin(self, step: int) -> None:
        """Hold what the last step measured, and say whether this one measures.

        Args:
            step: 0, 1, …, the number of the step that begins; all ranks begin it together.
        """
        unread = self._unread if self._loaded_at is None else _Unread(list(self.layers.values()))
        self._loaded_at = None
        self._is_settled = False
        ended = self._measuring()
        if ended:
            with torch.inference_mode(False):
                _hold(ended, greatest_of_ranks(_together(ended, "seen")))
        self.changes += 0 if unread is None else unread.tell()
        for layer in self.layers.values():
            layer.measures = layer.is_followed and step % layer.how.every == 0
        waiting = [layer for layer in ended if not all(layer.is_held)]
        self._unread = _Unread(waiting) if waiting else None

    def _measuring(self) -> list[LayerAmaxes]:
        return [layer for _, layer in sorted(self.layers.items()) if layer.measures]

    def pause(self) -> list[LayerAmaxes]:
        """Let no layer note what it meets, and return those that did; they go on when their `measures` is set again."""
        layers = self._measuring()
        for layer in layers:
            layer.measures = False
        return layers

    def settle(self) -> None:
        """Give all ranks, which call it together at a step's end, the greatest of what each has seen in it."""
        self._share_seen()
        self._is_settled = True

    def _share_seen(self) -> None:
        layers = self._measuring()
        if layers and not self._is_settled and _has_ranks():
            seen = greatest_of_ranks(_together(layers, "seen"))
            for layer, own in zip(layers, _apart(layers, seen), strict=True):
                torch._foreach_copy_(layer.seen, layer.parts(own))

    @property
    def exceeded(self) -> int:
        """How often a step that measured met a greater amax than it quantized with, of all operands; reads devices."""
        return sum(int(layer.exceeded.sum()) for layer in self.layers.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint needs, plain values by stream; ranks that have not settled call it together."""
        layers = [self.layers[stream] for stream in sorted(self.layers)]
        if not layers:
            return dict(self._loaded)
        self._share_seen()  # a step that goes on sees more: only who settles says that it has ended
        seen, held = (_together(layers, name) for name in ("seen", "held"))
        rows = zip(
            sorted(self.layers),
            _apart(layers, held.tolist()),
            [list(layer.is_held) for layer in layers],
            _apart(layers, seen.tolist()),
            [layer.exceeded.tolist() for layer in layers],
            strict=True,
        )
        own = {str(stream): dict(zip(_FIELDS, values, strict=True)) for stream, *values in rows}
        return self._loaded | own

    def load_state_dict(self, state: Any, step: int, *, is_scheduled: bool = False) -> None:
        """Take what a run kept after so many steps; layers that it does not name begin anew.

        Args:
            state: of `state_dict`.
            step: 0, 1, …, how many have begun.
            is_scheduled: whether layers that do not delay theirs yet may come to it.

        Raises:
            ValueError: it is nothing that `state_dict` returns, or of other layers; nothing has changed then.
        """
        _check(state, self.layers, is_scheduled)
        if step and self.layers and not is_scheduled and not set(map(str, self.layers)) & set(state):
            warnings.warn(
                f"the state of step {step} has no amaxes of the layers that delay theirs: they begin anew, with their "
                "own in the first step",
                stacklevel=3,
            )
        self.changes, self._is_settled = self.changes + 1, False
        for stream, layer in self.layers.items():
            nothing = {name: [0] * layer.count for name in _FIELDS}
            layer.load(state.get(str(stream), nothing), step)
        own = set(map(str, self.layers))
        self._loaded = {stream: values for stream, values in state.items() if stream not in own}
        self._loaded_at, self._unread = step, None


_REMEDY = "pass what RunState.state_dict() returned"


def _check(state: Any, layers: dict[int, LayerAmaxes], is_scheduled: bool) -> None:
    """Raise ValueError unless this is a state of these layers, of which a schedule may bring others."""
    if not isinstance(state, dict):
        raise ValueError(f"state['amaxes']={state!r}: not a dict by stream; {_REMEDY}")
    known = {str(stream): layer.count for stream, layer in layers.items()}
    for stream, values in state.items():
        _check_row(stream, values, known.get(stream))
        if known and not is_scheduled and stream not in known:
            raise ValueError(
                f"state['amaxes'][{stream!r}]: no layer of this model that delays its amaxes draws there; convert the "
                "model with the same recipe and rules before loading"
            )


def _check_row(stream: Any, values: Any, count: int | None) -> None:
    """Raise ValueError unless these are the numbers of a layer, `count` each, or of any if nobody knows."""
    is_named = isinstance(values, dict) and set(values) == set(_FIELDS)
    sizes = {len(row) if isinstance(row, list) else 0 for row in values.values()} if is_named else set()
    is_sized = len(sizes) == 1 and (sizes == {count} if count is not None else min(sizes) % _COUNT == 0 < min(sizes))
    if not is_sized or not all(map(_are_numbers, values.values())):
        wanted = f"{count or _COUNT}" if count is not None else f"{_COUNT}, or {_COUNT} for each expert,"
        raise ValueError(f"state['amaxes'][{stream!r}]={values!r}: not {wanted} finite numbers each; {_REMEDY}")


def _are_numbers(values: list) -> bool:
    return all(type(value) in (int, float, bool) and 0 <= value <= FLT_MAX and math.isfinite(value) for value in values)


def _together(layers: list[LayerAmaxes], name: str) -> Tensor:
    """Return all amaxes of one kind, fp32 [4 for each layer and expert], on the device of the first layer."""
    where = layers[0].device
    return torch.cat([tensor.to(where).reshape(-1) for layer in layers for tensor in getattr(layer, name)])


def _apart(layers: list[LayerAmaxes], together: Any) -> list[Any]:
    """Return what is of each layer of a tensor or list of all."""
    ends = list(accumulate(layer.count for layer in layers))
    return [together[end - layer.count : end] for end, layer in zip(ends, layers, strict=True)]


def _hold(layers: list[LayerAmaxes], seen: Tensor) -> None:
    """Move what layers of all ranks have seen, as `_together` returns it, to where they hold it."""
    with torch.no_grad(), torch.inference_mode(False):
        held = _together(layers, "held")
        margins = torch.tensor([layer.how.margin for layer in layers], dtype=torch.float32)
        margins = margins.repeat_interleave(torch.tensor([layer.count for layer in layers]))
        used = torch.tensor([is_held for layer in layers for is_held in layer.is_held])
        later = (seen * margins.to(seen.device)).clamp(max=FLT_MAX)
        now, exceeded = torch.where(seen > 0, later, held), used.to(seen.device) & (seen > held)
        for layer, amaxes, were in zip(layers, _apart(layers, now), _apart(layers, exceeded), strict=True):
            layer.hold(amaxes, were)


class _Unread:
    """Which amaxes of layers are held: on its way to the host, which asks a step later."""

    def __init__(self, layers: list[LayerAmaxes]) -> None:
        self._layers = layers
        found = _together(layers, "held") > 0 if layers else torch.zeros(0, dtype=torch.bool)
        self._event = None
        if found.device.type != "cuda":
            self._found = found.cpu()
            return
        self._found = torch.empty(found.shape, dtype=torch.bool, pin_memory=True)
        self._found.copy_(found, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(found.device))

    def tell(self) -> bool:
        """Tell the layers, and return whether that changes anything."""
        if self._event is not None:
            self._event.synchronize()
        found = list(zip(self._layers, _apart(self._layers, self._found.tolist()), strict=True))
        changed = [(layer, held) for layer, held in found if layer.is_held != held]
        for layer, held in changed:
            layer.is_held = held
        return bool(changed)

    def __getstate__(self) -> dict[str, Any]:
        if self._event is not None:
            self._event.synchronize()
        return {"_layers": self._layers, "_found": self._found.clone(), "_event": None}


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def greatest_of_ranks(amaxes: Tensor) -> Tensor:
    """Return the greatest of all ranks, element by element; of one process its own."""
    if _has_ranks():
        dist.all_reduce(amaxes, dist.ReduceOp.MAX)
    return amaxes
