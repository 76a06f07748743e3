"""Run a function on several gloo ranks, each a process forked from one server that has made all slow imports."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# An optimizer imports torch._dynamo when it is made: a second and more for every process.
CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.tensor", "halfbyte.distributed"])


def run(world: int, function: Callable, *arguments, seconds: float = 120) -> list:
    """Return what `function(rank, world, *arguments)` returned on every rank; raise what failed first.

    Args:
        world: how many processes.
        function: importable by name.
        seconds: after which all are stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            here, there = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_main, args=(rank, world, str(Path(folder, "store")), there, function, arguments)
            )
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
                ok, value = pipe.recv()
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
        finally:
            for process in processes:
                process.join(0 if failures else 10)
                if process.is_alive():
                    process.kill()
        assert not failures, "\n".join(failures)
        return results


def _main(rank: int, world: int, store: str, pipe, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        result = function(rank, world, *arguments)
        pipe.send((True, result))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
