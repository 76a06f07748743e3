"""How a rank can end without a result."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def in_a_foreign_thread(rank: int, world: int, marks: str, times: int, routine: str = "", said: str = "") -> int:
    """Let rank 1 crash in a thread of C's, so many times; return how often it has.

    Args:
        rank: this process.
        world: how many there are.
        marks: a folder, which counts.
        times: how often it crashes.
        routine: what of C's library the thread runs; without one, what is at address 0.
        said: what is written to standard error before.
    """
    mark = Path(marks, f"{len(os.listdir(marks))}")
    if rank == 1 and len(os.listdir(marks)) < times:
        mark.touch()
        os.write(2, said.encode())
        library = ctypes.CDLL(None)
        library.pthread_create(
            ctypes.byref(ctypes.c_ulong()), None, getattr(library, routine) if routine else None, None
        )
        time.sleep(60)
    dist.barrier()
    return len(os.listdir(marks))


def mismatched(rank: int, world: int) -> None:
    """Broadcast more than the other rank expects."""
    dist.broadcast(torch.zeros(1000 if rank == 0 else 10), 0)
    dist.barrier()


def in_python(rank: int, world: int) -> None:
    if rank == 1:
        faulthandler._sigsegv()
    dist.barrier()


def silently(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()
