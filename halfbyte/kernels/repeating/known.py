"""The table of records, and a way to them that makes no key of every tensor of a call.

Shapes, strides, dtypes and devices of ten tensors take Python longer to put in a key than a launch takes. Torch has the
guards of compiled code, which compare all of that in C; they hold values, no tensor and no identity. A call whose
static values are those of an earlier one asks the guards of that one first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels import launch

ALIGNMENT = 16
LARGEST_INT32 = (1 << 31) - 1
MARGIN = 1 << 12
"""What a launcher may add to a number that varies."""

MAX_ALIKE = 4
"""Records that are asked in turn where static values and the first tensor's shape are the same."""

Guard = Callable[..., bool]
Request = tuple[Callable, tuple, Sequence[Tensor | None], Sequence[int]]
"""A function, its static values, tensors and numbers."""


class Records(dict[Hashable, Any]):
    """What a request does, by request: a record, or the reason why it runs anew.

    alike: by all of a request but its tensors, guards of tensors, each with the record of such.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alike: dict[Hashable, list[tuple[Guard, Any]]] = {}

    def clear(self) -> None:
        super().clear()
        self.alike.clear()


def current_stream(device: torch.device) -> int:
    """Return the stream of a GPU on which work is launched now."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _stream_of(tensor: Tensor) -> int | None:
    """Return the stream for work on a tensor, 0 on a CPU, None on a GPU that is not the current one."""
    if not tensor.is_cuda:
        return 0
    return current_stream(tensor.device) if torch._C._cuda_getDevice() == tensor.get_device() else None


def autocast_on(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on a device, None where it is off."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def key_of(request: Request, where: tuple[torch.device, int]) -> tuple[Hashable, bool]:
    """Return the key of a request, and whether all its tensors are aligned and all its numbers small.

    Args:
        request: of plain tensors.
        where: their device, and the stream.
    """
    function, static, tensors, numbers = request
    given = [tensor for tensor in tensors if tensor is not None]
    same = _same(given)
    there = tuple([tensor is not None for tensor in tensors])
    widths, places = tuple(map(_width_of, numbers)), tuple(map(_place_of, given))
    # Kernels of the default stream share a workspace, the others have their own.
    key = function, static, there, places, same, widths, autocast_on(where[0]), where[1] == 0
    return key, not any(widths) and not any(place[-1] for place in places)


def _same(given: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return for each tensor where it is first; None where no two are one."""
    ids = list(map(id, given))
    return None if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def _place_of(tensor: Tensor) -> tuple:
    """Return what of a tensor decides how a request is met."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT


def _width_of(number: int) -> int:
    """Return what of a number decides whether kernels take its sums as 32 or 64 bits: near the limit, all of it."""
    return 0 if number <= LARGEST_INT32 - MARGIN else min(number, LARGEST_INT32 + 1)


def repeat(records: Records, request: Request) -> tuple[tuple, Any] | None:
    """Return what the record of a request does that looks like an earlier one, None where none is known to.

    Args:
        records: the table.
        request: its tensors are of any class.
    """
    if not records.alike:
        return None
    _, _, tensors, numbers = request
    given = [tensor for tensor in tensors if tensor is not None]
    stream = _stream_of(given[0])
    if stream is None or launch.watcher() is not None:
        return None
    if numbers and max(numbers) > LARGEST_INT32 - MARGIN:
        return None
    key = _key(request, given[0], stream)
    for guard, record in records.alike.get(key, ()):
        if guard(*given):
            return record(tensors, numbers, stream)
    if (same := _same(given)) is None:  # guards refuse what is given twice, such as the amax that siblings saved
        return None
    given = _firsts(given, same)
    for guard, record in records.alike.get((key, same), ()):
        if guard(*given):
            return record(tensors, numbers, stream)
    return None


def _firsts(given: Sequence[Tensor], same: tuple[int, ...]) -> list[Tensor]:
    """Return each tensor once."""
    return [tensor for i, tensor in enumerate(given) if same[i] == i]


def remember(records: Records, request: Request, stream: int, record: Any) -> None:
    """Let calls like this one find a record of it that serves every small number."""
    given = [tensor for tensor in request[2] if tensor is not None]
    key = _key(request, given[0], stream)
    if (same := _same(given)) is not None:
        given, key = _firsts(given, same), (key, same)
    with _LOCK:
        alike = records.alike.get(key, [])
        guard = None if len(alike) >= MAX_ALIKE else _guard_of(given)
        if guard is not None:
            records.alike[key] = [*alike, (guard, record)]


_LOCK = threading.Lock()


def _key(request: Request, first: Tensor, stream: int) -> Hashable:
    function, static, tensors, _ = request
    absent = tuple([tensor is None for tensor in tensors])
    return function, static, first.shape, absent, stream == 0, autocast_on(first.device)


def _guard_of(given: Sequence[Tensor]) -> Guard | None:
    """Return what says whether tensors are like these, and no two of them one; None where torch has no such thing.

    Classes, dispatch keys, dtypes, devices, sizes and strides are compared, and whether gradients are recorded.
    """
    try:
        guards: Any = torch._C._dynamo.guards
        guard = guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return guard if guard(*given) else None
    except (AttributeError, RuntimeError, TypeError, ValueError):  # none of torch's promises
        return None
