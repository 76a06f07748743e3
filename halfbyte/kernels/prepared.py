"""Calls that are worked out once: what a function allocates and launches for one request, kept and repeated.

Which kernels a request needs, their tiles, grids and constants follow from its specs and from the shapes, strides,
dtypes, alignment and device of its tensors. Working that out takes the host longer than the GPU needs for the kernels.
So the first call of a request runs the function and records what reached the GPU: tensors that were allocated, torch
ops, launches. Later calls repeat the record with their own memory. A record holds no tensor of a call, nothing in it is
keyed by the identity of an object, and what it could not understand is never repeated: such requests run anew.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.kernels import launch
from halfbyte.kernels.calling import Shape
from halfbyte.kernels.launch import Launch, Launched, Pointer, Program, PutOff, Varying, with_parts
from halfbyte.kernels.repeating import known
from halfbyte.kernels.repeating.compiling import compiling_together
from halfbyte.kernels.repeating.known import ALIGNMENT, Records
from halfbyte.kernels.repeating.steps import Allocation, Op, Slot, View, map_nested, tensors_in

MAX_RECORDS = 4096
"""Requests that are kept, the latest; a model of 100 layers of ten shapes has some hundreds."""

ONE_ALLOCATION = 2 << 20
"""Bytes of what only launches use that a record allocates at once; more would live longer than it has to."""

SECTOR = 512
"""Alignment of memory, in bytes, as torch's allocator gives it."""

_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    op.default if hasattr(op, "default") else op.memory_format
    for op in (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided)
)

COLLECTIVES = "_c10d_functional"
"""The namespace of ops by which ranks tell each other something."""

Function = Callable[..., Any]


def _names_of(part: str) -> list[str]:
    """Return the dotted name of a part of an argument, and those of what it is a part of."""
    words = part.split(".")
    return [".".join(words[: i + 1]) for i in range(len(words))]


def _depends_on_values(func: Any, used: list[Tensor]) -> bool:
    """Whether an op moves what a known tensor looks at, or makes a shape that follows from values."""
    if func is _aten.index.Tensor:  # by places, or by masks
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in used[1:])
    return torch.Tag.inplace_view in func.tags or torch.Tag.dynamic_output_shape in func.tags


