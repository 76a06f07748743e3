"""Launch kernels for a GPU that is not here: their PTX, as Triton compiles it for a target, is run on CPU tensors.

Triton's interpreter runs the source of a kernel and knows no inline assembly; this runs what a GPU would be given, all
threads of a launch at once, each instruction one operation of numpy. It is exact: products are added with one rounding
as `fma` says, conversions round as their names say. Two approximations are rounded correctly instead (rcp.approx.ftz,
which kernels correct by a step of Newton, and ex2.approx, whose last bits no check asks for). Instructions that no such
kernel has (matrix products, tensor maps, atomics) are refused by name.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from ptx_arithmetic import BITS, FLAT, FUNCTIONS, SIGNED, bits_of, joined, raw, typed
from ptx_program import Program, Statement, parse
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from halfbyte.kernels import record
from halfbyte.kernels.target import Target, assumed


class Access(NamedTuple):
    """What one instruction reads or writes of one tensor's memory, by the threads that do.

    name: "ld" or "st".
    tensor: its number among the launch's.
    program, warp: of each thread; warps are numbered through all programs.
    offset: bytes from where the tensor's memory begins.
    size: bytes of each thread.
    """

    name: str
    tensor: int
    program: np.ndarray
    warp: np.ndarray
    offset: np.ndarray
    size: int


@contextmanager
def emulated(target: Target, watch: Callable[[Access], None] | None = None) -> Iterator[list[str]]:
    """Give the names of the kernels that launchers launch inside the context, which run here as `target` would.

    Args:
        watch: is told what instructions read and write of tensors.

    Raises:
        NotImplementedError: a kernel has an instruction that is not emulated.
    """
    names: list[str] = []

    def run(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        names.append(kernel.fn.__name__)
        _launch(kernel, target, args, kwargs, grid, watch)

    original = JITFunction.run
    JITFunction.run = run
    try:
        with assumed(target):
            yield names
    finally:
        JITFunction.run = original


_programs: dict[str, tuple[Program, int]] = {}


def _launch(kernel: JITFunction, target: Target, args: tuple, kwargs: dict, grid: Any, watch: Any) -> None:
    launch = record._specialized(kernel, target, args, kwargs)
    if launch.key not in _programs:
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        compiled = triton.compile(source, target=record.gpu(target), options=launch.options)
        _programs[launch.key] = parse(compiled.asm["ptx"]), compiled.metadata.shared
    program, shared = _programs[launch.key]
    _, binder = record._binder(kernel, target)
    options = {**kwargs, "debug": False, "instrumentation_mode": ""}
    bound = binder(*args, **options)[0]
    values: list[Any] = []
    tensors: list[torch.Tensor] = []
    for name, kind in launch.signature.items():
        _flatten(kind, bound[name], values, tensors)
    grid = grid(bound) if callable(grid) else grid
    grid = (*grid, 1, 1)[:3]
    _Machine(program, values, tensors, grid, 32 * launch.options["num_warps"], shared, watch).run()


def _flatten(kind: Any, value: Any, values: list, tensors: list[torch.Tensor]) -> None:
    """Append what a parameter passes, without what is compiled in."""
    if isinstance(kind, tuple):
        for one, part in zip(kind, value, strict=True):
            _flatten(one, part, values, tensors)
    elif kind != "constexpr":
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            value = value.data_ptr()
        values.append(value)


class _Machine:
    """One launch: the registers of all threads [programs * threads], global memory where tensors have it."""

    def __init__(
        self,
        program: Program,
        values: list,
        tensors: list[torch.Tensor],
        grid: tuple,
        threads: int,
        shared: int,
        watch: Callable[[Access], None] | None,
    ) -> None:
        self.program, self.threads, self.watch = program, threads, watch
        programs = int(np.prod(grid))
        self.total = programs * threads
        self.thread = np.tile(np.arange(threads, dtype=np.uint32), programs)
        self.block = np.repeat(np.arange(programs, dtype=np.uint32), threads)
        self.grid = grid
        self.registers: dict[str, np.ndarray] = {}
        self.parameters = {}
        padded = [*values, *[0] * (len(program.parameters) - len(values))]  # scratch memory of Triton's
        for (name, kind), value in zip(program.parameters, padded, strict=True):
            dtype = np.float32 if kind == "f32" else BITS[kind[1:]]
            self.parameters[name] = raw(np.float32(value)) if kind == "f32" else np.array(value).astype(dtype)
        self.shared = np.zeros((programs, max(shared, 16)), np.uint8)
        self.memory = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            view = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)
            self.memory.append((storage.data_ptr(), storage.nbytes(), view))

    def run(self) -> None:
        """Run all threads; of those that went different ways, those furthest behind go first, up to a barrier."""
        places = np.zeros(self.total, np.int64)
        end = len(self.program.statements)
        with np.errstate(all="ignore"):
            while True:
                place = self.next_place(places, end)
                if place >= end:
                    return
                active = None if bool((places == place).all()) else places == place
                statement = self.program.statements[place]
                mask = active
                if statement.guard is not None:
                    name, negated = statement.guard
                    holds = np.broadcast_to(self.registers[name] ^ negated, (self.total,))
                    mask = holds if active is None else holds & active
                where = slice(None) if active is None else active
                if statement.opcode.startswith("bra"):
                    taken = np.ones(self.total, bool) if mask is None else mask
                    going = np.ones(self.total, bool) if active is None else active
                    places = np.where(
                        going, np.where(taken, self.program.labels[statement.operands[0]], place + 1), places
                    )
                    continue
                if statement.opcode in ("ret", "exit"):
                    gone = np.ones(self.total, bool) if mask is None else mask
                    places = np.where(gone, end, np.where(places == place, place + 1, places))
                    continue
                if statement.opcode.startswith("bar."):
                    self.together(active, 32 if "warp" in statement.opcode else self.threads, places < end)
                self.step(statement, mask)
                places[where] = place + 1

    def next_place(self, places: np.ndarray, end: int) -> int:
        """Return the first place of threads that do not wait at a barrier for others; if all wait, the first."""
        first = int(places.min())
        if first >= end or not self.program.statements[first].opcode.startswith("bar.") or int(places.max()) == first:
            return first
        statements = self.program.statements
        free = (int(p) for p in np.unique(places) if p < end and not statements[p].opcode.startswith("bar."))
        return next(free, first)

    def together(self, mask: np.ndarray | None, size: int, alive: np.ndarray | None = None) -> None:
        """Refuse an instruction that some of `size` neighbouring threads reach and others, who go on, do not."""
        if mask is None:
            return
        idle = ~mask if alive is None else ~mask & alive
        split = mask.reshape(-1, size).any(axis=1) & idle.reshape(-1, size).any(axis=1)
        assert not split.any(), "threads that have to meet went different ways"

    def step(self, statement: Statement, mask: np.ndarray | None) -> None:
        """Run one statement in the threads of `mask`, or in all."""
        name, _, rest = statement.opcode.partition(".")
        if name in ("griddepcontrol", "bar"):
            return
        if name in ("ld", "st"):
            self.access(name, rest.split("."), statement.operands, mask)
            return
        if name in ("ldmatrix", "stmatrix"):
            self.move_matrices(name, rest.split("."), statement.operands, mask)
            return
        if name == "shfl":
            self.shuffle(rest.split(".")[1], statement.operands, mask)
            return
        to, *operands = statement.operands
        if name == "vote":
            self.vote(rest.split("."), to, operands, mask)
            return
        if name == "redux":
            self.reduce(rest.split("."), to, operands, mask)
            return
        if name == "mov":
            self.move(rest, to, operands[0], mask)
            return
        if name == "setp":
            self.set_predicate(rest, to, operands, mask)
            return
        if name == "prmt" and re.fullmatch(r"0x[0-3]{4}U?", operands[2]):
            operands = [operands[0], operands[0], operands[2]]  # none of the second's bytes is chosen: nobody writes it
        function = FUNCTIONS.get(name)
        if function is None:
            raise NotImplementedError(f"PTX instruction {statement.opcode!r} is not emulated")
        self.write(to, function(rest.split("."), [self.read(o) for o in operands]), mask)

    def read(self, operand: str) -> Any:
        """Return raw bits: of a register, or a number as Python has it, or a float's bits."""
        if operand in self.registers:
            return self.registers[operand]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return np.uint32(int(operand[2:], 16))
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return np.uint64(int(operand[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return int(operand.rstrip("U"), 0)
        if re.fullmatch(r"%rs?\d+", operand):  # nobody writes it: a half that is not used, unless something is wrong
            return np.uint16(0xFFFF) if operand.startswith("%rs") else np.uint32(0xFFFFFFFF)
        if operand.startswith("%tid."):
            return self.thread if operand.endswith("x") else np.uint32(0)
        if operand == "%laneid":
            return self.thread % np.uint32(32)
        if operand.startswith("%ctaid."):
            divisor = {"x": 1, "y": self.grid[0], "z": self.grid[0] * self.grid[1]}[operand[-1]]
            return (self.block // np.uint32(divisor)) % np.uint32(self.grid["xyz".index(operand[-1])])
        if operand.startswith("%nctaid."):
            return np.uint32(self.grid["xyz".index(operand[-1])])
        if operand == "global_smem":
            return 0
        raise NotImplementedError(f"PTX operand {operand!r} is not emulated")

    def write(self, to: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        if mask is not None and to in self.registers:
            old = self.registers[to]
            assert old.dtype == value.dtype, (to, old.dtype, value.dtype)
            value = np.where(mask, value, old)
        self.registers[to] = value

    def move(self, kind: str, to: Any, operand: Any, mask: np.ndarray | None) -> None:
        if isinstance(to, list):  # taken apart
            value, size = self.read(operand), int(kind[1:]) // len(to)
            for i, part in enumerate(to):
                self.write(part, (value >> value.dtype.type(size * i)).astype(BITS[str(size)]), mask)
        elif isinstance(operand, list):
            wide, size = BITS[kind[1:]], int(kind[1:]) // len(operand)
            value = np.zeros((), wide)
            for i, part in enumerate(operand):
                value = value | (bits_of(self.read(part), BITS[str(size)]).astype(wide) << wide(size * i))
            self.write(to, value, mask)
        elif kind == "pred":
            self.write(to, np.asarray(self.read(operand)) != 0, mask)
        else:
            width = {"bf16x2": "32", "f16x2": "32", "bf16": "16"}.get(kind, kind[1:])
            self.write(to, bits_of(self.read(operand), BITS[width]), mask)

    def set_predicate(self, rest: str, to: str, operands: list[str], mask: np.ndarray | None) -> None:
        how, *more, kind = rest.split(".")
        a, b = (typed(self.read(o), kind) for o in operands[:2])
        floats = kind in FLAT or kind == "bf16"
        unordered = floats and how.endswith("u")
        unordered |= how == "nan"  # whether there is one, and nothing else
        plain = how[:-1] if unordered and how != "nan" else how
        value = {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "nan": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
        }[plain](a, b)  # fmt: skip
        if floats:
            nan = np.isnan(a) | np.isnan(b)
            value = (value | nan) if unordered else (value & ~nan)
        if more:
            other = self.read(operands[2])
            value = {"and": np.logical_and, "or": np.logical_or}[more[0]](value, other)
        self.write(to, value, mask)

    def access(self, name: str, rest: list[str], operands: list, mask: np.ndarray | None) -> None:
        space, kind = rest[0], rest[-1]
        count = next((int(part[1:]) for part in rest if re.fullmatch(r"v\d", part)), 1)
        dtype = BITS[kind[1:]]
        if name == "ld":
            to, place = operands
        else:
            place, to = operands
        parts = to if isinstance(to, list) else [to]
        if space == "param":
            value = self.parameters[place[1:-1]]
            signed = SIGNED[value.dtype.type] if kind[0] == "s" else value.dtype
            self.write(parts[0], value.astype(signed).astype(BITS["64"] if parts[0].startswith("%rd") else dtype), mask)
            return
        base, _, offset = place[1:-1].partition("+")
        address = bits_of(self.read(base), np.uint64) + np.uint64(int(offset or 0) % 2**64)
        address = np.broadcast_to(address, (self.total,))
        chosen = np.arange(self.total) if mask is None else np.flatnonzero(mask)
        if not chosen.size:
            return
        address = address[chosen]
        size = np.dtype(dtype).itemsize
        assert not (address % np.uint64(size * count)).any(), f"{name}.{'.'.join(rest)}: not aligned"
        if space == "shared":
            flat = self.shared.reshape(-1)
            assert int(address.max()) + size * count <= self.shared.shape[1], "beyond shared memory"
            index = self.block[chosen].astype(np.int64) * self.shared.shape[1] + address.astype(np.int64)
            self._move_bytes(name, flat, index, dtype, parts, chosen, mask)
            return
        assert space == "global", space
        left = np.ones(len(chosen), bool)
        for tensor, (start, length, view) in enumerate(self.memory):
            here = left & (address >= np.uint64(start)) & (address < np.uint64(start + length))
            if here.any():
                index = (address[here] - np.uint64(start)).astype(np.int64)
                assert int(index.max()) + size * count <= length, f"{name}: beyond a tensor"
                if self.watch is not None:
                    threads = chosen[here]
                    self.watch(Access(name, tensor, self.block[threads], threads // 32, index, size * count))
                self._move_bytes(name, view, index, dtype, parts, chosen[here], mask)
                left &= ~here
            if not left.any():
                return
        raise AssertionError(f"{name}: {int(left.sum())} addresses outside all tensors, {address[left][0]:#x}")

    def _move_bytes(
        self,
        name: str,
        flat: np.ndarray,
        index: np.ndarray,
        dtype: type,
        parts: list[str],
        chosen: np.ndarray,
        mask: Any,
    ) -> None:
        size = np.dtype(dtype).itemsize
        for i, part in enumerate(parts):
            at = (index + i * size)[:, None] + np.arange(size)
            if name == "ld":
                wide = dtype if dtype is not np.uint8 else np.uint16 if part.startswith("%rs") else np.uint32
                old = self.registers.get(part)
                value = np.zeros(self.total, wide) if old is None else np.broadcast_to(old, (self.total,)).copy()
                value[chosen] = flat[at].view(dtype)[:, 0]
                self.registers[part] = value
            else:
                value = np.broadcast_to(bits_of(self.read(part), dtype), (self.total,))[chosen]
                flat[at] = value[:, None].view(np.uint8).reshape(len(chosen), size)

    def move_matrices(self, name: str, rest: list[str], operands: list, mask: np.ndarray | None) -> None:
        """Read or write 8x8 matrices of 2 bytes; lane 8 * j + i has the address of row i of matrix j."""
        self.together(mask, 32)
        assert "m8n8" in rest and rest[-1] == "b16", (name, rest)
        parts, place = operands if name == "ldmatrix" else operands[::-1]
        base, _, offset = place[1:-1].partition("+")
        address = np.broadcast_to(bits_of(self.read(base), np.int64) + int(offset or 0), (self.total,))
        address = address if mask is None else np.where(mask, address, 0)
        warps = slice(None) if mask is None else mask.reshape(-1, 32)[:, 0]
        assert not (address % 16).any() and int(address.max()) + 16 <= self.shared.shape[1], f"{name}: {place}"
        rows = (self.block.astype(np.int64) * self.shared.shape[1] + address).reshape(-1, 32)
        lane, flat = np.arange(32), self.shared.reshape(-1)
        for j, part in enumerate(parts):
            words = []
            for half in range(2):
                row, col = lane // 4, 2 * (lane % 4) + half
                if "trans" in rest:
                    row, col = col, row
                words.append(rows[:, 8 * j + row] + 2 * col)
            if name == "ldmatrix":
                halves = [(flat[at].astype(np.uint32) | flat[at + 1].astype(np.uint32) << 8) for at in words]
                self.write(part, joined(*halves).reshape(-1), mask)
            else:
                value = np.broadcast_to(self.read(part), (self.total,)).reshape(-1, 32)
                for half, at in enumerate(words):
                    flat[at[warps]] = (value >> np.uint32(16 * half))[warps].astype(np.uint8)
                    flat[at[warps] + 1] = (value >> np.uint32(16 * half + 8))[warps].astype(np.uint8)

    def reduce(self, rest: list[str], to: str, operands: list, mask: np.ndarray | None) -> None:
        """Give all lanes of a warp the least or the largest of their numbers, or the sum, which wraps."""
        self.together(mask, 32)
        values = np.broadcast_to(typed(self.read(operands[0]), rest[-1]), (self.total,)).reshape(-1, 32)
        ways = {"min": values.min, "max": values.max, "add": lambda axis: values.sum(axis, dtype=values.dtype)}
        found = ways[rest[1]](axis=1)
        self.write(to, np.repeat(found, 32).view(BITS[rest[-1][1:]]), mask)

    def vote(self, rest: list[str], to: str, operands: list[str], mask: np.ndarray | None) -> None:
        """Give all lanes of a warp whether one of them holds a predicate, or which of them do."""
        self.together(mask, 32)
        assert rest[0] == "sync" and int(self.read(operands[1])) in (-1, 0xFFFFFFFF), "a vote in part of a warp"
        votes = np.broadcast_to(self.read(operands[0]), (self.total,)).reshape(-1, 32)
        if rest[1] == "any":
            found = votes.any(axis=1)
        else:
            assert rest[1] == "ballot", rest
            found = (votes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        self.write(to, np.repeat(found, 32), mask)

    def shuffle(self, how: str, operands: list, mask: np.ndarray | None) -> None:
        """Exchange words between the lanes of a warp, all of them."""
        self.together(mask, 32)
        last = int(self.read(operands[3]))  # and above it, which bits of a lane say its segment
        assert last in ((0,) if how == "up" else (31, 0x181F, 0x101F) if how == "idx" else (31,)), (
            "a shuffle in part of a warp"
        )
        value = np.broadcast_to(self.read(operands[1]), (self.total,))
        lane = np.arange(self.total)
        given = bits_of(self.read(operands[2]), np.int64) & 31
        below = np.where(lane % 32 < given, lane, lane - given)
        segment = ~31 | last >> 8
        chosen = (lane & segment) | (given & ~segment)
        source = {"bfly": lane ^ given, "idx": chosen, "up": below}[how]
        self.write(operands[0].partition("|")[0], value[source], mask)
