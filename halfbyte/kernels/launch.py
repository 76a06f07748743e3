"""Kernels that are launched, and launches whose every argument but the pointers is worked out before.

`jit` makes a kernel of a function as `triton.jit` does. Launched under `watching`, it also tells what was launched; a
`Launch` repeats that with other pointers and numbers, past Triton's binding of arguments, which takes longer than the
launch itself.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_MAPS = 64
"""Tensor maps that one argument keeps, one for each address that its tensor had."""


@dataclass(frozen=True)
class Varying:
    """A number that differs between calls that are otherwise equal. It is no int, so that nothing takes it for one.

    Kernels take it only where `do_not_specialize` names the parameter: one compilation serves all values.

    Args:
        place: among the call's numbers.
        value: that of this call, `beyond` included.
        beyond: what was added to it.
    """

    place: int
    value: int
    beyond: int = 0

    def __add__(self, other: int) -> Varying:
        return Varying(self.place, self.value + other, self.beyond + other)

    __radd__ = __add__


class Watcher(Protocol):
    """Who is told of launches."""

    def launched(self, launch: Launched) -> None: ...


class Launched(NamedTuple):
    """What one launch was.

    kernel: that was launched.
    compiled: Triton's CompiledKernel, None in the interpreter.
    grid: programs along three axes.
    arguments: all parameters by name, in order, constants included.
    options: of the launch, such as num_warps.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


_WATCHERS = threading.local()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every launch of this thread; the innermost one is told."""
    before = getattr(_WATCHERS, "last", None)
    _WATCHERS.last = watcher
    try:
        yield
    finally:
        _WATCHERS.last = before


def watcher() -> Any:
    """Return who watches this thread's launches, or None."""
    return getattr(_WATCHERS, "last", None)


def _tell(kernel: Any, compiled: Any, grid: Sequence[int], args: tuple, kwargs: dict[str, Any]) -> None:
    told = watcher()
    if told is None:
        return
    names, options = kernel.parameters, dict(kwargs)
    arguments = dict(zip(names, args, strict=False))
    arguments.update((name, options.pop(name)) for name in names[len(args) :])
    told.launched(Launched(kernel, compiled, tuple(grid), arguments, options))


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return arguments as Triton knows them."""
    return [value.value if type(value) is Varying else value for value in values]


class Kernel(JITFunction):
    """A compiled kernel."""

    def __init__(self, fn: Callable, do_not_specialize: Sequence[str]) -> None:
        super().__init__(fn, do_not_specialize=do_not_specialize)
        self.parameters = tuple(inspect.signature(fn).parameters)
        self.unspecialized = frozenset(do_not_specialize)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        """Launch it, and tell who watches."""
        named = dict(zip(kwargs, _plain(kwargs.values()), strict=True))
        compiled = super().run(*_plain(args), grid=grid, warmup=warmup, **named)
        if not warmup:
            _tell(self, compiled, grid, args, kwargs)
        return compiled


class InterpretedKernel(InterpretedFunction):
    """A kernel in Triton's interpreter."""

    def __init__(self, fn: Callable, do_not_specialize: Sequence[str]) -> None:
        super().__init__(fn, do_not_specialize=do_not_specialize)
        self.parameters = tuple(inspect.signature(fn).parameters)
        self.unspecialized = frozenset(do_not_specialize)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        """Interpret it, and tell who watches."""
        named = dict(zip(kwargs, _plain(kwargs.values()), strict=True))
        with _disable_current_modes():  # the interpreter computes with torch
            super().run(*_plain(args), grid=grid, warmup=warmup, **named)
        if not warmup:
            _tell(self, None, grid, args, kwargs)


