"""Kernels that are launched, and launches whose every argument but the pointers is worked out before.

`jit` makes a kernel of a function as `triton.jit` does. Launched under `watching`, it also tells what was launched; a
`Launch` repeats that with other pointers and numbers, past Triton's binding of arguments, which takes longer than the
launch itself.

Arguments that belong together are passed as one NamedTuple, whose parts have dotted names: "out.stream".
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

from halfbyte.kernels.calling import Called, Launcher, Maps, Shape

RELEASED = {"enable_fp_fusion": True}
"""Options of launches that do not name them: Triton's defaults, of which Triton 3.10 changes this one."""


@dataclass(frozen=True, eq=False)
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
        if type(other) is not int:
            return NotImplemented
        return Varying(self.place, self.value + other, self.beyond + other)

    __radd__ = __add__

    def __bool__(self) -> bool:
        raise TypeError(f"number {self.place} varies between calls: nothing but kernels may depend on its value")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __hash__ = None  # type: ignore[assignment]


class Watcher(Protocol):
    """Who is told of launches."""

    def launched(self, launch: Launched) -> None: ...


class PutOff(NamedTuple):
    """A launch that is put off.

    kernel, args, grid, options: as `kernel[grid](*args, **options)` takes them.
    """

    kernel: Any
    args: tuple
    grid: tuple[int, ...]
    options: dict[str, Any]

    def run(self, compile_only: bool = False) -> None:
        """Launch it now, or see to it that it is compiled."""
        self.kernel.run(*self.args, grid=self.grid, warmup=compile_only, **self.options)


class Deferring(Protocol):
    """Who lets launches wait."""

    def put_off(self, asked: PutOff) -> None: ...

    def launch_waiting(self) -> None: ...


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


class _Watchers(threading.local):
    last: Any = None
    deferring: Deferring | None = None
    events: list[Any] | None = None


_WATCHERS = _Watchers()  # whose defaults are found faster than a getattr's


@contextmanager
def watching(watcher: Watcher, deferring: Deferring | None = None) -> Iterator[None]:
    """Tell `watcher` of every launch of this thread; the innermost one is told.

    Args:
        watcher: is told.
        deferring: is given each launch instead, to be run outside of this.
    """
    _launch_waiting()
    before = _WATCHERS.last, _WATCHERS.deferring
    _WATCHERS.last, _WATCHERS.deferring = watcher, deferring
    try:
        yield
    finally:
        _WATCHERS.last, _WATCHERS.deferring = before


def _launch_waiting() -> None:
    """Launch what was asked for before something else is done with launches."""
    if _WATCHERS.deferring is not None:
        _WATCHERS.deferring.launch_waiting()


def watcher() -> Any:
    """Return who watches this thread's launches, or None."""
    return _WATCHERS.last


@contextmanager
def rehearsing() -> Iterator[list[Any]]:
    """Launch nothing in this thread; give the list of what would be: a `route.Choice` each, and each `Launched`."""
    _launch_waiting()
    before, events = rehearsal(), []
    _WATCHERS.events = events
    try:
        yield events
    finally:
        _WATCHERS.events = before


def rehearsal() -> list[Any] | None:
    """Return the list of the innermost `rehearsing`, None outside."""
    return _WATCHERS.events


def _tell(kernel: Any, compiled: Any, grid: Sequence[int], args: tuple, kwargs: dict[str, Any]) -> None:
    told = watcher()
    if told is not None:
        told.launched(_launched(kernel, compiled, grid, args, kwargs))


def _launched(kernel: Any, compiled: Any, grid: Sequence[int], args: tuple, kwargs: dict[str, Any]) -> Launched:
    names, options = kernel.parameters, dict(kwargs)
    arguments = dict(zip(names, args, strict=False))
    arguments.update((name, options.pop(name)) for name in names[len(args) :])
    return Launched(kernel, compiled, tuple(grid), arguments, options)


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return arguments as Triton knows them."""
    return [with_parts("", value, _number) for value in values]


def _number(name: str, value: Any) -> Any:
    return value.value if type(value) is Varying else value


def is_compound(argument: Any) -> bool:
    """Whether an argument is a NamedTuple of arguments."""
    return isinstance(argument, tuple) and hasattr(argument, "_fields")


def with_parts(name: str, argument: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return an argument with change(dotted name, part) of all its parts; itself is its part if it has none."""
    if is_compound(argument):
        named = zip(argument._fields, argument, strict=True)
        return type(argument)(*(with_parts(f"{name}.{field}", part, change) for field, part in named))
    return change(name, argument)


def _unspecialized(name: str, value: Any, told: tuple[Any, Any], names: frozenset[str]) -> tuple[Any, Any]:
    """Return Triton's (type, specialization) of an argument, without those of its parts that are named."""
    if not is_compound(value):
        return (mangle_type(value), None) if name in names else told
    kinds, keys = [], []
    for field, part, kind, key in zip(value._fields, value, *told, strict=True):
        inner = f"{name}.{field}"
        kind, key = _unspecialized(inner, part, (kind, key), names | {inner} if name in names else names)
        kinds.append(kind), keys.append(key)
    return type(value)(*kinds), type(value)(*keys)


