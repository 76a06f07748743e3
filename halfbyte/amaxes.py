"""The amaxes of earlier steps that layers with `Recipe(amax=...)` quantize with, as a RunState keeps them.

A layer has four: of x along its rows (fprop) and its columns (wgrad), of the gradient dy of its output along its rows
(dgrad) and its columns (wgrad). A step that measures notes the greatest it meets; when the next one begins these are
held, for the steps until others are (docs/numerics.md section 3).
"""

from __future__ import annotations

import math
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
    """The amaxes of one layer.

    how: what its recipe says, or said.
    held: four fp32 [], to quantize with; 0 where there is none yet.
    seen: four fp32 [], the greatest that the present step, or the last one that measured, has met.
    exceeded: int64 [4], in how many steps that measured an operand had a greater one than it was quantized with.
    is_held: of which one was held a step ago, so that the host knows it without waiting: these are used.
    is_followed: whether the recipe still says so.
    measures: whether the present step notes what it meets.
    """

    def __init__(self, how: Delayed, device: torch.device) -> None:
        self.how = how
        with torch.inference_mode(False):  # steps write to them, and autograd refuses inference tensors
            self.held, self.seen = ([torch.zeros((), device=device) for _ in OPERANDS] for _ in range(2))
            self.exceeded = torch.zeros(_COUNT, dtype=torch.int64, device=device)
        self.is_held = [False] * _COUNT
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
        return self

    def known(self, operand: int) -> Tensor | None:
        """Return the amax that an operand is to be quantized with, None for its own."""
        return self.held[operand] if self.is_held[operand] else None

    def note(self, operand: int, amax: Tensor) -> None:
        """Note what an operand has."""
        self.seen[operand].clamp_(min=amax)

    def hold(self, amaxes: Tensor, exceeded: Tensor) -> None:
        """Quantize with these from now on.

        Args:
            amaxes: fp32 [4].
            exceeded: bool [4], whether the last ones were too small.
        """
        torch._foreach_copy_(self.held, list(amaxes.to(self.device).unbind()))
        torch._foreach_zero_(self.seen)
        self.exceeded += exceeded.to(self.device)

    def load(self, values: dict[str, Any], step: int) -> None:
        """Take what `DelayedAmaxes.state_dict` said of this layer after so many steps.

        Whoever has seen something has measured, whatever the recipe says before a schedule is asked.
        """
        for name, tensors in (("held", self.held), ("seen", self.seen)):
            for tensor, value in zip(tensors, values[name], strict=True):
                tensor.fill_(value)
        self.exceeded.copy_(torch.tensor(values["exceeded"]))
        self.is_held = list(map(bool, values["is_held"]))
        measured = self.is_followed and step > 0 and (step - 1) % self.how.every == 0
        self.measures = measured or any(values["seen"])

    def load_late(self, values: dict[str, Any]) -> None:
        """Take the same where steps have begun since: what was seen then is held, and known to be."""
        self.load(values, 0)
        if self.measures:
            _hold([self], _together([self], "seen"))
        self.is_held, self.measures = [float(held) > 0 for held in self.held], False


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

    def of(self, stream: int, how: Delayed, device: torch.device) -> LayerAmaxes:
        """Return those of the layer with this stream, whose recipe says `how`."""
        layer = self.layers.get(stream)
        if layer is None:
            layer = self.layers[stream] = LayerAmaxes(how, device)
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
        layers = self._measuring()
        if layers and not self._is_settled and _has_ranks():
            seen = greatest_of_ranks(_together(layers, "seen"))
            for layer, own in zip(layers, seen.split(_COUNT), strict=True):
                torch._foreach_copy_(layer.seen, list(own.to(layer.device).unbind()))
        self._is_settled = True

    @property
    def exceeded(self) -> int:
        """How often a step that measured met a greater amax than it quantized with, of all operands; reads devices."""
        return sum(int(layer.exceeded.sum()) for layer in self.layers.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint needs, plain values by stream; ranks that have not settled call it together."""
        layers = [self.layers[stream] for stream in sorted(self.layers)]
        if not layers:
            return dict(self._loaded)
        self.settle()
        seen, held = (_together(layers, name) for name in ("seen", "held"))
        rows = zip(
            sorted(self.layers),
            held.view(-1, _COUNT).tolist(),
            [list(layer.is_held) for layer in layers],
            seen.view(-1, _COUNT).tolist(),
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
        _check(state, {} if is_scheduled else self.layers)
        self.changes, self._is_settled = self.changes + 1, False
        nothing = {name: [0] * _COUNT for name in _FIELDS}
        for stream, layer in self.layers.items():
            layer.load(state.get(str(stream), nothing), step)
        own = set(map(str, self.layers))
        self._loaded = {stream: values for stream, values in state.items() if stream not in own}
        self._loaded_at, self._unread = step, None


def _check(state: Any, layers: dict[int, LayerAmaxes]) -> None:
    remedy = "pass what RunState.state_dict() returned"
    if not isinstance(state, dict):
        raise ValueError(f"state['amaxes']={state!r}: not a dict by stream; {remedy}")
    for stream, values in state.items():
        if not isinstance(values, dict) or set(values) != set(_FIELDS) or not all(map(_is_row, values.values())):
            raise ValueError(f"state['amaxes'][{stream!r}]={values!r}: not {_COUNT} finite numbers each; {remedy}")
        if layers and stream not in map(str, layers):
            raise ValueError(
                f"state['amaxes'][{stream!r}]: no layer of this model that delays its amaxes draws there; convert the "
                "model with the same recipe and rules before loading"
            )


def _is_row(values: Any) -> bool:
    """Whether these are the four numbers of a layer."""
    if not isinstance(values, list) or len(values) != _COUNT:
        return False
    return all(type(value) in (int, float, bool) and 0 <= value <= FLT_MAX and math.isfinite(value) for value in values)


def _together(layers: list[LayerAmaxes], name: str) -> Tensor:
    """Return all amaxes of one kind, fp32 [4 * layers], on the device of the first layer."""
    where = layers[0].device
    return torch.stack([tensor.to(where) for layer in layers for tensor in getattr(layer, name)])


def _hold(layers: list[LayerAmaxes], seen: Tensor) -> None:
    """Move what layers of all ranks have seen, fp32 [4 * layers], to where they hold it."""
    with torch.no_grad(), torch.inference_mode(False):
        held = _together(layers, "held")
        margins = torch.tensor([layer.how.margin for layer in layers for _ in OPERANDS], dtype=torch.float32)
        used = torch.tensor([is_held for layer in layers for is_held in layer.is_held])
        later = (seen * margins.to(seen.device)).clamp(max=FLT_MAX)
        now, exceeded = torch.where(seen > 0, later, held), used.to(seen.device) & (seen > held)
        for layer, amaxes, were in zip(layers, now.split(_COUNT), exceeded.split(_COUNT), strict=True):
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
        before = [layer.is_held for layer in self._layers]
        for layer, found in zip(self._layers, self._found.view(-1, _COUNT).tolist(), strict=True):
            layer.is_held = found
        return before != [layer.is_held for layer in self._layers]

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
