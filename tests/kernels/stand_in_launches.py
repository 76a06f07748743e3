"""Launch kernels as Triton does and as they are repeated, over a driver that notes what it is given.

`python stand_in_launches.py FOLDER`, where FOLDER has libcuda.so.1, prints what the driver was given as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from halfbyte.kernels import calling
from halfbyte.kernels.calling import Shape
from halfbyte.kernels.launch import Launch, Pointer, Program, Varying, jit, watching

STREAM = 77
POINTER, INT32, INT64, FLOAT, MAP = 8, 4, 8, 4, 128


class Place(NamedTuple):
    ptr: Any
    number: Any
    absent: Any
    floor: Any


@jit(do_not_specialize=["number", "place.number"])
def mixed_kernel(x_ptr, place, number, none, one, rows, KIND: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    value = tl.load(x_ptr + i) + number + place.number + place.floor + one + rows
    if KIND[0] == "add" and none is None and place.absent is None:
        value += 1
    tl.store(place.ptr + i, value)


@jit
def described_kernel(desc, out_ptr, rows, SIZE: tl.constexpr):
    tile = desc.load([0, 0])
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.sum(tile, axis=0) + rows)


class Watcher:
    def __init__(self):
        self.seen = []

    def launched(self, launched):
        self.seen.append(launched)


class Noted(ctypes.Structure):
    _fields_ = [("words", ctypes.c_longlong * 16), ("params", ctypes.c_ubyte * 4096)]


class Driver:
    """The library, asked what it was given."""

    def __init__(self, folder: str) -> None:
        self._library, self._launches = ctypes.CDLL(str(Path(folder, "libcuda.so.1"))), 0

    def expect(self, sizes: list[int]) -> None:
        sizes = [*sizes, POINTER, POINTER]  # two kinds of scratch memory
        self._library.expect(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))
        self._bytes = sum(sizes)

    def given(self) -> dict[str, Any]:
        noted = Noted()
        launches = self._library.noted(ctypes.byref(noted))
        assert launches == self._launches + 1, "one launch reached the driver"
        self._launches = launches
        return {"words": list(noted.words), "params": bytes(noted.params[: self._bytes]).hex()}


def activate() -> None:
    """Let Triton believe in one GPU of compute capability 9.0."""
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.set_current_device = lambda device: None
    driver.get_current_stream = lambda device: STREAM
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)


def repeated(
    launched: Any, pointers: dict[str, Pointer], slots: tuple, numbers: tuple[int, int], watched: bool
) -> None:
    program = Program()
    addresses = "\n    ".join(program.known_address(i) for i in range(1, len(slots)))  # asked once, as records do
    line = Launch(launched, pointers).line(program)
    names = ", ".join(f"s{i}" for i in range(len(slots)))
    exec(
        f"def repeat(slots, n0, n1, stream, watched):\n    {names}, = slots\n    {addresses}\n    {line}",
        program.values,
    )
    program.values["repeat"](slots, *numbers, STREAM, watched)


def mixed(driver: Driver, watched: bool) -> list[dict[str, Any]]:
    """Triton's own launch with other memory and numbers, then a repetition with these of a launch before."""
    driver.expect([POINTER, POINTER, INT64, FLOAT, INT32, INT32])

    def launch(x, out, numbers):
        place = Place(out, Varying(1, numbers[1]), None, 0.1)
        mixed_kernel[(3, 2)](x, place, Varying(0, numbers[0] + 5, 5), None, 1, 6, KIND=("add", 2), SIZE=32, num_warps=2)

    first, then = [(torch.zeros(64), torch.zeros(96)) for _ in range(2)]
    watcher = Watcher()
    with watching(watcher):
        launch(*first, (11, 1 << 40))
    driver.given()
    (launched,) = watcher.seen
    launched.arguments["x_ptr"] = None
    launched.arguments["place"] = launched.arguments["place"]._replace(ptr=None)
    wanted = (1 << 20) + 3, (1 << 41) + 9
    launch(then[0], then[1][32:], wanted)
    own = driver.given()
    pointers = {"x_ptr": Pointer(0, 0, torch.float32), "place.ptr": Pointer(1, 128, torch.float32)}
    repeated(launched, pointers, then, wanted, watched)
    return [own, driver.given()]


def described(driver: Driver, watched: bool) -> list[dict[str, Any]]:
    """Likewise with a tensor map, whose tensor begins elsewhere."""
    driver.expect([MAP, INT32, INT32, INT64, INT64, POINTER, INT32])
    shape = Shape((48, 64), (64, 1), (16, 32), "zero")

    def launch(x, out):
        described_kernel[(5,)](shape.on(x), out, 48, SIZE=32, num_warps=4)

    first, then = [(torch.zeros(4096), torch.zeros(32)) for _ in range(2)]
    watcher = Watcher()
    with watching(watcher):
        launch(*first)
    driver.given()
    (launched,) = watcher.seen
    launched.arguments.update(desc=shape, out_ptr=None)
    launch(then[0][16:], then[1])
    own = driver.given()
    pointers = {"desc": Pointer(0, 64, torch.float32), "out_ptr": Pointer(1, 0, torch.float32)}
    repeated(launched, pointers, then, (0, 0), watched)
    return [own, driver.given()]


def main(folder: str) -> None:
    activate()
    driver = Driver(folder)
    found = {f"{case.__name__}, {watched=}": case(driver, watched) for case in (mixed, described) for watched in (0, 1)}
    print(json.dumps({"triton": triton.__version__, "supported": calling.supports(), "given": found}))


if __name__ == "__main__":
    main(sys.argv[1])
