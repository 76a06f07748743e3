"""Launches that are told and repeated: in the interpreter, and as calls of what Triton compiled, which stands here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.kernels import calling, launch
from halfbyte.kernels.calling import Shape
from halfbyte.kernels.launch import Launch, Launched, Pointer, Program, Varying, jit, watching


@jit(do_not_specialize=["number"])
def add_kernel(x_ptr, out_ptr, number, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + number)


class Watcher:
    def __init__(self):
        self.seen = []

    def launched(self, launched):
        self.seen.append(launched)


def test_who_watches_is_told():
    """Parameters are told by name, in their order, however they were given; options apart."""
    x, out, inner, outer = torch.zeros(4), torch.zeros(4), Watcher(), Watcher()
    with watching(outer):
        with watching(inner):
            add_kernel[(1,)](x, SIZE=4, number=Varying(0, 2), out_ptr=out, num_warps=2)
        add_kernel[(1, 1)](x, out, 3, SIZE=4)
    add_kernel[(1,)](x, out, 4, SIZE=4)
    assert (out == 4).all() and len(inner.seen) == len(outer.seen) == 1 and launch.watcher() is None
    told = inner.seen[0]
    assert list(told.arguments) == ["x_ptr", "out_ptr", "number", "SIZE"] and told.options == {"num_warps": 2}
    assert told.arguments["x_ptr"] is x and told.arguments["out_ptr"] is out and told.arguments["number"].place == 0
    assert told.kernel is add_kernel and told.compiled is None and told.grid == (1,)
    assert outer.seen[0].grid == (1, 1) and outer.seen[0].arguments["number"] == 3


def test_watching_ends_with_an_error():
    with pytest.raises(RuntimeError), watching(Watcher()):
        raise RuntimeError
    assert launch.watcher() is None


def test_kernels_are_of_the_kind_that_triton_makes():
    assert isinstance(add_kernel, InterpretedFunction) and add_kernel.unspecialized == {"number"}
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        compiled = jit(add_kernel.fn)
    assert isinstance(compiled, launch.Kernel) and compiled.parameters == add_kernel.parameters


def test_sums_of_numbers():
    total = 4 + (Varying(2, 10) + 3)
    assert (total.place, total.value, total.beyond) == (2, 17, 7)
    for wrong in (torch.ones(2), 1.5, True, Varying(0, 1)):
        with pytest.raises(TypeError):
            total + wrong
        with pytest.raises(TypeError):
            wrong + total


class Compiled:
    """What Triton returns of a launch, as far as a repetition uses it, with a launcher that notes its arguments."""

    function, packed_metadata = 4711, (1, 4, 0)

    def __init__(self, **flags):
        self.calls = []
        given = {"launch_cooperative_grid": False, "launch_pdl": False}
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        self.run = SimpleNamespace(
            launch=lambda *arguments: self.calls.append(arguments), **{**given, **scratch, **flags}
        )

    def launch_metadata(self, grid, stream, *arguments):
        return "metadata", grid, stream


def program_of(step: Launch):
    """Return step as a function of (slots, numbers, stream, watched)."""
    program = Program()
    text = f"def repeat(slots, n0, stream, watched):\n    s0, s1 = slots\n    {step.line(program)}"
    exec(text, program.values)
    return program.values["repeat"]


KERNEL = SimpleNamespace(__name__="k", constants={"KIND"})
ARGUMENTS = {
    "x_ptr": None,
    "out_ptr": None,
    "number": Varying(0, 12, 3),
    "floor": 1e-30,
    "rows": 7,
    "full": True,
    "KIND": "tensor",
}


def test_compiled_launch_gets_addresses_numbers_and_stream():
    compiled = Compiled(launch_pdl=True)
    step = Launch(
        Launched(KERNEL, compiled, (5, 2), ARGUMENTS, {}),
        {"x_ptr": Pointer(0, 0, torch.float32), "out_ptr": Pointer(1, -24, torch.int32)},
    )
    assert step.used == {0, 1} and step.name == "k" and [n.place for n in step.numbers] == [0]
    repeat = program_of(step)
    for _ in range(2):
        x, out = torch.zeros(3), torch.zeros(64)[16:]
        number = (1 << 31) + int(x.data_ptr() % 7)
        repeat((x, out), number, 99, False)
        wanted = (5, 2, 1, 99, 4711, False, True, None, None, (1, 4, 0), None, None, None)
        assert compiled.calls.pop() == (*wanted, x.data_ptr(), out.data_ptr() - 24, number + 3, 1e-30, 7, True, None)


class Inner(NamedTuple):
    number: Any
    other_ptr: Any
    none: Any = None


class Outer(NamedTuple):
    x_ptr: Any
    inner: Inner
    floor: float = 0.5


def test_parts_of_arguments_are_passed_like_arguments():
    """Tuples go as they are nested; one that never changes is made once."""
    compiled = Compiled()
    fixed = Outer(2, Inner(3, None), 0.25)
    arguments = {"moves": Outer(None, Inner(Varying(0, 12, 3), None)), "fixed": fixed, "KIND": Inner(1, 2)}
    pointers = {"moves.x_ptr": Pointer(0, 8, torch.float32), "moves.inner.other_ptr": Pointer(1, 0, torch.int32)}
    step = Launch(Launched(KERNEL, compiled, (1,), arguments, {}), pointers)
    assert step.used == {0, 1} and [n.place for n in step.numbers] == [0]
    repeat, seen = program_of(step), []
    for number in (5, 6):
        x, other = torch.zeros(3), torch.zeros(2)
        repeat((x, other), number, 0, False)
        moves, same, kind = compiled.calls.pop()[13:]
        assert moves == (x.data_ptr() + 8, (number + 3, other.data_ptr(), None), 0.5)
        assert same == fixed and kind is None
        seen.append(same)
    assert seen[0] is seen[1]


def test_binder_specializes_no_part_that_is_named():
    """A stream of 16 or of 1 is compiled as one of 7; other parts and those of another argument are not."""

    def two_kernel(row, col, tiles, SIZE: tl.constexpr): ...

    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        kernel = jit(do_not_specialize=["row.inner.number", "tiles"])(two_kernel)
    backend, x = make_backend(GPUTarget("cuda", 90, 32)), torch.zeros(4)
    bind = kernel.binder(backend)
    for number in (1, 7, 16):
        both = Outer(x, Inner(number, 16, None))
        bound, told, _ = bind(both, both, Inner(1, 16), SIZE=2)
        _, signature, constants, attributes = kernel._pack_args(backend, {}, bound, told, None)
        assert signature["row"] == ("*fp32", ("i32", "i32", "constexpr"), "fp32")
        assert (1, 1, 0) in attributes if number == 16 else ((1, 1, 0) in constants) == (number == 1)
        assert (0, 1, 0) not in attributes and (0, 1, 0) not in constants and (0, 1, 1) in attributes
        assert signature["tiles"][:2] == ("i32", "i32") and (2, 1) not in attributes


def test_profiler_is_told_of_repeated_launches(monkeypatch):
    compiled = Compiled()
    repeat = program_of(Launch(Launched(KERNEL, compiled, (5,), {"rows": 7}, {}), {}))
    assert not launch.hooked()
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert launch.hooked()
    repeat((None, None), 0, 99, True)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert compiled.calls[0][10:13] == (("metadata", (5, 1, 1), 99), *hooks)


def test_kernel_that_asks_for_scratch_memory_is_refused():
    step = Launch(Launched(KERNEL, Compiled(global_scratch_size=128), (1,), {}, {}), {})
    with pytest.raises(AssertionError, match="scratch"):
        program_of(step)


def test_tensor_maps_follow_the_address(monkeypatch):
    """A map is made once for an address, and few are kept."""
    made = []
    monkeypatch.setattr(calling.Maps, "_make", lambda self, address: made.append(address) or f"map of {address}")
    compiled, taken, meta = Compiled(), [], [{"fp4_padded": False}]

    def wrapped(launcher, tensordesc_meta):
        return lambda *arguments: launcher(*arguments, tensordesc_meta)

    compiled.run.launch = wrapped(lambda *arguments: taken.append(arguments), meta)
    shape = Shape.of(TensorDescriptor(torch.zeros(6, 8), [6, 8], [8, 1], [2, 8]))
    arguments = {"desc": shape, "last": 3}
    step = Launch(Launched(KERNEL, compiled, (1,), arguments, {}), {"desc": Pointer(1, 16, torch.float32)})
    repeat, kept = program_of(step), [torch.zeros(64) for _ in range(calling.MAX_MAPS + 1)]
    for tensor in (kept[0], kept[1], kept[0]):
        repeat((None, tensor), 0, 0, False)
        assert taken.pop()[13:] == (f"map of {tensor.data_ptr() + 16}", 6, 8, 8, 1, 3)
    assert len(made) == 2
    for tensor in kept[2:]:
        repeat((None, tensor), 0, 0, False)
    repeat((None, kept[0]), 0, 0, False)
    assert len(made) == len(kept) + 1, "all are forgotten where there are too many"


def test_tensor_map_asks_an_address_only():
    described = calling.Described(calling.Address(4096), *Shape((6, 8), (8, 1), (2, 8), "zero"))
    assert described.base.data_ptr() == 4096 and described.shape == (6, 8) and described.padding == "zero"


def test_interpreted_descriptor_is_that_of_the_memory_given():
    whole = torch.arange(32.0)
    shape = Shape.of(TensorDescriptor(whole, [4, 8], [8, 1], [2, 8]))
    descriptor = shape.on(launch._tensor_at(whole[4:], 16, torch.float32))
    assert descriptor.base.data_ptr() == whole.data_ptr() + 32
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([4, 8], [8, 1], [2, 8])


@pytest.mark.parametrize(
    "version, repeats", [("3.6.0", True), ("3.6.1+git", True), ("3.5.9", False), ("3.60.0", False)]
)
def test_only_launchers_that_are_known_are_repeated(version, repeats):
    assert calling.supports(version) == repeats


def test_amds_launchers_are_not_known(monkeypatch):
    assert calling.supports("3.6.0")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not calling.supports("3.6.0")
