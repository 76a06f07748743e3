"""The C functions behind Triton's launchers, called past everything that Triton does before, release by release.

Triton 3.6 makes one such function for each signature, whose arguments are the kernel's. From 3.7 on there is one for
all kernels, which takes the kernel's arguments as a sequence and is told how to read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

RELEASES = ("3.6", "3.7", "3.8", "3.9")
"""Releases of Triton whose launchers are known."""

SUPPORTED = f"Triton {RELEASES[0]} to {RELEASES[-1]} for NVIDIA GPUs is needed for repeating launches"

MAX_MAPS = 64
"""Tensor maps that one argument keeps, one for each address that its tensor had."""


def supports(version: str = triton.__version__) -> bool:
    """Whether launches of this Triton can be repeated: its launchers' arguments are known."""
    return ".".join(version.split(".")[:2]) in RELEASES and torch.version.hip is None


class Called(NamedTuple):
    """Texts of what a launch passes.

    before: grid, stream and flags.
    hooks: for a profiler; `metadata, enter, exit`.
    metadata: what Triton packed when it compiled.
    arguments: the kernel's.
    """

    before: Sequence[str]
    hooks: str
    metadata: str
    arguments: Sequence[str]


class Launcher:
    """What Triton launches a compiled kernel with.

    Args:
        launcher: Triton's `CudaLauncher`.
    """

    def __init__(self, launcher: Any) -> None:
        assert not launcher.global_scratch_size and not launcher.profile_scratch_size, "no kernel asks for scratch"
        assert not getattr(launcher, "gsan_enabled", False), "an instrumented kernel takes arguments of its own"
        self._function, self.maps = _unwrapped(launcher.launch)
        self.flags = bool(launcher.launch_cooperative_grid), bool(launcher.launch_pdl)
        annotations = getattr(launcher, "arg_annotations", None)
        self._reading = None if annotations is None else (annotations, launcher.kernel_signature)

    def text(self, called: Called, constant: Callable[[Any], str]) -> str:
        """Return the call as text.

        Args:
            called: what is passed.
            constant: returns the name of a value in the text.
        """
        before, after = ", ".join(called.before), "".join(f"{argument}, " for argument in called.arguments)
        function, no_scratch = constant(self._function), "None, None"
        if self._reading is None:
            return f"{function}({before}, {no_scratch}, {called.metadata}, {called.hooks}, {after})"
        reading = ", ".join(map(constant, self._reading))
        return f"{function}({before}, {called.metadata}, {called.hooks}, {no_scratch}, {reading}, ({after}))"


def _unwrapped(launch: Callable) -> tuple[Callable, Sequence[dict[str, Any]]]:
    """Return the C function of a launcher, which takes tensor maps, and what Triton knows of each map.

    Triton's own wrapper builds the maps anew in every launch.
    """
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "tensordesc_meta" not in names:
        return launch, ()
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True))
    return cells["launcher"], cells["tensordesc_meta"]


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

    def on(self, tensor: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a tensor that begins where its did."""
        return TensorDescriptor(tensor, *map(list, self[:3]), self.padding)


class Maps:
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

        given = Described(Address(address), *self._shape), self._metadata
        beside = len(inspect.signature(make_tensordesc_arg).parameters) - len(given)
        return make_tensordesc_arg(*given, *[None] * beside)[0]


class Address(NamedTuple):
    """Stands for a tensor of which a tensor map only asks where it is."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Described(NamedTuple):
    """A tensor descriptor whose tensor is an address."""

    base: Address
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str
    round_f32_to_tf32: bool = False
