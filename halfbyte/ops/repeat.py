"""Ops whose kernels are launched from a record of the first equal call (`halfbyte.kernels.prepared`).

Where nobody watches, what a pass does is no op: a record repeats it, and the reference calls the bodies of its ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from halfbyte.ops.backends import REFERENCE, choose, warn_once

VARYING = ("stream", "sign_stream")
"""Arguments that differ between layers which are equal otherwise."""


@lru_cache(maxsize=1)
def _prepared() -> Any:
    """Return the module that keeps records, None where this Triton's launches cannot be repeated."""
    from halfbyte.kernels import calling, prepared  # imports Triton, so only where it runs

    if calling.supports():
        return prepared
    warn_once(f"every kernel launch is worked out anew, which takes the host several times longer: {calling.SUPPORTED}")
    return None


BODIES: dict[Any, Callable] = {}
"""The body of every op, by torch.ops.halfbyte.NAME."""


class _Thread(threading.local):
    is_past_ops = False


_THREAD = _Thread()


@contextmanager
def _past_ops() -> Iterator[None]:
    before, _THREAD.is_past_ops = _THREAD.is_past_ops, True
    try:
        yield
    finally:
        _THREAD.is_past_ops = before


def call_op(op: Any, *arguments: Any) -> Any:
    """Return op(*arguments), or what its body does: a record sees that, and a dispatch takes 6 µs."""
    if is_past_ops():
        return BODIES[op](*arguments)
    return op(*arguments)


def is_past_ops() -> bool:
    """Whether what runs is recorded, or computed in plain torch: nobody would see an op."""
    return _THREAD.is_past_ops and not torch.compiler.is_compiling()


def _by_reference(function: Callable, device: torch.device, *arguments: Any) -> tuple:
    """Return function(*arguments), computed in plain torch; of meta tensors ops compute shapes alone."""
    if device.type == "meta":
        return function(*arguments)
    with _past_ops():
        return function(*arguments)


def run(function: Callable, static: tuple, tensors: Sequence[Any], numbers: Sequence[int]) -> tuple[tuple, Any]:
    """Return function(static, tensors, numbers), repeating what an equal call did where kernels run.

    Args:
        function: of a module; it calls ops and torch, and its results depend on nothing but its arguments. Its ops run
            on the backend of the device.
        static: hashable values.
        tensors: on one device, or None.
        numbers: ints that vary from call to call, such as streams, to which the function may only add constants.

    Returns:
        A tuple of tensors or None, and a value that depends on `static` alone.
    """
    if torch.compiler.is_compiling() or is_watched():
        return function(static, tensors, numbers)
    for prepared in _READY:
        made = prepared.again(function, static, tensors, numbers)
        if made is not None:
            return made
    if not _is_plain(tensors):
        return function(static, tensors, numbers)
    device = next(tensor.device for tensor in tensors if tensor is not None)
    if choose(device, None) == REFERENCE:
        return _by_reference(function, device, static, tensors, numbers)
    if (prepared := _prepared()) is None:
        return function(static, tensors, numbers)
    _READY[:] = [prepared]
    return prepared.call(function, static, tensors, numbers, _past_ops)


_READY: list[Any] = []
"""The module that keeps records, once it may have some."""


def constant(make: Callable[[], Tensor]) -> Tensor:
    """Return make(), a constant that outlives all calls: what `run` records reads it and does not make it again."""
    with _disable_current_modes():  # who records is not told how it is made
        tensor = make()
    if choose(tensor.device, None) == REFERENCE or (prepared := _prepared()) is None:
        return tensor
    return prepared.keep(tensor)


_BATCHED: Any = torch._C._parse_dispatch_key("VmapMode")
"""Gradients come in batches (is_grads_batched=True), of which torch runs an op for each."""

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _is_plain(tensors: Sequence[Any]) -> bool:
    """Whether ops on these tensors do nothing else: neither has a class of its own, or a sign that waits."""
    return _PLAIN.issuperset(map(type, tensors)) and not any(t is not None and t.is_neg() for t in tensors)


def is_watched() -> bool:
    """Whether somebody watches ops: a mode or a transform."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED)
        or (torch._C._len_torch_function_stack() and _functions_are_watched())
    )


def in_shape(matrices: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return matrices that nobody else holds as tensors of other leading dimensions.

    They are no views, which would cost the host more, and autograd functions may return them.

    Args:
        matrices: [M, N_i] each.
        shape: the leading dimensions.

    Returns:
        [*shape, N_i] each; the matrices as they are where somebody watches ops, or elements do not lie in order.
    """
    if _REINTERPRET is None or torch.compiler.is_compiling() or is_watched():
        return tuple(matrices)
    return tuple(
        [
            _REINTERPRET(t, (*shape, t.shape[1]), _strides(shape, t.shape[1]), 0)
            if type(t) is Tensor and t.is_contiguous()
            else t
            for t in matrices
        ]
    )


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], columns: int) -> tuple[int, ...]:
    strides, rows = [1], columns
    for size in reversed(shape):
        strides.append(max(rows, 1))
        rows = max(rows, 1) * max(size, 1)
    return tuple(reversed(strides))


