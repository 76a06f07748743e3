"""Work out requests of several kernels over the driver that stands in: `python compiling_together.py FOLDER`.

Prints as JSON what became of each. FOLDER has libcuda.so.1, as for stand_in_launches.py.
"""

from __future__ import annotations

import ast
import ctypes
import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import triton
import triton.language as tl
from stand_in_launches import STREAM, Noted, activate
from triton.runtime import _async_compile

from halfbyte.kernels import prepared
from halfbyte.kernels.launch import jit

WHERE = torch.device("cuda", 0), STREAM
SECONDS = 60


@jit
def doubling_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)


@jit
def adding_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(out_ptr + i))


@jit
def wrong_kernel(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "no size is negative")


def both(static, tensors, numbers):
    out = torch.empty(64)
    doubling_kernel[(1,)](tensors[0], out, SIZE=static[0])
    adding_kernel[(1,)](tensors[0], out, SIZE=static[0])
    return (out,), None


def wrong(static, tensors, numbers):
    wrong_kernel[(1,)](tensors[0], SIZE=32)
    return (torch.empty(1),), None


def call(function, *static: int):
    return prepared._call(function, (static, [torch.zeros(64)], ()), WHERE, nullcontext)


def launches(library: ctypes.CDLL) -> int:
    return library.noted(ctypes.byref(Noted()))


def compile_with(compile) -> None:
    for kernel in (doubling_kernel, adding_kernel):
        _ = kernel.device_caches[0]  # makes `compile`
        kernel.compile = compile


def waiting_for_each_other(*args, **kwargs):
    meeting.wait(SECONDS)
    return triton.compile(*args, **kwargs)


def stopped(*args, **kwargs):
    raise KeyboardInterrupt


def several(static, tensors, numbers):
    for size in range(1, 25):
        doubling_kernel[(1,)](tensors[0], torch.empty(64), SIZE=static[0], num_warps=1, num_stages=size)
    return (torch.empty(1),), None


def first_wrong(*args, **kwargs):
    begun.append(1)
    if len(begun) == 1:
        raise ValueError("the first of them")
    time.sleep(0.5)
    return triton.compile(*args, **kwargs)


def parsed_alone(*args, **kwargs):
    """Parse, which CPython's ast.parse does not in two threads at once."""
    parsing.append(1)
    found["parsing"] = max(found.get("parsing", 0), len(parsing))
    time.sleep(0.01)
    try:
        return parse(*args, **kwargs)
    finally:
        parsing.pop()


def afterwards() -> None:
    """Work out a request when the main thread has ended, as a thread may that trains."""
    threading.main_thread().join()
    compile_with(triton.compile)
    found["at the end"] = error_of(both, 64)
    print(json.dumps(found))


def error_of(function, *static: int) -> str:
    try:
        call(function, *static)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    activate()
    library = ctypes.CDLL(str(Path(sys.argv[1], "libcuda.so.1")))
    meeting = threading.Barrier(2)
    found: dict[str, object] = {"wrong": error_of(wrong)[-200:]}
    compile_with(stopped)
    found["stopped"] = error_of(both, 16)
    found["after both"] = _async_compile.active_mode.get() is None
    compile_with(waiting_for_each_other)
    before = launches(library)
    found["together"] = error_of(both, 32)
    found["launches"] = [launches(library) - before]
    call(both, 32)
    found["launches"].append(launches(library) - before)
    begun: list[int] = []
    compile_with(first_wrong)
    found["first wrong"], found["begun"] = error_of(several, 32), len(begun)
    compile_with(triton.compile)
    parsing: list[int] = []
    parse, ast.parse = ast.parse, parsed_alone
    found["again"] = error_of(several, 32)
    ast.parse = parse
    threading.Thread(target=afterwards).start()
