"""How a rank can end without a result."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import time
from pathlib import Path

import torch.distributed as dist


def in_a_foreign_thread(rank: int, world: int, marks: str, times: int) -> int:
    """Let rank 1 crash in a thread of C's, so many times; return how often it has."""
    mark = Path(marks, f"{len(os.listdir(marks))}")
    if rank == 1 and len(os.listdir(marks)) < times:
        mark.touch()
        ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, None, None)  # runs address 0
        time.sleep(60)
    dist.barrier()
    return len(os.listdir(marks))


def in_python(rank: int, world: int) -> None:
    if rank == 1:
        faulthandler._sigsegv()
    dist.barrier()


def silently(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()