def _names(fn: Callable) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the parameters of a kernel in order, and those that it is compiled for."""
    parameters = inspect.signature(fn).parameters
    return tuple(parameters), frozenset(name for name, p in parameters.items() if "constexpr" in str(p.annotation))


_PARSING = threading.RLock()


class KernelSource(ASTSource):
    """What is compiled. One thread at a time parses it: where two do, CPython's `ast.parse` may raise SystemError."""

    def hash(self) -> str:
        if self.fn.hash is not None:  # parsed before, and nobody is to wait for another kernel's IR
            return super().hash()
        with _PARSING:
            return super().hash()

    def make_ir(self, *arguments: Any) -> Any:
        with _PARSING:
            return super().make_ir(*arguments)


class Kernel(JITFunction):
    """A compiled kernel."""

    def __init__(self, fn: Callable, do_not_specialize: Sequence[str]) -> None:
        super().__init__(fn, do_not_specialize=do_not_specialize)
        self.parameters, self.constants = _names(fn)
        self.unspecialized = frozenset(do_not_specialize)

    def create_binder(self) -> tuple:
        """Return what Triton keeps for a device, the binder of arguments last."""
        *known, backend, _ = super().create_binder()
        self.ASTSource = KernelSource
        return *known, backend, self.binder(backend)

    def binder(self, backend: Any) -> Callable[..., tuple]:
        """Return Triton's binder, which specializes all parts of a tuple, without those of `do_not_specialize`."""
        bind = create_function_from_signature(self.signature, self.params, backend)
        inside = {name.split(".")[0] for name in self.unspecialized}
        places = [(i, name) for i, name in enumerate(self.parameters) if name in inside]

        def bind_parts(*args: Any, **kwargs: Any) -> tuple:
            named = dict(kwargs)  # options are among them
            bound, told, options = bind(*args, **named)
            for i, name in places:
                if is_compound(bound[name]):
                    told[i] = _unspecialized(name, bound[name], told[i], self.unspecialized)
            return bound, told, options

        return bind_parts

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        """Launch it, and tell who watches."""
        if (events := rehearsal()) is not None:
            events.append(_launched(self, None, grid, args, kwargs))
            return None
        if not warmup and _WATCHERS.deferring is not None:
            return _WATCHERS.deferring.put_off(PutOff(self, args, grid, kwargs))
        named = {**RELEASED, **dict(zip(kwargs, _plain(kwargs.values()), strict=True))}
        compiled = super().run(*_plain(args), grid=grid, warmup=warmup, **named)
        if not warmup:
            _tell(self, compiled, grid, args, kwargs)
        return compiled


class InterpretedKernel(InterpretedFunction):
    """A kernel in Triton's interpreter."""

    def __init__(self, fn: Callable, do_not_specialize: Sequence[str]) -> None:
        super().__init__(fn, do_not_specialize=do_not_specialize)
        self.parameters, self.constants = _names(fn)
        self.unspecialized = frozenset(do_not_specialize)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        """Interpret it, and tell who watches."""
        if (events := rehearsal()) is not None:
            events.append(_launched(self, None, grid, args, kwargs))
            return None
        if warmup:
            return None  # there is nothing to compile
        if _WATCHERS.deferring is not None:
            return _WATCHERS.deferring.put_off(PutOff(self, args, grid, kwargs))
        named = dict(zip(kwargs, _plain(kwargs.values()), strict=True))
        with _disable_current_modes():  # the interpreter computes with torch
            super().run(*_plain(args), grid=grid, warmup=False, **named)
        _tell(self, None, grid, args, kwargs)
        return None


