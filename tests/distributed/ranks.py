"""Run a function on several ranks, each a process forked from one server that has made all slow imports.

They meet over gloo and have the CPU's tensors; asked for "cuda", each has a GPU, whose tensors travel over NCCL.
"""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

CONTEXT = multiprocessing.get_context("forkserver")
# An optimizer imports torch._dynamo when it is made: a second and more for every process.
CONTEXT.set_forkserver_preload(
    [
        *("pytest", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"),
        *("torch.distributed.checkpoint", "torch.distributed.run", "halfbyte.distributed", "halfbyte.train.loop"),
    ]
)
ATTEMPTS = 2
PATIENCE = {"cpu": 60, "cuda": 300}
"""Seconds that a rank waits for the others: on a GPU one of them may have kernels to compile."""


def run(world: int, function: Callable, *arguments, seconds: float = 120, device: str = "cpu") -> list:
    """Return what `function(rank, world, *arguments)` returned on every rank; raise what failed first.

    On a busy machine a thread of gloo's has met a null pointer or called abort, once in thousands of runs, where no
    code of Python's ran: a run in which that happens is made once more, with a warning that says what the rank wrote.

    Args:
        world: how many processes.
        function: importable by name.
        seconds: after which all are stopped.
        device: "cuda" for a GPU each, from the first on, "cuda:2" from the third on; what is returned is on the CPU.
    """
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            results, failures = _attempt(world, function, arguments, seconds, (Path(folder), device))
            for rank in range(world):
                sys.stderr.write(_read(Path(folder), f"stderr{rank}"))
            foreign = [rank for rank in range(world) if _crashed_outside_python(Path(folder), rank)]
        if not (failures and foreign) or attempt == ATTEMPTS - 1:
            break
        warnings.warn(f"ranks {foreign} of {function.__name__} crashed where no Python ran, and ran again: {failures}")
    assert not failures, "\n".join(failures)
    return results


def device() -> torch.device:
    """Return where this process's tensors belong: the CPU, or a rank's GPU."""
    on_gpu = dist.is_initialized() and "cuda:nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> dist.DeviceMesh:
    """Return a mesh of the ranks' devices."""
    return dist.init_device_mesh(device().type, sizes, mesh_dim_names=names)


def on_cpu(values: Any) -> Any:
    """Return nested values with their tensors on the CPU, as another process can take them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values)


def gathered(values: Any) -> list:
    """Return every rank's nested values, on the CPU."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, on_cpu(values))
    return every


def looked_at(cases: list, look: Callable[[int, Any], list[str]]) -> list[str]:
    """Return on rank 0 what look(i, case) returns of all cases, of which each rank looks at some."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {i: look(i, cases[i]) for i in range(rank, len(cases), world)}
    found = dict(item for one in gathered(own) for item in one.items())
    return [] if rank else [line for i in range(len(cases)) for line in found[i]]


def _attempt(world: int, function: Callable, arguments: tuple, seconds: float, where: tuple) -> tuple[list, list[str]]:
    (folder, _), pipes, processes = where, [], []
    for rank in range(world):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_main, args=(rank, world, where, there, function, arguments))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + seconds
    results, failures = [None] * world, []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank}: no result within {seconds} s")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join(10)
                failures.append(f"rank {rank}: {_end(processes[rank].exitcode, folder, rank)}")
                continue
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
    finally:
        for process in processes:
            process.join(0 if failures else 10)
            if process.is_alive():
                process.kill()
    return results, failures


def _end(status: int | None, folder: Path, rank: int) -> str:
    """Return how a rank ended that returned nothing."""
    how = signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"
    return f"ended with {how} and no result\n{_read(folder, f'stderr{rank}')}{_read(folder, f'crash{rank}')}"


def _crashed_outside_python(folder: Path, rank: int) -> bool:
    """Return whether a rank ended in a thread that runs nothing of Python's, for another reason than ours.

    gloo also aborts where two ranks call different collectives, which is a fault of whoever calls them.
    """
    crash, said = _read(folder, f"crash{rank}"), _read(folder, f"stderr{rank}")
    _, _, stack = crash.partition("Current thread ")
    died = "Segmentation fault" in crash or "Fatal Python error: Aborted" in crash
    mismatch = "op.preamble.length" in said or "collective mismatch" in said
    return died and not mismatch and (not stack or "<no Python frame>" in stack.partition("\n\n")[0])


def _read(folder: Path, name: str) -> str:
    return (folder / name).read_text(errors="replace") if (folder / name).exists() else ""


def _join(rank: int, world: int, folder: Path, device: torch.device) -> None:
    backend = "gloo"
    if device.type == "cuda":
        _compile_once()
        torch.cuda.set_device((device.index or 0) + rank)
        backend = "cpu:gloo,cuda:nccl"  # as `halfbyte train` joins them: objects and notes go over gloo
    store, patience = f"file://{folder}/store", timedelta(seconds=PATIENCE[device.type])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=patience)


def _compile_once() -> None:
    """Let one process compile a kernel that several need at once: the others then find it in Triton's cache."""
    from triton import compiler

    compiles, folder = compiler.compile, Path(tempfile.gettempdir(), f"halfbyte-kernels-{os.getuid()}")
    folder.mkdir(exist_ok=True)

    def locked(src, *arguments, **options):
        with open(folder / src.hash(), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compiles(src, *arguments, **options)

    compiler.compile = locked  # which a kernel looks up before its first launch


def _main(rank: int, world: int, where: tuple, pipe, function: Callable, arguments: tuple) -> None:
    folder, device = where
    torch.set_num_threads(1)
    with open(Path(folder, f"crash{rank}"), "w") as crash, open(Path(folder, f"stderr{rank}"), "w") as said:
        os.dup2(said.fileno(), 2)  # C's threads say there why they abort
        faulthandler.enable(crash)
        try:
            _join(rank, world, folder, torch.device(device))
            pipe.send((True, on_cpu(function(rank, world, *arguments))))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.disable()