@lru_cache(maxsize=512)
def _only_looks(func: Any) -> bool:
    """Whether an op makes a view, which reads no memory. Ops made of others say so of what may be a copy."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return False  # they come whole in inference mode
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(aliases) and not func._schema.is_mutable


class Recorder(TorchDispatchMode):
    """Records what a function does with tensors.

    Launches wait until something reads what they write, so that their kernels are compiled side by side.

    Args:
        tensors: that it is given; None for none.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.refusal: str | None = None
        self.constants: list[Tensor] = []
        self._slots: dict[int, int] = {}
        self._seen: list[Tensor] = []  # kept alive, so that no two have one id
        self._roots: dict[int, tuple[int, int]] = {}
        self._waiting: list[tuple[int, PutOff]] = []
        self._place: int | None = None
        self.count, self._given = 0, len(tensors)
        self.present = {slot for slot, tensor in enumerate(tensors) if tensor is not None}
        for tensor in tensors:
            slot = self._new_slot()
            if tensor is not None and id(tensor) not in self._slots:
                self._know(tensor, slot)

    def _new_slot(self) -> int:
        self.count += 1
        return self.count - 1

    def _know(self, tensor: Tensor, slot: int, root: tuple[int, int] | None = None) -> None:
        self._slots[id(tensor)] = slot
        self._seen.append(tensor)
        self._roots[slot] = root or (slot, tensor.data_ptr())

    def _own(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by what is recorded: nobody differentiates it."""
        return self._slots.get(id(tensor), -1) >= self._given

    def refuse(self, reason: str) -> None:
        """Say why the record cannot be repeated."""
        self.refusal = self.refusal or reason

    def keep(self, tensor: Tensor) -> None:
        """Let a tensor that outlives all calls be used by the record."""
        if id(tensor) not in self._slots:
            self._know(tensor, self._new_slot())
        if all(kept is not tensor for kept in self.constants):  # also one that was made for this call
            self.constants.append(tensor)

    def slot_of(self, tensor: Tensor) -> int | None:
        """Return a tensor's slot; None, and no record, if it came from elsewhere."""
        slot = self._slots.get(id(tensor))
        if slot is None:
            self.refuse(f"a tensor {tuple(tensor.shape)} came from outside")
        return slot

    def put_off(self, asked: PutOff) -> None:
        """Let a launch wait; its step stands where it was asked for."""
        asked.run(compile_only=True)
        self._waiting.append((len(self.steps), asked))
        self.steps.append(None)

    def launch_waiting(self) -> None:
        """Launch what waits, in order."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        try:
            with launch.watching(self):
                for self._place, asked in waiting:
                    asked.run()
        except BaseException:
            self.refuse("a launch of it failed")  # and the function went on without it
            raise
        finally:
            self._place = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = tensors_in((args, kwargs))
        if used and not (func in ALLOCATIONS or _only_looks(func)):
            self.launch_waiting()
        result = func(*args, **kwargs)
        if self.refusal:
            return result
        made = tensors_in((result,))
        if func is _aten.detach.default and self._own(args[0]):  # of what a factory made
            self._know(result, self._slots[id(args[0])], self._roots[self._slots[id(args[0])]])
            return result
        if made and func in ALLOCATIONS:
            (tensor,) = made
            slot = self._new_slot()
            self._know(tensor, slot)
            self.steps.append(
                Allocation(slot, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
            )
            return result
        if any(not isinstance(out, Tensor | None) for out in (result if type(result) in (tuple, list) else (result,))):
            self.refuse(f"{func} returns what is no tensor")
        elif _depends_on_values(func, used):
            self.refuse(f"{func} makes a tensor that depends on more than shapes")
        elif used and any(tensor.device != used[0].device for tensor in made):
            self.refuse(f"{func} leaves the device")
        if self.refusal:
            return result
        self._record_op(func, (args, kwargs), used, made)
        return result

    def _record_op(self, func: Any, given: tuple, used: list[Tensor], made: list[Tensor]) -> None:
        filled = map_nested(given, Tensor, lambda tensor: Slot(self.slot_of(tensor) or 0))
        slots, view = [], None
        for tensor in made:
            if id(tensor) in self._slots:  # changed in place
                slots.append(self._slots[id(tensor)])
                continue
            slot, memory = self._new_slot(), tensor.untyped_storage()._cdata
            base = next((t for t in used if t.untyped_storage()._cdata == memory), None)
            root = None if base is None or self.refusal else self._roots[self._slots[id(base)]]
            self._know(tensor, slot, root)
            slots.append(slot)
            if base is not None and len(used) == len(made) == 1 and self._own(base) and base.dtype == tensor.dtype:
                view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - base.storage_offset()
        is_sent = func.namespace == COLLECTIVES  # other ranks wait for it, whoever reads what it returns
        acts = func._schema.is_mutable or is_sent
        step = func, *filled, tuple(slots), not acts
        self.steps.append(Op(*step) if view is None or acts else View(*step, *view))

    def alone(self, wanted: set[int]) -> set[int]:
        """Return the slots of which nothing that is returned shares memory with something else that is."""
        memory = [self._roots[slot][0] for slot in wanted]
        return {slot for slot, (root, _) in self._roots.items() if memory.count(root) <= 1}

    def launched(self, launched: Launched) -> None:
        """Record a launch."""
        pointers: dict[str, Pointer] = {}

        def without_memory(name: str, argument: Any) -> Any:
            tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
            if isinstance(tensor, Tensor):
                slot = self.slot_of(tensor)
                if slot is not None:
                    root, start = self._roots[slot]
                    offset = tensor.data_ptr() - start if tensor.numel() else 0  # nothing lies nowhere
                    pointers[name] = Pointer(root, offset, tensor.dtype)
                return Shape.of(argument) if isinstance(argument, TensorDescriptor) else None
            if tensors_in((argument,)):
                self.refuse(f"{launched.kernel.__name__} takes a tuple of tensors without names, {name}")
            elif type(argument) is Varying and not launched.kernel.unspecialized.intersection(_names_of(name)):
                self.refuse(f"{launched.kernel.__name__} is compiled for the value of {name}")
            return argument

        arguments = {name: with_parts(name, given, without_memory) for name, given in launched.arguments.items()}
        if self.refusal is None:
            self.steps[self._place] = Launch(launched._replace(arguments=arguments), pointers)


class Record:
    """What a request does.

    Args:
        recorder: that saw it.
        given: tensors of a call, constants excluded.
        outputs: what the function returned: tensors and None.
        value: that it returned beside them.
        aligned: whether all tensors begin where memory is aligned, and those of every call have to.
    """

    def __init__(
        self, recorder: Recorder, given: int, outputs: Sequence[Tensor | None], value: Any, aligned: bool = False
    ) -> None:
        returned = [None if out is None else recorder.slot_of(out) for out in outputs]
        wanted = {slot for slot in returned if slot is not None}
        constants = {recorder.slot_of(tensor) or 0: tensor for tensor in recorder.constants}
        viewed = set().union(*(step.used for step in recorder.steps if isinstance(step, Op)))
        for step in recorder.steps:
            if isinstance(step, Allocation) and 0 in step.shape and step.slot not in wanted | viewed:
                constants[step.slot] = step.constant()
        alone = recorder.alone(wanted)  # else torch has to know of views that what it keeps was changed by another name
        steps = [
            step.as_op() if isinstance(step, View) and step.made[0] not in alone else step for step in recorder.steps
        ]
        steps = _needed(steps, wanted, set(constants))
        self.steps = _together(steps, wanted | set(constants), recorder.count)
        self._repeat = _function(
            self.steps, (given, returned, value), constants, recorder.present if aligned else set()
        )

    def __call__(self, tensors: Sequence[Tensor | None], numbers: Sequence[int], stream: int) -> tuple[tuple, Any]:
        """Repeat it with other tensors; return None, and do nothing, if one begins elsewhere within 16 bytes."""
        if not torch._C._is_any_autocast_enabled():
            return self._repeat(tensors, numbers, stream, launch.hooked())
        kind = next(tensor.device.type for tensor in tensors if tensor is not None)
        enabled = torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, False)  # its casts are among the steps; a context costs ten times this
        try:
            return self._repeat(tensors, numbers, stream, launch.hooked())
        finally:
            torch.set_autocast_enabled(kind, enabled)


def _needed(steps: list[Any], wanted: set[int], constants: set[int]) -> list[Any]:
    """Return the steps without those that only make what nobody uses."""
    wanted, kept = set(wanted), []
    for step in reversed(steps):
        if step.pure and (wanted.isdisjoint(step.made) or not constants.isdisjoint(step.made)):
            continue
        wanted |= step.used
        kept.append(step)
    return kept[::-1]


def _together(steps: list[Any], known: set[int], new_slot: int) -> list[Any]:
    """Return the steps with one allocation for what is small, on the GPU and used by launches alone.

    Args:
        steps: in order.
        known: slots that others see.
        new_slot: of that allocation.
    """
    known = known.union(*(step.used for step in steps if isinstance(step, Op)))
    places: dict[int, int] = {}
    end = 0
    for step in steps:
        if isinstance(step, Allocation) and step.slot not in known and end + step.bytes <= ONE_ALLOCATION:
            places[step.slot] = end
            end += -(-step.bytes // SECTOR) * SECTOR
    if len(places) < 2:
        return steps
    first = next(step for step in steps if step.made and step.made[0] in places)
    found: list[Any] = [Allocation(new_slot, (end,), (1,), torch.uint8, first.device)]
    for step in steps:
        if isinstance(step, Launch):
            found.append(step.moved(new_slot, places))
        elif not (isinstance(step, Allocation) and step.slot in places):
            found.append(step)
    return found


def _function(
    steps: list[Any], ends: tuple[int, list[int | None], Any], constants: dict[int, Tensor], aligned: set[int]
) -> Callable:
    """Return a function of (tensors, numbers, stream, watched) that takes the steps.

    It is made from its text, like Triton's binders and dataclasses: a call is then a line for each step, with nothing
    to look up. Memory that nobody reads any more goes back to the allocator, which gives it to what comes next on the
    stream.

    Args:
        steps: in order.
        ends: how many tensors are given, which slots are returned, and the value beside them.
        constants: tensors by slot.
        aligned: slots of tensors that have to be; where one is not, None is returned at once.
    """
    given, returned, value = ends
    program = Program()
    program.values.update({program.name(slot): tensor for slot, tensor in constants.items()})
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        last.update(dict.fromkeys((*step.used, *step.made), i))
    over: dict[int, list[int]] = {}
    for slot, end in last.items():
        if slot >= given and slot not in returned and slot not in constants:
            over.setdefault(end, []).append(slot)
    lines = ["def repeat(tensors, numbers, stream, watched):"]
    lines.append("".join(f"{program.name(slot)}, " for slot in range(given)) + "= tensors")
    most = max((v.place for step in steps for v in getattr(step, "numbers", ())), default=-1)
    lines += [f"n{i} = numbers[{i}]" for i in range(most + 1)]
    pointed = set().union(*(step.used for step in steps if isinstance(step, Launch)))
    known = sorted({slot for slot in pointed if slot < given or slot in constants} | aligned)
    lines += map(program.known_address, known)
    if aligned:
        lines.append(f"if ({' | '.join(map(program.address, sorted(aligned)))}) & {ALIGNMENT - 1}: return None")
    for i, step in enumerate(steps):
        lines.append(step.line(program))
        lines += [program.known_address(slot) for slot in step.made if slot in pointed and slot not in known]
        if i in over:
            lines.append(" = ".join(map(program.name, over[i])) + " = None")
    outputs = "".join(f"{None if slot is None else program.name(slot)}, " for slot in returned)
    lines.append(f"return ({outputs}), {program.constant(value)}")
    exec("\n    ".join(lines), program.values)  # every name in it is ours
    return program.values["repeat"]


_RECORDS = Records()
_LOCK = threading.Lock()
_stream = known.current_stream


def again(*request: Any) -> tuple[tuple, Any] | None:
    """Return what `call` does of a request that looks like an earlier one; None of others, whose tensors are any."""
    return known.repeat(_RECORDS, request)


def call(
    function: Function,
    static: tuple,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int] = (),
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[tuple, Any]:
    """Return function(static, tensors, numbers), from the record of an equal request if there is one.

    Args:
        function: of a module, whose launches and results depend on nothing but its arguments. It must not return a
            tensor that it was given unless that is always so.
        static: hashable values.
        tensors: plain ones on one device, or None.
        numbers: ints that vary from call to call; of them the function may form sums with constants, which kernels take
            unspecialized.
        around: makes a context for the function while it is recorded.

    Returns:
        What the function returned: tensors or None in a tuple, and a value that follows from `static`.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    if device.type != "cuda":
        return _call(function, (static, tensors, numbers), (device, 0), around)
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _call(function, (static, tensors, numbers), (device, _stream(device)), around)
    return _call(function, (static, tensors, numbers), (device, _stream(device)), around)


def _call(
    function: Function, arguments: tuple, where: tuple[torch.device, int], around: Callable[[], AbstractContextManager]
) -> tuple[tuple, Any]:
    static, tensors, numbers = arguments
    if launch.watcher() is not None:
        return function(static, tensors, numbers)
    key, usual = known.key_of((function, static, tensors, numbers), where)
    record = _RECORDS.get(key)
    if type(record) is Record:
        if usual:
            known.remember(_RECORDS, (function, static, tensors, numbers), where[1], record)
        return record(tensors, numbers, where[1])
    if record is not None:
        return function(static, tensors, numbers)
    recorder = Recorder(tensors)
    varying = [Varying(i, number) for i, number in enumerate(numbers)]
    with compiling_together(where[0]):
        with recorder, launch.watching(recorder, recorder), around():
            outputs, value = function(static, tensors, varying)
        recorder.launch_waiting()
    if recorder.refusal is None:
        assert None not in recorder.steps, "a launch that waited was not told of"
        record = Record(recorder, len(tensors), outputs, value, usual)
    else:
        name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        warnings.warn(f"{name} is worked out anew in every call, slower on the host: {recorder.refusal}", stacklevel=1)
    _keep(key, recorder.refusal or record)
    return outputs, value


def _keep(key: Hashable, record: Record | str | None) -> None:
    assert record is not None
    with _LOCK:
        while len(_RECORDS) >= MAX_RECORDS:
            del _RECORDS[next(iter(_RECORDS))]
            _RECORDS.alike.clear()
        _RECORDS[key] = record


def keep(tensor: Tensor) -> Tensor:
    """Return a tensor that outlives all calls, such as a workspace, after telling who records."""
    recorder = launch.watcher()
    if isinstance(recorder, Recorder):
        recorder.keep(tensor)
    return tensor