def jit(fn: Callable | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Make a kernel that is launched of a function; `triton.jit` is for device functions.

    Args:
        fn: the function, if there is nothing else to say.
        do_not_specialize: parameters, and parts of them ("out.stream"), that one compilation serves with any value.
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


class Program:
    """The text of a function that repeats steps, and the values that it names."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._addresses: set[int] = set()

    def known_address(self, slot: int) -> str:
        """Return a line that asks a tensor for its address, once."""
        line = f"p{slot} = {self.address(slot)}"
        self._addresses.add(slot)
        return line

    def address(self, slot: int) -> str:
        """Return how the text says where the memory of a slot begins."""
        return f"p{slot}" if slot in self._addresses else f"{self.name(slot)}.data_ptr()"

    def name(self, slot: int) -> str:
        """Return the variable that holds the tensor of a slot."""
        return f"s{slot}"

    def constant(self, value: Any) -> str:
        """Return how the text says a value: as a number where it is one, by a name else."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name


class Launch:
    """One launch, to be repeated with other memory and numbers.

    Args:
        launched: what is repeated.
        pointers: of each argument or part of one that is a tensor or a tensor descriptor, its place.
    """

    def __init__(self, launched: Launched, pointers: dict[str, Pointer]) -> None:
        self._launched, self._pointers = launched, pointers

    @property
    def used(self) -> set[int]:
        """The slots whose memory is used."""
        return {pointer.slot for pointer in self._pointers.values()}

    made: tuple[int, ...] = ()
    pure = False

    def moved(self, slot: int, places: dict[int, int]) -> Launch:
        """Return it with the memory of some slots in another: `places` says how many bytes from its start."""
        pointers = {
            name: Pointer(slot, places[at.slot] + at.offset, at.dtype) if at.slot in places else at
            for name, at in self._pointers.items()
        }
        return Launch(self._launched, pointers)

    @property
    def numbers(self) -> list[Varying]:
        """The arguments, and parts of arguments, that vary."""
        found: list[Any] = []
        for argument in self._launched.arguments.values():
            with_parts("", argument, lambda _, part: found.append(part))
        return [part for part in found if type(part) is Varying]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._launched.kernel.__name__

    def line(self, program: Program) -> str:
        """Return a line that launches: `stream` and n0, n1, … of the numbers are known where it stands."""
        return self._interpreted(program) if self._launched.compiled is None else self._direct(program)

    def _interpreted(self, program: Program) -> str:

        def text(name: str, argument: Any) -> str:
            if isinstance(argument, Shape):
                return f"{program.constant(argument.on)}({there(name)})"
            if self._moves(name, argument):
                named = zip(argument._fields, argument, strict=True)
                parts = ", ".join(text(f"{name}.{field}", part) for field, part in named)
                return f"{program.constant(type(argument))}({parts})"
            return there(name) if name in self._pointers else _varying(argument) or program.constant(argument)

        def there(name: str) -> str:
            slot, offset, dtype = self._pointers[name]
            return f"{program.constant(_tensor_at)}({program.name(slot)}, {offset}, {program.constant(dtype)})"

        arguments = [f"{name}={text(name, argument)}" for name, argument in self._launched.arguments.items()]
        options = program.constant(self._launched.options)
        kernel = program.constant(self._launched.kernel[self._launched.grid])
        return f"{kernel}({', '.join(arguments)}, **{options})"

    def _direct(self, program: Program) -> str:
        """Call the C function that Triton launches with."""
        compiled, grid = self._launched.compiled, (*self._launched.grid, 1, 1)[:3]
        launcher = Launcher(compiled.run)
        described, arguments = iter(launcher.maps), []
        for name, argument in self._launched.arguments.items():
            if isinstance(argument, Shape):
                tensor_maps = Maps(argument, next(described))
                arguments += [f"{program.constant(tensor_maps)}({self._address(name, program)})"]
                arguments += map(str, (*argument.shape, *argument.strides))
            else:
                is_constant = name in self._launched.kernel.constants
                arguments.append("None" if is_constant else self._passed(name, argument, program))
        before = [*map(str, grid), "stream", str(compiled.function), *map(repr, launcher.flags)]
        hooks = program.constant(_Hooks(compiled, grid, tuple(self._launched.arguments.values())))
        metadata = program.constant(compiled.packed_metadata)
        # Spelled out for either case: a call with a star makes a list and a tuple of all that it passes.
        told, plain = (
            launcher.text(Called(before, given, metadata, arguments), program.constant)
            for given in (f"*{hooks}(stream)", "None, None, None")
        )
        return f"{told} if watched else {plain}"

    def _moves(self, name: str, argument: Any) -> bool:
        """Whether an argument has parts that are not the same in every call."""
        found: list[bool] = []
        with_parts(name, argument, lambda n, part: found.append(n in self._pointers or type(part) is Varying))
        return is_compound(argument) and any(found)

    def _address(self, name: str, program: Program) -> str:
        slot, offset, _ = self._pointers[name]
        return program.address(slot) + (f" + {offset}" if offset else "")

    def _passed(self, name: str, argument: Any, program: Program) -> str:
        """Return the text of an argument as the C function takes it; what never changes is one tuple, made before."""
        if name in self._pointers:
            return self._address(name, program)
        if self._moves(name, argument):
            named = zip(argument._fields, argument, strict=True)
            return f"({''.join(self._passed(f'{name}.{field}', part, program) + ', ' for field, part in named)})"
        if is_compound(argument):
            return program.constant(with_parts(name, argument, lambda _, part: _passable(part)))
        return _varying(argument) or program.constant(_passable(argument))


class _Hooks:
    """What a profiler that hooks into Triton's launches is given, for one launch."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
        self._compiled, self._grid, self._arguments = compiled, grid, arguments

    def __call__(self, stream: int) -> tuple:
        metadata = self._compiled.launch_metadata(self._grid, stream, *self._arguments)
        return metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def hooked() -> bool:
    """Whether a profiler hooks into Triton's launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _passable(argument: Any) -> Any:
    """Return a number; None for what is compiled in."""
    return argument if type(argument) in (int, float, bool) else None


def _varying(argument: Any) -> str | None:
    return f"n{argument.place} + {argument.beyond}" if type(argument) is Varying else None


def _tensor_at(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return memory from `offset` bytes after the first element of `tensor` on, as a vector of one element."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    assert start % dtype.itemsize == 0, "a view of another dtype begins between two of its elements"
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), start // dtype.itemsize, (1,), (1,)
    )