def _reinterpret() -> Any:
    """Return the function with which inductor's code looks at memory of its own, None where torch has none."""
    try:
        guards: Any = torch._C._dynamo.guards
        return guards._reinterpret_tensor
    except AttributeError:
        return None


_REINTERPRET = _reinterpret()


def _functions_are_watched() -> bool:
    """Whether a mode other than torch.set_default_device's is told of functions."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def repeat_pass(function: Callable, static: tuple, tensors: Sequence[Any], numbers: Sequence[int]) -> tuple:
    """Return the tensors of function(static, tensors, numbers) inside an op: as `run`, but for modes, which see ops."""
    if torch._C._len_torch_dispatch_stack():
        return function(static, tensors, numbers)[0]
    return (_made(function, static, tensors, numbers, None) or function(static, tensors, numbers))[0]


def _made(
    function: Callable, static: tuple, tensors: Sequence[Any], numbers: Sequence[int], backend: str | None
) -> tuple[tuple, Any] | None:
    """Return function(static, tensors, numbers), by a record that is there or made; None where nothing is repeated."""
    for prepared in _READY:
        made = prepared.again(function, static, tensors, numbers)
        if made is not None:
            return made
    device = next(tensor.device for tensor in tensors if tensor is not None)
    if choose(device, backend) == REFERENCE or (prepared := _prepared()) is None:
        return None
    _READY[:] = [prepared]
    return prepared.call(function, static, tensors, numbers, _past_ops)


def refuse_gradients(name: str, tensors: Sequence[Any]) -> None:
    """Raise ValueError where autograd would look for a backward that ops do not have: theirs is that of the layer."""
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"torch.ops.halfbyte.{name} was given a tensor that requires a gradient, and computes none: graphs of "
            "torch.export hold the forward alone. Run it under torch.no_grad() or detach the tensor, and train the "
            "module that was exported, compiled by torch.compile if it shall be faster"
        )


def _repeated_of_list(function: Callable) -> Callable:
    """Return what `repeated` does of an op that takes (tensors, backend) and returns a tensor."""

    def body(static_values: tuple, given: Any, varying: Any) -> tuple:
        return (function(given, *static_values),), None

    def implementation(given: Any, backend: str) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return function(given, backend)
        made = _made(body, (backend,), given, (), backend or None)
        return function(given, backend) if made is None else made[0][0]

    return implementation


def repeated(function: Callable, schema: str, *, takes_parameters: bool) -> Callable:
    """Return an op's implementation that runs `function` once for each request where kernels run, and repeats it.

    Args:
        function: the op's body, called with positional arguments.
        schema: the op's.
        takes_parameters: as for `define.op`.
    """
    name = schema.partition("(")[0]
    parsed: Any = torch._C.parse_schema(f"halfbyte::{schema}")
    kinds = [str(argument.type) for argument in parsed.arguments]
    names = [argument.name for argument in parsed.arguments]
    tensors = [i for i, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    numbers = [i for i, name in enumerate(names) if name in VARYING]
    static = [i for i in range(len(kinds)) if i not in tensors and i not in numbers]
    returned = len(parsed.returns)
    last = len(kinds) - 1
    assert names[last] == "backend", "the last argument of every op names the backend"
    if kinds[0] == "List[Tensor]":
        assert (takes_parameters, kinds[1:], returned) == (True, ["str"], 1), "what ops of a list are like so far"
        return _repeated_of_list(function)

    def body(static_values: tuple, given: Any, varying: Any) -> tuple:
        arguments = [None] * len(kinds)
        for places, values in ((static, static_values), (tensors, given), (numbers, varying)):
            for i, value in zip(places, values, strict=True):
                arguments[i] = value
        out = function(*arguments)
        return (out if returned > 1 else (out,) if returned else ()), None

    def implementation(*arguments: Any) -> Any:
        if not takes_parameters and torch.is_grad_enabled():
            refuse_gradients(name, [arguments[i] for i in tensors])
        if torch._C._len_torch_dispatch_stack():  # a mode that watches itself
            return function(*arguments)
        fixed, given, varying = (tuple([arguments[i] for i in places]) for places in (static, tensors, numbers))
        made = _made(body, fixed, given, varying, arguments[last] or None)
        if made is None:
            return function(*arguments)
        out, _ = made
        return out if returned > 1 else out[0] if returned else None

    return implementation