def jit(fn: Callable | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Make a kernel that is launched of a function; `triton.jit` is for device functions.

    Args:
        fn: the function, if there is nothing else to say.
        do_not_specialize: parameters that one compilation serves with any value.
    """

    def decorate(fn: Callable) -> Any:
        kind = InterpretedKernel if knobs.runtime.interpret else Kernel
        return kind(fn, do_not_specialize)

    return decorate if fn is None else decorate(fn)


class Pointer(NamedTuple):
    """Where in a slot's memory an argument points: bytes from its first element, and the dtype it is read as."""

    slot: int
    offset: int
    dtype: torch.dtype


class Launch:
    """One launch, to be repeated with other memory and numbers.

    Args:
        launched: what is repeated.
        pointers: of each argument that is a tensor or a tensor descriptor, its place.
    """

    def __init__(self, launched: Launched, pointers: dict[str, Pointer]) -> None:
        names = list(launched.arguments)
        self._kernel, self._grid = launched.kernel, launched.grid
        self._arguments, self._options = list(launched.arguments.values()), launched.options
        self._numbers = [(i, a.place, a.beyond) for i, a in enumerate(self._arguments) if type(a) is Varying]
        self._pointers = [(names.index(name), *pointer) for name, pointer in pointers.items()]
        self._call = None if launched.compiled is None else _direct(launched, pointers)

    @property
    def slots(self) -> set[int]:
        """The slots whose memory is used."""
        return {slot for _, slot, _, _ in self._pointers}

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._kernel.__name__

    def __call__(self, slots: list[Tensor], numbers: Sequence[int], stream: int) -> None:
        """Launch on `stream` with the memory of `slots`."""
        if self._call is not None:
            self._call(slots, numbers, stream)
            return
        arguments = list(self._arguments)
        for i, slot, offset, dtype in self._pointers:
            arguments[i] = _like(self._arguments[i], _tensor_at(slots[slot], offset, dtype))
        for i, place, beyond in self._numbers:
            arguments[i] = numbers[place] + beyond
        self._kernel[self._grid](**dict(zip(self._kernel.parameters, arguments, strict=True)), **self._options)


class Shape(NamedTuple):
    """A tensor descriptor without its tensor."""

    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str

    @classmethod
    def of(cls, descriptor: TensorDescriptor) -> Shape:
        """Return what a descriptor says beside where its tensor is."""
        given = (tuple(part) for part in (descriptor.shape, descriptor.strides, descriptor.block_shape))
        return cls(*given, descriptor.padding)


def _like(argument: Any, tensor: Tensor) -> Any:
    return (
        TensorDescriptor(tensor, *map(list, argument[:3]), argument.padding) if isinstance(argument, Shape) else tensor
    )


def _tensor_at(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return memory from `offset` bytes after the first element of `tensor` on, as a vector of one element."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    assert start % dtype.itemsize == 0, "a view of another dtype begins between two of its elements"
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), start // dtype.itemsize, (1,), (1,)
    )


def _direct(launched: Launched, pointers: dict[str, Pointer]) -> Callable[[list[Tensor], Sequence[int], int], None]:
    """Return the launch of a compiled kernel as a call of the C function that Triton made for its signature."""
    compiled, hooks = launched.compiled, knobs.runtime
    launcher = compiled.run
    assert not launcher.global_scratch_size and not launcher.profile_scratch_size, "no kernel asks for scratch memory"
    grid = (*launched.grid, 1, 1)[:3]
    call, maps = _unwrapped(launcher.launch)
    template: list[Any] = [*grid, 0, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
    template += [None, None, compiled.packed_metadata, None, None, None]
    memory: list[tuple[int, int, int]] = []
    mapped: list[tuple[int, int, int, Callable[[int], Any]]] = []
    varying: list[tuple[int, int, int]] = []
    described = iter(maps)
    for name, argument in launched.arguments.items():
        at = len(template)
        if isinstance(argument, Shape):
            pointer = pointers[name]
            mapped.append((at, pointer.slot, pointer.offset, _Maps(argument, next(described))))
            template += [None, *argument.shape, *argument.strides]
            continue
        if name in pointers:
            memory.append((at, pointers[name].slot, pointers[name].offset))
        elif type(argument) is Varying:
            varying.append((at, argument.place, argument.beyond))
        template.append(argument)

    def launch(slots: list[Tensor], numbers: Sequence[int], stream: int) -> None:
        arguments = template.copy()
        arguments[3] = stream
        for i, slot, offset in memory:
            arguments[i] = slots[slot].data_ptr() + offset
        for i, slot, offset, map_at in mapped:
            arguments[i] = map_at(slots[slot].data_ptr() + offset)
        for i, place, beyond in varying:
            arguments[i] = numbers[place] + beyond
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler
            metadata = compiled.launch_metadata(grid, stream, *launched.arguments.values())
            arguments[10:13] = metadata, hooks.launch_enter_hook, hooks.launch_exit_hook
        call(*arguments)

    return launch


class _Maps:
    """The tensor maps of one argument, by address: what they say follows from that and from what never changes."""

    def __init__(self, shape: Shape, metadata: dict[str, Any]) -> None:
        self._shape, self._metadata = shape, metadata
        self._known: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= MAX_MAPS:
                self._known = {}
            known = self._known[address] = self._make(address)
        return known

    def _make(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return make_tensordesc_arg(_Described(_Address(address), *self._shape), self._metadata)[0]


class _Address(NamedTuple):
    """Stands for a tensor of which a tensor map only asks where it is."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Described(NamedTuple):
    """A tensor descriptor whose tensor is an address."""

    base: _Address
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str


def _unwrapped(launch: Callable) -> tuple[Callable, Sequence[dict[str, Any]]]:
    """Return the C function of a launcher, which takes tensor maps, and what Triton knows of each map.

    Triton's own wrapper builds the maps anew in every launch.
    """
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "tensordesc_meta" not in names:
        return launch, ()
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True))
    return cells["launcher"], cells["tensordesc_meta"]


SUPPORTED = "Triton 3.6 is needed for repeating launches"


def supports(version: str = triton.__version__) -> bool:
    """Whether launches of this Triton can be repeated: its launchers' arguments are known."""
    return version.split(".")[:2] == ["3", "6"]
