"""Record what launchers launch for a GPU that is not here, compile it, and read what it uses.

A launcher is called with tensors on the device "meta", which have shapes, strides and alignment but no memory. Its
kernels do not run: they are specialized as Triton would do it on the target. `scenarios` has the calls.
`python -m halfbyte.kernels.record` compiles a sample of the launches for every target, with `--all` all of them, with
`--day` a third of the sample; it needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import random
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from halfbyte.kernels.launch import Kernel
from halfbyte.kernels.target import AMD, Target, amd, assumed, nvidia

NVIDIA = {80: 108, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170}
"""Multiprocessors by compute capability: A100, L40, H100, B200, B300, RTX 5090."""

COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
"""By architecture: MI300X, MI355X."""

TARGETS = {
    target.name: target
    for target in (
        *(nvidia(capability, count) for capability, count in NVIDIA.items()),
        *(amd(name, COMPUTE_UNITS[name]) for name in AMD),
    )
}

SHARED_MEMORY = {
    **dict.fromkeys(("sm_80",), 163),
    **dict.fromkeys(("sm_89", "sm_120"), 99),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227),
    "gfx942": 64,
    "gfx950": 160,
}
"""KiB of shared memory that one block may use (CUDA C++ programming guide; AMD's instruction set architectures)."""


SAMPLE = 440
"""Launches that two cores compile in five to nine minutes; AMD takes up to five times as long as NVIDIA."""

UNLIMITED = 1 << 30
DIVISIBLE = ["tt.divisibility", 16]

SPILLS = {
    ("activation_backward_kernel", "sm_120"): 8,
    ("packed_amax_kernel", "sm_100"): 48,
    ("packed_amax_kernel", "sm_103"): 48,
}
"""Bytes that tuned launches of a kernel are known to spill on a target, at most: never more, better fewer.

Where there is no PTX no launch is tuned yet: what spills there is printed, and listed in docs/hardware.md.
"""
NEWER = (3, 9)
SPILLS_OF_NEWER = {("amax_rotated_kernel", "sm_90"): 40, ("amax_rotated_rows_kernel", "sm_90"): 16}
"""What more is known from Triton 3.9 on, with which nothing is tuned: fresh signs of 64 values."""


@dataclass(frozen=True)
class Specialized:
    """One kernel as it is compiled for one launch.

    Args:
        kernel: the @triton.jit function.
        signature: the type of every parameter by name: "*bf16", "i32", "tensordesc<bf16[128,64]>", "constexpr"; of a
            NamedTuple those of its parts.
        constants: the values of the constexpr ones, by their place.
        attributes: what is known of others, by their place: divisibility by 16.
        options: num_warps and whatever else the compiler takes.
    """

    kernel: Kernel
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """What decides the machine code."""
        function = f"{self.kernel.module}.{self.kernel.fn.__qualname__}"
        return repr((function, self.signature, self.constants, self.attributes, sorted(self.options.items())))

    @property
    def name(self) -> str:
        """The kernel, its pointers and its constants."""
        names = list(self.signature)
        constants = [f"{names[place[0]]}={value!r}" for place, value in self.constants.items() if len(place) == 1]
        pointers = [
            kind + (":16" if DIVISIBLE in self.attributes.get(place, ()) else "")
            for place, kind in _placed(tuple(self.signature.values()))
            if kind[0] in "*t"
        ]
        return f"{self.kernel.fn.__name__}({', '.join(pointers + constants)}) warps={self.options['num_warps']}"


def _placed(kinds: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield types of arguments with their places, those of a tuple's parts one by one."""
    if isinstance(kinds, str):
        yield place, kinds
        return
    for i, kind in enumerate(kinds):
        yield from _placed(kind, (*place, i))


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses on a target, by its name; stack bytes are spills or indexed local arrays."""

    target: str
    registers: int
    stack_bytes: int
    shared_bytes: int

    def problem(self, most_stack_bytes: int = 0) -> str | None:
        """Say why the kernel does not belong on its target, or None."""
        limit = SHARED_MEMORY[self.target] * 1024
        if self.stack_bytes > most_stack_bytes:
            return f"{self.target}: spills {self.stack_bytes} bytes ({self.registers} registers)"
        if self.shared_bytes > limit:
            return f"{self.target}: {self.shared_bytes} bytes of shared memory, the limit is {limit}"
        return None


@contextmanager
def recording(target: Target) -> Iterator[list[Specialized]]:
    """Give a list of what launchers launch inside the context, for `target`; no kernel runs.

    Raises:
        ValueError: kernels are defined for Triton's interpreter.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET=1: the interpreter launches nothing; unset it in a process of its own")
    launches: list[Specialized] = []

    def record(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        launches.append(_specialized(kernel, target, args, kwargs))

    run = JITFunction.run
    JITFunction.run = record
    try:
        with assumed(target):
            yield launches
    finally:
        JITFunction.run = run


@lru_cache(maxsize=1024)
def _binder(kernel: Kernel, target: Target) -> tuple[Any, Any]:
    backend = make_backend(gpu(target))
    return backend, kernel.binder(backend)


def _specialized(kernel: JITFunction, target: Target, args: tuple, kwargs: dict[str, Any]) -> Specialized:
    """Return a launch as `JITFunction.run` specializes it before it compiles."""
    backend, binder = _binder(kernel, target)
    kwargs = {**kwargs, "debug": kernel.debug or triton.knobs.runtime.debug}
    kwargs["instrumentation_mode"] = triton.knobs.compilation.instrumentation_mode
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return Specialized(kernel, signature, constants, attributes, dict(options.__dict__))


def gpu(target: Target) -> GPUTarget:
    """Return what Triton compiles for."""
    return GPUTarget(target.backend, target.capability if target.ptx else target.name, target.warp)


def compile_launch(launch: Specialized, target: Target) -> Usage:
    """Compile a launch to machine code for a target without such a GPU."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=gpu(target), options=launch.options)
    registers, stack = _resources(compiled.asm["cubin"]) if target.ptx else _amd_resources(compiled.asm["amdgcn"])
    return Usage(target.name, registers, stack, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, stack bytes) as the assembler recorded them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    (registers,), (stack,) = (re.findall(rf"{key}:(\d+)", report) for key in ("REG", "STACK"))
    return int(registers), int(stack)


def _amd_resources(assembly: str) -> tuple[int, int]:
    """Return (vector registers, bytes of scratch a thread) as the compiler wrote them behind the instructions."""
    keys = (r"\.vgpr_count", r"\.private_segment_fixed_size")
    (registers,), (scratch,) = (re.findall(rf"{key}:\s+(\d+)", assembly) for key in keys)
    return int(registers), int(scratch)


@dataclass(frozen=True)
class Recorded:
    """A distinct launch on one target.

    Args:
        scenario: the first call that makes it.
        tuned: whether a call makes it whose launches may not spill.
    """

    launch: Specialized
    target: Target
    scenario: str
    tuned: bool

    def problem(self, outcome: Usage | str) -> str | None:
        """Say why a compiled kernel does not belong on its target, or None; what is not tuned may spill."""
        key = self.launch.kernel.fn.__name__, self.target.name
        is_newer = tuple(map(int, triton.__version__.split(".")[:2])) >= NEWER
        known = max(SPILLS.get(key, 0), SPILLS_OF_NEWER.get(key, 0) if is_newer else 0)
        most = known if self.tuned and self.target.ptx else UNLIMITED
        problem = outcome if isinstance(outcome, str) else outcome.problem(most)
        return problem and f"{problem}: {self.launch.name}, as in {self.scenario}"


def recorded(target: Target) -> list[Recorded]:
    """Return the distinct launches of all scenarios on a target."""
    from halfbyte.kernels.scenarios import scenarios  # imports every launcher

    found: dict[str, Recorded] = {}
    for scenario in scenarios(target):
        with recording(target) as launches:
            scenario.call()
        for launch in launches:
            key = launch.key
            if key not in found or (scenario.tuned and not found[key].tuned):
                found[key] = Recorded(launch, target, scenario.name, scenario.tuned)
    return list(found.values())


def sample(found: Sequence[Recorded], count: int, seed: int = 0) -> list[Recorded]:
    """Return `count` launches: of every kernel one on every target, a tuned and another one on some, then NVIDIA's."""
    rest = list(found)
    random.Random(seed).shuffle(rest)
    kinds: tuple[Callable[[Recorded], tuple], ...] = (
        lambda one: (one.launch.kernel, one.tuned),
        lambda one: (one.launch.kernel, one.target.name),
    )
    chosen: dict[int, Recorded] = {}
    for kind in kinds:
        met = {kind(one) for one in chosen.values()}
        for one in rest:
            if kind(one) not in met:
                met.add(kind(one))
                chosen[id(one)] = one
    others = sorted((one for one in rest if id(one) not in chosen), key=lambda one: not one.target.ptx)
    return [*chosen.values(), *others][:count]


def of_the_day(chosen: Sequence[Recorded], day: datetime.date) -> list[Recorded]:
    """Return the third of every kernel's launches that is a day's; the next two days have the others."""
    kernels: defaultdict[Kernel, list[Recorded]] = defaultdict(list)
    for one in chosen:
        kernels[one.launch.kernel].append(one)
    turn = day.toordinal()
    return [one for i, own in enumerate(kernels.values()) for one in own[(turn + i) % 3 :: 3] or own]


def compile_all(found: Sequence[Recorded], jobs: int) -> Iterator[tuple[Recorded, Usage | str]]:
    """Compile launches in `jobs` processes; yield each with what it uses, or why it does not compile, in no order."""
    context = multiprocessing.get_context("fork")  # a launch holds functions that cannot be sent
    tasks, done = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=_compile_some, args=(found, tasks, done), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for index in (*range(len(found)), *[None] * jobs):
        tasks.put(index)
    for _ in found:
        index, outcome = done.get()
        yield found[index], outcome
    for worker in workers:
        worker.join()


def _compile_some(found: Sequence[Recorded], tasks: Any, done: Any) -> None:
    while (index := tasks.get()) is not None:
        one = found[index]
        try:
            done.put((index, compile_launch(one.launch, one.target)))
        except Exception as error:
            done.put((index, f"{one.target.name}: does not compile, {type(error).__name__}: {str(error)[-500:]}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile recorded launches; print one line per failure and a summary, return the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m halfbyte.kernels.record", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--all", action="store_true", help="all launches, not a sample")
    parser.add_argument("--count", type=int, default=SAMPLE, help="launches of the sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--day", type=datetime.date.fromisoformat, help="compile its third of a sample, 2026-11-27; without, the whole"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: launches are recorded for {', '.join(TARGETS)}")
    found = [one for name in options.targets or TARGETS for one in recorded(TARGETS[name])]
    chosen = found if options.all else sample(found, options.count, options.seed)
    chosen = chosen if options.day is None else of_the_day(chosen, options.day)
    failures, spills = 0, {}
    for one, outcome in compile_all(chosen, options.jobs):
        problem, name = one.problem(outcome), one.launch.kernel.fn.__name__
        if problem:
            failures += 1
            print(problem, flush=True)
        if isinstance(outcome, Usage):
            spilled = spills.setdefault(one.target.name, {})
            spilled[name] = max(spilled.get(name, 0), outcome.stack_bytes)
    for target, spilled in spills.items():
        worst = ", ".join(f"{name} {n}" for name, n in sorted(spilled.items()) if n)
        print(f"most bytes spilled on {target}: {worst or 'none'}")
    print(f"{len(chosen)} of {len(found)} compiled, {failures} unfit", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
