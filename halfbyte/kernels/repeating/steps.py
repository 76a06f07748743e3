"""The steps of a record beside launches: memory that is allocated, and torch ops; each says its line of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.launch import Program


@dataclass(frozen=True)
class Allocation:
    """Memory that is not initialized."""

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    pure = True
    used: frozenset[int] = frozenset()

    def line(self, program: Program) -> str:
        """Return a line that does it."""
        named = program.constant(self.dtype), program.constant(self.device)
        if self.device.type == "cuda":
            new = f"{program.constant(empty_on_gpu)}({self.shape}, {self.stride}, {named[0]})"
        else:
            empty = program.constant(torch.empty_strided)
            new = f"{empty}({self.shape}, {self.stride}, dtype={named[0]}, device={named[1]})"
        return f"{program.name(self.slot)} = {new}"

    def constant(self) -> Tensor:
        """Return the tensor itself, where it holds nothing."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @property
    def made(self) -> tuple[int, ...]:
        """The slots that it fills."""
        return (self.slot,)

    @property
    def bytes(self) -> int:
        """From its first element to its last."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize if 0 not in self.shape else 0


class Slot(int):
    """Stands for a tensor among the arguments of an op."""


@dataclass(frozen=True)
class Op:
    """A torch op, such as a view or a sum.

    made: a slot for each tensor that it returned, in order; those of tensors that it was given, too.
    pure: whether it is needed only for what it returns.
    """

    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    made: tuple[int, ...]
    pure: bool

    def line(self, program: Program) -> str:
        """Return a line that does it."""
        given = [text_of(argument, program) for argument in self.arguments]
        given += [f"{name}={text_of(argument, program)}" for name, argument in self.named.items()]
        call = f"{program.constant(self.function)}({', '.join(given)})"
        returns = self.function._schema.returns
        if self.used.issuperset(self.made):  # changed in place: it has its name, which may be that of a constant
            return call
        names = ", ".join(map(program.name, self.made))
        if len(returns) == 1 and str(returns[0].type) == "Tensor":
            return f"{names} = {call}"
        return f"{names}, = {program.constant(tensors_in)}({call})"

    @property
    def used(self) -> set[int]:
        """The slots that it reads."""
        return {int(slot) for slot in found_in((self.arguments, self.named), Slot)}


@dataclass(frozen=True)
class View(Op):
    """An op that only looks at memory that the record allocated, made past torch's dispatcher.

    shape, stride: of what it makes.
    offset: elements from the first of what it looks at.
    """

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0

    def as_op(self) -> Op:
        """Return the op itself, whose result torch knows for a view."""
        return Op(self.function, self.arguments, self.named, self.made, self.pure)

    def line(self, program: Program) -> str:
        """Return a line that does it."""
        (base,) = self.used
        place = f"{program.name(base)}, {self.shape}, {self.stride}, {self.offset}"
        return f"{program.name(self.made[0])} = {program.constant(reinterpreted)}({place})"


def text_of(value: Any, program: Program) -> str:
    """Return how the text of a program says an op's argument."""
    if isinstance(value, Slot):
        return program.name(value)
    if type(value) in (tuple, list) and found_in(value, Slot):
        inside = "".join(f"{text_of(item, program)}, " for item in value)
        return f"[{inside}]" if type(value) is list else f"({inside})"
    return program.constant(value)


def _empty_on_gpu() -> Callable[[tuple, tuple, torch.dtype], Tensor]:
    """Return the function with which inductor's code allocates on the current GPU, or torch's own."""
    try:
        return torch._C._dynamo.guards._empty_strided_cuda
    except AttributeError:
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


empty_on_gpu = _empty_on_gpu()
reinterpreted: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)
"""The function with which inductor's code looks at memory of its own; takes a tensor, shape, strides and an offset."""


def map_nested(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `change` of everything of one type in its place."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: map_nested(item, kind, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_nested(item, kind, change) for item in value)
    return value


def found_in(value: Any, kind: type) -> list[Any]:
    """Return what nested arguments hold of one type, in order."""
    found: list[Any] = []
    map_nested(value, kind, found.append)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested arguments, in order."""
    return found_in(value, Tensor)
